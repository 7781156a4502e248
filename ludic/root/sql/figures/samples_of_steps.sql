-- samples_of_steps: the best and the worst rollout of groups, the $most of each step and environment that differ most
-- grain: one row per rollout_id, best before worst | reads: batches
-- a group whose rewards are equal has one row; groups without a scored rollout have none
with scored as (
    select
        *,
        max(comparable_reward(episode_reward)) over (partition by step, group_id)
        - min(comparable_reward(episode_reward)) over (partition by step, group_id) as spread,
        row_number() over (partition by step, group_id order by comparable_reward(episode_reward) desc, rollout_id) as best,
        row_number() over (partition by step, group_id order by comparable_reward(episode_reward), rollout_id desc) as worst
    from batches
    where isfinite(episode_reward)
),

chosen as (
    select *, dense_rank() over (partition by step, env_name order by spread desc, group_id) as place
    from scored
)

select * exclude (spread, best, worst, place)
from chosen
where place <= $most and (best = 1 or (worst = 1 and spread > 0))
order by step, env_name, place, best
