-- bias_by_order: groups by the order of their starts, to see which were lost and whether early steps saw short answers only
-- grain: one row per twentieth of the groups of a run, in the order of their starts | reads: requests
-- num_tokens_mean: sampled tokens a complete group; share_used: of the complete groups that do not wait
-- used_step_mean: step that first used them
-- NULL: means and shares of no groups
with placed as (
    select *, ntile(20) over (partition by run_id order by coalesce(started_at, ended_at), group_number) as twentieth
    from requests
)

select
    run_id,
    twentieth,
    min(started_at) as first_started_at,
    count(*) as num_groups,
    count(*) filter (outcome = 'complete') as num_complete,
    count(*) filter (outcome = 'given_up') as num_given_up,
    count(*) filter (outcome = 'lost') as num_lost,
    count(*) filter (outcome = 'running') as num_running,
    count(*) filter (fate = 'used') as num_used,
    count(*) filter (fate = 'max_off_policy_steps') as num_too_old,
    count(*) filter (fate = 'used') / nullif(count(*) filter (fate != 'waiting'), 0) as share_used,
    avg(num_tokens) filter (outcome = 'complete') as num_tokens_mean,
    avg(sampled_s) filter (outcome = 'complete') as sampled_s_mean,
    avg(used_step) as used_step_mean,
    avg(off_policy_steps) as off_policy_steps_mean
from placed
group by run_id, twentieth
order by run_id, twentieth
