-- gigpo: the episode's advantage for each token, plus step_weight times the advantage of its environment step among
-- all steps of the same agent in the group that began at the same observation
-- paper: Feng et al. 2025 (GiGPO), arXiv 2505.10978, eq. 3, 6, 7 and 8
-- each advantage: value minus mean, divided by the standard deviation (divide_by_std false: by 1); the value of an
-- episode is its reward, of a step the discounted sum of the environment's rewards from this step on
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, environment_steps
-- a token of agent step i belongs to the first environment step that i led to; other tokens, and those of a step that
-- shares its observation with no other step, get the episode's advantage
-- steps go on over an agent's rows of an episode, by segment_index; a trajectory counts once, by its first row;
-- children of one agent_id and one parent are told apart only if each has one row
-- NULL: for a rollout that was not scored
-- a step without observation_hash (files before rollouts 1.2) shares its observation with no other
-- $step_weight multiplies the step's advantage | $discount: factor on a reward per step between
-- $divide_by_std: true or false | $epsilon is added to each standard deviation
-- default: step_weight = 1.0
-- default: discount = 0.95
-- default: divide_by_std = true
-- default: epsilon = 1e-6
with scored as materialized (
    select
        rollout_id,
        group_id,
        episode_id,
        agent_id,
        coalesce(parent_rollout_id, '') as parent_id,
        segment_index,
        episode_reward,
        [coalesce(step.reward, 0) for step in environment_steps] as rewards,
        -- 64 bits compare faster than text
        [
            case when step.observation_hash is not null then hash(step.observation_hash) end
            for step in environment_steps
        ] as states
    from rollouts
    where episode_reward is not null
),

-- children of one agent_id and one parent, which no column tells apart
siblings as (
    select episode_id, agent_id, parent_id
    from scored
    where segment_index = 0 and parent_id <> ''
    group by episode_id, agent_id, parent_id
    having count(*) > 1
),

-- each row of an agent's episode with each later row of it
pairs as (
    select earlier.rollout_id as earlier_id, later.rollout_id as later_id, later.segment_index, later.rewards
    from scored as later
    inner join scored as earlier using (episode_id, agent_id, parent_id)
    anti join siblings using (episode_id, agent_id, parent_id)
    where later.segment_index > 0 and earlier.segment_index < later.segment_index
),

afters as (
    select earlier_id as rollout_id, flatten(list(rewards order by segment_index)) as rewards_after
    from pairs
    group by earlier_id
),

continued as (
    select
        rollout_id,
        group_id,
        agent_id,
        episode_reward,
        states,
        list_concat(rewards, coalesce(rewards_after, [])) as rewards
    from scored
    left join afters using (rollout_id)
),

powers as (
    select [pow($discount, k) for k in range(coalesce(max(len(rewards)), 0)::bigint)] as powers
    from continued
),

returns as materialized (
    select
        rollout_id,
        group_id,
        agent_id,
        episode_reward,
        states,
        [
            list_inner_product(rewards[step:], powers[:len(rewards) - step + 1])
            for step in range(1, len(states) + 1)
        ] as returns
    from continued
    cross join powers
),

moves as (
    select group_id, agent_id, unnest(states) as state, unnest(returns) as return
    from returns
),

-- sorted, so that sums are bit-identical for any number of threads
sorted as (
    select group_id, agent_id, state, list_sort(list(return)) as returns
    from moves
    where state is not null
    group by group_id, agent_id, state
),

-- relative to the lowest return: equal returns give exactly 0, and large returns lose no digits
shared as (
    select
        group_id,
        agent_id,
        list(state) as known,
        list(returns[1]) as lowests,
        list(list_avg([return - returns[1] for return in returns])) as means,
        list(
            case
                when $divide_by_std then list_stddev_samp([return - returns[1] for return in returns]) + $epsilon
                else 1
            end
        ) as scales
    from sorted
    where len(returns) > 1
    group by group_id, agent_id
),

agents as (
    select group_id, agent_id, list(episode_reward order by episode_reward) as rewards
    from scored
    where segment_index = 0
    group by group_id, agent_id
),

baselines as (
    select
        group_id,
        agent_id,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from agents
),

credits as (
    select
        rollout_id,
        (episode_reward - lowest - mean) / case when $divide_by_std then coalesce(std, 0) + $epsilon else 1 end as base,
        [list_position(known, state) for state in states] as places,
        [
            base
                + $step_weight
                * coalesce((return - lowests[places[step]] - means[places[step]]) / scales[places[step]], 0)
            for return, step in returns
        ] as credits
    from returns
    inner join baselines using (group_id, agent_id)
    left join shared using (group_id, agent_id)
),

steps as (
    select
        rollouts.rollout_id,
        episode_reward,
        response_length,
        base::float as base,
        credits::float[] as credits,
        [step.start for step in agent_steps] as starts,
        [step.end for step in agent_steps] as ends,
        [step.agent_steps for step in environment_steps] as led_here
    from rollouts
    left join credits on credits.rollout_id = rollouts.rollout_id
)

select
    rollout_id,
    case
        when episode_reward is not null then
            list_resize(
                flatten([
                    list_resize(
                        list_resize([]::float[], start - coalesce(ends[i - 1], 0), base),
                        ends[i] - coalesce(ends[i - 1], 0),
                        coalesce(credits[list_position([list_contains(led, i - 1) for led in led_here], true)], base)
                    )
                    for start, i in starts
                ]),
                response_length,
                base
            )
    end as token_advantages
from steps
