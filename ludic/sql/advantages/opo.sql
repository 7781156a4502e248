-- opo: reward minus the mean of the group's rewards, each weighed by its length: the baseline of least variance
-- paper: Hao et al. 2025 (OPO, On-Policy RL with Optimal Reward Baseline), arXiv 2505.23585: where the
-- gradient's norm grows with the length of a response
-- grain: one row per rollout_id | reads: rollouts
-- an episode of several rollouts counts once, as long as all of them; a group of one scored episode gets 0
-- NULL: the rollout was not scored
with episodes as (
    select group_id, episode_id, max(episode_reward) as reward, sum(response_length) as length
    from rollouts
    where episode_reward is not null
    group by group_id, episode_id
),

-- in order, so that no bit of a sum depends on threads
groups as (
    select group_id, list({reward: reward, length: length} order by reward, length) as episodes
    from episodes
    group by group_id
),

-- above the lowest reward, so that equal rewards give exactly 0 and large ones lose no digits
baselines as (
    select
        group_id,
        episodes[1].reward as lowest,
        list_sum([(episode.reward - episodes[1].reward) * episode.length for episode in episodes]) as total,
        list_sum([episode.length for episode in episodes]) as num_tokens
    from groups
)

select
    rollout_id,
    episode_reward - lowest - coalesce(total / nullif(num_tokens, 0), 0) as advantage
from rollouts
left join baselines on baselines.group_id = rollouts.group_id
