-- maj_at_k: success of the answer that most of the first k episodes of an example give
-- the answer is the last action of an episode; several most frequent answers count as their mean
-- an episode without an answer has no vote; an example without votes counts as 0
-- grain: one row per example and agent | reads: eval_episodes, evals | NULL: an example with fewer than k episodes,
-- whose chosen answer is not scored, or of an environment and version where no episode has an action
-- $threshold: reward of a success; NULL: the answer is correct, where that is known, else the reward is 1 (is_success)
-- default: k = 1
-- default: threshold = null
with answers as (
    select
        eval_episodes.*,
        case
            when evals.agent_steps[-1].action_target = 'env' then coalesce(
                evals.agent_steps[-1].action, evals.messages[evals.agent_steps[-1].action_message + 1].content
            )
        end as answer
    from eval_episodes
    left join (
        select rollout_id as last_id, episode_id, agent_id, agent_steps, messages
        from evals
        where depth = 0
        qualify row_number() over (partition by episode_id, agent_id order by segment_index desc) = 1
    ) as evals using (episode_id, agent_id)
    where sample_index < $k
),

examples as (
    select evaluation, policy_version, env_name, env_example_id, agent_id, count(*) as num_episodes
    from answers
    group by all
),

votes as (
    select
        evaluation,
        policy_version,
        env_name,
        env_example_id,
        agent_id,
        count(*) as num_votes,
        avg(is_success(reward, correct, $threshold::double)::double) as success
    from answers
    where answer is not null
    group by evaluation, policy_version, env_name, env_example_id, agent_id, answer
),

winners as (
    select evaluation, policy_version, env_name, env_example_id, agent_id, success
    from votes
    qualify rank() over (
        partition by evaluation, policy_version, env_name, env_example_id, agent_id order by num_votes desc
    ) = 1
),

parsed as (
    select evaluation, policy_version, env_name from votes group by all
)

select
    examples.evaluation,
    examples.policy_version,
    examples.env_name,
    examples.env_example_id,
    case
        when any_value(parsed.env_name) is null or any_value(examples.num_episodes) < $k then null
        when count(winners.agent_id) = 0 then 0.0
        else avg(winners.success)
    end as value,
    1 as num_trials -- one vote of an example
from examples
left join winners
    on
        winners.evaluation is not distinct from examples.evaluation
        and winners.policy_version = examples.policy_version
        and winners.env_name = examples.env_name
        and winners.env_example_id = examples.env_example_id
        and winners.agent_id = examples.agent_id
left join parsed
    on
        parsed.evaluation is not distinct from examples.evaluation
        and parsed.policy_version = examples.policy_version
        and parsed.env_name = examples.env_name
group by
    examples.evaluation, examples.policy_version, examples.env_name, examples.env_example_id, examples.agent_id
