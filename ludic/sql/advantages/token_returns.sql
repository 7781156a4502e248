-- token_returns: at each token, the discounted sum of token_rewards from there on, less the batch's mean return
-- the return of policy gradients, Sutton and Barto 2018, eq. 3.8; the baseline is one number for all tokens
-- grain: one row per rollout_id, a list as long as response_tokens | reads: rollouts, with token_rewards
-- NULL: never
-- $discount: what a reward is worth one token earlier; 0 is each token's own reward
-- its powers must not underflow over a response (0.9: 6,700 tokens), or no finite advantage comes out
-- default: discount = 1.0
with tokens as (
    select
        rollout_id,
        unnest(token_rewards) as reward,
        unnest(range(len(token_rewards))) as place
    from rollouts
),

returns as (
    select
        rollout_id,
        place,
        case
            when $discount = 0 then reward
            else sum(reward * pow($discount, place)) over (
                partition by rollout_id order by place rows between current row and unbounded following
            ) / pow($discount, place)
        end as return
    from tokens
),

-- in order, so that no bit of a sum depends on threads
baseline as (
    select list_avg(list(return order by rollout_id, place)) as mean
    from returns
),

by_rollout as (
    select rollout_id, list(return - mean order by place) as token_advantages
    from returns
    cross join baseline
    group by rollout_id
)

select rollouts.rollout_id, coalesce(token_advantages, []) as token_advantages
from rollouts
left join by_rollout on by_rollout.rollout_id = rollouts.rollout_id
