-- means: counts, means and fractions of rollouts, by environment, by version or by both
-- grain: one row per $keys, which are columns | reads: rollouts; see ludic.root.sql.reports.means
-- one cause counts once: unparsed_fraction and other_limit_fraction leave out rollouts with an answer cut at max_tokens
-- NULL: reward_mean if no episode of the row is scored; accuracy if of none it is known whether the answer is correct
select
    $keys,
    count(*) as num_rollouts,
    count(distinct group_id) as num_groups,
    avg(episode_reward) as reward_mean,
    avg(correct::integer) as accuracy,
    avg(response_length) as response_length_mean,
    avg(truncated::integer) as truncated_fraction,
    avg(incomplete_completion::integer) as incomplete_fraction,
    avg(parse_error::integer) as parse_error_fraction,
    avg((parse_error and not incomplete_completion)::integer) as unparsed_fraction,
    avg((truncated and not incomplete_completion)::integer) as other_limit_fraction,
    avg((error is not null)::integer) as error_fraction
from rollouts
group by all
order by $keys
