-- balanced: batches are divided among environments by weight; within an environment, groups go in order of arrival
-- paper: Demers, Keshav & Shenker 1989 (fair queueing): the n-th group of an environment finishes at n / weight
-- grain: one row per group_id, the first rows make the batch | reads: groups
-- an environment that has too few groups leaves its share to the others
-- fractional shares are right on average: an environment's queue moves ahead by a fraction of one group, taken from
-- an MD5 of its name, $seed (of run.json) and $step
-- $env_weights: such as 'math=2, code=1'; other environments have weight 1; weight 0 leaves an environment out
-- default: env_weights = ""
with weights as (
    select trim(split_part(pair, '=', 1)) as env_name, split_part(pair, '=', 2)::double as weight
    from (select unnest(string_split($env_weights::varchar, ',')) as pair)
    where trim(pair) <> ''
),

queued as (
    select
        group_id,
        queue_position,
        coalesce(weight, 1) as weight,
        row_number() over (partition by groups.env_name order by queue_position) as position,
        ((md5_number_upper(concat_ws('/', groups.env_name, $seed, $step)) >> 12) + 0.5) / pow(2, 52) as ahead
    from groups
    left join weights on weights.env_name = groups.env_name
)

select group_id from queued where weight > 0 order by (position - ahead) / weight, queue_position
