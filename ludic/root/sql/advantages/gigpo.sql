-- gigpo: the episode's advantage for each token, plus step_weight times the advantage of its environment step among
-- all steps of the same agent in the group that began at the same observation
-- paper: Feng et al. 2025 (GiGPO), arXiv 2505.10978, eq. 3, 6, 7 and 8
-- each advantage: value minus mean, divided by the standard deviation (divide_by_std false: by 1); the value of an
-- episode is its reward, of a step the discounted sum of the steps' rewards from this step on
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, environment_steps, token_rewards; trajectory_rows
-- reward of a step: the token_rewards since the step before, which are the environment's and those for the format
-- a token of agent step i belongs to the next environment step of the trajectory, also if the context was rewritten
-- before it (tool calls, summaries); other tokens, and those of a step that shares its observation with
-- no other step, get the episode's advantage
-- a trajectory (view trajectory_rows): its rows by segment_index; of rows before rollouts 1.4, siblings of one agent_id,
-- parent and reward are told apart only if each has one row
-- it counts once
-- after a completion that could not be parsed, the state is the one before, and the observation, which is the feedback,
-- is replaced by the one before
-- NULL: for a rollout that was not scored
-- a step without observation_hash (files before rollouts 1.2) shares its observation with no other
-- $step_weight multiplies the step's advantage | $discount: factor on a reward per step between
-- $divide_by_std: true or false | $epsilon is added to each standard deviation
-- default: step_weight = 1.0
-- default: discount = 0.95
-- default: divide_by_std = true
-- default: epsilon = 1e-6
with scored as materialized (
    select
        rollouts.rollout_id,
        rollouts.group_id,
        -- an agent at one depth: a child is not compared with its parent
        hash(rollouts.agent_id, rollouts.depth) as agent,
        rollouts.segment_index,
        rollouts.episode_reward,
        -- hashes, since 64 bits compare faster than text
        hash(trajectory_rows.trajectory_id) as trajectory,
        [agent_steps[step.agent_steps[-1] + 1].end for step in environment_steps] as step_ends,
        [
            coalesce(list_sum(token_rewards[coalesce(step_ends[i - 1], 0) + 1:step_end]), 0)
            for step_end, i in step_ends
        ] as rewards,
        [
            case when step.observation_hash is not null then hash(step.observation_hash) end
            for step in environment_steps
        ] as observations,
        [agent_steps[step.agent_steps[-1] + 1].parse_error for step in environment_steps] as failures
    from rollouts
    inner join trajectory_rows using (rollout_id)
    where rollouts.episode_reward is not null
),

-- with later rows; the lists are NULL for siblings that are alike
trajectories as (
    select
        trajectory,
        min(segment_index) as first_index,
        count(*) = len(list_distinct(list(segment_index))) as is_one,
        case when is_one then flatten(list(rewards order by segment_index)) end as all_rewards,
        case when is_one then flatten(list(observations order by segment_index)) end as all_observations,
        case when is_one then flatten(list(failures order by segment_index)) end as all_failures,
        case when is_one then list({segment_index: segment_index, num_steps: len(rewards)}) end as rows
    from scored
    where trajectory in (select trajectory from scored where segment_index > 0)
    group by trajectory
),

continued as materialized (
    select
        rollout_id,
        group_id,
        agent,
        episode_reward,
        step_ends,
        coalesce(segment_index = first_index, true) as is_first,
        coalesce(all_rewards, rewards) as rewards,
        coalesce(all_observations, observations) as observations,
        coalesce(all_failures, failures) as failures,
        coalesce(list_sum([row.num_steps for row in rows if row.segment_index < scored.segment_index]), 0)::bigint
            as num_before,
        len(scored.rewards) as num_steps
    from scored
    left join trajectories using (trajectory)
),

powers as (
    select [pow($discount, k) for k in range(coalesce(max(len(rewards)), 0)::bigint)] as powers
    from continued
),

-- of the row's steps and the next one, to which its last tokens may belong
returns as materialized (
    select
        rollout_id,
        group_id,
        agent,
        episode_reward,
        step_ends,
        num_steps,
        range(num_before + 1, least(num_before + num_steps + 1, len(rewards)) + 1) as steps,
        [list_inner_product(rewards[step:], powers[:len(rewards) - step + 1]) for step in steps] as returns,
        case
            when list_contains(failures, true)
                -- of the first step since one that did not fail
                then
                    [
                        observations[
                            coalesce(step - list_position(list_reverse(failures[:step - 1]), false) + 1, 1)
                        ]
                        for step in steps
                    ]
            else [observations[step] for step in steps]
        end as states
    from continued
    cross join powers
),

moves as (
    select group_id, agent, unnest(states[:num_steps]) as state, unnest(returns[:num_steps]) as return
    from returns
),

-- sorted, so that sums are bit-identical for any number of threads
sorted as (
    select group_id, agent, state, list_sort(list(return)) as returns
    from moves
    where state is not null
    group by group_id, agent, state
),

-- relative to the lowest return: equal returns give exactly 0, and large returns lose no digits
shared as (
    select
        group_id,
        agent,
        list(state) as known,
        list(returns[1]) as lowests,
        list(list_avg([return - returns[1] for return in returns])) as means,
        list(
            case
                when $divide_by_std then list_stddev_samp([return - returns[1] for return in returns]) + $epsilon
                else 1
            end
        ) as scales
    from sorted
    where len(returns) > 1
    group by group_id, agent
),

baselines as (
    select group_id, agent, baseline_of(episode_reward) as baseline
    from continued
    where is_first
    group by group_id, agent
),

credits as (
    select
        rollout_id,
        step_ends,
        (episode_reward - baseline.lowest - baseline.total / baseline.n)
            / case when $divide_by_std then baseline.std + $epsilon else 1 end as base,
        [list_position(known, state) for state in states] as places,
        [
            base
                + $step_weight
                * coalesce((return - lowests[places[step]] - means[places[step]]) / scales[places[step]], 0)
            for return, step in returns
        ] as credits
    from returns
    inner join baselines using (group_id, agent)
    left join shared using (group_id, agent)
),

steps as (
    select
        rollouts.rollout_id,
        episode_reward,
        response_length,
        step_ends,
        base::float as base,
        credits::float[] as credits,
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
                [coalesce(credits[len([1 for each in step_ends if each < turn_end]) + 1], base) for turn_end in ends],
                base,
                response_length
            )
    end as token_advantages
from steps
