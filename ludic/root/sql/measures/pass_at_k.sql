-- pass_at_k: probability that at least one of k episodes of an example succeeds, without bias
-- 1 - C(n - c, k) / C(n, k) for c successes among n scored episodes (Chen et al. 2021, arXiv 2107.03374, equation 1)
-- $threshold: reward of a success; NULL: the answer is correct, where that is known, else the reward is 1 (is_success)
-- n // k trials: groups of k episodes that share none
-- grain: one row per example and agent | reads: eval_episodes | NULL: an example with fewer than k scored episodes
-- default: k = 1
-- default: threshold = null
-- default: unscored = null
with examples as (
    select
        evaluation,
        policy_version,
        env_name,
        env_example_id,
        count(coalesce(reward, $unscored::double)) as n,
        count(*) filter (
            coalesce(
                is_success(reward, correct, $threshold::double), is_success($unscored::double, null, $threshold::double)
            )
        ) as c
    from eval_episodes
    group by evaluation, policy_version, env_name, env_example_id, agent_id
)

select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    case
        when n < $k then null
        when n - c < $k then 1.0
        -- C(n - c, k) / C(n, k) as a product of k factors, which do not overflow
        else 1 - list_product([(n - c - i) / (n - i) for i in range($k::bigint)])
    end as value,
    n // $k::bigint as num_trials
from examples
