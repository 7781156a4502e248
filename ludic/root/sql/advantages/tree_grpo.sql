-- tree_grpo: reward normalised as in grpo among the trajectories that share a prefix, plus the same in the whole group
-- paper: Ji et al. 2025 (Tree-GRPO), arXiv 2509.21240: advantage in the tree plus advantage over all trees of the
-- group; each leaf is a trajectory, with one advantage for all its tokens
-- a tree: the trajectories of an agent at one depth in the group whose first completion has the same tokens
-- grain: one row per rollout_id | reads: rollouts, with agent_steps, response_tokens; trajectory_rows, trajectories
-- a trajectory (view trajectory_rows) counts once, in the tree of its first row that is there
-- a tree of one trajectory adds 0, where the authors' code adds its reward
-- NULL: for a rollout that was not scored
-- $epsilon is added to each standard deviation, see grpo
-- default: epsilon = 1e-6
with firsts as materialized (
    select
        trajectories.trajectory_id,
        trajectories.group_id,
        trajectories.agent_id,
        trajectories.depth,
        reward,
        -- the tokens themselves: DuckDB's hash of a list does not see zeros at its start
        coalesce(response_tokens[agent_steps[1].start + 1:agent_steps[1].end], []) as tree
    from trajectories
    inner join rollouts on rollouts.rollout_id = trajectories.first_rollout_id
    where reward is not null
),

-- sorted, so that sums are bit-identical for any number of threads
trees as (
    select group_id, agent_id, depth, tree, list(reward order by reward) as rewards
    from firsts
    group by group_id, agent_id, depth, tree
),

forests as (
    select group_id, agent_id, depth, list_sort(flatten(list(rewards))) as rewards
    from trees
    group by group_id, agent_id, depth
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
tree_baselines as (
    select
        group_id,
        agent_id,
        depth,
        tree,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        coalesce(list_stddev_samp([reward - rewards[1] for reward in rewards]), 0) as std
    from trees
),

forest_baselines as (
    select
        group_id,
        agent_id,
        depth,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        coalesce(list_stddev_samp([reward - rewards[1] for reward in rewards]), 0) as std
    from forests
),

estimated as (
    select
        trajectory_id,
        (reward - trees.lowest - trees.mean) / (trees.std + $epsilon)
            + (reward - forests.lowest - forests.mean) / (forests.std + $epsilon) as advantage
    from firsts
    inner join tree_baselines as trees using (group_id, agent_id, depth, tree)
    inner join forest_baselines as forests using (group_id, agent_id, depth)
)

select rollout_id, advantage
from trajectory_rows
left join estimated using (trajectory_id)
