-- versions_of_example: answers to the example $id of environment $env_name, by version
-- grain: one row per version, newest first | reads: rollouts, evals | without rows of sub-agents and rewritten contexts
-- NULL: reward_mean, reward_min, reward_max if no answer is scored; accuracy if of none it is known
with answers as (
    select version, 'rollouts' as found_in, episode_reward, correct
    from rollouts
    where env_name = $env_name and env_example_id = $id and depth = 0 and segment_index = 0
    union all
    select version, 'evals' as found_in, episode_reward, correct
    from evals
    where env_name = $env_name and env_example_id = $id and depth = 0 and segment_index = 0
)

select
    version,
    count(*) as num_answers,
    count(*) filter (found_in = 'evals') as num_samples,
    count(episode_reward) as num_scored,
    avg(episode_reward) as reward_mean,
    min(episode_reward) as reward_min,
    max(episode_reward) as reward_max,
    avg(correct::integer) as accuracy
from answers
group by version
order by version desc
