-- pass_hat_k: probability that all of k episodes of an example succeed (pass^k), without bias
-- C(c, k) / C(n, k) for c successes among n scored episodes (Yao et al. 2024, arXiv 2406.12045)
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
        when c < $k then 0.0
        else list_product([(c - i) / (n - i) for i in range($k::bigint)])
    end as value,
    n // $k::bigint as num_trials
from examples
