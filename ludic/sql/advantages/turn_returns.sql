-- turn_returns: for each token, the discounted sum of the environment's rewards from its turn on, minus the mean
-- return of that turn over the group's scored rollouts
-- the return of policy gradients, Sutton and Barto 2018, eq. 3.8, with an environment step as the step
-- grain: one row per rollout_id, a list as long as response_tokens | reads: rollouts, with agent_steps, environment_steps
-- a token of agent step i belongs to the first environment step that i led to; tokens outside of steps get 0
-- NULL: for a rollout that was not scored
-- $discount: factor on a reward per turn between; 1 gives undiscounted returns, 0 only each step's own reward
-- default: discount = 1.0
with scored as (
    select *
    from rollouts
    where episode_reward is not null
),

turns as (
    select
        rollout_id,
        group_id,
        [coalesce(step.reward, 0) for step in environment_steps] as rewards,
        unnest(range(1, len(environment_steps) + 1)) as turn,
        unnest(environment_steps).agent_steps as led_here
    from scored
),

returns as (
    select
        rollout_id,
        group_id,
        turn,
        led_here,
        list_sum([rewards[later] * pow($discount, later - turn) for later in range(turn, len(rewards) + 1)]) as return
    from turns
),

-- sorted, so that sums are bit-identical for any number of threads
baselines as (
    select group_id, turn, list_avg(list(return order by rollout_id)) as mean
    from returns
    group by group_id, turn
),

steps as (
    select rollout_id, unnest(range(len(agent_steps))) as agent_step, unnest(agent_steps) as step
    from scored
),

tokens as (
    select
        steps.rollout_id,
        unnest(range(step.start, step.end)) as token_index,
        return - mean as advantage
    from steps
    inner join returns on returns.rollout_id = steps.rollout_id and list_contains(led_here, agent_step)
    inner join baselines on baselines.group_id = returns.group_id and baselines.turn = returns.turn
    qualify row_number() over (partition by steps.rollout_id, agent_step order by returns.turn) = 1
),

by_rollout as (
    select rollout_id, map_from_entries(list((token_index, advantage))) as advantages
    from tokens
    group by rollout_id
)

select
    rollouts.rollout_id,
    case
        when episode_reward is not null then [coalesce(advantages[token_index], 0) for token_index in range(response_length)]
    end as token_advantages
from rollouts
left join by_rollout on by_rollout.rollout_id = rollouts.rollout_id
