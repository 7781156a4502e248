"""Protocol of one agent in one environment: ask the agent, run its tools, step the environment, until an end.

An episode ends when the environment terminates or truncates it, or at a limit: max_steps, max_seq_len, the model's
context, or time. A completion that can't be parsed, or that was cut off and is refused, is a step of its own: the
environment is not stepped, and the agent is told what was wrong. Errors of the environment are stored in the rows and
not raised.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ludic.agents.agent import Agent
from ludic.agents.contexts import text_without_thinking
from ludic.agents.environment_calls import check_text, checked_messages, own_max_steps, reset, step
from ludic.agents.episode import Episode
from ludic.agents.failures import EpisodeFailedError, fails_the_episode
from ludic.agents.prompts import PromptBuilder
from ludic.agents.requests import EpisodeRequest, derive_seed
from ludic.agents.reward_spans import rewards_at_tokens
from ludic.engines.engine import Completion, GenerationRequest
from ludic.environments.environment import Environment, Transition
from ludic.errors import LudicError
from ludic.models.chat import decode
from ludic.records import Message, Rollout, ToolCall

INCOMPLETE_OBSERVATION = "Your answer was cut off: it reached the limit of tokens. Answer more briefly."
"""Observation of the agent instead of the environment's answer, if its completion was cut off."""

TOO_MANY_CALLS = "You have called tools too often. Answer now, without tools."
"""Observation of an agent that calls tools again and again."""

MAX_STEPS = 32
"""Steps of an episode if neither the run nor the environment says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_steps: int | None = None
    """Maximum steps of the environment; None takes the environment's own, else MAX_STEPS."""
    max_seq_len: int | None = None
    """Maximum tokens of prompt and completion together; None is the engine's."""
    max_tool_rounds: int = 16
    """Maximum completions with tool calls before one step of the environment."""
    accept_incomplete: bool = False
    """Pass a completion that reached max_tokens on, instead of refusing it."""
    timeout_s: float | None = None
    """Maximum seconds of an episode; None is no limit."""


async def run_single_agent(
    agent: Agent,
    make_environment: Callable[[], Environment],
    request: EpisodeRequest,
    limits: EpisodeLimits = EpisodeLimits(),
) -> list[Rollout]:
    """Run an episode and return its rows, at least one. Raises ModelError and ConfigError of the engine."""
    episode = Episode(request, agent.model, agent.engine.policy_version)
    player = _Player(agent, request, limits, episode)
    try:
        async with asyncio.timeout(limits.timeout_s) as time_limit:
            await _play(player, make_environment, episode)
    except _NoRoomError as error:
        player.end(error.reason, str(error))
    except EpisodeFailedError as error:
        episode.error = str(error)
    except TimeoutError:
        if not time_limit.expired():
            raise
        player.end("time_limit", f"the episode took more than {limits.timeout_s:g} s")
    return episode.rollouts() or [player.failed_rollout()]


async def _play(player: "_Player", make_environment: Callable[[], Environment], episode: Episode) -> None:
    environment, messages = reset(make_environment, player.request.example)
    player.messages = list(messages)
    for _ in range(player.limits.max_steps or own_max_steps(environment) or MAX_STEPS):
        observation = player.messages[-1].content
        action, feedback = await player.act()
        rewards: list[tuple[int, float]] = []
        if action is None:
            transition = Transition(observation=feedback, reward=0.0, terminated=False)
        else:
            try:
                transition = step(environment, action)
            except EpisodeFailedError as error:
                return episode.add_failed_step(observation, action, str(error))
            tokens = episode.last_completion.tokens
            rewards = rewards_at_tokens(player.tokenizer, tokens, action, transition.span_rewards)
        episode.add_step(observation, action, transition, rewards)
        if transition.terminated or transition.truncated:
            return None
        player.messages.append(Message(role="user", content=transition.observation or ""))
    return episode.truncate("max_steps")


class _NoRoomError(Exception):
    """The next prompt does not fit; `reason` is a truncation reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One model call."""

    view: tuple[Message, ...]
    """What the model saw, and its completion as the last message."""
    prompt: np.ndarray
    completion: Completion

    @property
    def text(self) -> str:
        return self.view[-1].content

    def marked_text(self, tokenizer: Any) -> str:
        """Return the text after thinking, with special tokens, by which some model families mark tool calls.

        The token that ended the completion is left out.
        """
        is_complete = self.completion.finish_reason == "stop"
        text = tokenizer.decode(self.completion.tokens[: -1 if is_complete else None].tolist())
        return text_without_thinking(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What the agent does after a completion: act, call tools, or be told what was wrong."""

    action: str | None = None
    feedback: str | None = None
    """What was wrong with the completion; None if it has an action or tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    reward: float = 0.0
    """Format reward of the completion."""


class _Player:
    """The agent's side of an episode: the dialogue, its prompts and its calls of the engine."""

    def __init__(self, agent: Agent, request: EpisodeRequest, limits: EpisodeLimits, episode: Episode) -> None:
        self._agent, self._episode, self.tokenizer = agent, episode, agent.tokenizer
        self.request, self.limits = request, limits
        self._context = agent.make_context()
        self._prompts = PromptBuilder(agent.tokenizer, agent.toolbox.schemas, agent.render)
        self.messages = list(request.example.messages)
        """The dialogue so far."""

    def failed_rollout(self) -> Rollout:
        """Return the row of an episode that failed before its first call."""
        return self._episode.failed_rollout(self.messages, self._prompts.build(self.messages))

    def end(self, reason: str, explanation: str) -> None:
        """End the episode by a limit; one in which nothing was sampled has failed."""
        if self._episode.num_calls:
            self._episode.truncate(reason)
        else:
            self._episode.error = explanation

    async def act(self) -> tuple[str | None, str | None]:
        """Ask the agent, and run its tools, until it acts; returns the action, or None and what was wrong."""
        for num_left in range(self.limits.max_tool_rounds, -1, -1):
            call = await self._call(await self._view())
            decision = self._decide(call, num_left)
            self.messages.append(call.view[-1])
            if not decision.tool_calls:
                self._note(call, decision)
                return decision.action, decision.feedback
            results = await asyncio.gather(*map(self._agent.toolbox.run, decision.tool_calls))
            self._note(call, replace(decision, tool_calls=tuple(results)))
            self.messages.extend(map(_as_message, results))
        raise AssertionError("the last round has no tool calls")

    async def _view(self) -> Sequence[Message]:
        """Return what the next call sees. Raises EpisodeFailedError for an error of the context, not of the engine."""
        with fails_the_episode(unless=(LudicError, _NoRoomError)):
            return checked_messages("the context", await self._context.view(tuple(self.messages), self._ask))

    def _decide(self, call: _Call, num_left: int) -> _Decision:
        """Read a completion. num_left: rounds of tool calls that are allowed before the next step."""
        if call.completion.finish_reason == "length" and not self.limits.accept_incomplete:
            return _Decision(feedback=INCOMPLETE_OBSERVATION)
        if self._agent.toolbox.schemas:
            found = self._agent.tool_format.parse(call.marked_text(self.tokenizer))
            if found.feedback is not None:
                return _Decision(feedback=found.feedback)
            if found.calls and num_left == 0:
                return _Decision(feedback=TOO_MANY_CALLS)
            if found.calls:
                return _Decision(tool_calls=_numbered(found.calls, self._episode.num_calls))
        try:
            with fails_the_episode():
                parsed = self._agent.parser.parse(call.text)
                check_text(
                    "the parser's action or feedback", parsed.feedback if parsed.action is None else parsed.action
                )
        except EpisodeFailedError:
            self._note(call, _Decision())
            raise
        return _Decision(action=parsed.action, feedback=parsed.feedback, reward=parsed.reward)

    def _note(self, call: _Call, decision: _Decision) -> None:
        self._episode.add_call(
            call.view,
            call.prompt,
            call.completion,
            target="internal" if decision.tool_calls else "env",
            action=decision.action,
            feedback=decision.feedback,
            tool_calls=decision.tool_calls,
            reward=decision.reward,
        )

    async def _ask(self, messages: Sequence[Message]) -> str:
        """Make a call for the context, such as a summary; it is stored and trained on."""
        call = await self._call(messages)
        self._episode.add_call(call.view, call.prompt, call.completion, target="internal")
        return call.text

    async def _call(self, messages: Sequence[Message]) -> _Call:
        prompt = self._prompts.build(messages)
        num_calls = self._episode.num_calls
        params, room = self.request.params, self._room(len(prompt), is_first=num_calls == 0)
        if room < params.max_tokens:
            params = replace(params, max_tokens=room)
        seed = derive_seed(self.request.seed, num_calls) if num_calls else self.request.seed
        generation = GenerationRequest(prompt_tokens=prompt, params=params, seed=seed)
        completion = await self._agent.engine.generate(generation)
        answer = Message(role="assistant", content=decode(self.tokenizer, completion.tokens))
        self._prompts.complete(messages, prompt, completion, answer)
        return _Call(view=(*messages, answer), prompt=prompt, completion=completion)

    def _room(self, prompt_length: int, *, is_first: bool) -> int:
        """Return max_tokens of a call: later calls get what is left. Raises _NoRoomError if nothing is."""
        limit, reason = self._agent.engine.max_length, "context_length"
        if self.limits.max_seq_len is not None and self.limits.max_seq_len < limit:
            limit, reason = self.limits.max_seq_len, "max_seq_len"
        wanted = self.request.params.max_tokens
        if prompt_length + (wanted if is_first else 1) > limit:
            of = "the model's" if reason == "context_length" else "max_seq_len"
            text = f"a prompt of {prompt_length} tokens and max_tokens {wanted} exceed {of} {limit}"
            raise _NoRoomError(reason, text)
        return min(wanted, limit - prompt_length)


def _numbered(calls: Sequence[ToolCall], num_calls: int) -> tuple[ToolCall, ...]:
    """Give tool calls ids that are unique in the episode."""
    return tuple(replace(call, id=f"call_{num_calls}_{index}") for index, call in enumerate(calls))


def _as_message(call: ToolCall) -> Message:
    content = call.result if call.error is None else f"Error: {call.error}"
    return Message(role="tool", content=content or "", name=call.name)
