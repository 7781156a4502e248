-- rewards_by_column: counts and rewards of the most frequent values of a column of the rollouts
-- grain: one row per value, the $most that most rollouts have | reads: rollouts
-- $value: an expression over rollouts; see ludic.root.sql.reports.rewards_by
-- rewards: mean reward of each group with a scored rollout, in the order of their ids
-- num_values, num_in_all: number of values, and of the rollouts of all of them
-- NULL: value of rollouts without one; rewards without a scored rollout
with groups as (
    select
        ($value)::varchar as value,
        group_id,
        avg(episode_reward) filter (where isfinite(episode_reward)) as reward,
        count(*) as num_rollouts
    from rollouts
    group by all
)

select
    value,
    sum(num_rollouts)::bigint as num_rollouts,
    list(reward order by group_id) filter (where reward is not null) as rewards,
    count(*) over () as num_values,
    sum(sum(num_rollouts)) over ()::bigint as num_in_all
from groups
group by value
order by num_rollouts desc, value
limit $most
