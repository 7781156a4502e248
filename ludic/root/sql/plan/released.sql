-- released: rows of groups that are ready, with the versions of their scores
-- grain: one row per rollout_id | reads: waiting, ready, scores, score_versions
-- with $reward_scorer, episode_reward is its value $reward_name
-- NULL: episode_reward without such a value; score_problem of a row that has all values it needs, or needs none
with answers as (
    select
        rollout_id,
        scorer,
        any_value(scorer_version) as scorer_version,
        bool_or(value is not null and (name = $reward_name or scorer is distinct from $reward_scorer::varchar)) as has_value
    from scores
    group by rollout_id, scorer
),

scored as (
    select
        rollout_id,
        map_from_entries(list({k: scorer, v: scorer_version} order by scorer)) as versions,
        count(*) filter (has_value) as num_values
    from answers
    group by rollout_id
),

rewards as (
    select rollout_id, value
    from scores
    where scorer = $reward_scorer::varchar and name = $reward_name
)

select
    waiting.* exclude (since) replace (
        case when $reward_scorer::varchar is null then episode_reward else rewards.value end as episode_reward,
        case
            when waiting.error is not null or refusal is not null then null
            when
                not $mixed
                and group_id in (select group_id from score_versions where scorer_version is null)
                then 'mixed_scorers'
            when coalesce(num_values, 0) < $num_scorers then 'unscored'
        end as score_problem,
        coalesce(scored.versions, map {}) as scorer_versions
    )
from waiting
left join scored on scored.rollout_id = waiting.rollout_id
left join rewards on rewards.rollout_id = waiting.rollout_id
where group_id in (select group_id from ready)
