-- gdpo: each reward component normalised within its group as in grpo, then their sum normalised over the batch
-- paper: Liu et al. 2026 (GDPO, Group reward-Decoupled Normalization), arXiv 2601.05242: components with large
-- rewards do not dominate the others
-- grain: one row per rollout_id | reads: rollouts, with reward_components; trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the group and the batch (view trajectory_rows)
-- a component that a trajectory lacks is left out of its sum and the means
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
    select trajectory_id, group_id, peers, entry.key as component, entry.value as reward
    from (
        select trajectories.*, unnest(map_entries(reward_components)) as entry
        from trajectories
        inner join rollouts on rollouts.rollout_id = trajectories.first_rollout_id
        where reward is not null
    )
),

baselines as (
    select group_id, peers, component, baseline_of(reward) as base
    from components
    group by group_id, peers, component
),

parts as (
    select
        trajectory_id,
        peers,
        component,
        coalesce(weight, 1) * (reward - base.lowest - base.total / base.n) / (base.std + $epsilon) as part
    from components
    inner join baselines using (group_id, peers, component)
    left join weights using (component)
),

sums as (
    select trajectory_id, any_value(peers) as peers, list_sum(list(part order by component)) as total
    from parts
    group by trajectory_id
),

-- sorted, so that sums are bit-identical for any number of threads
sorted as (
    select peers, list(total order by total) as totals
    from sums
    group by peers
),

batch as (
    select peers, list_avg(totals) as mean, list_stddev_samp(totals) as std
    from sorted
)

select
    rollout_id,
    case
        when episode_reward is null then null
        when total is null then 0
        else (total - batch.mean) / (coalesce(std, 0) + $epsilon)
    end as advantage
from trajectory_rows
left join sums using (trajectory_id)
left join batch on batch.peers = sums.peers
