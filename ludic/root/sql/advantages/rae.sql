-- rae: reward minus an exponential average of the earlier rewards of the same role in the same environment
-- paper: Liu et al. 2025 (SPIRAL, role-conditioned advantage estimation), arXiv 2506.24119; as in the authors' code,
-- the average starts at 0 and does not yet hold the episode's own reward: A = R - b, then b = decay b + (1 - decay) R
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a role is an agent_id at one depth; a trajectory counts once, in the order of request_index (siblings: of their ids);
-- the average starts at 0 with the rows that are read: in training, those of the batch and the newest of the batches before it, also after a
-- restart; where an episode of an earlier batch has a higher request_index, it does not count yet
-- history: 10000
-- NULL: for a rollout that was not scored
-- $decay: weight of the average so far
-- default: decay = 0.95
with roles as (
    select
        list(trajectory_id order by request_index, episode_id, trajectory_id) as trajectory_ids,
        list((1 - $decay) * reward order by request_index, episode_id, trajectory_id) as updates
    from trajectories
    where reward is not null
    group by env_name, agent_id, depth
),

-- each pass doubles the number of trajectories in an average; passes end where the weights are below 1e-40
averages as (
    select
        trajectory_ids,
        list_reduce(
            list_concat(
                [updates],
                [
                    [pow(2, k)] for k in range(ceil(log2(len(updates)))::bigint)
                    if pow($decay::double, pow(2, k)) > 1e-40
                ]
            ),
            lambda sums, step: [
                sum + case when i > step[1] then pow($decay::double, step[1]) * sums[i - step[1]::bigint] else 0 end
                for sum, i in sums
            ]
        ) as averages
    from roles
),

baselines as (
    select
        unnest(trajectory_ids) as trajectory_id,
        unnest(list_concat([0::double], averages[:-2])) as baseline
    from averages
)

select rollout_id, episode_reward - baseline as advantage
from trajectory_rows
left join baselines using (trajectory_id)
