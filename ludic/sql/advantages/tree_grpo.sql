-- tree_grpo: reward normalised as in grpo among the trajectories that share a prefix, plus the same in the whole group
-- paper: Ji et al. 2025 (Tree-GRPO), arXiv 2509.21240: advantage in the tree plus advantage over all trees of the
-- group; each leaf is a trajectory, with one advantage for all its tokens
-- a tree: the trajectories of an agent in the group whose first completion has the same tokens
-- grain: one row per rollout_id | reads: rollouts, with agent_steps, response_tokens
-- a trajectory: the rows of one episode_id, agent_id, parent_rollout_id and episode_reward; it counts once, by its
-- first row that is there, since filters may have dropped the row of segment_index 0 (baseline_over kept)
-- a tree of one trajectory adds 0, where the authors' code adds its reward
-- later rows of children of one agent_id, parent and reward belong to any of their trees
-- NULL: for a rollout that was not scored
-- $epsilon is added to each standard deviation, see grpo
-- default: epsilon = 1e-6
with scored as materialized (
    select
        rollout_id,
        group_id,
        episode_id,
        agent_id,
        coalesce(parent_rollout_id, '') as parent_id,
        segment_index,
        episode_reward as reward,
        hash(response_tokens[agent_steps[1].start + 1:agent_steps[1].end]) as tree
    from rollouts
    where episode_reward is not null
),

firsts as materialized (
    select *
    from scored
    -- a hash, since 64 bits compare faster than text
    window trajectory as (partition by hash(episode_id, agent_id, parent_id, reward))
    qualify segment_index = min(segment_index) over trajectory
),

-- sorted, so that sums are bit-identical for any number of threads
trees as (
    select group_id, agent_id, tree, list(reward order by reward) as rewards
    from firsts
    group by group_id, agent_id, tree
),

forests as (
    select group_id, agent_id, list_sort(flatten(list(rewards))) as rewards
    from trees
    group by group_id, agent_id
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
tree_baselines as (
    select
        group_id,
        agent_id,
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
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        coalesce(list_stddev_samp([reward - rewards[1] for reward in rewards]), 0) as std
    from forests
),

leaves as (
    select rollout_id, group_id, agent_id, reward, tree
    from firsts
    union all
    select later.rollout_id, later.group_id, later.agent_id, later.reward, min(firsts.tree)
    from scored as later
    inner join firsts using (episode_id, agent_id, parent_id, reward)
    where later.segment_index > 0 and firsts.segment_index < later.segment_index
    group by later.rollout_id, later.group_id, later.agent_id, later.reward
),

estimated as (
    select
        rollout_id,
        (reward - trees.lowest - trees.mean) / (trees.std + $epsilon)
            + (reward - forests.lowest - forests.mean) / (forests.std + $epsilon) as advantage
    from leaves
    inner join tree_baselines as trees using (group_id, agent_id, tree)
    inner join forest_baselines as forests using (group_id, agent_id)
)

select rollout_id, advantage
from rollouts
left join estimated using (rollout_id)
