-- turn_returns: for each token, the discounted sum of the environment's rewards from its turn on, minus the mean
-- return of that turn over all trajectories of the same agent in the group
-- the return of policy gradients, Sutton and Barto 2018, eq. 3.8, with an environment step as the step
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, environment_steps
-- a token of agent step i belongs to the first environment step that i led to; tokens outside of steps get 0
-- turns and returns go on over an agent's rows of an episode, by segment_index; children of one agent_id and one
-- parent are told apart only if each has one row
-- NULL: for a rollout that was not scored
-- $discount: factor on a reward per turn between; 1 gives undiscounted returns, 0 only each step's own reward
-- default: discount = 1.0
with scored as materialized (
    select
        rollout_id,
        group_id,
        episode_id,
        agent_id,
        coalesce(parent_rollout_id, '') as parent_id,
        segment_index,
        [coalesce(step.reward, 0) for step in environment_steps] as rewards
    from rollouts
    where episode_reward is not null
),

-- children of one agent_id and one parent, which no column tells apart
siblings as (
    select episode_id, agent_id, parent_id
    from scored
    where segment_index = 0 and parent_id <> ''
    group by episode_id, agent_id, parent_id
    having count(*) > 1
),

-- each row of an agent's episode with each later row of it
pairs as (
    select
        earlier.rollout_id as earlier_id,
        later.rollout_id as later_id,
        later.segment_index,
        earlier.rewards as rewards_before,
        later.rewards
    from scored as later
    inner join scored as earlier using (episode_id, agent_id, parent_id)
    anti join siblings using (episode_id, agent_id, parent_id)
    where later.segment_index > 0 and earlier.segment_index < later.segment_index
),

befores as (
    select later_id as rollout_id, sum(len(rewards_before))::bigint as num_before
    from pairs
    group by later_id
),

afters as (
    select earlier_id as rollout_id, flatten(list(rewards order by segment_index)) as rewards_after
    from pairs
    group by earlier_id
),

continued as (
    select
        rollout_id,
        group_id,
        agent_id,
        coalesce(num_before, 0) as num_before,
        len(rewards) as num_turns,
        list_concat(rewards, coalesce(rewards_after, [])) as rewards
    from scored
    left join befores using (rollout_id)
    left join afters using (rollout_id)
),

powers as (
    select [pow($discount, k) for k in range(coalesce(max(len(rewards)), 0)::bigint)] as powers
    from continued
),

returns as materialized (
    select
        rollout_id,
        group_id,
        agent_id,
        num_before,
        [
            list_inner_product(rewards[turn:], powers[:len(rewards) - turn + 1])
            for turn in range(1, num_turns + 1)
        ] as returns
    from continued
    cross join powers
),

agents as (
    select
        group_id,
        agent_id,
        list({num_before: num_before, returns: returns}) as rows,
        max(num_before + len(returns)) as num_turns
    from returns
    group by group_id, agent_id
),

-- sorted, so that sums are bit-identical for any number of threads
baselines as (
    select
        group_id,
        agent_id,
        [
            list_avg(list_sort(
                [case when turn > each.num_before then each.returns[turn - each.num_before] end for each in rows]
            ))
            for turn in range(1, num_turns + 1)
        ] as means
    from agents
),

credits as (
    select rollout_id, [return - means[num_before + turn] for return, turn in returns] as credits
    from returns
    inner join baselines using (group_id, agent_id)
),

steps as (
    select
        rollouts.rollout_id,
        episode_reward,
        response_length,
        credits::float[] as credits,
        [step.start for step in agent_steps] as starts,
        [step.end for step in agent_steps] as ends,
        [step.agent_steps for step in environment_steps] as led_here
    from rollouts
    left join credits on credits.rollout_id = rollouts.rollout_id
)

select
    rollout_id,
    case
        when episode_reward is not null then
            list_resize(
                flatten([
                    list_resize(
                        list_resize([]::float[], start - coalesce(ends[i - 1], 0), 0),
                        ends[i] - coalesce(ends[i - 1], 0),
                        coalesce(credits[list_position([list_contains(led, i - 1) for led in led_here], true)], 0)
                    )
                    for start, i in starts
                ]),
                response_length,
                0
            )
    end as token_advantages
from steps
