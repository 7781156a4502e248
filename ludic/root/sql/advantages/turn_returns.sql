-- turn_returns: for each token, the discounted sum of the rewards of environment steps from its turn on, minus the mean
-- return of that turn over all trajectories of the same agent in the group
-- the return of policy gradients, Sutton and Barto 2018, eq. 3.8, with an environment step as the step
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, environment_steps, token_rewards; trajectory_rows
-- reward of a step: the token_rewards since the step before, which are the environment's and those for the format
-- a token of agent step i belongs to the next environment step of the trajectory, also if the context was rewritten
-- before it (tool calls, summaries); other tokens get 0
-- a trajectory (view trajectory_rows): its rows by segment_index; of rows before rollouts 1.4, siblings of one agent_id,
-- parent and reward are told apart only if each has one row
-- NULL: for a rollout that was not scored
-- $discount: factor on a reward per turn between; 1 gives undiscounted returns, 0 only each step's own reward
-- default: discount = 1.0
with scored as materialized (
    select
        rollouts.rollout_id,
        rollouts.group_id,
        -- an agent at one depth: a child is not compared with its parent
        hash(rollouts.agent_id, rollouts.depth) as agent,
        rollouts.segment_index,
        -- 64 bits compare faster than text
        hash(trajectory_rows.trajectory_id) as trajectory,
        [agent_steps[step.agent_steps[-1] + 1].end for step in environment_steps] as step_ends,
        [
            coalesce(list_sum(token_rewards[coalesce(step_ends[i - 1], 0) + 1:step_end]), 0)
            for step_end, i in step_ends
        ] as rewards
    from rollouts
    inner join trajectory_rows using (rollout_id)
    where rollouts.episode_reward is not null
),

-- of several rows
trajectories as (
    select
        trajectory,
        flatten(list(rewards order by segment_index)) as all_rewards,
        list({segment_index: segment_index, num_turns: len(rewards)}) as rows
    from scored
    where trajectory in (select trajectory from scored where segment_index > 0)
    group by trajectory
    having count(*) = len(list_distinct(list(segment_index)))
),

continued as (
    select
        rollout_id,
        group_id,
        agent,
        step_ends,
        len(rewards) as num_turns,
        coalesce(all_rewards, rewards) as rewards,
        coalesce(list_sum([row.num_turns for row in rows if row.segment_index < scored.segment_index]), 0)::bigint
            as num_before
    from scored
    left join trajectories using (trajectory)
),

powers as (
    select [pow($discount, k) for k in range(coalesce(max(len(rewards)), 0)::bigint)] as powers
    from continued
),

-- of the row's turns and the next one, to which its last tokens may belong
returns as materialized (
    select
        rollout_id,
        group_id,
        agent,
        step_ends,
        num_before,
        num_turns,
        [
            list_inner_product(rewards[turn:], powers[:len(rewards) - turn + 1])
            for turn in range(num_before + 1, least(num_before + num_turns + 1, len(rewards)) + 1)
        ] as returns
    from continued
    cross join powers
),

agents as (
    select
        group_id,
        agent,
        list({num_before: num_before, returns: returns[:num_turns]}) as rows,
        max(num_before + num_turns) as num_turns
    from returns
    group by group_id, agent
),

-- sorted, so that sums are bit-identical for any number of threads
baselines as (
    select
        group_id,
        agent,
        [
            list_avg(list_sort(
                [case when turn > each.num_before then each.returns[turn - each.num_before] end for each in rows]
            ))
            for turn in range(1, num_turns + 1)
        ] as means
    from agents
),

credits as (
    select
        rollout_id,
        step_ends,
        [return - means[num_before + turn] for return, turn in returns]::float[] as credits
    from returns
    inner join baselines using (group_id, agent)
),

steps as (
    select
        rollouts.rollout_id,
        episode_reward,
        response_length,
        step_ends,
        credits,
        [step.start for step in agent_steps] as starts,
        [step.end for step in agent_steps] as ends
    from rollouts
    left join credits on credits.rollout_id = rollouts.rollout_id
)

select
    rollout_id,
    case
        when episode_reward is not null then
            spread_over_tokens(
                starts,
                ends,
                [coalesce(credits[len([1 for each in step_ends if each < turn_end]) + 1], 0) for turn_end in ends],
                0,
                response_length
            )
    end as token_advantages
from steps
