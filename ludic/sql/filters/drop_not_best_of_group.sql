-- drop_not_best_of_group: the episode does not have the highest reward of its group, as in rejection sampling
-- considers all scored episodes of the group without errors, also those that other filters drop; of equal rewards the
-- lowest id is kept
episode_id not in (
    select min_by(episode_id, {cost: -episode_reward, id: episode_id})
    from rollouts
    where episode_reward is not null and error is null
    group by group_id
)
