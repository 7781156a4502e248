-- reinforce: reward minus the mean reward of all scored episodes of all groups
-- paper: Williams 1992, REINFORCE with a constant baseline; in training, the batch's mean
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once in the mean
-- NULL: for a rollout that was not scored
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
    select rewards[1] as lowest, list_avg([reward - rewards[1] for reward in rewards]) as mean
    from batch
)

select rollout_id, episode_reward - lowest - mean as advantage
from rollouts
cross join baseline
