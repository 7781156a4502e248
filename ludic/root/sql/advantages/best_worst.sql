-- best_worst: pairs of a group's best and worst rollout, for the objectives dpo, ipo and orpo
-- paper: Rafailov et al. 2023 (Direct Preference Optimization), arXiv 2305.18290, whose pairs people chose
-- grain: one row per rollout_id of a pair | reads: rollouts
-- advantage: 1 for the chosen, -1 for the rejected side; a group whose rewards are all equal makes no pair
-- an episode with several rollouts uses its first rollout, since both sides must answer the same prompt
-- NULL: never
with sides as (
    select
        group_id,
        min_by(rollout_id, {cost: -comparable_reward(episode_reward), id: rollout_id}) as chosen,
        min_by(rollout_id, {cost: comparable_reward(episode_reward), id: rollout_id}) as rejected
    from rollouts
    where episode_reward is not null and segment_index = 0 and depth = 0
    group by group_id
    having max(comparable_reward(episode_reward)) > min(comparable_reward(episode_reward))
)

select chosen as rollout_id, group_id as pair_id, 1 as advantage
from sides
union all
select rejected as rollout_id, group_id as pair_id, -1 as advantage
from sides
