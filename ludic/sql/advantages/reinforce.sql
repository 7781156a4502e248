-- reinforce: reward minus the mean reward of all scored episodes, of whatever group
-- paper: Williams 1992, REINFORCE with a constant baseline: in training, the batch's mean
-- grain: one row per rollout_id | reads: rollouts
-- an episode of several rollouts counts once in the mean
-- NULL: the rollout was not scored
with episodes as (
    select episode_id, max(episode_reward) as reward
    from rollouts
    where episode_reward is not null
    group by episode_id
),

-- in order, so that no bit of a sum depends on threads
batch as (
    select list(reward order by reward) as rewards
    from episodes
),

-- above the lowest reward, so that equal rewards give exactly 0 and large ones lose no digits
baseline as (
    select rewards[1] as lowest, list_avg([reward - rewards[1] for reward in rewards]) as mean
    from batch
)

select rollout_id, episode_reward - lowest - mean as advantage
from rollouts
cross join baseline
