-- drop_zero_variance_groups: all scored trajectories of the group that share a baseline have the same reward, so their
-- advantages are 0: agents of the environment, and sub-agents of one agent_id and depth (view trajectory_rows)
-- considers the whole group, also rows that other filters drop
group_id in (
    select group_id
    from (
        select group_id, max(comparable_reward(episode_reward)) = min(comparable_reward(episode_reward)) as is_equal
        from rollouts
        group by group_id, depth, case when depth > 0 then agent_id end
    )
    group by group_id
    having bool_and(is_equal)
)
