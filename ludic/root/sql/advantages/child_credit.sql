-- child_credit: for a child, its own rloo advantage mixed with the advantage of the root agent that it works for
-- root: own; child: (1 - inherit_weight) own + inherit_weight depth_discount^depth (own of its root)
-- own: reward minus the mean reward of the other trajectories of the same agent and depth in the group, siblings included;
-- rloo (Ahmadian et al. 2024, arXiv 2402.14740, section 2.2) by agent
-- grain: one row per rollout_id | reads: rollouts, trajectories
-- a trajectory (view trajectory_rows) counts once
-- an agent with one scored trajectory in the group gets 0
-- a child whose root failed, or whose parent's row is not there, has nothing to inherit and gets its own advantage
-- NULL: for a rollout that was not scored; with inherit_weight 1 only if its root was not scored either
-- $inherit_weight: 0 is the child's own advantage, 1 the root's
-- $depth_discount: factor on the root's advantage for each delegation above the child
-- default: inherit_weight = 0.5
-- default: depth_discount = 1.0
with recursive baselines as (
    select group_id, agent_id, depth, baseline_of(reward) as base
    from trajectories
    group by group_id, agent_id, depth
),

owned as materialized (
    select
        rollout_id,
        parent_rollout_id,
        depth,
        (base.n * (episode_reward - base.lowest) - base.total) / greatest(base.n - 1, 1) as own
    from rollouts
    left join baselines using (group_id, agent_id, depth)
),

descent as (
    select rollout_id, own as root
    from owned
    where parent_rollout_id is null
    union all
    select owned.rollout_id, descent.root
    from owned
    inner join descent on descent.rollout_id = owned.parent_rollout_id
)

select
    rollout_id,
    case
        when depth = 0 or root is null then own
        when $inherit_weight = 1 then pow($depth_discount, depth) * root
        else (1 - $inherit_weight) * own + $inherit_weight * pow($depth_discount, depth) * root
    end as advantage
from owned
left join descent using (rollout_id)
