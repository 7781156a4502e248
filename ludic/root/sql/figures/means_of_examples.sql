-- means_of_examples: counts of rollouts of evaluations, and means over examples, by environment, version or both
-- grain: one row per $keys, which are columns | reads: evals, eval_episodes; see ludic.root.sql.reports.means
-- an example of an evaluation counts once, with the mean of its samples, of its reward the scored ones
-- one cause counts once: unparsed_fraction and other_limit_fraction leave out episodes with an answer cut at max_tokens
-- NULL: reward_mean if no sample is scored; accuracy if of none it is known whether the answer is correct
with examples as (
    select
        $keys,
        avg(reward) as reward,
        avg(correct::integer) as correct,
        avg(response_length) as response_length,
        avg(truncated::integer) as truncated,
        avg(incomplete_completion::integer) as incomplete,
        avg(parse_error::integer) as parse_error,
        avg((parse_error and not incomplete_completion)::integer) as unparsed,
        avg((truncated and not incomplete_completion)::integer) as other_limit,
        avg((error is not null)::integer) as error
    from eval_episodes
    group by $keys, evaluation, env_name, env_example_id
),

counts as (
    select $keys, count(*) as num_rollouts, count(distinct group_id) as num_groups
    from evals
    group by all
)

select
    $keys,
    any_value(num_rollouts) as num_rollouts,
    any_value(num_groups) as num_groups,
    avg(reward) as reward_mean,
    avg(correct) as accuracy,
    avg(response_length) as response_length_mean,
    avg(truncated) as truncated_fraction,
    avg(incomplete) as incomplete_fraction,
    avg(parse_error) as parse_error_fraction,
    avg(unparsed) as unparsed_fraction,
    avg(other_limit) as other_limit_fraction,
    avg(error) as error_fraction
from counts
natural left join examples -- on $keys
group by $keys
order by $keys
