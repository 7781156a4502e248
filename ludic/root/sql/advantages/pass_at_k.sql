-- pass_at_k: advantage for the reward 1 if any of k trajectories drawn from the group succeeds
-- paper: Chen et al. 2025 (Pass@k Training), arXiv 2508.10751, section 2.4, analytical derivation
-- with n trajectories, f of them failures, and R = 1 - C(f, k) / C(n, k), S = sqrt(R (1 - R)):
-- success: (1 - R) / S; failure: (1 - R - C(f - 1, k - 1) / C(n - 1, k - 1)) / S
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is drawn with its peers in the group (view trajectory_rows); 0 if all draws have the same
-- reward, or there are fewer than k
-- NULL: for a rollout that was not scored
-- $success: reward of a success; NULL: the answer is correct, where that is known, else the reward is 1 (is_success)
-- default: k = 4
-- default: success = null
with groups as (
    select group_id, peers, count(*) as n, count(*) filter (not is_success(reward, correct, $success::double)) as f
    from trajectories
    where reward is not null
    group by group_id, peers
),

-- C(f, k) / C(n, k) as a product of ratios, since factorials could overflow; 0 if f < k
draws as (
    select
        group_id,
        peers,
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
        when is_success(episode_reward, correct, $success::double) then all_fail / std
        else (all_fail - others_fail) / std
    end as advantage
from trajectory_rows
left join worth using (group_id, peers)
