-- lite_ppo: reward minus the group's mean, divided by the standard deviation of the whole batch
-- paper: Liu et al. 2025 (Part I: Tricks or Traps?), arXiv 2508.08221: the group's own deviation would blow up the
-- advantages of a group with nearly equal rewards
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once; a batch with one scored episode gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with episodes as (
    select group_id, episode_id, agent_id, max(episode_reward) as reward
    from rollouts
    where episode_reward is not null
    group by group_id, episode_id, agent_id
),

-- sorted, so that sums are bit-identical for any number of threads
groups as (
    select group_id, list(reward order by reward) as rewards
    from episodes
    group by group_id
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean
    from groups
),

sorted as (
    select list(reward order by reward) as rewards
    from episodes
),

batch as (
    select list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from sorted
)

select
    rollout_id,
    (episode_reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as advantage
from rollouts
left join baselines on baselines.group_id = rollouts.group_id
cross join batch
