-- mt_grpo: the advantage of the outcome for each token, plus turn_weight times that of its turn, unless it is the last
-- paper: Zeng et al. 2025 (MT-GRPO), arXiv 2505.11821v1, as in the authors' code, which has two turns; here every turn
-- but the last is treated as their first
-- outcome: reward of the last environment step; of a trajectory without environment steps its episode_reward
-- each advantage: reward minus the mean, divided by the standard deviation, of all trajectories of the same agent in
-- the group; of turn k over those in which k is not the last
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, environment_steps, token_rewards; trajectory_rows
-- reward of a step: the token_rewards since the step before, which are the environment's and those for the format
-- a token of agent step i belongs to the next environment step of the trajectory, also if the context was rewritten
-- before it (tool calls, summaries); other tokens get the outcome's advantage
-- a trajectory (view trajectory_rows): its rows by segment_index; of rows before rollouts 1.4, siblings of one agent_id,
-- parent and reward are told apart only if each has one row
-- it counts once
-- NULL: for a rollout that was not scored
-- $turn_weight multiplies the advantage of a turn | $epsilon is added to each standard deviation
-- default: turn_weight = 1.0
-- default: epsilon = 1e-4
with scored as materialized (
    select
        rollouts.rollout_id,
        rollouts.group_id,
        -- an agent at one depth: a child is not compared with its parent
        hash(rollouts.agent_id, rollouts.depth) as agent,
        rollouts.segment_index,
        rollouts.episode_reward,
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

-- with later rows; all_rewards and rows are NULL for siblings that are alike
trajectories as (
    select
        trajectory,
        min(segment_index) as first_index,
        count(*) = len(list_distinct(list(segment_index))) as is_one,
        case when is_one then flatten(list(rewards order by segment_index)) end as all_rewards,
        case when is_one then list({segment_index: segment_index, num_turns: len(rewards)}) end as rows
    from scored
    where trajectory in (select trajectory from scored where segment_index > 0)
    group by trajectory
),

-- turn_rewards: of the row's turns and the next one, to which its last tokens may belong, but not of the last turn
continued as materialized (
    select
        rollout_id,
        group_id,
        agent,
        step_ends,
        coalesce(segment_index = first_index, true) as is_first,
        coalesce(all_rewards, rewards) as rewards_in_all,
        coalesce(list_sum([row.num_turns for row in rows if row.segment_index < scored.segment_index]), 0)::bigint
            as num_before,
        coalesce(rewards_in_all[-1], episode_reward) as outcome,
        rewards_in_all[num_before + 1:least(num_before + len(rewards) + 1, len(rewards_in_all) - 1)] as turn_rewards,
        turn_rewards[:len(rewards)] as own_rewards
    from scored
    left join trajectories using (trajectory)
),

agents as (
    select
        group_id,
        agent,
        list(outcome order by outcome) filter (is_first) as outcomes,
        list({num_before: num_before, rewards: own_rewards}) as rows,
        max(num_before + len(own_rewards)) as num_turns
    from continued
    group by group_id, agent
),

-- sorted, so that sums are bit-identical for any number of threads
sorted as (
    select
        group_id,
        agent,
        outcomes,
        [
            list_sort(list_filter(
                [case when turn > each.num_before then each.rewards[turn - each.num_before] end for each in rows],
                lambda reward: reward is not null
            ))
            for turn in range(1, num_turns + 1)
        ] as turns
    from agents
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        agent,
        outcomes[1] as lowest,
        list_avg([outcome - outcomes[1] for outcome in outcomes]) as mean,
        list_stddev_samp([outcome - outcomes[1] for outcome in outcomes]) as std,
        [rewards[1] for rewards in turns] as lowests,
        [list_avg([reward - rewards[1] for reward in rewards]) for rewards in turns] as means,
        [coalesce(list_stddev_samp([reward - rewards[1] for reward in rewards]), 0) for rewards in turns] as stds
    from sorted
),

credits as (
    select
        rollout_id,
        step_ends,
        (outcome - lowest - mean) / (coalesce(std, 0) + $epsilon) as base,
        [
            base
                + $turn_weight
                * (reward - lowests[num_before + turn] - means[num_before + turn])
                / (stds[num_before + turn] + $epsilon)
            for reward, turn in turn_rewards
        ] as credits
    from continued
    inner join baselines using (group_id, agent)
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
