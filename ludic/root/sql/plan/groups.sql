-- groups: pending groups with a row that no filter drops; a selection chooses from them
-- grain: one row per group_id | reads: rollouts, queue
-- as in the view of ludic.connect, rewards count an episode once, without those of sub-agents; lengths and num_ count rollouts, also dropped ones
-- queue_position: sorts groups by policy version, oldest first, then by arrival; place: the same, for older selections
-- num_uses: steps that have trained on the group
-- outcomes: reward of each scored episode, and whether its answer is correct, in any order
-- NULL: rewards of a group without a scored episode; reward_std (of the sample) of a group with one scored episode
with episodes as (
    select
        group_id,
        env_name,
        policy_version,
        arrival,
        num_uses,
        created_at,
        response_length,
        queue_position,
        {episode_id: episode_id, reward: case when depth = 0 then episode_reward end} as episode,
        {episode_id: episode_id, reward: episode_reward, correct: correct} as outcome,
        depth = 0 and episode_reward is not null as is_scored
    from rollouts
    inner join queue using (group_id)
)

select
    group_id,
    min(env_name) as env_name,
    min(policy_version) as policy_version,
    min(created_at) as created_at,
    min(arrival) as arrival,
    min(queue_position) as queue_position,
    min(queue_position) as place,
    min(num_uses) as num_uses,
    count(*) as num_rollouts,
    avg(response_length) as response_length_mean,
    count(distinct episode.episode_id) as num_episodes,
    -- sorted, so that sums are bit-identical for any order of rows
    list_sort([pair.reward for pair in list(distinct episode) if pair.reward is not null]) as rewards,
    list(distinct outcome) filter (is_scored) as outcomes,
    len(rewards) as num_scored,
    list_avg(rewards) as reward_mean,
    rewards[1] as reward_min,
    rewards[-1] as reward_max,
    list_stddev_samp(rewards) as reward_std
from episodes
group by group_id
