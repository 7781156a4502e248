-- mismatch: how far the logprobs of sampler and trainer are apart, by five columns in turn
-- grain: one row per value of the column that grouping names | reads: trained_tokens
-- k1, k3: estimates of KL(sampler || trainer), nats per token; ratio_*: quantiles of trainer's over sampler's probability
-- position: first position of its range, which ends before the next power of two
-- NULL: the columns that grouping does not name; engine of rollouts that an older ludic wrote
with tokens as (
    select
        * replace (if(position = 0, 0, 1 << floor(log2(position))::integer) as position),
        exp(log_ratio)::float as ratio
    from trained_tokens
)

select
    case 0
        when grouping(step) then 'step'
        when grouping(position) then 'position'
        when grouping(off_policy_steps) then 'off_policy_steps'
        when grouping(engine) then 'engine'
        else 'sampling'
    end as grouping,
    step,
    position,
    off_policy_steps,
    engine,
    sampling,
    avg(-log_ratio) as k1,
    avg(exp(log_ratio) - 1 - log_ratio) as k3,
    quantile_cont(ratio, 0.01) as ratio_p01,
    quantile_cont(ratio, 0.5) as ratio_p50,
    quantile_cont(ratio, 0.99) as ratio_p99,
    max(ratio) as ratio_max,
    count(*) as num_tokens
from tokens
group by grouping sets ((step), (position), (off_policy_steps), (engine), (sampling))
