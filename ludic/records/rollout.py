"""Define the records that flow through ludic: rollouts, their groups and batches, and the steps and messages in them.

No I/O. Arrays are NumPy. `Rollout` holds one row of `schemas/rollouts.v1.json`,
except the provenance that the store adds (worker_id, sequence, created_at, group_key, run_id).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, Self

import numpy as np
import uuid_utils

Purpose = Literal["train", "eval"]
ActionTarget = Literal["internal", "external", "env"]
FinishReason = Literal["stop", "length"]
Capture = Literal["sampler", "trainer", "ids", "text"]
"""Levels of stored sampling data of a row, from most to least; see the column in schemas/rollouts.v1.json."""
WITHOUT_LOGPROBS: Collection[Capture | None] = ("ids", "text")
"""Levels of rows whose response_logprobs are zeros without meaning."""
NO_LOGPROBS: Mapping[str, str] = {
    "no_logprobs": (
        "their sampling logprobs were not stored; compute them offline with compute_logprobs, if the "
        "weights of their version are in the root, or train by sft, dpo, ipo or orpo, which need none"
    ),
    "text_capture": (
        "their tokens were made later from recorded texts, so no ratio to a sampler can be taken; train by sft, dpo, "
        "ipo or orpo, which need none"
    ),
}
"""Reasons for which a plan drops such a row (ludic/root/sql/plan/judge.sql), with the remedy for each."""
EpisodeOutcome = Literal["complete", "failed", "given_up"]
GroupEventKind = Literal["started", "complete", "given_up"]

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Maximum absolute value of a reward, which is stored as float32 at its token."""


def add_rewards(rewards: Iterable[float]) -> float:
    """Return the sum, rounded once: 0.7 + 0.2 + 0.1 is 1.0, where adding in turn gives 0.9999999999999999."""
    rewards = list(rewards)
    try:
        return math.fsum(rewards)
    except (OverflowError, ValueError):  # too large, or infinities of both signs: the sum is not finite
        return sum(rewards)


def add_components(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each component of a reward, by name, in the order in which the names appear."""
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: add_rewards(part[name] for part in parts if name in part) for name in names}


REWARD_DIGITS = 9
"""Digits after the point to which rewards are compared, since sums of rewards are rounded."""


def comparable_reward(reward: float) -> float:
    """Return a reward rounded for comparisons with other rewards and numbers; as in ludic/root/sql/macros/."""
    return round(reward, REWARD_DIGITS)


MAX_TOKENS = "max_tokens"
"""Value of `ended_by` for a rollout whose last answer was cut at max_tokens."""


def ended_by(truncation_reason: str | None, finish_reason: str | None, parse_error: bool) -> str | None:
    """Return the reason of a rollout's end, as in ludic/root/sql/macros/: a limit, or the model's own end.

    max_tokens: the last answer was cut there. In a store the row then has finish_reason length, and truncation_reason
    max_steps if the refused answer was the last that the episode allowed. None if nothing is known.
    """
    is_cut = finish_reason == "length" and (
        truncation_reason is None or (truncation_reason == "max_steps" and parse_error)
    )
    return MAX_TOKENS if is_cut else truncation_reason or finish_reason


MOST_WANTED_CHARACTERS = 2_000
"""Maximum characters of a wanted answer in a row. SQL caches this column of all rows on the querying machine."""

ExtraValue = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool] | None
"""Value of a run's own column in a row; None is the same as leaving the column out."""


def new_id() -> str:
    """Return a new uuid7: unique without coordination, and roughly sorted by time."""
    return str(uuid_utils.uuid7())


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call that the model requested, with its result or error."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it."""
    result: str | None = None
    error: str | None = None


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; `developer` is OpenAI's newer name of `system`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of the conversation as text."""

    role: str
    """One of ROLES."""
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """Text of the model's thinking, apart from the content; None if there is none, or if the content holds it."""
    tool_call_id: str | None = None
    """Id of the tool call that a message of role tool answers; None if calls and results are matched by their order."""


AWAITS_SCORE = "awaits_score"
"""Metadata of a row without a reward that is sound: name of the scorer that will score it."""
GROUP_CLOSED = "given up: its group was closed early (close_groups_at)"
"""Error of the rows of an episode that was given up because enough others of its group had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """How an episode of a group ended."""

    group_index: int
    outcome: EpisodeOutcome
    ended_at: datetime | None = None
    policy_version: int | None = None
    """Version of the weights at its first sampled token."""
    num_tokens: int | None = None
    """Sampled tokens of all its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent:
    """Start or end of a group of the schedule; one row of schemas/requests.v1.json."""

    event: GroupEventKind
    group_id: str
    group_number: int
    env_name: str
    env_example_id: str
    group_size: int
    policy_version: int
    """Version of the weights in use."""
    created_at: datetime
    episodes: tuple[EpisodeEnd, ...] | None = None
    """Episodes of the group; None at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """Tokens start to end, all sampled with one version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStep:
    """One completion of the model; start and end index response_tokens."""

    turn: int
    action_target: ActionTarget
    start: int
    end: int
    finish_reason: FinishReason | None = None
    parse_error: bool = False
    parse_feedback: str | None = None
    """Feedback to the agent after a parse failure."""
    action: str | None = None
    """The parsed action that was passed on; for an internal call, its text. None after a parse failure and for an
    external call."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStep:
    """One step of the environment and the agent steps that led to it."""

    turn: int
    agent_steps: tuple[int, ...]
    """Indexes into the rollout's agent_steps."""
    observation: str | None
    observation_hash: str | None = None
    """Digest of the observation before the step: equal observations are equal states to GiGPO."""
    action: str | None
    next_observation: str | None
    reward: float | None
    terminated: bool
    truncated: bool
    info: Mapping[str, str] = field(default_factory=dict)


class HasTokens:
    """Common base of rows: arrays by name, including those of their tokens."""

    __slots__ = ()
    columns: Mapping[str, Any]

    @property
    def prompt_tokens(self) -> np.ndarray:
        """(prompt_length,) int32."""
        return self.columns["prompt_tokens"]

    @property
    def response_tokens(self) -> np.ndarray:
        """(response_length,) int32."""
        return self.columns["response_tokens"]

    @property
    def action_mask(self) -> np.ndarray | None:
        """(response_length,) bool, 1 for sampled tokens; None if all tokens were sampled."""
        return self.columns.get("action_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(HasTokens):
    """One agent's token transcript of one episode; one row of the rollouts table."""

    rollout_id: str
    group_id: str
    """Id of the group: rollouts of one example that share a baseline."""
    episode_id: str
    """Id of the episode; the same in all its rows."""
    group_index: int
    """Index of the episode in its group, from 0."""
    group_size: int
    """Number of episodes in the group; an episode may have several rows."""
    request_index: int
    """Index of the episode in the run's deterministic schedule; see ludic.rollouts.group_schedule."""
    env_name: str
    env_example_id: str
    purpose: Purpose = "train"

    agent_id: str = "agent"
    parent_rollout_id: str | None = None
    depth: int = 0
    segment_index: int = 0
    parent_segment_index: int | None = None
    """The earlier row of this agent whose context was rewritten into this one; None for the first row."""
    trajectory_id: str | None = None
    """rollout_id of the first row of the same trajectory, which is all rows of one agent in one episode; None if
    unknown: RolloutGroup.trajectory_ids derives it."""

    policy_version: int
    """Version of the weights that sampled the first token."""
    policy_version_last: int
    """Version of the weights that sampled the last token."""
    weight_versions: Sequence[WeightSpan] | None = None
    """Spans of response_tokens by version; None if one version sampled all tokens."""
    model: str
    engine: str | None = None
    """Engine that sampled the tokens, with its version; None if unknown."""
    capture: Capture | None = None
    """Level of the stored sampling data; None is `sampler`."""
    temperature: float
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int
    seed: int

    columns: Mapping[str, Any]
    """Arrays of its tokens by the name of their column; one that is left out is absent. schemas/rollouts.v1.json
    describes each of them, see ludic.records.columns."""

    num_turns: int = 1
    episode_reward: float | None
    """Reward of the whole episode; None if it was not scored because something failed."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    wanted: str | None = None
    """The beginning of the wanted answer; None if the example has none, and in rows of sub-agents, which have other
    tasks."""
    example_columns: str | None = None
    """Columns of the example's row in its data set as a JSON object; None if it has none, or none are stored."""
    correct: bool | None = None
    """True if the answer was correct; None if the environment does not report it, or the episode failed."""
    terminated: bool
    truncated: bool
    truncation_reason: str | None = None
    finish_reason: FinishReason | None
    incomplete_completion: bool = False
    parse_error: bool = False
    error: str | None = None
    """Error of an environment or a tool; a row with an error is stored and counted, never trained on."""
    traceback: str | None = None
    """Traceback of the user's code that raised the error; without an error, of the first tool call that raised one."""
    agent_steps: Sequence[AgentStep] = ()
    environment_steps: Sequence[EnvironmentStep] = ()
    messages: Sequence[Message] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, ExtraValue] = field(default_factory=dict)
    """Values of the run's own columns x_*, as declared in RunConfig.extra_columns; a column left out is null."""

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Make a rollout from the values of its columns by name: arrays, which go into `columns`, and all others."""
        own = {field.name for field in fields(cls)}
        arrays = {name: value for name, value in values.items() if name not in own and value is not None}
        others = {name: value for name, value in values.items() if name in own}
        return cls(**{**others, "columns": {**others.get("columns", {}), **arrays}})

    @property
    def response_logprobs(self) -> np.ndarray:
        """(response_length,) float32, nats, under the distribution sampled from; 0 where action_mask is 0."""
        return self.columns["response_logprobs"]

    @property
    def token_rewards(self) -> np.ndarray:
        """(response_length,) float32; the reward that the episode gave at each token."""
        return self.columns["token_rewards"]

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_tokens)

    @property
    def response_length(self) -> int:
        return len(self.response_tokens)

    @property
    def action_length(self) -> int:
        """Number of sampled tokens, which are the tokens trained on."""
        return self.response_length if self.action_mask is None else int(np.count_nonzero(self.action_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """Episodes of one example; always stored, delivered and trained on as a whole."""

    key: str
    """The example that the group was made from; for people to read."""
    rollouts: tuple[Rollout, ...]

    def rloo_advantages(self) -> np.ndarray:
        """(len(rollouts),) float64: reward minus the mean reward of the other scored trajectories.

        REINFORCE leave-one-out, Ahmadian et al. 2024 (arXiv 2402.14740), equation 8. A trajectory counts once, with all
        its rows (trajectory_ids). Agents of the environment share a baseline; a sub-agent is compared with the
        sub-agents of its agent_id and depth. A trajectory without others gets 0, an unscored row NaN.
        ludic/root/sql/advantages/rloo.sql is tested against this function.
        """
        advantages = np.array([r.episode_reward for r in self.rollouts], dtype=np.float64)  # None becomes NaN
        peers = [r.depth and (r.agent_id, r.depth) for r in self.rollouts]
        ids = self.trajectory_ids()
        for own in set(peers):
            rows = [index for index, of_row in enumerate(peers) if of_row == own]
            scored = {ids[i]: advantages[i] for i in rows if self.rollouts[i].episode_reward is not None}
            # Subtract the lowest reward first, so that ties give exactly 0 and large rewards lose no digits. The
            # result is the same for any constant subtracted from all: r - (sum - r) / (n - 1) = (n r - sum) / (n - 1).
            lowest = min(scored.values(), default=0.0)
            total = math.fsum(reward - lowest for reward in scored.values())
            advantages[rows] = (len(scored) * (advantages[rows] - lowest) - total) / max(len(scored) - 1, 1)
        return advantages

    def trajectory_ids(self) -> list[str]:
        """The trajectory_id of each rollout, by the rule of ludic/root/sql/views/trajectory_rows.sql where it is
        None."""
        alike: dict[tuple[object, ...], list[tuple[int, str]]] = {}
        keys = [(r.episode_id, r.agent_id, r.parent_rollout_id, r.episode_reward) for r in self.rollouts]
        for key, r in zip(keys, self.rollouts, strict=True):
            alike.setdefault(key, []).append((r.segment_index, r.rollout_id))
        firsts = [min(alike[key]) for key in keys]
        return [
            r.trajectory_id or (r.rollout_id if r.segment_index == segment_index else first)
            for r, (segment_index, first) in zip(self.rollouts, firsts, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMetadata:
    """The worker that made a batch, and the time."""

    worker_id: str
    """Id of the worker; unique to one life of one process."""
    timestamp: datetime = field(default_factory=lambda: datetime.now(UTC))
    """Time of the batch by the worker's clock; nothing depends on clocks agreeing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Groups that a worker appends together; validated, and accepted or refused, as a whole."""

    groups: tuple[RolloutGroup, ...]
    metadata: RolloutMetadata
