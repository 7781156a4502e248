-- rewards_of_peers: what the reward of a trajectory is compared with: the rewards of its peers in the group, its own among
-- them; a trajectory counts once
-- grain: one row per group_id and peers with a scored trajectory | reads: trajectories, which says what peers are
-- n, lowest, total, mean, std, rewards: see the macro baseline_of; mean and std are those of GRPO, and
-- (n * (reward - lowest) - total) / (n - 1) is the leave-one-out of RLOO
-- NULL: never
select group_id, peers, unnest(baseline_of(reward))
from trajectories
where reward is not null
group by group_id, peers
