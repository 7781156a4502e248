-- ngrams: word n-grams of evaluated prompts that occur in texts of trained rollouts
-- grain: one row per env_name and env_example_id whose prompt has words | reads: eval_episodes, evals, batches, rollouts
-- prompt: messages of the user before the first completion, of the example's first sample
-- trained text: every message of a rollout that a gradient step used, whatever its role, and its thinking, each on its own
-- a word is a run of letters and digits, in lower case; a text of fewer than n words is one n-gram
-- ngram: hash of the words as one text; DuckDB's hash of a list does not see zeros at its start
-- an n-gram in more than a share `common` of an environment's examples, and in two or more, is its template: left out
-- rollout_id: trained rollout with the most n-grams of the prompt, the oldest one for ties | NULL: no n-gram is found
-- default: n = 13
-- default: common = 0.5
with asked as (
    select
        env_name,
        env_example_id,
        arg_min(rollout_id, (request_index, rollout_id)) as rollout_id
    from eval_episodes
    group by all
),

prompts as (
    select
        asked.env_name,
        asked.env_example_id,
        unnest(messages[:coalesce(list_position([m.role for m in messages], 'assistant') - 1, len(messages))]) as message
    from asked
    inner join evals using (rollout_id)
),

prompt_ngrams as (
    select distinct
        env_name,
        env_example_id,
        unnest([
            hash(array_to_string(words[i:i + $n - 1], ' ')) for i in range(1, greatest(len(words) - $n + 1, 1) + 1)
        ]) as ngram
    from (
        select
            env_name,
            env_example_id,
            regexp_extract_all(lower(message.content), '[\p{L}\p{N}]+') as words
        from prompts
        where message.role = 'user'
    )
    where len(words) > 0
),

templates as (
    select
        env_name,
        ngram
    from prompt_ngrams
    inner join (
        select env_name, count(distinct env_example_id) as num_examples
        from prompt_ngrams
        group by all
    ) using (env_name)
    group by all
    having count(*) > greatest(1, $common * any_value(num_examples))
),

wanted as (
    from prompt_ngrams
    anti join templates using (env_name, ngram)
),

texts as (
    select
        content,
        min(rollout_id) as rollout_id
    from (
        select
            rollout_id,
            unnest([message.content, message.reasoning]) as content
        from (
            select
                rollout_id,
                unnest(messages) as message
            from rollouts
            semi join (from batches where used) as trained using (rollout_id)
        )
    )
    where content is not null
    group by all
),

trained_ngrams as (
    select distinct
        ngram,
        rollout_id
    from (
        select
            rollout_id,
            unnest([
                hash(array_to_string(words[i:i + $n - 1], ' ')) for i in range(1, greatest(len(words) - $n + 1, 1) + 1)
            ]) as ngram
        from (
            select
                rollout_id,
                regexp_extract_all(lower(content), '[\p{L}\p{N}]+') as words
            from texts
        )
        where len(words) > 0
    )
    semi join wanted using (ngram)
),

shared as (
    select
        env_name,
        env_example_id,
        rollout_id,
        count(*) as num_shared
    from wanted
    inner join trained_ngrams using (ngram)
    group by all
),

nearest as (
    from shared
    qualify row_number() over (partition by env_name, env_example_id order by num_shared desc, rollout_id) = 1
),

counts as (
    select
        env_name,
        env_example_id,
        count(*) as num_ngrams,
        count(*) filter (ngram in (select ngram from trained_ngrams)) as num_found
    from wanted
    group by all
)

select
    env_name,
    env_example_id,
    num_ngrams,
    num_found,
    rollout_id,
    coalesce(num_shared, 0) as num_shared
from counts
left join nearest using (env_name, env_example_id)
