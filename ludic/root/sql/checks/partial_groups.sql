-- partial_groups: a group of which a step considered only some of the rollouts
-- grain: one row per attempt_id, step and group_id | reads: all_batches, rollouts, attempts
-- a trainer that was recorded may take the rows of a group at several steps
with planned as (
    select attempt_id, step, group_id, count(distinct rollout_id) as num_planned
    from all_batches
    anti join (from attempts where (config -> 'recorded') is not null) as recorded using (attempt_id)
    group by all
),

stored as (
    select group_id, count(distinct rollout_id) as num_stored
    from rollouts
    group by all
)

select *
from planned
inner join stored using (group_id)
where num_planned < num_stored
