-- gdpo: each reward component normalised within its group as in grpo, then their sum normalised over the batch
-- paper: Liu et al. 2026 (GDPO, Group reward-Decoupled Normalization), arXiv 2601.05242: components with large
-- rewards do not dominate the others
-- grain: one row per rollout_id | reads: rollouts, with reward_components
-- an agent's rollouts of an episode count once; a component that an episode lacks is left out of its sum and the means
-- NULL: for a rollout that was not scored
-- $component_weights: such as 'correct=2, format=0.5'; other components have weight 1
-- $epsilon is added to both standard deviations
-- default: component_weights = ""
-- default: epsilon = 1e-4
with weights as (
    select trim(split_part(pair, '=', 1)) as component, split_part(pair, '=', 2)::double as weight
    from (select unnest(string_split($component_weights::varchar, ',')) as pair)
    where trim(pair) <> ''
),

components as (
    select group_id, episode_id, agent_id, entry.key as component, max(entry.value) as reward
    from (select group_id, episode_id, agent_id, unnest(map_entries(reward_components)) as entry from rollouts
        where episode_reward is not null)
    group by all
),

-- sorted, so that sums are bit-identical for any number of threads
groups as (
    select group_id, component, list(reward order by reward) as rewards
    from components
    group by group_id, component
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
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
        agent_id,
        component,
        coalesce(weight, 1) * (reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as part
    from components
    inner join baselines using (group_id, component)
    left join weights using (component)
),

sums as (
    select group_id, episode_id, agent_id, list_sum(list(part order by component)) as total
    from parts
    group by group_id, episode_id, agent_id
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
left join sums on
    sums.group_id = rollouts.group_id
    and sums.episode_id = rollouts.episode_id
    and sums.agent_id = rollouts.agent_id
cross join batch
