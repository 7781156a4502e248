-- overlong: grpo over a reward that is up to 1 lower for long responses (soft overlong punishment)
-- paper: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13
-- punishment: 0 up to $max_length - $margin sampled tokens, then falling linearly to -1 at $max_length
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, with the sampled tokens of all its rows, and is compared with its peers in the group (view
-- trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with punished as (
    select
        trajectory_id,
        group_id,
        peers,
        reward - least(1, greatest(0, (action_length - ($max_length - $margin)) / $margin)) as reward
    from trajectories
    where reward is not null
),

baselines as (
    select group_id, peers, baseline_of(reward) as base
    from punished
    group by group_id, peers
)

select rollout_id, (reward - base.lowest - base.total / base.n) / (base.std + $epsilon) as advantage
from trajectory_rows
left join punished using (trajectory_id)
left join baselines on baselines.group_id = punished.group_id and baselines.peers = punished.peers
