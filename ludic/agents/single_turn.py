"""Episodes of one step: prompt, one completion, one answer of the environment.

Rollouts keep the token ids that the engine returned; text is decoded from them only for the environment and for
people. An environment's error is stored in the row and not raised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

import numpy as np

from ludic.agents.requests import EpisodeRequest
from ludic.agents.transcript import RowBuilder, Span, Transcript, TranscriptBuilder
from ludic.engines.engine import Completion, Engine, GenerationRequest, generate_all
from ludic.environments.environment import Environment, Transition
from ludic.models.chat import decode, render_prompt
from ludic.records import AgentStep, EnvironmentStep, Message, Rollout, new_id
from ludic.user_code import exit_is_an_error

INCOMPLETE_OBSERVATION = "Your answer was cut off: it reached the limit of tokens. Answer more briefly."
"""Observation of the agent instead of the environment's answer, if its completion was cut off."""

_LARGEST_REWARD = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A model that continues a conversation."""

    engine: Engine
    tokenizer: Any
    """Tokenizer of transformers with a chat template, which is applied once, to the prompt."""
    model: str
    """Model name, stored with each rollout."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """Episode after reset and before sampling."""

    request: EpisodeRequest
    environment: Environment | None
    """Environment of the episode; None if its constructor failed."""
    messages: tuple[Message, ...]
    prompt_tokens: np.ndarray
    error: str | None


def run_single_step(
    agent: Agent,
    make_environment: Callable[[], Environment],
    requests: Sequence[EpisodeRequest],
    *,
    accept_incomplete: bool = False,
) -> list[Rollout]:
    """Return one rollout per request, in order; one call of the engine samples all completions.

    A completion that reached max_tokens is refused unless `accept_incomplete`: the environment is not
    stepped, the reward is 0, and the episode is truncated by max_steps.
    """
    openings = [_open(agent, make_environment, request) for request in requests]
    sampled = iter(
        generate_all(
            agent.engine,
            [
                GenerationRequest(prompt_tokens=o.prompt_tokens, params=o.request.params, seed=o.request.seed)
                for o in openings
                if o.error is None
            ],
        )
    )
    return [
        _failed(agent, o) if o.error is not None else _finish(agent, o, next(sampled), accept_incomplete)
        for o in openings
    ]


def _open(agent: Agent, make_environment: Callable[[], Environment], request: EpisodeRequest) -> _Opening:
    environment, messages, error = None, request.example.messages, None
    try:
        with exit_is_an_error():
            environment = make_environment()
            messages = _checked_messages(environment.reset(request.example))
    except Exception as raised:
        error = _explain(raised)
    prompt_tokens = render_prompt(agent.tokenizer, messages)
    error = error or _too_long(agent, request, len(prompt_tokens))
    return _Opening(request, environment, messages, prompt_tokens, error)


def _checked_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    if not messages:
        raise ValueError("reset returned no message, wanted at least one")
    return tuple(messages)


def _too_long(agent: Agent, request: EpisodeRequest, prompt_length: int) -> str | None:
    wanted, most = prompt_length + request.params.max_tokens, agent.engine.max_length
    if wanted <= most:
        return None
    return f"a prompt of {prompt_length} tokens and max_tokens {request.params.max_tokens} exceed the model's {most}"


def _finish(agent: Agent, opening: _Opening, completion: Completion, accept_incomplete: bool) -> Rollout:
    builder = TranscriptBuilder()
    span = builder.add_call(opening.prompt_tokens, completion.tokens, completion.logprobs)
    (transcript,) = builder.transcripts()
    text = decode(agent.tokenizer, completion.tokens)
    incomplete = completion.finish_reason == "length"
    refused = incomplete and not accept_incomplete
    transition, error = _refuse() if refused else _step(opening.environment, text)
    # A failed episode does not count as truncated.
    truncation_reason = None if error else _truncation_reason(transition)
    reward = None if error else transition.reward
    token_rewards = np.zeros(len(transcript.response_tokens), dtype=np.float32)
    token_rewards[span.end - 1] = reward or 0.0
    action = None if refused else text
    environment_step = EnvironmentStep(
        turn=0,
        agent_steps=(0,),
        observation=opening.messages[-1].content,
        action=action,
        next_observation=transition.observation,
        reward=reward,
        terminated=transition.terminated,
        truncated=truncation_reason is not None,
        info=transition.info,
    )
    return Rollout(
        **_identity(agent, opening.request, transcript),
        policy_version=completion.policy_version,
        policy_version_last=completion.policy_version_last,
        token_rewards=token_rewards,
        episode_reward=reward,
        reward_components=transition.reward_components,
        terminated=transition.terminated,
        truncated=truncation_reason is not None,
        truncation_reason=truncation_reason,
        finish_reason=completion.finish_reason,
        incomplete_completion=incomplete,
        parse_error=refused,
        error=error,
        agent_steps=(_agent_step(span, completion, action),),
        environment_steps=(environment_step,),
        messages=(*opening.messages, Message(role="assistant", content=text)),
        extra=transition.extra,
    )


def _agent_step(span: Span, completion: Completion, action: str | None) -> AgentStep:
    """Return the step of a completion. action: None if the completion was refused."""
    return AgentStep(
        turn=0,
        action_target="env",
        start=span.start,
        end=span.end,
        finish_reason=completion.finish_reason,
        parse_error=action is None,
        action=action,
    )


def _failed(agent: Agent, opening: _Opening) -> Rollout:
    """Return the rollout of an episode that failed before sampling."""
    row = RowBuilder()
    row.add_context(opening.prompt_tokens)
    return Rollout(
        **_identity(agent, opening.request, row.transcript()),
        policy_version=agent.engine.policy_version,
        policy_version_last=agent.engine.policy_version,
        token_rewards=np.zeros(0, dtype=np.float32),
        num_turns=0,
        episode_reward=None,
        terminated=False,
        truncated=False,
        finish_reason=None,
        error=opening.error,
        messages=opening.messages,
    )


def _identity(agent: Agent, request: EpisodeRequest, transcript: Transcript) -> dict[str, Any]:
    """Return the columns that follow from the request and the transcript."""
    params = request.params
    return {
        "rollout_id": new_id(),
        "episode_id": new_id(),
        "group_id": request.group_id,
        "group_index": request.group_index,
        "group_size": request.group_size,
        "request_index": request.request_index,
        "env_name": request.env_name,
        "env_example_id": request.example.example_id,
        "purpose": request.purpose,
        "segment_index": transcript.segment_index,
        "model": agent.model,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": params.max_tokens,
        "seed": request.seed,
        "prompt_tokens": transcript.prompt_tokens,
        "response_tokens": transcript.response_tokens,
        "response_logprobs": transcript.response_logprobs,
        "action_mask": transcript.action_mask,
    }


def _step(environment: Environment | None, action: str) -> tuple[Transition, str | None]:
    assert environment is not None
    try:
        with exit_is_an_error():
            return _checked(environment.step(action)), None
    except Exception as error:
        return Transition(observation=None, reward=0.0, terminated=False), _explain(error)


def _checked(transition: Transition) -> Transition:
    """Convert a transition's bools and NumPy numbers to plain types. Raises ValueError if a number is not finite.

    So an environment's mistake fails one rollout; the store would refuse the whole batch.
    """
    return replace(
        transition,
        reward=_finite("reward", transition.reward),
        reward_components={name: _finite(name, value) for name, value in transition.reward_components.items()},
        terminated=bool(transition.terminated),
        truncated=bool(transition.truncated),
        info={name: str(value) for name, value in transition.info.items()},
        extra={name: value for name, value in transition.extra.items() if value is not None},
    )


def _finite(name: str, value: SupportsFloat) -> float:
    number = float(value)
    # NaN fails this comparison.
    if not abs(number) <= _LARGEST_REWARD:
        raise ValueError(f"{name} is {number}, wanted a finite float32")
    return number


def _refuse() -> tuple[Transition, None]:
    return Transition(observation=INCOMPLETE_OBSERVATION, reward=0.0, terminated=False), None


def _truncation_reason(transition: Transition) -> str | None:
    if transition.truncated:
        return "env"
    # There is only one step: an episode that the environment has not ended is truncated.
    return None if transition.terminated else "max_steps"


def _explain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
