"""Schedule the episodes of open groups: start one as soon as a slot is free, oldest group first.

Touches no files. A worker, an evaluation and `GroupSampler` start groups, and take them when they are complete. Raises
the errors of the engine; other errors fail their episode.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np

from ludic.agents import Ending, EpisodeFailedError, EpisodeRequest, ending, environment_calls
from ludic.base import storable
from ludic.engines import Completion, Engine, EngineConfig, GenerationRequest
from ludic.environments import GroupAnswer, LimitedEnvironments, TaskScorer, Transition, event_loops
from ludic.errors import HalfLoadedError
from ludic.records import (
    GROUP_CLOSED,
    LARGEST_REWARD,
    EnvironmentStep,
    EpisodeEnd,
    EpisodeOutcome,
    Rollout,
    RolloutGroup,
    add_rewards,
    find_misfits,
    with_columns,
)
from ludic.settings import GRACE_S

RunEpisode = Callable[[LimitedEnvironments, EpisodeRequest], Awaitable[Sequence[Rollout]]]
"""Runs an episode and returns its rows, at least one."""


class OpenedEpisodes(Protocol):
    """A RunEpisode that runs episodes only within a block, such as one that serves a gateway for them."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Prepare the episodes of this event loop, all of which begin and end within the block."""
        ...


def opened(run_episode: RunEpisode) -> AbstractAsyncContextManager[None]:
    """Prepare what runs episodes; a function needs nothing."""
    return run_episode.opened() if hasattr(run_episode, "opened") else nullcontext()


_MOST_WAITING = 8
"""Maximum concurrent episodes, as a multiple of the sequences that the engine decodes together: most of them may wait
for their environments."""
_SETTLED_S = 0.02
"""Seconds after its start in which an episode counts as about to call the engine."""
_POLL_S = 0.05
"""Seconds between checks for new weights after a load failed half-way."""

_start: ContextVar["_Start"] = ContextVar("start")
"""Start of the episode whose task runs. Threads and processes of an episode keep its context as long as they exist, so
it holds nothing large."""


@dataclass(slots=True, eq=False)
class BegunGroup:
    """A group that has begun."""

    number: int
    """Number with which it was started."""
    requests: Sequence[EpisodeRequest]
    """Requests of its episodes."""
    environments: LimitedEnvironments
    began_s: float
    """Time of the event loop at its start."""
    rows: dict[int, Sequence[Rollout]] = field(default_factory=dict)
    """Rows of the episodes that have ended, by their index in the group."""
    ended_at: dict[int, datetime] = field(default_factory=dict)
    """Times at which these ended."""
    left: "dict[int, _Episode]" = field(default_factory=dict)
    """The other episodes by index: running ones, and those that wait for a slot."""

    @property
    def episodes(self) -> list[Sequence[Rollout]]:
        """Rows of each episode of a group whose episodes have all ended."""
        return [self.rows[index] for index in range(len(self.requests))]

    @property
    def ends(self) -> tuple[EpisodeEnd, ...]:
        """How each episode has ended; one that still runs counts as given up."""
        return tuple(self._end(index) for index in range(len(self.requests)))

    def _end(self, index: int) -> EpisodeEnd:
        rows = self.rows.get(index)
        if rows is None:
            return EpisodeEnd(group_index=index, outcome="given_up")
        return EpisodeEnd(
            group_index=index,
            outcome=_outcome(rows),
            ended_at=self.ended_at[index],
            policy_version=min(row.policy_version for row in rows),
            num_tokens=sum(row.action_length for row in rows),
        )


@dataclass(slots=True, eq=False)
class _Start:
    settles_s: float = 0.0
    """Time until which the episode counts as calling the engine, if it has not done so yet."""


@dataclass(slots=True, eq=False)
class _Episode:
    group: BegunGroup
    index: int
    start: _Start = field(default_factory=_Start)
    ending: Ending = field(default_factory=Ending)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group whose episodes have all ended, with its final scores."""

    begun: BegunGroup
    group: RolloutGroup
    sampled_s: float
    """Seconds since the group began."""
    ended_s: float
    """Time of the event loop when it was complete."""


class Scheduler:
    """Groups that have begun and are not complete. Call all methods in one event loop."""

    def __init__(
        self,
        run_episode: RunEpisode,
        environments: Mapping[str, LimitedEnvironments],
        extra_columns: Mapping[str, str],
        *,
        in_flight: int | None = None,
        calls: "EngineCalls | None" = None,
        close_groups_at: int | None = None,
    ) -> None:
        """in_flight: maximum concurrent episodes. None: as many as keep the engine of `calls` full, or all at once
        without `calls`. extra_columns: the run's own columns; an episode with other values fails.
        close_groups_at: episodes of a group that end before the others are given up; None waits for all.
        """
        self._run_episode, self._environments, self._extra_columns = run_episode, environments, extra_columns
        self._in_flight, self._calls, self._close_groups_at = in_flight, calls, close_groups_at
        self._waiting: OrderedDict[_Episode, None] = OrderedDict()
        """Episodes that wait for a slot, in order; removing the first one is as fast as removing any other."""
        self._running: dict[asyncio.Task[Any], _Episode] = {}
        self._scoring: set[asyncio.Task[None]] = set()
        """Calls of score_group."""
        self._new: deque[_Start] = deque()
        """Tasks of episodes that may be about to call the engine, in order."""
        self._finished: list[Finished] = []
        self._open: dict[int, BegunGroup] = {}
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.is_paused = False
        """True if no further episode starts, though slots are free."""
        if calls is not None:
            calls.on_change = self.wake

    @property
    def num_open(self) -> int:
        """Groups that have begun and are not complete."""
        return len(self._open)

    @property
    def open_groups(self) -> list[BegunGroup]:
        """These groups, in the order of their starts."""
        return list(self._open.values())

    @property
    def num_running(self) -> int:
        """Episodes that run."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """True if no episode runs and no group is being scored."""
        return not self._running and not self._scoring

    @property
    def has_room(self) -> bool:
        """True if another group would begin at once."""
        return not self._waiting and not self.is_paused and self._free_slots() > 0

    def start(
        self, number: int, requests: Sequence[EpisodeRequest], environments: LimitedEnvironments | None = None
    ) -> BegunGroup:
        """Begin a group. requests: of its episodes, at least one. number: of no other group that is open.

        environments: of this group; None takes the scheduler's environment of the requests' env_name.
        """
        if environments is None:
            environments = self._environments[requests[0].env_name]
        group = BegunGroup(number, requests, environments, asyncio.get_running_loop().time())
        group.left = {index: _Episode(group, index) for index in range(len(requests))}
        self._open[number] = group
        self._waiting.update(dict.fromkeys(group.left.values()))
        self._fill()
        return group

    def wake(self) -> None:
        """Wake `wait`, which then checks again."""
        self._changed.set()

    async def wait(self, timeout_s: float | None = None) -> list[Finished]:
        """Wait until an episode or a call of the engine ends, or for a time; returns the groups completed since.

        With a time of 0, the tasks that are ready have one turn. Raises the errors of the engine, which end everything.
        """
        self._fill()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()
        if self._error is not None:
            raise self._error
        self._fill()
        return self.take()

    def take(self) -> list[Finished]:
        """Return the groups completed since the last call of this or of `wait`."""
        finished, self._finished = self._finished, []
        return finished

    async def close(self) -> None:
        """Give up all episodes that run."""
        self._waiting.clear()
        running = [*self._running, *self._scoring]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=GRACE_S)

    @property
    def _keeps_full(self) -> bool:
        """True if as many episodes run as keep the engine full."""
        return self._in_flight is None and self._calls is not None

    def _free_slots(self) -> int:
        if self._in_flight is not None:
            return self._in_flight - len(self._running)
        if self._calls is None:
            return 1
        now = asyncio.get_running_loop().time()
        while self._new and self._new[0].settles_s <= now:
            self._new.popleft()
        free = self._calls.max_batch - self._calls.num_running - self._calls.num_held - len(self._new)
        return min(free, _MOST_WAITING * self._calls.max_batch - len(self._running))

    def _fill(self) -> None:
        """Start the episodes that wait while slots are free."""
        started = False
        while self._waiting and not self.is_paused and self._free_slots() > 0:
            self._begin(self._waiting.popitem(last=False)[0])
            started = True
        if started and self._keeps_full:
            asyncio.get_running_loop().call_later(_SETTLED_S, self.wake)

    def _begin(self, episode: _Episode) -> None:
        episode.start.settles_s = asyncio.get_running_loop().time() + _SETTLED_S
        request = episode.group.requests[episode.index]
        tokens = _start.set(episode.start), ending.set(episode.ending)
        task = asyncio.ensure_future(self._run_episode(episode.group.environments, request))
        _start.reset(tokens[0])
        ending.reset(tokens[1])
        self._running[task] = episode
        if self._keeps_full:
            self._new.append(episode.start)
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[Sequence[Rollout]]") -> None:
        episode = self._running.pop(task)
        episode.start.settles_s = 0.0
        del episode.group.left[episode.index]
        self.wake()
        try:
            if task.cancelled():
                raise RuntimeError("an episode was cancelled")
            self._add(episode, task.result())
        except BaseException as error:  # raised by `wait`: an event loop only logs what a callback raises
            self._error = self._error or error

    def _add(self, episode: _Episode, rows: Sequence[Rollout]) -> None:
        """Add the rows of an episode to its group, which may be complete then."""
        group = episode.group
        group.rows[episode.index], group.ended_at[episode.index] = rows, datetime.now(UTC)
        if len(group.rows) < len(group.requests):
            if len(group.rows) == self._close_groups_at:
                self._close_group(group)
            return
        if group.environments.scores_groups:
            task = asyncio.ensure_future(self._score(group))
            self._scoring.add(task)
            task.add_done_callback(self._end_of_scoring)
        else:
            self._finish(group)

    def _close_group(self, group: BegunGroup) -> None:
        """End the other episodes of a group, also those that wait for a slot; their rows get an error."""
        for episode in group.left.values():
            episode.ending.end(GROUP_CLOSED)
            if episode in self._waiting:
                del self._waiting[episode]
                self._begin(episode)

    async def _score(self, group: BegunGroup) -> None:
        """Let the environment score the answers of a group together, while other episodes continue."""
        fitting = _without_misfits(group.episodes, self._extra_columns)
        scored = await score_together(group.environments, group.requests[0], fitting)
        group.rows = dict(enumerate(scored))
        self._finish(group)

    def _end_of_scoring(self, task: "asyncio.Task[None]") -> None:
        self._scoring.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self.wake()

    def _finish(self, group: BegunGroup) -> None:
        group.rows = dict(enumerate(_without_misfits(group.episodes, self._extra_columns)))
        del self._open[group.number]
        now = asyncio.get_running_loop().time()
        made = _group(group.requests[0], group.episodes)
        self._finished.append(Finished(begun=group, group=made, sampled_s=now - group.began_s, ended_s=now))


class EngineCalls(Engine):
    """Wraps an engine, counts its open requests, and records the time of its first tokens."""

    name: str  # attributes of the engine, through __getattr__
    repeats_in_any_batch: bool
    policy_version: int
    max_length: int

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.max_batch = getattr(engine, "max_batch", EngineConfig().max_batch)
        self.num_running = 0
        """Requests that wait in the engine or are being decoded."""
        self.num_held = 0
        """Requests that wait until `release`."""
        self.first_tokens: dict[int, float] = {}
        """Time, in seconds since 1970, of the first token by version. A version counts if a completion began with it.
        """
        self.on_change: Callable[[], None] = lambda: None
        """Called in the event loop when a request has ended."""
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._num_loads = self.num_stuck = 0
        """num_stuck: requests that wait for weights, since others have failed to load half-way."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Completion:
        if start := _start.get(None):
            start.settles_s = 0.0
        self.num_held += 1
        try:
            await self._may_begin.wait()
        finally:
            self.num_held -= 1
        self.num_running += 1
        began = time.time()
        try:
            completion = await self._generate(request)
        finally:
            self.num_running -= 1
            self.on_change()
        waited = completion.first_token_s
        first = time.time() if waited is None else began + waited
        version = completion.policy_version
        self.first_tokens[version] = min(first, self.first_tokens.get(version, first))
        return completion

    async def _generate(self, request: GenerationRequest) -> Completion:
        """Generate; if a load of weights fails half-way, generate again with the next loaded weights."""
        while True:
            num_loads = self._num_loads
            try:
                return await self._engine.generate(request)
            except HalfLoadedError:
                self.num_stuck += 1
                try:
                    while self._num_loads == num_loads:
                        await asyncio.sleep(_POLL_S)
                finally:
                    self.num_stuck -= 1

    def hold(self) -> None:
        """Let further requests wait before they reach the engine, until `release`."""
        self._may_begin.clear()

    def release(self) -> None:
        """Let the requests continue."""
        self._may_begin.set()

    def load_weights(self, folder: str, version: int) -> None:
        self._engine.load_weights(folder, version)
        self._num_loads += 1


def sample_groups(
    requests: Sequence[Sequence[EpisodeRequest]],
    run_episode: RunEpisode,
    environments: Mapping[str, LimitedEnvironments],
    extra_columns: Mapping[str, str],
) -> tuple[RolloutGroup, ...]:
    """Sample all episodes at the same time, and return a group for each sequence of requests.

    extra_columns: as of a Scheduler.
    """
    groups: dict[int, RolloutGroup] = {}

    async def sample() -> None:  # returns nothing, since asyncio.run makes the repr of a result (Python 3.11)
        scheduler = Scheduler(run_episode, environments, extra_columns)
        async with opened(run_episode):
            for number, of_group in enumerate(requests):
                scheduler.start(number, of_group)
            while scheduler.num_open:
                groups.update((finished.begun.number, finished.group) for finished in await scheduler.wait())

    event_loops.run(sample())
    return tuple(groups[number] for number in range(len(requests)))


def _outcome(rows: Sequence[Rollout]) -> EpisodeOutcome:
    errors = {row.error for row in rows} - {None}
    return "complete" if not errors else "given_up" if errors == {GROUP_CLOSED} else "failed"


def _group(request: EpisodeRequest, episodes: Sequence[Sequence[Rollout]]) -> RolloutGroup:
    rollouts = [rollout for rows in episodes for rollout in rows]
    return RolloutGroup(key=f"{request.env_name}/{request.example.example_id}", rollouts=tuple(rollouts))


def _without_misfits(
    episodes: Sequence[Sequence[Rollout]], extra_columns: Mapping[str, str]
) -> Sequence[Sequence[Rollout]]:
    """Fail the episodes with values that do not fit the schema; the store would otherwise refuse the whole batch."""
    rows = [row for of_episode in episodes for row in of_episode]
    errors = {rows[row].episode_id: f"{column} {found}" for row, column, found in find_misfits(rows, extra_columns)}
    if not errors:
        return episodes
    return [
        [_failed(row, errors[row.episode_id]) if row.episode_id in errors else row for row in of_episode]
        for of_episode in episodes
    ]


def _failed(row: Rollout, error: str) -> Rollout:
    """Return a row with an error, with its tokens, and without values of users' code."""
    return replace(
        with_columns(failed(row, error), token_rewards=np.zeros(row.response_length, np.float32)),
        agent_steps=(),
        environment_steps=(),
        messages=(),
        extra={},
    )


# --- Scores of all answers to an example together --------------------------------------------------------
# Score the answers to one example together: pass them to the environment's score_group, and write its scores into the
# rows.
#
# Touches no files. A score replaces the environment's earlier reward: the difference is added at the last step, and at
# the last token of its completion, so that the sums over steps and tokens stay equal to the episode's reward. An error
# of score_group fails all episodes of the group.

Episodes = Sequence[Sequence[Rollout]]


async def score_together(environments: LimitedEnvironments, request: EpisodeRequest, episodes: Episodes) -> Episodes:
    """Return the rows of a group's episodes with the rewards of score_group, whose errors are not raised.

    request: of any of the episodes, which share its example.
    """
    agents = [agent for rows in episodes for agent in _agents(rows)]
    if not agents:
        return episodes
    try:
        held = await environment_calls.make(environments)
        try:
            scores = await environment_calls.score_group(held, request.example, [_answer(agent) for agent in agents])
        finally:
            held.close()
    except EpisodeFailedError as error:
        why = f"score_group of environment {request.env_name} failed: {error}"
        return [
            [
                row
                if row.error is not None
                # The components of single answers show which scorer did not fail.
                else replace(failed(row, why, error.traceback), reward_components=row.reward_components)
                for row in rows
            ]
            for rows in episodes
        ]
    tasks_have_scores = isinstance(held.environment, TaskScorer)
    changed: dict[str, Rollout] = {}
    for agent, score in zip(agents, scores, strict=True):
        changed |= {row.rollout_id: row for row in _scored(agent, score)}
    return [
        [_with_score_of_root(changed.get(row.rollout_id, row), rows, changed, tasks_have_scores) for row in rows]
        for rows in episodes
    ]


def _agents(rows: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rows of each agent of the environment that did not fail, in the order of its segments."""
    agents: dict[str | None, list[Rollout]] = {}
    for row in rows:
        if row.depth == 0 and row.error is None:
            agents.setdefault(row.trajectory_id, []).append(row)
    return list(agents.values())


def _answer(agent: Sequence[Rollout]) -> GroupAnswer:
    actions = [step.action for step in _steps(agent) if step.action is not None]
    last = agent[-1]
    return GroupAnswer(
        text=actions[-1] if actions else "",
        reward=_reward_of_steps(agent),
        components=dict(last.reward_components),
        messages=tuple(last.messages),
        group_index=last.group_index,
        agent_id=last.agent_id,
        correct=last.correct,
    )


def _steps(agent: Sequence[Rollout]) -> list[EnvironmentStep]:
    """Return the steps of all rows in the order of the episode."""
    return sorted((step for row in agent for step in row.environment_steps), key=lambda step: step.turn)


def _reward_of_steps(agent: Sequence[Rollout]) -> float:
    """Return the environment's reward; the rest of an episode's reward is for its format."""
    return add_rewards(step.reward or 0.0 for step in _steps(agent))


def _scored(agent: Sequence[Rollout], score: Transition) -> list[Rollout]:
    """Return the rows of an agent with its score."""
    before = _reward_of_steps(agent)
    reward = add_rewards([agent[0].episode_reward or 0.0, -before, score.reward])
    components = {**agent[0].reward_components, **score.reward_components}
    correct = agent[0].correct if score.correct is None else score.correct
    columns: dict[str, Any] = {"episode_reward": reward, "reward_components": components, "correct": correct}
    rows = [replace(row, **columns, extra={**row.extra, **score.extra}) for row in agent]
    last = max(range(len(rows)), key=lambda index: [step.turn for step in rows[index].environment_steps[-1:]])
    rows[last] = _with_last_step(rows[last], score.reward - before, score)
    return rows


def _with_last_step(row: Rollout, difference: float, score: Transition) -> Rollout:
    """Return the row with a difference in reward at its last step, and at the last token that led to it."""
    steps, agent_steps = list(row.environment_steps), row.agent_steps
    at = agent_steps[-1]
    if steps:
        at = agent_steps[steps[-1].agent_steps[-1]]
        reward = add_rewards([steps[-1].reward or 0.0, difference])
        steps[-1] = replace(steps[-1], reward=reward, info={**steps[-1].info, **score.info})
    rewards = row.token_rewards.astype(np.float64)
    rewards[at.end - 1] = add_rewards([rewards[at.end - 1], difference])
    rewards = np.clip(rewards, -LARGEST_REWARD, LARGEST_REWARD).astype(np.float32)
    return replace(with_columns(row, token_rewards=rewards), environment_steps=tuple(steps))


def _with_score_of_root(
    row: Rollout, rows: Sequence[Rollout], changed: dict[str, Rollout], tasks_have_scores: bool
) -> Rollout:
    """Return the row of a sub-agent, whose reward includes that of the agent above it unless tasks have their own."""
    if row.depth == 0 or row.error is not None or tasks_have_scores:
        return row
    by_id = {each.rollout_id: each for each in rows}
    root = row
    while root.depth and root.parent_rollout_id in by_id:
        root = by_id[root.parent_rollout_id]
    if root.rollout_id not in changed:
        return row
    difference = (changed[root.rollout_id].episode_reward or 0.0) - (root.episode_reward or 0.0)
    return replace(row, episode_reward=add_rewards([row.episode_reward or 0.0, difference]))


def failed(row: Rollout, error: str, traceback: str | None = None) -> Rollout:
    """Return the row of an episode that has failed after its end, with its tokens and steps."""
    return replace(
        row,
        error=storable(error),
        traceback=traceback,
        episode_reward=None,
        reward_components={},
        correct=None,
        terminated=False,
        truncated=False,
        truncation_reason=None,
    )
