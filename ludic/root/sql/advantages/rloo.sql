-- rloo: reward minus the mean reward of the other scored trajectories of the group (leave-one-out)
-- paper: Ahmadian et al. 2024, arXiv 2402.14740, section 2.2
-- grain: one row per rollout_id | reads: trajectory_rows, rewards_of_peers
-- a trajectory counts once, and is compared with its peers in the group (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
-- $noise_scale: standard deviation of normal noise against identical rewards, 0 is off; the noise depends only on
-- rollout_id and $seed (Box-Muller over an MD5), so a batch can be recomputed exactly
-- default: noise_scale = 0
-- default: seed = 0
select
    rollout_id,
    (n * (episode_reward - lowest) - total) / greatest(n - 1, 1)
        + case
            when n > 1 and $noise_scale > 0 then
                $noise_scale
                * sqrt(-2 * ln((md5_number_upper(rollout_id || '/' || $seed::varchar)::double + 1) / pow(2, 64)))
                * cos(2 * pi() * md5_number_lower(rollout_id || '/' || $seed::varchar)::double / pow(2, 64))
            else 0
        end as advantage
from trajectory_rows
left join rewards_of_peers using (group_id, peers)
