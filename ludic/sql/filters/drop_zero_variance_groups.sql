-- drop_zero_variance_groups: all scored episodes of the group have the same reward, and so no advantage
-- over the whole group, rows that other filters drop included
max(episode_reward) over (partition by group_id) = min(episode_reward) over (partition by group_id)
