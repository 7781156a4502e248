"""Play one episode whose agent is a program that calls the model over HTTP: open, run, score, seal, and make its rows.

An episode of the schedule has an id that follows from its number, so that it outlives its worker: the next life of the
slot finds it, uses it if it was sealed, and otherwise runs the program again, whose calls get the stored answers as
long as they repeat. Errors of programs and environments are stored in the rows. Reads and writes what
ludic.gateway.gateway does, and a folder of the machine for each episode.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from ludic.agents import (
    Agent,
    Ending,
    Episode,
    EpisodeFailedError,
    EpisodeLimits,
    EpisodeRequest,
    Toolbox,
    ending,
    environment_tools,
    fails_the_episode,
    stored_wanted,
)
from ludic.agents import environment_calls as calls
from ludic.base import mask, private_folder
from ludic.environments import HeldEnvironment, LimitedEnvironments, Transition
from ludic.errors import ConfigError
from ludic.gateway import (
    EpisodeFacts,
    EpisodeResult,
    Gateway,
    OpenEpisode,
    RefusedCallError,
    SealedEpisode,
    agent_variables,
    assemble,
)
from ludic.records import Message, Rollout, ToolCall, new_id
from ludic.rollouts.commands import environment_of, limits_of, run_command, split_command
from ludic.rollouts.programs import AgentProgram, AgentTools, Clients, ProgramEnd, Task, check_fits
from ludic.root import EpisodeClaim, Root, newest_episode_claim
from ludic.root.rows import read_prompt
from ludic.root.storage import back_off
from ludic.run import RunConfig
from ludic.settings import SideThread

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_CODE, LAST_OUTPUT = "exit_code", "last_output"
"""Keys of what a command left, in the metadata of the rows and in the claim."""
_MOST_ATTEMPTS = 100
"""Attempts at an episode; more mean that something else is wrong."""
_NAMESPACE = uuid.UUID("4be0643f-1d98-573b-97cd-ca98a65347dd")
"""Of the ids of episodes."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_NOT_STARTED = 127
"""Exit code of a command that could not be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """What all episodes of a worker share."""

    root: Root
    run: RunConfig
    agent: Agent
    program: AgentProgram
    gateway: Gateway
    address: str
    """Of the gateway, without /v1."""
    timeout_s: float | None
    """Maximum seconds of an episode; None is no limit."""
    thread: SideThread
    """Makes rows, beside the event loop."""
    clients: Clients


class _ReusedError(Exception):
    """The episode was sealed by an earlier life, before its group was stored."""

    def __init__(self, claim: EpisodeClaim) -> None:
        super().__init__()
        self.claim = claim


class Play:
    """Plays one episode."""

    def __init__(self, player: Player, request: EpisodeRequest) -> None:
        self._player, self._gateway, self._request = player, player.gateway, request
        # Samples of an evaluation have the same numbers for each version.
        name = f"{player.root.run_id}/{request.request_index}"
        self._id = str(uuid.uuid5(_NAMESPACE, name)) if request.purpose == "train" else new_id()
        columns = {"example_columns": request.example_columns, "wanted": stored_wanted(request.example.wanted)}
        self._columns = {name: value for name, value in columns.items() if value is not None}
        self._facts = EpisodeFacts(
            env_name=request.env_name,
            env_example_id=request.example.example_id,
            group_id=request.group_id,
            group_index=request.group_index,
            group_size=request.group_size,
            request_index=request.request_index,
            purpose=request.purpose,
            columns=self._columns,
        )
        self._traceback: str | None = None
        self._transition: Transition | None = None
        self._action: str | None = None
        """The text that was scored."""
        self._end = ProgramEnd()

    async def run(self, environments: LimitedEnvironments) -> list[Rollout]:
        """Play the episode and return its rows, at least one."""
        if self._request.error is not None:
            result = EpisodeResult(outcome="failed", error=self._request.error)
            return [self._failed_row(result.error, self._request.traceback)]
        try:
            episode = await self._open()
        except _ReusedError as found:
            return await self._rows_of_claim(found.claim)
        began = time.monotonic()
        result = await self._result(environments, episode)
        # A call that the agent left behind holds the worker no longer than the agent could.
        left_s = None if self._player.timeout_s is None else self._player.timeout_s + began - time.monotonic()
        await self._persist(partial(self._gateway.seal, episode, result, wait_s=left_s))
        table = partial(self._gateway.calls_of, episode)
        return await self._rows(table, episode.attempt, episode.result or result, episode.left_behind)

    # --- Earlier lives ----------------------------------------------------------------------------------------

    async def _open(self) -> OpenEpisode:
        """Open the episode: the open attempt of a life that has ended, which goes on, or the next one.

        Raises _ReusedError for one that was sealed.
        """
        replays = self._player.run.agent_replay
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                return await self._open_attempt(attempt, replay=replays)
            except RefusedCallError as error:
                if error.reason not in ("sealed", "elsewhere", "invalid"):
                    raise
                claim = await asyncio.to_thread(newest_episode_claim, self._player.root, self._id, attempt)
                if claim is None:
                    raise
                if self._is_reusable(claim):
                    raise _ReusedError(claim) from None
                if claim.sealed_at is None and error.reason == "invalid" and not replays:
                    await self._give_up(attempt)
        raise ConfigError(f"{self._player.root.url}: episode {self._id} has {_MOST_ATTEMPTS} attempts; delete the root")

    async def _open_attempt(self, attempt: int, *, replay: bool) -> OpenEpisode:
        request = self._request
        opened = partial(
            self._gateway.open_episode,
            episode_id=self._id,
            attempt=attempt,
            seed=request.seed,
            facts=self._facts,
            replay=replay,
        )
        return await self._persist(opened)

    def _is_reusable(self, claim: EpisodeClaim) -> bool:
        """Return whether the rows of a sealed episode can be made from what is stored, for this example."""
        is_whole = claim.end is not None and claim.end != "given_up" and not self._player.run.extra_columns
        return claim.sealed_at is not None and is_whole and claim.env_example_id == self._request.example.example_id

    async def _give_up(self, attempt: int) -> None:
        """Seal an attempt that another one follows."""
        with suppress(RefusedCallError):
            episode = await self._open_attempt(attempt, replay=True)
            await self._gateway.seal(
                episode, EpisodeResult(outcome="given_up", error="the worker ended, and the episode began again")
            )

    async def _rows_of_claim(self, claim: EpisodeClaim) -> list[Rollout]:
        """Return the rows of an episode that an earlier life has sealed."""
        result = EpisodeResult(
            outcome=claim.end or "complete",
            error=claim.error,
            reward=claim.reward,
            reward_components=claim.reward_components,
            correct=claim.correct,
        )
        self._end = ProgramEnd(exit_code=claim.agent.get(EXIT_CODE), last_output=claim.agent.get(LAST_OUTPUT))
        table = partial(self._gateway.stored_calls, claim.episode_id, claim.attempt)
        return await self._rows(table, claim.attempt, result, claim.left_behind)

    async def _persist(self, write: Callable[[], Awaitable[T]]) -> T:
        """Return what a coroutine function returns, and call it again while the filesystem fails."""
        for wait_s in back_off(_SHORTEST_WAIT_S, _LONGEST_WAIT_S):
            try:
                return await write()
            except RefusedCallError as error:
                if error.reason != "stopping":
                    raise
                self._gateway.life.check()  # no try succeeds for a gateway that has lost its lease
                logger.warning("trying again: %s", error)
            await asyncio.sleep(wait_s)
        raise AssertionError("back_off does not end")

    # --- The program and its score ----------------------------------------------------------------------------

    async def _result(self, environments: LimitedEnvironments, episode: OpenEpisode) -> EpisodeResult:
        """Run the program and score what it did, within the limits; return the result, also of a failure."""
        early = ending.get() or Ending()
        try:
            async with asyncio.timeout(self._player.timeout_s) as time_limit:
                early.watch(time_limit)
                return await self._play(environments, episode)
        except EpisodeFailedError as error:
            self._traceback = error.traceback
            return self._ended(outcome="failed", error=str(error), reward_components=dict(error.components))
        except RefusedCallError as error:  # such as of an agent that sealed its episode itself
            return self._ended(outcome="failed", error=f"the gateway refused to score the episode: {error}")
        except TimeoutError:
            if not time_limit.expired():
                raise
            if early.reason is not None:
                return self._ended(outcome="given_up", error=early.reason)
            return self._ended(outcome="expired", error="time_limit", reward=0.0)
        finally:
            early.watch(None)

    async def _play(self, environments: LimitedEnvironments, episode: OpenEpisode) -> EpisodeResult:
        held = await calls.make(environments)
        folder = await asyncio.to_thread(_folder_of, self._id)
        try:
            check_fits(self._request.env_name, held)
            messages = await calls.reset(held, self._request.example)
            with fails_the_episode():
                (folder / "work").mkdir(parents=True)
            self._end = await self._player.program.run(self._task(held, messages, episode, folder))
            counts = self._gateway.counts(episode)
            last = await self._gateway.last_answer(episode)
            self._action = self._end.text if last is None or self._end.text is not None else last.content
            if counts.num_calls + counts.num_replayed_calls == 0:
                raise EpisodeFailedError(self._without_calls())
            if self._player.run.posted_scores:
                return await self._posted(episode)
            self._transition = await self._score(held, folder)
            return self._scored(self._transition)
        finally:
            held.close()
            await asyncio.to_thread(_delete, folder)

    def _task(self, held: HeldEnvironment, messages: Sequence[Message], episode: OpenEpisode, folder: Path) -> Task:
        tools, validators = environment_tools(held)
        toolbox = Toolbox(tools, time_limit_s=None, validators=validators)

        async def call(name: str, arguments: str) -> str:
            done = await toolbox.run(ToolCall(id="", name=name, arguments=arguments))
            return done.result if done.result is not None else f"error: {done.error}"

        key = episode.key
        assert key is not None, "an episode that was opened has its key"
        variables = agent_variables(self._player.address, self._id, episode.attempt, key)
        return Task(
            example_id=self._request.example.example_id,
            messages=tuple(messages),
            columns=self._request.example.columns,
            model=self._player.agent.model,
            variables=variables,
            folder=folder,
            tools=AgentTools(toolbox.schemas, call),
            clients=self._player.clients,
        )

    def _without_calls(self) -> str:
        if self._end.exit_code is None:
            return "the agent ended without a call of the model"
        return (
            f"the agent's command made no call of the model; exit code {self._end.exit_code}, "
            f"last output: {(self._end.last_output or 'none')[-500:]}"
        )

    async def _score(self, held: HeldEnvironment, folder: Path) -> Transition:
        """Return the score of the episode as the transition that ends it. Raises EpisodeFailedError."""
        if self._player.run.score_command is not None:
            return await self._score_by_command(self._player.run.score_command, folder)
        if hasattr(held.environment, "score_folder"):
            return await calls.score_folder(held, self._request.example, folder / "work")
        transition = await calls.step(held, self._action or "")
        if not (transition.terminated or transition.truncated):
            raise EpisodeFailedError(
                f"environment {self._request.env_name} goes on after the agent's final text, which ends the episode; "
                "take an environment with a question and a score, or with score_folder"
            )
        return transition

    async def _score_by_command(self, command: str, folder: Path) -> Transition:
        run = self._player.run
        with fails_the_episode():
            # A new one: from the agent's home, programs would run what it wrote there, such as Python's usercustomize.
            home = Path(tempfile.mkdtemp(prefix="score-", dir=folder))
            end = await run_command(
                split_command("score_command", command),
                folder=folder / "work",
                environment=environment_of(run, home, {}),
                limits=limits_of(run),
            )
        if end.exit_code == _NOT_STARTED:
            raise EpisodeFailedError(f"score_command could not be started: {end}")
        passed = end.exit_code == 0
        return Transition(
            observation=None,
            reward=float(passed),
            correct=passed,
            terminated=True,
            info={"score_command": str(end)},
        )

    def _scored(self, transition: Transition) -> EpisodeResult:
        if transition.span_rewards:
            raise EpisodeFailedError(
                f"environment {self._request.env_name} rewards parts of the answer (span_rewards), and it is not known "
                "which tokens of an agent that makes its own calls these are"
            )
        return self._ended(
            reward=transition.reward, reward_components=transition.reward_components, correct=transition.correct
        )

    def _ended(self, **values: Any) -> EpisodeResult:
        return EpisodeResult(exit_code=self._end.exit_code, last_output=self._end.last_output, **values)

    async def _posted(self, episode: OpenEpisode) -> EpisodeResult:
        """Return the result with the score that the agent posted."""
        found = await self._gateway.posted_score(episode)
        if found is None or found.reward is None:
            raise EpisodeFailedError("the agent posted no score to its gateway, and posted_scores is set")
        return replace(found, exit_code=self._end.exit_code, last_output=self._end.last_output)

    # --- Rows -------------------------------------------------------------------------------------------------

    async def _rows(
        self, read: Callable[[], pa.Table], attempt: int, result: EpisodeResult, left_behind: Sequence[str]
    ) -> list[Rollout]:
        """Return the rows of the sealed episode. read: returns its calls. left_behind: as in SealedEpisode."""
        request, root = self._request, self._player.root
        sealed = SealedEpisode(
            episode_id=self._id,
            attempt=attempt,
            seed=request.seed,
            facts=self._facts,
            result=result,
            left_behind=left_behind,
            columns=self._columns,
        )

        def make() -> list[Rollout]:
            table = read()
            digests = table["system_digest"].unique().drop_null().to_pylist()
            return assemble(table, sealed, {digest: read_prompt(root, digest) for digest in digests})

        rows = await self._player.thread.run(make)
        if not rows:
            return [self._failed_row(result.error or "the agent ended without a call of the model", self._traceback)]
        return [self._finished(row) for row in rows]

    def _finished(self, row: Rollout) -> Rollout:
        """Return a row with what the program and the environment said."""
        left = {EXIT_CODE: self._end.exit_code, LAST_OUTPUT: self._end.last_output}
        metadata = {**row.metadata, **{name: str(value) for name, value in left.items() if value not in (None, "")}}
        row = replace(row, metadata=metadata, traceback=self._traceback)
        transition = self._transition
        if transition is None:
            return row
        action = None if self._action is None else mask(self._action)
        steps = tuple(replace(step, action=action, info=transition.info) for step in row.environment_steps)
        row = replace(row, environment_steps=steps, extra=transition.extra)
        if not transition.truncated:
            return row
        steps = tuple(
            replace(step, terminated=False, truncated=True, info={"truncation_reason": "env", **step.info})
            for step in steps
        )
        return replace(row, environment_steps=steps, terminated=False, truncated=True, truncation_reason="env")

    def _failed_row(self, error: str | None, traceback: str | None) -> Rollout:
        """Return the row of an episode that failed before its first call."""
        failed = Episode(self._player.agent, self._request, EpisodeLimits())
        failed.fail(error or "the episode failed", traceback)
        (row,) = failed.rollouts()
        return self._finished(replace(row, episode_id=self._id, traceback=traceback))


def _folder_of(episode_id: str) -> Path:
    """Return an empty folder of an episode, not yet made.

    Its path is the same in each life, since harnesses write it into their prompts, and calls repeat only then.
    """
    folder = private_folder(f"ludic-agents-{os.geteuid()}") / episode_id
    _delete(folder)
    return folder


def _delete(folder: Path) -> None:
    """Delete a folder, also folders in it that may not be written, as Go's cache of modules has them.

    Follows no link. Folders below a thousand others may stay.
    """
    with suppress(OSError, RecursionError):
        if folder.is_symlink():
            folder.unlink()
        for parent, names, _ in os.walk(folder):
            for path in (Path(parent, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("%s could not be deleted; delete it by hand", folder)
