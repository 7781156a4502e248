-- tools_by_step: tool calls of the rollouts that each gradient step considered, used or dropped, by tool
-- grain: one row per step and tool, also where the step did not call it | reads: batches, rollouts
-- tool: a name as the model wrote it; all but the $most most frequent ones are together, as NULL
-- calls_mean: calls of a rollout, of all that the step considered and this root has
-- NULL: error_fraction, the share of calls that failed, where there was none
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
),

tools as (select distinct tool from named)

select
    sizes.step,
    tools.tool,
    count(named.failed) / any_value(num_rollouts) as calls_mean,
    avg(named.failed::integer) as error_fraction,
    count(named.failed) as num_calls
from sizes
cross join tools
left join named on named.step = sizes.step and named.tool is not distinct from tools.tool
group by sizes.step, tools.tool
order by sizes.step, tools.tool
