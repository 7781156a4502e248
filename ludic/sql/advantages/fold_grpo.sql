-- fold_grpo: grpo over the root's reward plus penalties by turn: (clip(R + Q, 0, 1) - mean of R) / deviation of R
-- paper: Sun et al. 2025 (Context-Folding, FoldGRPO), arXiv 2510.11967
-- R: reward, between 0 and 1, of the root agent, also for the children (branches) of its episode
-- Q: -1 for each turn of the root that calls no $branch_tool, in a row longer than half of $context_limit tokens;
-- -1 for a turn that could not be parsed or with a tool call that failed; and for all turns of a child its reward
-- component $scope_component, which the paper's judge sets to -0.2 if the child leaves its task; several are added
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, reward_components
-- a root agent counts once in its group, by its first row (segment_index 0); tokens outside of turns have Q = 0
-- NULL: for a rollout whose root was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: branch_tool = "delegate"
-- default: scope_component = "scope"
-- default: epsilon = 1e-6
with recursive members as materialized (
    select
        rollout_id,
        group_id,
        agent_id,
        parent_rollout_id,
        segment_index,
        episode_reward,
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
    select rollout_id, group_id, agent_id as root_agent_id, episode_reward as reward
    from members
    where parent_rollout_id is null
    union all
    select members.rollout_id, descent.group_id, descent.root_agent_id, descent.reward
    from members
    inner join descent on descent.rollout_id = members.parent_rollout_id
),

-- sorted, so that sums are bit-identical for any number of threads
groups as (
    select group_id, agent_id as root_agent_id, list(episode_reward order by episode_reward) as rewards
    from members
    where parent_rollout_id is null and segment_index = 0 and episode_reward is not null
    group by group_id, agent_id
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        root_agent_id,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        coalesce(list_stddev_samp([reward - rewards[1] for reward in rewards]), 0) + $epsilon as scale
    from groups
),

credits as (
    select
        members.rollout_id,
        response_length,
        starts,
        ends,
        reward,
        ((least(greatest(reward, 0), 1) - lowest - mean) / scale)::float as base,
        [(least(greatest(reward + penalty, 0), 1) - lowest - mean) / scale for penalty in penalties]::float[]
            as credits
    from members
    left join descent on descent.rollout_id = members.rollout_id
    left join baselines on
        baselines.group_id = descent.group_id and baselines.root_agent_id = descent.root_agent_id
)

select
    rollout_id,
    case
        when reward is not null then
            list_resize(
                flatten([
                    list_resize(
                        list_resize([]::float[], start - coalesce(ends[i - 1], 0), base),
                        ends[i] - coalesce(ends[i - 1], 0),
                        credits[i]
                    )
                    for start, i in starts
                ]),
                response_length,
                base
            )
    end as token_advantages
from credits
