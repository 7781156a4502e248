-- reinforce_pp: reward minus the batch's mean, divided by the batch's standard deviation
-- paper: Hu 2025 (REINFORCE++), arXiv 2501.03262, section 3.1, without a KL term in the reward
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once; a batch with one scored episode gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with episodes as (
    select episode_id, agent_id, max(episode_reward) as reward
    from rollouts
    where episode_reward is not null
    group by episode_id, agent_id
),

-- sorted, so that sums are bit-identical for any number of threads
batch as (
    select list(reward order by reward) as rewards
    from episodes
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baseline as (
    select
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from batch
)

select rollout_id, (episode_reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as advantage
from rollouts
cross join baseline
