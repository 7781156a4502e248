-- gdpo: each component of the reward normalised within its group as in grpo, their sum normalised over the batch
-- paper: Liu et al. 2026 (GDPO, Group reward-Decoupled Normalization), arXiv 2601.05242: a component of large
-- rewards does not drown the others
-- grain: one row per rollout_id | reads: rollouts, with reward_components
-- an episode of several rollouts counts once; a component that an episode lacks neither counts nor adds to it
-- NULL: the rollout was not scored
-- $component_weights: such as 'correct=2, format=0.5'; those not named weigh 1
-- $epsilon is added to both standard deviations
-- default: component_weights = ""
-- default: epsilon = 1e-4
with weights as (
    select trim(split_part(pair, '=', 1)) as component, split_part(pair, '=', 2)::double as weight
    from (select unnest(string_split($component_weights::varchar, ',')) as pair)
    where trim(pair) <> ''
),

components as (
    select group_id, episode_id, entry.key as component, max(entry.value) as reward
    from (select group_id, episode_id, unnest(map_entries(reward_components)) as entry from rollouts
        where episode_reward is not null)
    group by all
),

-- in order, so that no bit of a sum depends on threads
groups as (
    select group_id, component, list(reward order by reward) as rewards
    from components
    group by group_id, component
),

-- above the lowest reward, so that equal rewards give exactly 0 and large ones lose no digits
baselines as (
    select
        group_id,
        component,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from groups
),

parts as (
    select
        group_id,
        episode_id,
        component,
        coalesce(weight, 1) * (reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as part
    from components
    inner join baselines using (group_id, component)
    left join weights using (component)
),

sums as (
    select group_id, episode_id, list_sum(list(part order by component)) as total
    from parts
    group by group_id, episode_id
),

sorted as (
    select list(total order by total) as totals
    from sums
),

batch as (
    select list_avg(totals) as mean, list_stddev_samp(totals) as std
    from sorted
)

select
    rollout_id,
    case
        when episode_reward is null then null
        when total is null then 0
        else (total - batch.mean) / (coalesce(std, 0) + $epsilon)
    end as advantage
from rollouts
left join sums on sums.group_id = rollouts.group_id and sums.episode_id = rollouts.episode_id
cross join batch
