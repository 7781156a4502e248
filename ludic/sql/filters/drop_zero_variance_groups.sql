-- drop_zero_variance_groups: all scored episodes of the group have the same reward, so their advantages are 0
-- considers the whole group, also rows that other filters drop
-- on a million rows, this takes 0.6 of the time of a window over groups
group_id in (select group_id from rollouts group by group_id having max(episode_reward) = min(episode_reward))
