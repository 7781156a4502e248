-- mt_grpo: the advantage of the outcome for each token, plus turn_weight times that of its turn, unless it is the last
-- paper: Zeng et al. 2025 (MT-GRPO), arXiv 2505.11821v1, as in the authors' code, which has two turns; here every turn
-- but the last is treated as their first
-- outcome: reward of the last environment step; of a trajectory without environment steps its episode_reward
-- each advantage: reward minus the mean, divided by the standard deviation, of all trajectories of the same agent in
-- the group; of turn k over those in which k is not the last
-- grain: one row per rollout_id, a list as long as response_tokens
-- reads: rollouts, with agent_steps, environment_steps
-- a token of agent step i belongs to the first environment step that i led to; other tokens get the outcome's advantage
-- turns go on over an agent's rows of an episode, by segment_index; a trajectory counts once, by its first row;
-- children of one agent_id and one parent are told apart only if each has one row
-- NULL: for a rollout that was not scored
-- $turn_weight multiplies the advantage of a turn | $epsilon is added to each standard deviation
-- default: turn_weight = 1.0
-- default: epsilon = 1e-4
with scored as materialized (
    select
        rollout_id,
        group_id,
        episode_id,
        agent_id,
        coalesce(parent_rollout_id, '') as parent_id,
        segment_index,
        episode_reward,
        [coalesce(step.reward, 0) for step in environment_steps] as rewards
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
    select
        earlier.rollout_id as earlier_id,
        later.rollout_id as later_id,
        later.segment_index,
        earlier.rewards as rewards_before,
        later.rewards
    from scored as later
    inner join scored as earlier using (episode_id, agent_id, parent_id)
    anti join siblings using (episode_id, agent_id, parent_id)
    where later.segment_index > 0 and earlier.segment_index < later.segment_index
),

befores as (
    select later_id as rollout_id, sum(len(rewards_before))::bigint as num_before
    from pairs
    group by later_id
),

afters as (
    select earlier_id as rollout_id, flatten(list(rewards order by segment_index)) as rewards_after
    from pairs
    group by earlier_id
),

continued as materialized (
    select
        rollout_id,
        group_id,
        agent_id,
        segment_index,
        coalesce(num_before, 0) as num_before,
        list_concat(rewards, coalesce(rewards_after, [])) as all_rewards,
        coalesce(all_rewards[-1], episode_reward) as outcome,
        rewards[:least(len(rewards), len(all_rewards) - 1)] as turn_rewards
    from scored
    left join befores using (rollout_id)
    left join afters using (rollout_id)
),

agents as (
    select
        group_id,
        agent_id,
        list(outcome order by outcome) filter (segment_index = 0) as outcomes,
        list({num_before: num_before, rewards: turn_rewards}) as rows,
        max(num_before + len(turn_rewards)) as num_turns
    from continued
    group by group_id, agent_id
),

-- sorted, so that sums are bit-identical for any number of threads
sorted as (
    select
        group_id,
        agent_id,
        outcomes,
        [
            list_sort(list_filter(
                [case when turn > each.num_before then each.rewards[turn - each.num_before] end for each in rows],
                lambda reward: reward is not null
            ))
            for turn in range(1, num_turns + 1)
        ] as turns
    from agents
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        agent_id,
        outcomes[1] as lowest,
        list_avg([outcome - outcomes[1] for outcome in outcomes]) as mean,
        list_stddev_samp([outcome - outcomes[1] for outcome in outcomes]) as std,
        [rewards[1] for rewards in turns] as lowests,
        [list_avg([reward - rewards[1] for reward in rewards]) for rewards in turns] as means,
        [coalesce(list_stddev_samp([reward - rewards[1] for reward in rewards]), 0) for rewards in turns] as stds
    from sorted
),

credits as (
    select
        rollout_id,
        (outcome - lowest - mean) / (coalesce(std, 0) + $epsilon) as base,
        [
            base
                + $turn_weight
                * (reward - lowests[num_before + turn] - means[num_before + turn])
                / (stds[num_before + turn] + $epsilon)
            for reward, turn in turn_rewards
        ] as credits
    from continued
    inner join baselines using (group_id, agent_id)
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
