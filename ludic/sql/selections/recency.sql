-- recency: recent weights more often: sampled without replacement, a group weighing exp(-$alpha x its lag in versions)
-- paper: Efraimidis & Spirakis 2006 (Weighted random sampling with a reservoir), algorithm A-ES with exponential keys:
-- the smallest -ln(u) / weight come first, u uniform in (0, 1); compared by its logarithm, which no weight underflows
-- grain: one row per group_id, the first ones make the batch | reads: groups
-- u is made of an MD5 of the group, $seed (of run.json) and $step, so that the same groups give the same batch
-- $alpha: 0 is uniform, 0.7 halves a group's odds with each version, a large one takes the newest first
-- default: alpha = 0.7
with draws as (
    select
        group_id,
        $trainer_version - policy_version as lag,
        ((md5_number_upper(concat_ws('/', group_id, $seed, $step)) >> 12) + 0.5) / pow(2, 52) as u
    from groups
)

select group_id from draws order by ln(-ln(u)) + $alpha * lag, group_id
