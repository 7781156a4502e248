-- requests: the groups that workers started, how each ended, and what the trainer did with it
-- grain: one row per group_id | reads: requests/ of the root, workers, batches, policies, attempts
-- outcome: complete, given_up (its worker stopped), lost (its worker ended or lost its slot before the group was
-- committed) or running (as far as is known: what a kill lost is known when the slot's next life has begun)
-- fate of a complete group: used, the reason of its drop as in batches, or waiting; a group that came when its weights
-- were too old to be read has the fate max_off_policy_steps, too
-- next_group_id: the group that sampled the same number again, as after a kill
-- policy_version: in use at its start; oldest_version: of its first sampled tokens
-- rows that are stored twice, as during a compaction, count once
-- NULL: what is not known before the end; fate, used_step and off_policy_steps of groups that are not complete or not used;
-- started_at and sampled_s if the row of the start has expired
with events as (
    from $stored
    where group_id is not null
),

groups_begun as (
    select
        group_id,
        any_value(run_id) as run_id,
        any_value(group_number) as group_number,
        any_value(worker_id) as worker_id,
        try_cast(regexp_extract(any_value(worker_id), '^w(\d+)-', 1) as bigint) as slot,
        any_value(env_name) as env_name,
        any_value(env_example_id) as env_example_id,
        any_value(group_size) as group_size,
        min(created_at) filter (event = 'started') as started_at,
        max(created_at) filter (event != 'started') as ended_at,
        min(policy_version) as policy_version,
        any_value(event) filter (event != 'started') as ended_how,
        any_value(episodes) filter (event != 'started') as episodes
    from events
    group by group_id
),

begun as (
    select
        *,
        lead(group_id) over (
            partition by run_id, group_number
            order by coalesce(started_at, ended_at), group_id
        ) as next_group_id
    from groups_begun
),

newest_lives as (
    select slot, max(life) as life
    from workers
    group by slot
),

ledger as (
    select
        group_id,
        bool_or(used) as used,
        min(step) filter (used) as used_step,
        any_value(reason) filter (not used) as reason,
        avg(off_policy_steps) filter (used) as off_policy_steps
    from batches
    group by group_id
),

oldest as (
    select (select max(version) from policies) - try_cast(config ->> '$.max_off_policy_steps' as bigint) as version
    from attempts
    where not coalesce(try_cast(config ->> '$.offline' as boolean), false)
    order by attempt_id desc
    limit 1
)

select
    begun.group_id,
    begun.run_id,
    group_number,
    begun.worker_id,
    begun.slot,
    env_name,
    env_example_id,
    group_size,
    policy_version,
    list_min([episode.policy_version for episode in episodes]) as oldest_version,
    started_at,
    begun.ended_at,
    epoch(begun.ended_at - started_at) as sampled_s,
    case
        -- The schedule repeats a number only if no group of it was committed.
        when ended_how = 'complete' and (ledger.group_id is not null or next_group_id is null) then 'complete'
        when ended_how = 'given_up' then 'given_up'
        when ended_how = 'complete' or workers.ended_at is not null or workers.life < newest_lives.life then 'lost'
        else 'running'
    end as outcome,
    len([episode for episode in episodes if episode.outcome != 'given_up']) as num_ended,
    len([episode for episode in episodes if episode.outcome = 'failed']) as num_failed,
    list_sum([episode.num_tokens for episode in episodes])::bigint as num_tokens,
    case
        when outcome != 'complete' then null
        when used then 'used'
        when reason is not null then reason
        when oldest_version < (select version from oldest) then 'max_off_policy_steps'
        else 'waiting'
    end as fate,
    used_step,
    off_policy_steps,
    next_group_id,
    episodes
from begun
left join workers using (worker_id)
left join newest_lives on begun.slot = newest_lives.slot
left join ledger on begun.group_id = ledger.group_id
