-- grpo_by_agent: reward minus the mean, divided by the standard deviation, of all trajectories of the same agent in the
-- group, at the same depth; children are compared with children of their agent_id, of their own episode (siblings) and of
-- the others
-- paper: after Hong et al. 2025 (M-GRPO), arXiv 2511.13288, which takes group-relative advantages of main agent and
-- sub-agents apart; Feng et al. 2026 (Dr. MAS), arXiv 2602.08847, say why each agent needs its own statistics
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory (view trajectory_rows) counts once
-- an agent with one scored trajectory in the group gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with baselines as (
    select group_id, agent_id, depth, baseline_of(reward) as base
    from trajectories
    group by group_id, agent_id, depth
)

select rollout_id, (episode_reward - base.lowest - base.total / base.n) / (base.std + $epsilon) as advantage
from trajectory_rows
left join baselines using (group_id, agent_id, depth)
