-- token_returns: for each token, the discounted sum of token_rewards from that token on, minus the batch's mean return
-- the return of policy gradients, Sutton and Barto 2018, eq. 3.8; the baseline is one number for all tokens
-- grain: one row per rollout_id, a list as long as response_tokens | reads: rollouts, with token_rewards
-- NULL: for a rollout that was not scored; the baseline leaves out its tokens
-- $discount: factor on a reward per token between; 0 gives each token only its own reward
-- default: discount = 1.0
with scored as (
    select
        rollout_id,
        token_rewards::double[] as rewards,
        [[pow(2, k)] for k in range(ceil(log2(greatest(len(token_rewards), 1)))::bigint)] as steps
    from rollouts
    where episode_reward is not null
),

-- each pass doubles the number of tokens in a sum, so log2(length) passes are enough, and nothing is divided by a power
-- of the discount, however long the response
returns as (
    select
        rollout_id,
        list_reduce(
            list_concat([rewards], steps),
            lambda sums, step: [
                sums[i] + pow($discount, step[1]) * coalesce(sums[i + step[1]::bigint], 0) for i in range(1, len(sums) + 1)
            ]
        ) as returns
    from scored
),

-- sorted, so that sums are bit-identical for any number of threads
batch as (
    select flatten(list(returns order by rollout_id)) as returns, min(list_min(returns)) as lowest
    from returns
),

-- relative to the lowest return: equal returns give exactly 0, and large returns lose no digits
baseline as (
    select lowest, list_avg([return - lowest for return in returns]) as mean
    from batch
)

select rollouts.rollout_id, [return - lowest - mean for return in returns] as token_advantages
from rollouts
left join returns on returns.rollout_id = rollouts.rollout_id
cross join baseline
