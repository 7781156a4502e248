-- turns_by_step: means by turn of the rollouts that each gradient step considered, used or dropped
-- grain: one row per step and turn | reads: batches, rollouts
-- turn: counts from 1; $last stands for that turn and all later ones
-- reward_mean: of the environment's steps, of which one may follow several completions; tokens_mean: of completions
-- num_steps, num_completions: how many these means are of
-- NULL: a mean of nothing, as where the environment rewards no step
with considered as (
    select
        step,
        list_transform(agent_steps, lambda each: each."end" - each.start) as lengths,
        list_transform(environment_steps, lambda each: each.reward) as rewards
    from batches
    inner join (
        select rollout_id, policy_version, agent_steps, environment_steps from rollouts
    ) using (rollout_id, policy_version)
),

turns as (
    select
        step,
        least(unnest(range(1, greatest(len(lengths), len(rewards)) + 1)), $last) as turn,
        unnest(list_resize(lengths, greatest(len(lengths), len(rewards)))) as num_tokens,
        unnest(list_resize(rewards, greatest(len(lengths), len(rewards)))) as reward
    from considered
)

select
    step,
    turn,
    avg(reward) as reward_mean,
    avg(num_tokens) as tokens_mean,
    count(reward) as num_steps,
    count(num_tokens) as num_completions
from turns
group by step, turn
order by step, turn
