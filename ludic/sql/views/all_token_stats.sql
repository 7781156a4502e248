-- all_token_stats: what the gradient steps of all attempts saw of each token, where the trainer kept it
-- grain: one row per attempt_id, step and rollout_id | reads: token_stats/ of the root, attempt_chain
-- superseded: true off the chain, where a later attempt went on from an earlier step
with kept as (
    select $columns
    from (
        from $empty.token_stats
        union all by name
        from read_parquet(
            $root || '/token_stats/attempt=*/step=*.parquet',
            schema = $schema,
            filename = true,
            hive_partitioning = false,
            allow_empty = true
        )
    )
    where not list_contains($without, filename)
)
select
    kept.*,
    attempt_chain.attempt_id is null as superseded
from kept
left join attempt_chain
    on kept.attempt_id = attempt_chain.attempt_id
    and kept.step >= attempt_chain.first_step
    and kept.step <= coalesce(attempt_chain.last_step, kept.step)
