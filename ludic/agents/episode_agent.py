"""One agent in one episode, with its dialogue, its prompts, its tools and its record.

A protocol asks an agent to act, and gives it what came of its action. A completion that can't be parsed, or that was
cut off and is refused, is a step of its own: the environment is not stepped, and the agent is told what was wrong.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import numpy as np

from ludic.agents.agent import Agent, PromptBuilder
from ludic.agents.contexts import Context, begins_thinking, text_after_thinking
from ludic.agents.environment_calls import check_text, checked, checked_messages, finite
from ludic.agents.parsers import Parsed
from ludic.agents.requests import (
    NO_COMPONENTS,
    EpisodeFailedError,
    EpisodeLimits,
    EpisodeRequest,
    LimitReachedError,
    TokenBudget,
    derive_seed,
    fails_the_episode,
)
from ludic.agents.tools.toolbox import Toolbox
from ludic.agents.trajectory import TrajectoryKey, TrajectoryRecorder
from ludic.base import shortened
from ludic.engines import Completion, GenerationRequest, check_completion
from ludic.environments import SpanReward, Transition
from ludic.errors import ModelError
from ludic.models import decode
from ludic.records import ActionTarget, Message, Rollout, ToolCall, add_components, add_rewards
from ludic.settings import CodeFailure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


INCOMPLETE_OBSERVATION = "Your answer was cut off: it reached the limit of tokens. Answer more briefly."
"""Observation of the agent instead of the environment's answer, if its completion was cut off."""

OBSERVATION_CUT = "observation_cut"
"""Key of the number of cut characters, in the info of a step, or in the metadata of the rows for the first
observation."""

_NO_PROMPT = np.zeros(1, np.int32)
"""Prompt of a failed episode whose messages can't be rendered; each row has at least one token."""

TOO_MANY_CALLS = "You have called tools too often. Answer now, without tools."
"""Observation of an agent that calls tools again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One model call."""

    view: tuple[Message, ...]
    """Messages of the call, with the completion as the last one."""
    prompt: np.ndarray
    completion: Completion
    said: str
    """Text of the completion; the last message of `view` may hold its tool calls in another form."""

    def marked_text(self, tokenizer: Any) -> str:
        """Return the text after thinking, with special tokens, by which some model families mark tool calls.

        The token that ended the completion is left out.
        """
        is_complete = self.completion.finish_reason == "stop"
        text = tokenizer.decode(self.completion.tokens[: -1 if is_complete else None].tolist())
        # Some chat templates begin the thinking at the end of the prompt. Its last tokens are enough to see that.
        before = tokenizer.decode(self.prompt[-16:].tolist())
        return text_after_thinking(text, is_thinking=begins_thinking(before))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """Next step of the agent after a completion: act, call tools, or get feedback."""

    action: str | None = None
    feedback: str | None = None
    """Feedback on the completion; None if it has an action or tool calls."""
    start: int | None = None
    """Index of the action in the completion's text; None if it is not known."""
    tool_calls: tuple[ToolCall, ...] = ()
    transition: Transition | None = None
    """Transition of the tool calls that the environment ran; None if it ran none."""
    reward: float = 0.0
    """Format reward of the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTools:
    """Tools of a ToolRunner; see ludic.environments.environment."""

    schemas: Sequence[Mapping[str, Any]]
    run: Callable[[str, Sequence[ToolCall]], Awaitable[Transition]]
    """Runs calls of a completion, given its text without calls. Raises EpisodeFailedError."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(schema["function"]["name"] for schema in self.schemas)


class EpisodeAgent:
    """One agent in one episode."""

    def __init__(
        self,
        agent: Agent,
        request: EpisodeRequest,
        limits: EpisodeLimits,
        key: TrajectoryKey,
        *,
        acting: set[asyncio.Task[Any]],
        budget: TokenBudget | None = None,
    ) -> None:
        """acting: holds the tasks in which agents of the episode are asked. budget: tokens that it shares, or None."""
        self.request, self.limits, self.key, self.tokenizer = request, limits, key, agent.tokenizer
        self.max_steps: int | None = None
        """Largest number of steps; None is no limit."""
        self.messages: list[Message] = list(request.example.messages)
        """The dialogue so far; see `begin`."""
        self.external = Toolbox(())
        """Tools that the protocol runs for the agent."""
        self.of_environment: EnvironmentTools | None = None
        """Tools that the environment runs as a step; None if it has none."""
        self._agent, self._acting, self._budget = agent, acting, budget
        self._recorder = TrajectoryRecorder(request, key, agent.model, agent.engine.name, agent.engine.policy_version)
        self._context: Context | None = None
        self._prompts: PromptBuilder | None = None
        self._step: PendingStep | None = None
        self._observed: str | None = None
        """Transition of the last step, with the results of tools that the environment ran."""
        self._early: list[Transition] = []
        """Transition before the first action."""
        self._error_of_ask: Exception | None = None
        """Error of a call for the context."""

    @property
    def is_over(self) -> bool:
        """True if the episode is over for this agent."""
        ends = (each.terminated or each.truncated for each in (self._step.transitions if self._step else self._early))
        return any(ends) or self._recorder.is_over

    @property
    def error(self) -> str | None:
        """Why the episode failed; None if it did not."""
        return self._recorder.error

    @property
    def last_rollout_id(self) -> str:
        """Id of the row that the newest completion is in."""
        return self._recorder.last_rollout_id

    def begin(self, messages: Sequence[Message]) -> None:
        """Begin the dialogue with the first observation; a message that is too long is cut, and marked in the rows."""
        most = self.limits.max_observation_characters
        with fails_the_episode():
            cut = [(message, *shortened(message.content, most)) for message in messages]
        self.messages = [replace(message, content=text) if num else message for message, text, num in cut]
        num_cut = sum(num for _, _, num in cut)
        if num_cut:
            self._recorder.metadata = {OBSERVATION_CUT: str(num_cut)}

    # --- What a protocol does with an agent ------------------------------------------------------------------

    async def act(self) -> str | None:
        """Ask the agent, and run its tools, until it acts; returns its action.

        None after a completion without an action: the agent got feedback, or the environment ran its tool calls. Unless
        the episode is over by then, it may act again. Raises LimitReachedError if the agent has no step, no token or no
        room left, and EpisodeFailedError.
        """
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        is_first = task not in self._acting  # an agent that waits for a sub-agent acts in the task of its tool
        self._acting.add(task)
        try:
            return await self._act()
        finally:
            if is_first:
                self._acting.discard(task)

    async def _act(self) -> str | None:
        self._record_step()
        if self.max_steps is not None and self._recorder.num_steps >= self.max_steps:
            raise LimitReachedError("max_steps", f"the agent has made {self.max_steps} steps")
        newest = self.messages[-1]
        observation = None if newest.role == "assistant" else self._observed or newest.content
        decision = await self._decide_with_tools()
        self._step = PendingStep(observation, decision.action, decision.start, transitions=self._early)
        self._early = []
        if decision.transition is not None:
            self.take(decision.transition)
            return None
        if decision.action is None:
            self._add(Transition(observation=decision.feedback, reward=0.0, terminated=False))
        return decision.action

    def take(self, transition: Transition) -> None:
        """Take the transition of the action. Raises EpisodeFailedError if it can't be stored."""
        if self._step is None:
            raise RuntimeError("take without an action; call act first")
        action = self._step.action or ""
        transition = self._checked(transition, action)
        self._step.token_rewards += rewards_at_tokens(
            self.tokenizer,
            self._recorder.last_completion.tokens,
            action,
            transition.span_rewards,
            start=self._step.start,
        )
        self._add(transition)

    def observe(self, transition: Transition) -> None:
        """Take a transition while others acted; rewards count for the agent's last action, or else for its first.

        Raises EpisodeFailedError, as `take` does, for a transition that can't be stored.
        """
        transition = self._checked(transition, "")
        if self._step is None:
            self._early.append(transition)
        else:
            self._add(transition)

    def fail(self, error: str, traceback: str | None = None, components: Mapping[str, float] = NO_COMPONENTS) -> None:
        """End the episode with an error; a step that is not complete has no reward.

        traceback: of a user's code. components: known components of the reward.
        """
        if self._step is not None and not self._step.transitions:
            self._recorder.add_failed_step(self._step.observation, self._step.action, error)
            self._step = None
        self._record_step()
        self._recorder.error, self._recorder.traceback = error, traceback
        self._recorder.components_of_failure = components

    def end(self, reason: str, explanation: str) -> None:
        """End the episode by a limit; one in which nothing was sampled has failed."""
        self._record_step()
        if self._recorder.num_calls:
            self._recorder.truncate(reason)
        else:
            self._recorder.error = explanation

    # --- Rows ------------------------------------------------------------------------------------------------

    def rollouts(self) -> list[Rollout]:
        """Return the rows, none if no call was made."""
        self._record_step()
        return self._recorder.rollouts()

    def share_reward_of(self, other: "EpisodeAgent") -> None:
        """Count the reward of another agent for this one too; if that one failed, it has none."""
        self._recorder.add_reward(other._recorder.reward)
        if self._recorder.error is None and other.error is not None:
            self._recorder.error = f"the episode failed: {other.error}"
            self._recorder.traceback = other._recorder.traceback

    def failed_rollout(self) -> Rollout:
        """Return the row of an episode that failed before its first call, without messages if they have no prompt."""
        try:
            messages = checked_messages("the example", self.messages)
            return self._recorder.failed_rollout(messages, self._prompt_builder.build(messages))
        except Exception:  # of the messages or the chat template; the episode has failed already, and this row says why
            return self._recorder.failed_rollout((), _NO_PROMPT)

    # --- Steps -----------------------------------------------------------------------------------------------

    def _checked(self, transition: Transition, action: str) -> Transition:
        with fails_the_episode():
            transition = checked(transition, len(action), "step")
        if transition.observation is None:
            return transition
        observation, num_cut = shortened(transition.observation, self.limits.max_observation_characters)
        info = {**transition.info, OBSERVATION_CUT: str(num_cut)} if num_cut else transition.info
        return replace(transition, observation=observation, info=info)

    def _add(self, transition: Transition) -> None:
        assert self._step is not None, "the agent has acted"
        self._step.transitions.append(transition)

    def _record_step(self) -> None:
        """Record the agent's step, and show its transition to the agent."""
        merged = merge(self._step.transitions if self._step else self._early)
        if merged is None:
            return
        if self._step is None:
            # The first action gets the reward.
            self._early = [replace(merged, observation=None)]
        else:
            observed = self._observed = _joined(merged)
            self._recorder.add_step(
                self._step.observation,
                self._step.action,
                replace(merged, observation=observed),
                self._step.token_rewards,
            )
            self._step = None
        if merged.observation is not None and not (merged.terminated or merged.truncated):
            self._show(merged.observation)

    def _show(self, observation: str) -> None:
        """Add an observation to the dialogue. Chat templates want turns to alternate, so it may add to the first."""
        if not self._recorder.num_calls and self.messages[-1].role == "user":
            before = self.messages.pop().content
            observation = f"{before}\n\n{observation}"
        self.messages.append(Message(role="user", content=observation))

    # --- Completions -----------------------------------------------------------------------------------------

    async def _decide_with_tools(self) -> _Decision:
        for num_left in range(self.limits.max_tool_rounds, -1, -1):
            call = await self._call(await self._view())
            decision = self._decide(call, num_left)
            if decision.tool_calls and self._agent.tool_format.calls_apart:
                call = self._with_calls_apart(call, decision.tool_calls)
            self._note(call, decision)
            self.messages.append(call.view[-1])
            if not decision.tool_calls:
                return decision
            results, transition = await self._run_tools(call, decision.tool_calls)
            self._recorder.set_results(results)
            self.messages.extend(map(_as_message, results))
            if transition is not None:
                return replace(decision, action=call.said, transition=transition)
        raise AssertionError("the last round has no tool calls")

    def _with_calls_apart(self, call: _Call, tool_calls: tuple[ToolCall, ...]) -> _Call:
        """Return a model call whose message holds the tool calls apart from the text, as some templates require."""
        *seen, _ = call.view
        answer = Message(role="assistant", content="", tool_calls=tool_calls)
        self._prompt_builder.complete(seen, call.prompt, call.completion, answer)
        return replace(call, view=(*seen, answer))

    async def _run_tools(self, call: _Call, calls: Sequence[ToolCall]) -> tuple[list[ToolCall], Transition | None]:
        """Run the tools side by side. A blocking tool has a thread for each call, so their number is limited.

        Returns the calls with their results, and the transition of those that the environment ran.
        """
        limit = self.limits.max_tool_calls
        error = f"not run: only the first {limit} calls of an answer are run"
        results = {each.id: replace(each, error=error) for each in calls}
        own = [each for each in calls[:limit] if self._is_of_environment(each)]
        others = [each for each in calls[:limit] if not self._is_of_environment(each)]
        results |= {each.id: each for each in await asyncio.gather(*map(self._run_tool, others))}
        transition = None
        if own:
            results_of_own, transition = await self._run_in_environment(call, own)
            results |= {each.id: each for each in results_of_own}
        return list(results.values()), transition

    def _is_of_environment(self, call: ToolCall) -> bool:
        """Return whether the environment runs a call: of one of its tools, or of an unknown tool."""
        return self.of_environment is not None and call.name not in (*self._agent.toolbox.names, *self.external.names)

    async def _run_in_environment(self, call: _Call, calls: Sequence[ToolCall]) -> tuple[list[ToolCall], Transition]:
        assert self.of_environment is not None
        form = self._agent.tool_format
        text = "" if form.calls_apart else form.parse(call.said).rest
        transition = await self.of_environment.run(text, calls)
        results = [
            replace(each, error="not run by the environment")
            if result is None
            else replace(each, result=self.external.cut(result))
            for each, result in zip(calls, transition.tool_results, strict=True)
        ]
        return results, replace(transition, tool_results=tuple(each.result for each in results))

    async def _run_tool(self, call: ToolCall) -> ToolCall:
        toolbox, also = self._agent.toolbox, self.external.names
        if call.name in self.external:
            toolbox, also = self.external, ()
        return await toolbox.run(call, also=also, note=self._note_failed_tool)

    def _note_failed_tool(self, failure: CodeFailure) -> None:
        """Keep the traceback of the first tool that failed; the model reads its error, and the episode goes on."""
        self._recorder.traceback = self._recorder.traceback or failure.traceback

    async def _view(self) -> Sequence[Message]:
        """Return the messages of the next call. Raises EpisodeFailedError for an error of the context, not of the
        engine."""
        try:
            with fails_the_episode():
                self._context = self._context or self._agent.make_context()
                return checked_messages("the context", await self._context.view(tuple(self.messages), self._ask))
        except EpisodeFailedError as failure:
            if self._error_of_ask is not None and failure.__cause__ is self._error_of_ask:
                raise self._error_of_ask from None
            raise

    def _decide(self, call: _Call, num_left: int) -> _Decision:
        """Parse a completion. num_left: rounds of tool calls that are allowed before the next step."""
        if call.completion.finish_reason == "length" and not self.limits.accept_incomplete:
            return _Decision(feedback=INCOMPLETE_OBSERVATION)
        if self._agent.toolbox.names or self.external.names or self.of_environment is not None:
            found = self._agent.tool_format.parse(call.marked_text(self.tokenizer), self._schemas)
            if found.feedback is not None:
                return _Decision(feedback=found.feedback)
            if found.calls and num_left == 0:
                return _Decision(feedback=TOO_MANY_CALLS)
            if found.calls:
                return _Decision(tool_calls=_numbered(found.calls, self._recorder.num_calls))
        try:
            with fails_the_episode():
                parsed = self._agent.parser.parse(call.said)
                if not isinstance(parsed, Parsed):
                    raise TypeError(f"parse returned {shown(parsed)}, wanted a ludic.agents.parsers.Parsed")
                check_text(
                    "the parser's action or feedback", parsed.feedback if parsed.action is None else parsed.action
                )
                reward = finite("the parser's reward", parsed.reward)
        except EpisodeFailedError:
            self._note(call, _Decision())
            raise
        return _Decision(action=parsed.action, feedback=parsed.feedback, start=parsed.start, reward=reward)

    def _note(self, call: _Call, decision: _Decision) -> None:
        target: ActionTarget = "env"
        action = decision.action
        if any(each.name in self.external or self._is_of_environment(each) for each in decision.tool_calls):
            target = "external"
        elif decision.tool_calls:
            target, action = "internal", call.said
        self._recorder.add_call(
            call.view,
            call.prompt,
            call.completion,
            target=target,
            action=action,
            feedback=decision.feedback,
            tool_calls=decision.tool_calls,
            reward=decision.reward,
        )

    async def _ask(self, messages: Sequence[Message]) -> str:
        """Make a call for the context, such as a summary; it is stored and trained on."""
        with fails_the_episode():
            messages = checked_messages("the context's question", messages)
        try:
            call = await self._call(messages)
        except Exception as error:
            self._error_of_ask = error
            raise
        self._recorder.add_call(call.view, call.prompt, call.completion, target="internal", action=call.said)
        return call.said

    @property
    def _prompt_builder(self) -> PromptBuilder:
        if self._prompts is None:
            # Without tools of the protocol, prompts are rendered once for the first calls of a group's episodes.
            has_own = self.external.names or (self.of_environment is not None and self.of_environment.schemas)
            self._prompts = PromptBuilder(self.tokenizer, self._schemas, None if has_own else self._agent.render)
        return self._prompts

    @property
    def _schemas(self) -> list[Mapping[str, Any]]:
        """Schemas of all tools that the model may call."""
        own = self.of_environment.schemas if self.of_environment is not None else ()
        return [*self._agent.toolbox.schemas, *self.external.schemas, *own]

    async def _call(self, messages: Sequence[Message]) -> _Call:
        num_calls = self._recorder.num_calls
        # A template that refuses the first prompt does not fit the run; one that refuses a later one, the episode.
        with fails_the_episode(unless=() if num_calls else (ModelError,)):
            prompt = await self._prompt_builder.build_beside(messages)
        params, room = self.request.params, self._room(len(prompt), is_first=num_calls == 0)
        granted = room if self._budget is None else self._budget.reserve(room)
        if granted < params.max_tokens:
            params = replace(params, max_tokens=granted)
        seed = derive_seed(self.request.seed, num_calls) if num_calls else self.request.seed
        generation = GenerationRequest(prompt_tokens=prompt, params=params, seed=seed)
        unused = granted
        try:
            completion = await self._agent.engine.generate(generation)
            check_completion(self._agent.engine.name, generation, completion, self._agent.vocab_size)
            unused -= len(completion.tokens)
        finally:
            if self._budget is not None:
                self._budget.give_back(unused)
        answer = Message(role="assistant", content=decode(self.tokenizer, completion.tokens))
        self._prompt_builder.complete(messages, prompt, completion, answer)
        return _Call(view=(*messages, answer), prompt=prompt, completion=completion, said=answer.content)

    def _room(self, prompt_length: int, *, is_first: bool) -> int:
        """Return max_tokens of a call: later calls get the remaining tokens. Raises LimitReachedError if none
        remain."""
        limit, reason = self._agent.engine.max_length, "context_length"
        if self.limits.max_seq_len is not None and self.limits.max_seq_len < limit:
            limit, reason = self.limits.max_seq_len, "max_seq_len"
        wanted = self.request.params.max_tokens
        if prompt_length + (wanted if is_first else 1) > limit:
            of = "the model's" if reason == "context_length" else "max_seq_len"
            text = f"a prompt of {prompt_length} tokens and max_tokens {wanted} exceed {of} {limit}"
            raise LimitReachedError(reason, text)
        return min(wanted, limit - prompt_length)


def _numbered(calls: Sequence[ToolCall], num_calls: int) -> tuple[ToolCall, ...]:
    """Give tool calls ids that are unique in the episode: nine letters and digits, as Mistral's templates want them."""
    return tuple(replace(call, id=f"c{num_calls:05d}{index:03d}") for index, call in enumerate(calls))


def _as_message(call: ToolCall) -> Message:
    content = call.result if call.error is None else f"Error: {call.error}"
    return Message(role="tool", content=content or "", name=call.name)


# --- Steps -----------------------------------------------------------------------------------------------
# A step of one agent: its action, and all transitions until the agent acts again.


@dataclass(slots=True)
class PendingStep:
    """A step that is not recorded yet, since more transitions may follow."""

    observation: str | None
    action: str | None
    start: int | None
    """Index of the action in the completion's text; None if it is not known."""
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)


def merge(transitions: Sequence[Transition]) -> Transition | None:
    """Return the combined transition of an action; None if there is none. Span rewards are at their tokens by then."""
    if len(transitions) <= 1:
        return transitions[0] if transitions else None
    observations = [each.observation for each in transitions if each.observation is not None]
    return Transition(
        observation="\n\n".join(observations) if observations else None,
        reward=add_rewards(each.reward for each in transitions),
        reward_components=add_components(each.reward_components for each in transitions),
        correct=next((each.correct for each in reversed(transitions) if each.correct is not None), None),
        terminated=any(each.terminated for each in transitions),
        truncated=any(each.truncated for each in transitions),
        info={name: value for each in transitions for name, value in each.info.items()},
        extra={name: value for each in transitions for name, value in each.extra.items()},
        tool_results=next((each.tool_results for each in transitions if each.tool_results), ()),
    )


def _joined(transition: Transition) -> str | None:
    """Return what the agent is told: the results of its tools, then the observation; None if there is nothing."""
    observed = [each for each in (*transition.tool_results, transition.observation) if each is not None]
    return "\n\n".join(observed) if observed else None


# --- Rewards of parts of an action -----------------------------------------------------------------------
# The tokens of a completion at which they fall.


def rewards_at_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    tokens: np.ndarray,
    action: str,
    spans: Sequence[SpanReward],
    *,
    start: int | None = None,
) -> list[tuple[int, float]]:
    """Return for each span the index of the token that ends it, and its reward.

    tokens: (length,) int32, the completion. action: the parser's result, and start: its position in the text. Where the
    action is not in the text, or no start is known and it is there more than once, all rewards fall at the last token.
    """
    if not spans:
        return []
    start = _start_of(action, decode(tokenizer, tokens), start)
    if start is None:
        return [(len(tokens) - 1, span.reward) for span in spans]
    return [(token_at(tokenizer, tokens, start + span.end), span.reward) for span in spans]


def _start_of(action: str, text: str, start: int | None) -> int | None:
    if isinstance(start, int) and start >= 0 and text.startswith(action, start):  # a user's parser may return anything
        return start
    first = text.find(action)
    return first if first >= 0 and first == text.rfind(action) else None


def token_at(tokenizer: "PreTrainedTokenizerBase", tokens: np.ndarray, num_characters: int) -> int:
    """Return the index of the first of (length,) int32 tokens with which their text has this number of characters."""

    def num_complete(index: int) -> int:
        # The bytes of a character that is not complete are decoded as U+FFFD.
        return len(decode(tokenizer, tokens[: index + 1]).rstrip("\ufffd"))

    return min(bisect_left(range(len(tokens)), num_characters, key=num_complete), len(tokens) - 1)
