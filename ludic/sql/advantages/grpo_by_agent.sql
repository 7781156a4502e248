-- grpo_by_agent: reward minus the mean, divided by the standard deviation, of all trajectories of the same agent in the
-- group; children are compared with children of their agent_id, of their own episode (siblings) and of the others
-- paper: after Hong et al. 2025 (M-GRPO), arXiv 2511.13288, which takes group-relative advantages of main agent and
-- sub-agents apart; Feng et al. 2026 (Dr. MAS), arXiv 2602.08847, say why each agent needs its own statistics
-- grain: one row per rollout_id | reads: rollouts
-- a trajectory: the rows of one episode_id, agent_id, parent_rollout_id and episode_reward; it counts once, by its
-- first row that is there, since filters may have dropped the row of segment_index 0 (baseline_over kept)
-- an agent with one scored trajectory in the group gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with firsts as (
    select group_id, agent_id, episode_reward
    from rollouts
    where episode_reward is not null
    -- a hash, since 64 bits compare faster than text
    window trajectory as (partition by hash(episode_id, agent_id, parent_rollout_id, episode_reward))
    qualify segment_index = min(segment_index) over trajectory
),

-- sorted, so that sums are bit-identical for any number of threads
agents as (
    select group_id, agent_id, list(episode_reward order by episode_reward) as rewards
    from firsts
    group by group_id, agent_id
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        agent_id,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from agents
)

select
    rollout_id,
    (episode_reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as advantage
from rollouts
left join baselines on baselines.group_id = rollouts.group_id and baselines.agent_id = rollouts.agent_id
