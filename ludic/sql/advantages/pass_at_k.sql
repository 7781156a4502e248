-- pass_at_k: advantage for the reward 1 if any of k episodes drawn from the group succeeds
-- paper: Chen et al. 2025 (Pass@k Training), arXiv 2508.10751, section 2.4, analytical derivation
-- with n episodes, f of them failures, and R = 1 - C(f, k) / C(n, k), S = sqrt(R (1 - R)):
-- success: (1 - R) / S; failure: (1 - R - C(f - 1, k - 1) / C(n - 1, k - 1)) / S
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once; 0 if all draws have the same reward, or the group has fewer than k
-- NULL: for a rollout that was not scored
-- $success: minimum reward of a successful episode
-- default: k = 4
-- default: success = 1.0
with episodes as (
    select group_id, episode_id, agent_id, max(episode_reward) >= $success as succeeded
    from rollouts
    where episode_reward is not null
    group by group_id, episode_id, agent_id
),

groups as (
    select group_id, count(*) as n, count(*) filter (not succeeded) as f
    from episodes
    group by group_id
),

-- C(f, k) / C(n, k) as a product of ratios, since factorials could overflow; 0 if f < k
draws as (
    select
        group_id,
        n >= $k as enough,
        list_product([greatest(f - i, 0)::double / (n - i) for i in range($k::bigint) if n > i]) as all_fail,
        coalesce(list_product([greatest(f - i, 0)::double / (n - i) for i in range(1, $k::bigint) if n > i]), 1)
            as others_fail
    from groups
),

worth as (
    select *, sqrt((1 - all_fail) * all_fail) as std
    from draws
)

select
    rollout_id,
    case
        when episode_reward is null then null
        when not enough or std = 0 then 0
        when episode_reward >= $success then all_fail / std
        else (all_fail - others_fail) / std
    end as advantage
from rollouts
left join worth on worth.group_id = rollouts.group_id
