-- tools_by_step: tool calls of the rollouts that each gradient step considered, used or dropped, by tool
-- grain: one row per step and tool; a step without calls has none | reads: batches, rollouts
-- tool: a name as the model wrote it; all but the $most most frequent ones are together, as NULL
-- calls_mean: calls of a rollout, of all that the step considered and this root has; error_fraction: share of calls
with considered as (
    select step, flatten([each.tool_calls for each in agent_steps]) as calls
    from batches
    inner join (select rollout_id, policy_version, agent_steps from rollouts) using (rollout_id, policy_version)
),

sizes as (select step, count(*) as num_rollouts from considered group by step),

calls as (
    select step, call.name as tool, call.error is not null as failed
    from (select step, unnest(calls) as call from considered)
),

frequent as (select tool from calls group by tool order by count(*) desc, tool limit $most),

named as (
    select step, if(frequent.tool is not null, calls.tool, null) as tool, failed
    from calls
    left join frequent on frequent.tool = calls.tool
)

select
    step,
    tool,
    count(*) / any_value(num_rollouts) as calls_mean,
    avg(failed::integer) as error_fraction,
    count(*) as num_calls
from named
inner join sizes using (step)
group by step, tool
order by step, tool
