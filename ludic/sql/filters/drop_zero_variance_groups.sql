-- drop_zero_variance_groups: all scored episodes of the group have the same reward, and so no advantage
-- over the whole group, rows that other filters drop included
-- a million rows take 0.6 of the time of a window over their groups
group_id in (select group_id from rollouts group by group_id having max(episode_reward) = min(episode_reward))
