-- recency: samples groups without replacement; a group has weight exp(-$alpha * off_policy_steps)
-- paper: Efraimidis & Spirakis 2006 (Weighted random sampling with a reservoir), algorithm A-ES with exponential keys:
-- the smallest -ln(u) / weight come first, u uniform in (0, 1); compared by its logarithm, so no weight underflows
-- grain: one row per group_id, the first rows make the batch | reads: groups
-- u comes from an MD5 of the group, $seed (of run.json) and $step, so the same groups give the same batch
-- $alpha: 0 is uniform, 0.7 halves a group's odds with each version, a large value takes the newest first
-- default: alpha = 0.7
with draws as (
    select
        group_id,
        $trainer_version - policy_version as off_policy_steps,
        ((md5_number_upper(concat_ws('/', group_id, $seed, $step)) >> 12) + 0.5) / pow(2, 52) as u
    from groups
)

select group_id from draws order by ln(-ln(u)) + $alpha * off_policy_steps, group_id
