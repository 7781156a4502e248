-- fold_grpo: grpo over the root's reward plus penalties by turn: (clip(R + Q, 0, 1) - mean of R) / deviation of R
-- paper: Sun et al. 2025 (Context-Folding, FoldGRPO), arXiv 2510.11967
-- R: reward of the root agent, also for the children (branches) of its episode; the paper's is 0 or 1, others are
-- clipped to [0, 1] also in mean and deviation
-- Q: -1 for each turn of the root that calls no $branch_tool, in a row longer than half of $context_limit tokens;
-- -1 for a turn that could not be parsed or with a tool call that failed; and for all turns of a child its reward
-- component $scope_component, which the paper's judge sets to -0.2 if the child leaves its task; several are added
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, reward_components; trajectories
-- tokens outside of turns have Q = 0
-- where all R of a group are equal, the paper divides by 0; here by 1, so that the outcome counts 0 and a penalty at
-- most 1, as in the authors' code
-- a trajectory (view trajectory_rows) counts once
-- a child whose root failed, or whose parent's row is not there: R is its own, compared with children of its agent_id and depth
-- NULL: for a rollout that was not scored and has no scored root
-- $epsilon is added to the standard deviation, see grpo; a deviation up to it is taken for 0
-- default: branch_tool = "delegate"
-- default: scope_component = "scope"
-- default: epsilon = 1e-6
with recursive members as materialized (
    select
        rollout_id,
        group_id,
        agent_id,
        parent_rollout_id,
        depth,
        -- least and greatest would leave a NULL out
        case when episode_reward is not null then least(greatest(episode_reward, 0), 1) end as reward,
        response_length,
        [step.start for step in agent_steps] as starts,
        [step.end for step in agent_steps] as ends,
        [
            case
                when step.parse_error or list_bool_or([call.error is not null for call in step.tool_calls]) then -1
                else 0
            end
                + case
                    when depth > 0 then coalesce(reward_components[$scope_component], 0)
                    when
                        prompt_length + response_length > 0.5 * $context_limit
                        and not list_contains([call.name for call in step.tool_calls], $branch_tool)
                        then -1
                    else 0
                end
            for step in agent_steps
        ] as penalties
    from rollouts
),

descent as (
    select rollout_id, agent_id as root_agent_id, reward
    from members
    where parent_rollout_id is null and reward is not null
    union all
    select members.rollout_id, descent.root_agent_id, descent.reward
    from members
    inner join descent on descent.rollout_id = members.parent_rollout_id
),

-- sorted, so that sums are bit-identical for any number of threads
agents as (
    select group_id, agent_id, depth, list_sort(list(least(greatest(reward, 0), 1))) as rewards
    from trajectories
    where reward is not null
    group by group_id, agent_id, depth
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        agent_id,
        depth,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std,
        case when std > $epsilon then std + $epsilon else 1 end as scale
    from agents
),

compared as (
    select
        members.rollout_id,
        group_id,
        coalesce(root_agent_id, agent_id) as agent_id,
        case when root_agent_id is null then depth else 0 end as depth,
        response_length,
        coalesce(descent.reward, members.reward) as reward,
        starts,
        ends,
        penalties
    from members
    left join descent on descent.rollout_id = members.rollout_id
),

credits as (
    select
        rollout_id,
        response_length,
        starts,
        ends,
        reward,
        ((reward - lowest - mean) / scale)::float as base,
        [(least(greatest(reward + penalty, 0), 1) - lowest - mean) / scale for penalty in penalties]::float[]
            as credits
    from compared
    left join baselines using (group_id, agent_id, depth)
)

select
    rollout_id,
    case
        when reward is not null then spread_over_tokens(starts, ends, credits, base, response_length)
    end as token_advantages
from credits
