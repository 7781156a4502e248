-- weights: weight of each row to train on, where the loss averages over trajectories
-- grain: one row per rollout_id | reads: rollouts, chosen, judged, trajectory_rows
-- weights add up to the number of rows, and those of each trajectory to the same sum, in proportion to num_trained_tokens
with trained as (
    select rollouts.rollout_id, trajectory_rows.trajectory_id, num_trained_tokens
    from rollouts
    inner join trajectory_rows using (rollout_id)
    where
        rollouts.group_id in (select group_id from chosen)
        and rollouts.rollout_id in (select rollout_id from judged where reason is null)
),

counts as (
    select count(*) as num_rows, count(distinct trajectory_id) as num_trajectories
    from trained
)

select
    rollout_id,
    num_trained_tokens * num_rows
    / (num_trajectories * sum(num_trained_tokens) over (partition by trajectory_id)) as weight
from trained
cross join counts
