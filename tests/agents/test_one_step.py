"""Episodes of one step with a real model: what is sampled is what is stored, and nothing an environment does raises."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import transformers
from episodes import without_place
from tiny_models import forward_logprobs

from ludic.agents.agent import Agent
from ludic.agents.episode import run_episode, single_agent
from ludic.agents.episode_agent import INCOMPLETE_OBSERVATION
from ludic.agents.requests import EpisodeLimits, EpisodeRequest, repeat
from ludic.engines.engine import Completion, GenerationRequest, SamplingParams, generate_all
from ludic.environments.environment import Environment, Example, Transition
from ludic.environments.registry import make_environment
from ludic.errors import ModelError
from ludic.models.chat import render_prompt
from ludic.models.decoding import decode
from ludic.records.rollout import Message, Rollout, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.records.validation import validate

EXAMPLE = Example(example_id="2+2", messages=(Message(role="user", content="what is 2 + 2"),))
NUM_EPISODES = 12
ADDITION = make_environment("addition")
QUESTION = ADDITION().example(0, "train")


@dataclass
class Scripted:
    """Answers any action with the same transition, and remembers the actions; raises errors it was given."""

    transition: Transition | None = None
    reset_error: Exception | None = None
    step_error: Exception | None = None
    observation: Sequence[Message] = EXAMPLE.messages
    actions: list[str] = field(default_factory=list)

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> tuple[Message, ...]:
        if self.reset_error:
            raise self.reset_error
        return self.observation

    def step(self, action: str) -> Transition:
        self.actions.append(action)
        if self.step_error:
            raise self.step_error
        return self.transition


def end(reward: float = 1.0, **options: object) -> Transition:
    return Transition(**{"observation": None, "reward": reward, "terminated": True} | options)


def requests(
    example: Example = EXAMPLE, n: int = NUM_EPISODES, *, seed: int = 0, **params: object
) -> tuple[EpisodeRequest, ...]:
    """A group of n; of its completions of at most 32 tokens some stop and some are cut off."""
    group = EpisodeRequest(
        env_name="sums",
        example=example,
        params=SamplingParams(**{"max_tokens": 32} | params),
        seed=0,
        group_id="group",
        request_index=0,
    )
    return repeat(group, n, seed)


def run_all(
    agent: Agent, make: Callable[[], Environment], episodes: Sequence[EpisodeRequest], **limits: object
) -> list[Rollout]:
    """The rows of all episodes, which run at the same time with one step each."""

    async def gather() -> list[list[Rollout]]:
        each = EpisodeLimits(**{"max_steps": 1} | limits)
        return await asyncio.gather(*(run_episode(single_agent, agent, make, request, each) for request in episodes))

    return [row for rows in asyncio.run(gather()) for row in rows]


def run_one(agent: Agent, environment: Environment, **options: object) -> Rollout:
    """The first episode whose completion stops by itself; only that one is run in the environment."""
    everything = sample(agent, requests())
    index = next(i for i, completion in enumerate(everything) if completion.finish_reason == "stop")
    (rollout,) = run_all(agent, lambda: environment, [requests()[index]], **options)
    return rollout


def sample(agent: Agent, episodes: Sequence[EpisodeRequest]) -> list[Completion]:
    """What the engine itself answers to the episodes' prompts."""
    prompt = render_prompt(agent.tokenizer, episodes[0].example.messages)
    return generate_all(
        agent.engine, [GenerationRequest(prompt_tokens=prompt, params=e.params, seed=e.seed) for e in episodes]
    )


def check_storable(rollouts: Sequence[Rollout]) -> None:
    """Raises what the store would raise."""
    group = RolloutGroup(key="sums/2+2", rollouts=tuple(rollouts))
    validate(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0-test")))


@pytest.fixture(scope="module")
def rollouts(agent: Agent) -> list[Rollout]:
    return run_all(agent, ADDITION, requests(QUESTION))


# --- What was sampled ------------------------------------------------------------------------------------


def test_tokens_and_logprobs_are_those_that_the_engine_returned(agent: Agent, rollouts: list[Rollout]) -> None:
    completions = sample(agent, requests(QUESTION))
    for rollout, completion in zip(rollouts, completions, strict=True):
        assert rollout.response_tokens.tolist() == completion.tokens.tolist()
        assert rollout.response_logprobs.tolist() == completion.logprobs.tolist()
        assert (rollout.policy_version, rollout.policy_version_last) == (7, 7)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_pass(agent: Agent, folder: str, temperature: float) -> None:
    for rollout in run_all(agent, ADDITION, requests(QUESTION, 4, temperature=temperature)):
        expected = forward_logprobs(folder, rollout.prompt_tokens, rollout.response_tokens, temperature=temperature)
        assert rollout.response_logprobs == pytest.approx(expected, abs=1e-4)


def test_the_chat_template_is_applied_once(agent: Agent, rollouts: list[Rollout]) -> None:
    expected = render_prompt(agent.tokenizer, QUESTION.messages).tolist()
    assert agent.tokenizer.decode(expected) == "<|user|> what is 2 5 4 + 1 ? end with the sum . <eos> <|assistant|>"
    assert all(rollout.prompt_tokens.tolist() == expected for rollout in rollouts)


def test_the_end_of_sequence_is_the_last_token_of_what_stopped_and_of_nothing_else(
    agent: Agent, rollouts: list[Rollout]
) -> None:
    end_token = agent.tokenizer.eos_token_id
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        stopped = rollout.finish_reason == "stop"
        assert (rollout.response_tokens == end_token).tolist() == [False] * (rollout.response_length - 1) + [stopped]
        assert stopped or rollout.response_length == 32


def test_messages_hold_the_conversation_as_text(agent: Agent, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        question, answer = rollout.messages
        assert question == QUESTION.messages[0]
        assert (answer.role, answer.content) == ("assistant", decode(agent.tokenizer, rollout.response_tokens))
        assert "<eos>" not in answer.content


def test_the_same_requests_give_the_same_tokens_and_another_seed_others(agent: Agent, rollouts: list[Rollout]) -> None:
    def tokens_of(seed: int) -> list[list[int]]:
        episodes = run_all(agent, ADDITION, requests(QUESTION, seed=seed))
        return [rollout.response_tokens.tolist() for rollout in episodes]

    assert tokens_of(0) == [rollout.response_tokens.tolist() for rollout in rollouts] != tokens_of(1)


def test_the_episodes_of_a_group_differ(rollouts: list[Rollout]) -> None:
    assert len({tuple(rollout.response_tokens.tolist()) for rollout in rollouts}) == NUM_EPISODES


def test_rows_say_what_was_asked_and_may_be_stored(rollouts: list[Rollout]) -> None:
    check_storable(rollouts)
    for index, (rollout, request) in enumerate(zip(rollouts, requests(QUESTION), strict=True)):
        assert (rollout.group_id, rollout.group_index, rollout.group_size) == ("group", index, NUM_EPISODES)
        assert (rollout.request_index, rollout.seed) == (index, request.seed)
        assert (rollout.env_name, rollout.env_example_id, rollout.purpose) == ("sums", QUESTION.example_id, "train")
        assert rollout.engine == f"transformers {transformers.__version__}"
        assert (rollout.model, rollout.temperature, rollout.top_p, rollout.top_k) == ("tiny", 1.0, 1.0, None)
        assert (rollout.max_tokens, rollout.num_turns, rollout.segment_index) == (32, 1, 0)
    assert len({rollout.rollout_id for rollout in rollouts}) == NUM_EPISODES
    assert len({rollout.episode_id for rollout in rollouts}) == NUM_EPISODES


def test_no_requests_give_no_rollouts(agent: Agent) -> None:
    assert run_all(agent, ADDITION, []) == []


# --- What the environment answered -----------------------------------------------------------------------


def test_the_environment_gets_the_text_once_and_its_answer_is_stored(agent: Agent) -> None:
    components, info = {"correct": 1.0, "format": 0.5}, {"judge": "strict"}
    environment = Scripted(end(0.75, reward_components=components, info=info))
    rollout = run_one(agent, environment)
    check_storable([replace(rollout, group_index=0, group_size=1)])
    text = decode(agent.tokenizer, rollout.response_tokens)
    assert environment.actions == [text]
    assert (rollout.episode_reward, rollout.reward_components, rollout.error) == (0.75, components, None)
    assert (rollout.terminated, rollout.truncated, rollout.truncation_reason) == (True, False, None)

    (agent_step,) = rollout.agent_steps
    assert (agent_step.action_target, agent_step.action, agent_step.parse_error) == ("env", text, False)
    assert (agent_step.start, agent_step.end) == (0, rollout.response_length)
    (step,) = rollout.environment_steps
    assert (step.observation, step.action, step.next_observation) == ("what is 2 + 2", text, None)
    assert (step.agent_steps, step.reward, step.terminated, step.truncated) == ((0,), 0.75, True, False)
    assert step.info == info


def test_the_reward_falls_at_the_last_token(agent: Agent) -> None:
    rollout = run_one(agent, Scripted(end(0.75)))
    assert rollout.token_rewards.tolist() == [0.0] * (rollout.response_length - 1) + [0.75]


def test_values_of_the_runs_own_columns_are_stored_with_the_rollout(agent: Agent) -> None:
    rollout = run_one(agent, Scripted(end(extra={"x_judge": "strict", "x_score": None, "x_tags": ["a"]})))
    assert rollout.extra == {"x_judge": "strict", "x_tags": ["a"]}
    assert run_one(agent, Scripted(end(extra=["x_judge"]))).error.startswith("AttributeError")


def test_an_environment_of_several_steps_is_cut_off_after_one(agent: Agent) -> None:
    rollout = run_one(agent, Scripted(end(0.5, terminated=False, observation="go on")))
    assert (rollout.terminated, rollout.truncated, rollout.truncation_reason) == (False, True, "max_steps")
    assert rollout.environment_steps[0].truncated
    assert rollout.environment_steps[0].next_observation == "go on"
    assert (rollout.episode_reward, rollout.error) == (0.5, None)


def test_an_environment_that_cuts_the_episode_off_itself_is_the_reason(agent: Agent) -> None:
    rollout = run_one(agent, Scripted(end(0.5, terminated=False, truncated=True)))
    assert (rollout.terminated, rollout.truncated, rollout.truncation_reason) == (False, True, "env")


def test_each_episode_has_an_environment_of_its_own(agent: Agent) -> None:
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted(end()))
        return made[-1]

    run_all(agent, make, requests(n=3), accept_incomplete=True)
    assert [len(environment.actions) for environment in made] == [1, 1, 1]


# --- Completions that were cut off -----------------------------------------------------------------------


def test_a_completion_that_hit_max_tokens_is_refused_and_the_environment_not_stepped(agent: Agent) -> None:
    environment = Scripted(end())
    rollouts = run_all(agent, lambda: environment, requests(n=3, max_tokens=2))
    check_storable(rollouts)
    assert environment.actions == []
    for rollout in rollouts:
        assert (rollout.finish_reason, rollout.incomplete_completion, rollout.parse_error) == ("length", True, True)
        assert (rollout.terminated, rollout.truncated, rollout.truncation_reason) == (False, True, "max_steps")
        assert (rollout.episode_reward, rollout.token_rewards.tolist(), rollout.error) == (0.0, [0.0, 0.0], None)
        (agent_step,), (step,) = rollout.agent_steps, rollout.environment_steps
        assert (agent_step.finish_reason, agent_step.parse_error, agent_step.action) == ("length", True, None)
        assert (step.action, step.next_observation, step.truncated) == (None, INCOMPLETE_OBSERVATION, True)


def test_a_completion_that_hit_max_tokens_is_handed_over_where_that_is_accepted(agent: Agent) -> None:
    environment = Scripted(end(0.5))
    (rollout,) = run_all(agent, lambda: environment, requests(n=1, max_tokens=2), accept_incomplete=True)
    check_storable([rollout])
    assert environment.actions == [decode(agent.tokenizer, rollout.response_tokens)]
    assert (rollout.finish_reason, rollout.incomplete_completion, rollout.parse_error) == ("length", True, False)
    assert (rollout.terminated, rollout.truncated, rollout.episode_reward) == (True, False, 0.5)


# --- What fails ------------------------------------------------------------------------------------------


def failing_factory() -> Environment:
    raise RuntimeError("no sandbox left")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Scripted(reset_error=KeyError("task")), "KeyError: 'task'"),
        (lambda: Scripted(observation=()), "ValueError: reset returned no message, wanted at least one"),
        (lambda: Scripted(observation=None), "ValueError: reset returned no message, wanted at least one"),
        (failing_factory, "RuntimeError: no sandbox left"),
    ],
)
def test_an_environment_that_does_not_begin_gives_a_row_with_its_error(
    agent: Agent, make: Callable[[], Environment], error: str
) -> None:
    (rollout,) = run_all(agent, make, requests(n=1))
    check_storable([rollout])
    assert without_place(rollout.error) == error
    assert (rollout.episode_reward, rollout.response_length, rollout.num_turns) == (None, 0, 0)
    assert (rollout.finish_reason, rollout.truncated, rollout.terminated) == (None, False, False)
    assert (rollout.policy_version, rollout.messages) == (7, EXAMPLE.messages)


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (Scripted(step_error=ZeroDivisionError("division by zero")), "ZeroDivisionError: division by zero"),
        (Scripted(end(float("nan"))), "ValueError: the reward that step returned is nan, wanted a finite float32"),
        (Scripted(end(1e39)), "ValueError: the reward that step returned is 1e+39, wanted a finite float32"),
        (
            Scripted(end(reward_components={"part": -np.inf})),
            "ValueError: component 'part' that step returned is -inf, wanted a finite float32",
        ),
    ],
)
def test_an_environment_that_fails_at_its_step_gives_a_row_with_its_error(
    agent: Agent, environment: Scripted, error: str
) -> None:
    rollout = run_one(agent, environment)
    check_storable([replace(rollout, group_index=0, group_size=1)])
    assert without_place(rollout.error) == error
    # What was sampled is kept; it is neither scored nor said to be cut off.
    assert (rollout.response_length > 0, rollout.finish_reason) == (True, "stop")
    assert (rollout.episode_reward, rollout.environment_steps[0].reward) == (None, None)
    assert (rollout.terminated, rollout.truncated, rollout.truncation_reason) == (False, False, None)
    assert not rollout.token_rewards.any()


def test_rewards_that_are_true_or_numpy_scalars_are_stored_as_numbers(agent: Agent) -> None:
    transition = end(np.bool_(True), terminated=np.bool_(True), reward_components={"part": True}, info={"tries": 3})
    rollout = run_one(agent, Scripted(transition))
    check_storable([replace(rollout, group_index=0, group_size=1)])
    assert (rollout.error, rollout.episode_reward, rollout.reward_components) == (None, 1.0, {"part": 1.0})
    assert rollout.environment_steps[0].info == {"tries": "3"}


def test_a_prompt_that_leaves_no_room_for_max_tokens_gives_a_row_with_an_error(agent: Agent) -> None:
    # The model holds 256 tokens; 250 words and the template's three are 253.
    example = Example(example_id="long", messages=(Message(role="user", content="a " * 250),))
    environment = Scripted(end(), observation=example.messages)
    (rollout,) = run_all(agent, lambda: environment, requests(example, 1, max_tokens=4))
    check_storable([rollout])
    assert rollout.error == "a prompt of 253 tokens and max_tokens 4 exceed the model's 256"
    assert (rollout.prompt_length, rollout.response_length, rollout.episode_reward) == (253, 0, None)
    (fitting,) = run_all(agent, lambda: environment, requests(example, 1, max_tokens=3))
    assert fitting.error is None


def test_what_fails_leaves_the_other_episodes_as_they_would_have_been(agent: Agent) -> None:
    environments = iter([Scripted(end()), Scripted(reset_error=OSError("gone")), Scripted(end())])
    mixed = run_all(agent, lambda: next(environments), requests(n=3))
    alone = run_all(agent, lambda: Scripted(end()), requests(n=3))
    assert [without_place(rollout.error) for rollout in mixed] == [None, "OSError: gone", None]
    assert [rollout.request_index for rollout in mixed] == [0, 1, 2]
    for index in (0, 2):
        assert mixed[index].response_tokens.tolist() == alone[index].response_tokens.tolist()


def test_a_model_whose_template_refuses_the_conversation_stops_with_its_name(agent: Agent) -> None:
    """Not an error of one episode: every other would fail alike."""
    refusing = replace(agent, tokenizer=type(agent.tokenizer).from_pretrained(agent.tokenizer.name_or_path))
    refusing.tokenizer.chat_template = "{{ raise_exception('only the system may speak') }}"
    with pytest.raises(ModelError, match="refuses a conversation of user: only the system may speak"):
        run_all(refusing, lambda: Scripted(end()), requests(n=1))


def test_an_environment_that_exits_fails_its_episode_only(agent: Agent) -> None:
    leaving = Scripted(step_error=SystemExit(3))  # type: ignore[arg-type]
    rollouts = run_all(agent, lambda: leaving, requests(n=1), accept_incomplete=True)
    assert rollouts[0].error is not None
    assert "sys.exit(3) was called" in rollouts[0].error
