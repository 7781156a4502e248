-- balanced: batches share out over environments by given weights, within one in the order of arrival
-- paper: Demers, Keshav & Shenker 1989 (fair queueing): the n-th group of an environment finishes at n / weight
-- grain: one row per group_id, the first ones make the batch | reads: groups
-- an environment that has too few groups leaves its share to the others
-- shares that are no whole number come out on average: the first group of an environment is moved ahead by a part
-- of itself that an MD5 of its name, $seed (of run.json) and $step gives
-- $env_weights: such as 'math=2, code=1'; those not named weigh 1, and at 0 are left out
-- default: env_weights = ""
with weights as (
    select trim(split_part(pair, '=', 1)) as env_name, split_part(pair, '=', 2)::double as weight
    from (select unnest(string_split($env_weights::varchar, ',')) as pair)
    where trim(pair) <> ''
),

queued as (
    select
        group_id,
        place,
        coalesce(weight, 1) as weight,
        row_number() over (partition by groups.env_name order by place) as position,
        ((md5_number_upper(concat_ws('/', groups.env_name, $seed, $step)) >> 12) + 0.5) / pow(2, 52) as ahead
    from groups
    left join weights on weights.env_name = groups.env_name
)

select group_id from queued where weight > 0 order by (position - ahead) / weight, place
