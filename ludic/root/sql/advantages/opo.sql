-- opo: reward minus the mean of the group's rewards weighted by sampled tokens, the baseline of least variance
-- paper: Hao et al. 2025 (OPO, On-Policy RL with Optimal Reward Baseline), arXiv 2505.23585; assumes that the
-- squared norm of the gradient grows with the number of tokens that it sums over: those that were sampled (action_length),
-- not those of tools and the environment
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the group (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
with
-- sorted, so that sums are bit-identical for any number of threads
groups as (
    select group_id, peers, list({reward: reward, length: action_length} order by reward, action_length) as scored
    from trajectories
    where reward is not null
    group by group_id, peers
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        peers,
        scored[1].reward as lowest,
        list_sum([(each.reward - scored[1].reward) * each.length for each in scored]) as total,
        list_sum([each.length for each in scored]) as num_tokens
    from groups
)

select
    rollout_id,
    episode_reward - lowest - coalesce(total / nullif(num_tokens, 0), 0) as advantage
from trajectory_rows
left join baselines using (group_id, peers)
