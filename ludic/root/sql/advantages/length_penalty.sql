-- length_penalty: rloo over a reward that prefers the trajectories with fewer sampled tokens
-- paper: Kimi k1.5, arXiv 2501.12599, section 2.3.3: with L = 0.5 - (length - shortest) / (longest - shortest),
-- a success gets L more, a failure min(0, L); nothing if all lengths are equal
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, with the sampled tokens of all its rows, and is compared with its peers in the group (view
-- trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
-- $length_weight multiplies the length reward
-- $success: reward of a success; NULL: the answer is correct, where that is known, else the reward is 1 (is_success)
-- default: length_weight = 1.0
-- default: success = null
with scaled as (
    select
        trajectory_id,
        group_id,
        peers,
        reward,
        is_success(reward, correct, $success::double) as succeeds,
        min(action_length) over alike as shortest,
        max(action_length) over alike as longest,
        coalesce(0.5 - (action_length - shortest)::double / nullif(longest - shortest, 0), 0) as brevity
    from trajectories
    where reward is not null
    window alike as (partition by group_id, peers)
),

penalised as (
    select
        trajectory_id,
        group_id,
        peers,
        reward + $length_weight * case when succeeds then brevity else least(0, brevity) end as reward
    from scaled
),

baselines as (
    select group_id, peers, baseline_of(reward) as base
    from penalised
    group by group_id, peers
)

select rollout_id, (base.n * (reward - base.lowest) - base.total) / greatest(base.n - 1, 1) as advantage
from trajectory_rows
left join penalised using (trajectory_id)
left join baselines on baselines.group_id = penalised.group_id and baselines.peers = penalised.peers
