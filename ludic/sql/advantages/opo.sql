-- opo: reward minus the length-weighted mean of the group's rewards, the baseline of least variance
-- paper: Hao et al. 2025 (OPO, On-Policy RL with Optimal Reward Baseline), arXiv 2505.23585; assumes that the
-- gradient's norm grows with the length of a response
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once, with their total length; a group with one scored episode gets 0
-- NULL: for a rollout that was not scored
with episodes as (
    select group_id, episode_id, agent_id, max(episode_reward) as reward, sum(response_length) as length
    from rollouts
    where episode_reward is not null
    group by group_id, episode_id, agent_id
),

-- sorted, so that sums are bit-identical for any number of threads
groups as (
    select group_id, list({reward: reward, length: length} order by reward, length) as episodes
    from episodes
    group by group_id
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
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
