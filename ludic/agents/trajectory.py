"""Record the model calls and steps of one agent in an episode, and return them as rows for the store.

Each model call, each step of the environment and the end of the episode is recorded once. Rows hold the token ids that
the engine returned; a rewritten context begins a new row (ludic.agents.transcript). Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from ludic.agents.requests import NO_COMPONENTS, EpisodeRequest
from ludic.agents.transcript import CompletionSpan, RowBuilder, Transcript, TranscriptBuilder
from ludic.base import shortened
from ludic.engines import Completion
from ludic.environments import Transition
from ludic.records import (
    LARGEST_REWARD,
    MOST_WANTED_CHARACTERS,
    ActionTarget,
    AgentStep,
    EnvironmentStep,
    ExtraValue,
    Message,
    Rollout,
    ToolCall,
    WeightSpan,
    add_components,
    add_rewards,
    new_id,
)


@dataclass(slots=True)
class _Row:
    """Records of one row, apart from its tokens."""

    rollout_id: str = field(default_factory=new_id)
    agent_steps: list[AgentStep] = field(default_factory=list)
    environment_steps: list[EnvironmentStep] = field(default_factory=list)
    completions: list[tuple[CompletionSpan, Completion]] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Index of a response token, and a reward at it."""
    messages: tuple[Message, ...] = ()
    """Messages of the last call, with its completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryKey:
    """Role of an agent in an episode; columns of its rows."""

    episode_id: str
    agent_id: str = "agent"
    parent_rollout_id: str | None = None
    """The row in which another agent delegated its task to this one."""
    depth: int = 0
    """Number of agents above this one."""


class TrajectoryRecorder:
    """Records the trajectory of one agent in one episode."""

    def __init__(
        self, request: EpisodeRequest, key: TrajectoryKey, model: str, engine: str, policy_version: int
    ) -> None:
        """engine: its name. policy_version: of the weights in use, for a row in which nothing is sampled."""
        self._request, self.key, self._model, self._engine = request, key, model, engine
        self._policy_version = policy_version
        self._transcripts = TranscriptBuilder()
        self._rows: list[_Row] = []
        self._pending: list[tuple[int, int]] = []
        """Row and index of the agent steps since the last step of the environment."""
        self._components: list[Mapping[str, float]] = []
        """Components of the reward, by step."""
        self._correct: bool | None = None
        self._extra: dict[str, ExtraValue] = {}
        self._terminated = False
        self._truncation_reason: str | None = None
        self.metadata: Mapping[str, str] = {}
        """Other facts of the rows."""
        self._rewards: list[float] = []
        self.error: str | None = None
        self.traceback: str | None = None
        """Traceback of the user's code that raised the error, or else of the first tool that failed."""
        self.components_of_failure: Mapping[str, float] = NO_COMPONENTS
        """Known reward components of a failed episode."""

    @property
    def is_over(self) -> bool:
        """True if the episode has ended for this agent."""
        return self._terminated or self._truncation_reason is not None or self.error is not None

    @property
    def reward(self) -> float:
        """Sum of all rewards so far."""
        return add_rewards(self._rewards)

    @property
    def num_steps(self) -> int:
        """Number of steps of the environment."""
        return sum(len(row.environment_steps) for row in self._rows)

    @property
    def num_calls(self) -> int:
        """Number of model calls."""
        return sum(len(row.agent_steps) for row in self._rows)

    @property
    def last_completion(self) -> Completion:
        """The newest completion since the last step of the environment."""
        segment, index = self._pending[-1]
        return self._rows[segment].completions[index][1]

    @property
    def last_rollout_id(self) -> str:
        """Id of the row of the newest completion since the last step of the environment."""
        return self._rows[self._pending[-1][0]].rollout_id

    def add_call(
        self,
        messages: Sequence[Message],
        prompt: np.ndarray,
        completion: Completion,
        *,
        target: ActionTarget,
        action: str | None = None,
        feedback: str | None = None,
        tool_calls: Sequence[ToolCall] = (),
        reward: float = 0.0,
    ) -> None:
        """Record a model call, before its tools are run.

        messages: those of the call, and its completion as the last one. prompt: (length,) int32. action: the action
        passed on, or the text of an internal call; None after a parse failure and for external calls. feedback: message
        to the agent about a parse failure. reward: for the format, in addition to rewards of the environment.
        """
        span = self._transcripts.add_call(prompt, completion.tokens, completion.columns)
        if span.segment_index == len(self._rows):
            self._rows.append(_Row())
        row = self._rows[span.segment_index]
        row.messages = tuple(messages)
        row.completions.append((span, completion))
        self._pending.append((span.segment_index, len(row.agent_steps)))
        row.agent_steps.append(
            AgentStep(
                turn=self.num_calls,
                action_target=target,
                start=span.start,
                end=span.end,
                finish_reason=completion.finish_reason,
                parse_error=feedback is not None,
                parse_feedback=feedback,
                action=action,
                tool_calls=tuple(tool_calls),
            )
        )
        self._add_reward(span.segment_index, span.end - 1, reward)

    def set_results(self, tool_calls: Sequence[ToolCall]) -> None:
        """Record the results of the newest call's tools."""
        segment, index = self._pending[-1]
        steps = self._rows[segment].agent_steps
        steps[index] = replace(steps[index], tool_calls=tuple(tool_calls))

    def add_step(
        self,
        observation: str | None,
        action: str | None,
        transition: Transition,
        token_rewards: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Record a step of the environment, to which the calls since the last step led.

        action: None after a parse failure, whose transition the protocol makes up. token_rewards: index of a token in
        the last completion, and the reward at it, for the transition's span_rewards.
        """
        segment, _ = self._pending[-1]
        row = self._rows[segment]
        step = EnvironmentStep(
            turn=self.num_steps,
            agent_steps=tuple(index for owner, index in self._pending if owner == segment),
            observation=observation,
            observation_hash=None if observation is None else hash_observation(observation),
            action=action,
            next_observation=transition.observation,
            reward=add_rewards([transition.reward, *(reward for _, reward in token_rewards)]),
            terminated=transition.terminated,
            truncated=transition.truncated,
            info={"truncation_reason": "env", **transition.info} if transition.truncated else transition.info,
        )
        row.environment_steps.append(step)
        span, _ = row.completions[-1]
        self._add_reward(span.segment_index, span.end - 1, transition.reward)
        for index, reward in token_rewards:
            self._add_reward(span.segment_index, span.start + index, reward)
        self._components.append(transition.reward_components)
        if transition.correct is not None:
            self._correct = transition.correct
        self._extra.update(transition.extra)
        self._pending.clear()
        self._terminated = transition.terminated
        self._truncation_reason = "env" if transition.truncated else None

    def add_failed_step(self, observation: str | None, action: str | None, error: str) -> None:
        """Record a step in which the environment failed; the episode then has no reward."""
        self.add_step(observation, action, Transition(observation=None, reward=0.0, terminated=False))
        steps = self._steps_with_the_last()
        steps[-1] = replace(steps[-1], reward=None)
        self.error = error

    def truncate(self, reason: str) -> None:
        """End the episode by a limit of the protocol; its last step of the environment, if any, is marked."""
        self._truncation_reason = reason
        if steps := self._steps_with_the_last():
            info = {**steps[-1].info, "truncation_reason": reason}
            steps[-1] = replace(steps[-1], truncated=True, info=info)

    def rollouts(self) -> list[Rollout]:
        """Return the rows, in the order of their first calls; none if no call was made."""
        pairs = zip(self._transcripts.transcripts(), self._rows, strict=True)
        return [self._rollout(transcript, row) for transcript, row in pairs]

    def failed_rollout(self, messages: Sequence[Message], prompt: np.ndarray) -> Rollout:
        """Return the row of an episode that failed before its first call. prompt: (length,) int32, of the messages."""
        builder = RowBuilder()
        builder.add_context(prompt)
        return self._rollout(builder.transcript(), _Row(messages=tuple(messages)))

    def _steps_with_the_last(self) -> list[EnvironmentStep]:
        """Return the row's steps that end with the episode's last step so far; empty before the first."""
        steps = [row.environment_steps for row in self._rows if row.environment_steps]
        return max(steps, key=lambda of_row: of_row[-1].turn, default=[])

    def _add_reward(self, segment: int, index: int, reward: float) -> None:
        self.add_reward(reward)
        if reward:
            self._rows[segment].rewards.append((index, reward))

    def add_reward(self, reward: float) -> None:
        """Add a reward that belongs to no token, such as that of another agent."""
        self._rewards.append(reward)

    def _rollout(self, transcript: Transcript, row: _Row) -> Rollout:
        token_rewards = np.zeros(len(transcript.response_tokens))
        at_tokens: dict[int, list[float]] = {}
        for index, reward in row.rewards:
            at_tokens.setdefault(index, []).append(reward)
        for index, rewards in at_tokens.items():
            token_rewards[index] = add_rewards(rewards)
        reasons = [completion.finish_reason for _, completion in row.completions]
        is_truncated = self.error is None and self._truncation_reason is not None
        return Rollout(
            **self._identity(),
            rollout_id=row.rollout_id,
            trajectory_id=(self._rows or [row])[0].rollout_id,
            **version_columns(row.completions, self._policy_version),
            # The sum of several rewards at one token may overflow float32.
            columns={
                **transcript.columns,
                "token_rewards": np.clip(token_rewards, -LARGEST_REWARD, LARGEST_REWARD).astype(np.float32),
            },
            segment_index=transcript.segment_index,
            parent_segment_index=transcript.parent_segment_index,
            num_turns=len(row.agent_steps),
            episode_reward=None if self.error is not None else self.reward,
            reward_components=add_components(self._components) if self.error is None else self.components_of_failure,
            correct=None if self.error is not None else self._correct,
            terminated=self._terminated,
            truncated=is_truncated,
            truncation_reason=self._truncation_reason if is_truncated else None,
            finish_reason=reasons[-1] if reasons else None,
            incomplete_completion="length" in reasons,
            parse_error=any(step.parse_error for step in row.agent_steps),
            error=self.error,
            traceback=self.traceback,
            agent_steps=tuple(row.agent_steps),
            environment_steps=tuple(row.environment_steps),
            messages=row.messages,
            metadata=self.metadata,
            extra=self._extra,
        )

    def _identity(self) -> dict[str, Any]:
        """Return the columns that follow from the request and the key."""
        request, params, key = self._request, self._request.params, self.key
        return {
            "episode_id": key.episode_id,
            "agent_id": key.agent_id,
            "parent_rollout_id": key.parent_rollout_id,
            "depth": key.depth,
            "group_id": request.group_id,
            "group_index": request.group_index,
            "group_size": request.group_size,
            "request_index": request.request_index,
            "env_name": request.env_name,
            "env_example_id": request.example.example_id,
            "wanted": stored_wanted(request.example.wanted) if key.depth == 0 else None,
            "example_columns": request.example_columns,
            "purpose": request.purpose,
            "model": self._model,
            "engine": self._engine,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": params.max_tokens,
            "seed": request.seed,
        }


def stored_wanted(wanted: str | None) -> str | None:
    """Return the beginning of a wanted answer, which each row stores."""
    return None if wanted is None else shortened(wanted, MOST_WANTED_CHARACTERS)[0]


def version_columns(completions: Iterable[tuple[CompletionSpan, Completion]], policy_version: int) -> Mapping[str, Any]:
    """Return the columns of a row on versions of the weights. policy_version: used if nothing was sampled."""
    spans: list[WeightSpan] = []
    for span, completion in completions:
        for part in completion.weight_versions:
            start, end = span.start + part.start, span.start + part.end
            spans.append(WeightSpan(version=part.version, start=start, end=end))
    versions = [span.version for span in spans] or [policy_version]
    return {
        "policy_version": versions[0],
        "policy_version_last": versions[-1],
        "weight_versions": tuple(spans) if len(set(versions)) > 1 else None,
    }


def hash_observation(observation: str) -> str:
    """Return 32 hexadecimal digits, equal for equal observations on every machine."""
    return blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
