-- drop_not_best_of_group: the episode does not have the highest reward of its group, as in rejection sampling
-- the reward of an episode is that of an agent of the environment, not of a sub-agent
-- considers all scored episodes of the group without errors, also those that other filters drop; of equal rewards the
-- lowest id is kept
episode_id not in (
    select min_by(episode_id, {cost: -comparable_reward(episode_reward), id: episode_id})
    from rollouts
    where episode_reward is not null and error is null and depth = 0
    group by group_id
)
