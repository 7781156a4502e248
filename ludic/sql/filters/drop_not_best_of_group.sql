-- drop_not_best_of_group: every episode but the one with the highest reward of its group, as rejection sampling does
-- over all scored episodes of the group, those that other filters drop included; of equal ones the lowest id stays
episode_id not in (
    select min_by(episode_id, {cost: -episode_reward, id: episode_id})
    from rollouts
    where episode_reward is not null and error is null
    group by group_id
)
