"""Sample the missing samples of an evaluation as a stream of blocks, each stored when it is complete.

Reads policies/ and evals/, writes evals/, evaluations/ and evaluators/. The next block of a version begins when the
engine has room, not when the last one is complete, so a long answer delays only its own block. Any number of processes
may share an evaluation: each claims its blocks, and waits at the end for those of the others. The blocks of a killed
process are sampled by others. Raises ConfigError for weights that are not stored, ConsentError for code of the root
that the user has not agreed to, TimeLimitError if an environment is not made or returns no example in time.
"""

import asyncio
import itertools
import logging
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from ludic.agents import Agent, EpisodeRequest
from ludic.base import make_folder
from ludic.engines import MakeEngine
from ludic.environments import Announce, LimitedEnvironments, TimeLimit, event_loops
from ludic.errors import ModelError, NameTakenError, SchemaError
from ludic.eval.config import EvalConfig
from ludic.eval.estimates import Chosen
from ludic.eval.plan import (
    EvaluatedEnvironment,
    MissingWeightsError,
    choose_versions,
    environment_settings,
    heldout_examples,
    missing_blocks,
    sampling_params,
    settings_of,
    unknown_versions,
)
from ludic.eval.suite import labelled
from ludic.models import load_tokenizer
from ludic.records import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.rollouts import (
    EngineCalls,
    FailureLog,
    Finished,
    RunEpisode,
    Scheduler,
    episodes_of_run,
    most_in_flight,
    open_code,
)
from ludic.rollouts import opened as opened_episodes
from ludic.root import EvaluationRecord, Root, is_questions
from ludic.root.rows import (
    BlockClaims,
    RolloutFile,
    RolloutWriter,
    SampleBlock,
    evaluation_of,
    put_evaluation,
    stored_blocks,
)
from ludic.root.weights import fetch_policy, first_model, has_weights, vocabulary_of
from ludic.run import RunConfig
from ludic.settings import Files, SideThread

logger = logging.getLogger(__name__)

BatchCallback = Callable[[RolloutBatch], None]

_POLL_S = 1.0
"""Mean seconds between checks of blocks that others have claimed."""
_MOST_COMPLETE = 16
"""Maximum complete blocks that wait to be stored; no further block begins then, which bounds memory if the filesystem
is slow."""
_TICK_S = 0.1
"""Seconds between checks of `stop`: a signal does not wake an event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """An environment that is ready to be sampled."""

    config: EvalConfig
    evaluation: EvaluationRecord
    plan: EvaluatedEnvironment
    environments: LimitedEnvironments
    files: Files


def evaluate(
    root: Root,
    configs: Mapping[str, EvalConfig],
    make_engine: MakeEngine,
    stop: threading.Event,
    *,
    model: str | None = None,
    versions: Iterable[int] | None = None,
    report: BatchCallback | None = None,
    announce: Announce | None = None,
) -> "EvaluationSamples":
    """Sample until everything is stored or `stop` is set; returns the evaluations' ids of each of the settings.

    configs: settings of the same versions, by the label that begins their errors. model: location of the run's first
    model, if it is not where run.json says. versions: those to evaluate, which may come over time; one whose weights
    are gone is skipped with a warning. None evaluates the versions of the settings. report: called with each sampled
    batch. announce: as in ludic.rollouts.worker.
    """
    first = next(iter(configs.values()))
    chosen = choose_versions(root, first.versions) if versions is None else []
    opened = {label: _open_all(root, label, config, announce, stop) for label, config in configs.items()}
    everything = [*chain(*opened.values())]
    if versions is None:
        _check_weights(root, chosen, everything)
    for each in everything:
        put_evaluation(root, each.evaluation)
    limits = [most for each in everything if (most := most_in_flight(each.plan.run)) is not None]
    in_flight = first.in_flight or min(limits, default=None)
    with _Weights(root, make_engine, model) as weights, BlockClaims(root) as claims:
        sampler = _Sampler(root, everything, weights, claims, stop, in_flight=in_flight, report=report)
        if versions is None:
            # A process waits for the blocks of others only when no version has a block left to begin.
            for version in chosen:
                sampler.sample(version, wait=False)
            for version in chosen:
                sampler.sample(version, wait=True)
        else:
            _follow(sampler, versions)
    ids = {label: [each.evaluation.evaluation for each in some] for label, some in opened.items()}
    return EvaluationSamples(versions=chosen if versions is None else None, evaluations=ids)


def _follow(sampler: "_Sampler", versions: Iterable[int]) -> None:
    for version in versions:
        try:
            sampler.sample(version, wait=True)
        except MissingWeightsError as error:
            logger.warning("skipped version %d: %s", version, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSamples:
    """Evaluations that `evaluate` sampled."""

    versions: Sequence[int] | None
    """Versions that were evaluated. None: all stored ones, after following a run."""
    evaluations: Mapping[str, Sequence[str]]
    """Ids of the evaluations of each settings, by their label."""

    def chosen(self, label: str) -> Chosen:
        """Return the choice of the samples of some settings, to measure them."""
        return Chosen(versions=self.versions, evaluations=sorted(self.evaluations[label]))


def _open_all(
    root: Root, label: str, config: EvalConfig, announce: Announce | None, stop: threading.Event
) -> list[_Opened]:
    limit = TimeLimit(timeout_s=config.env_timeout_s, announce=announce)
    with labelled(label):
        return [_open(root, config, run, limit, stop) for run in environment_settings(root, config)]


def _open(root: Root, config: EvalConfig, run: RunConfig, limit: TimeLimit, stop: threading.Event) -> _Opened:
    """Load an environment and choose its examples."""
    made, files, code = open_code(root, limit, run, stop=stop)
    environments = made[run.env[0]]
    params = sampling_params(run, config)
    examples = heldout_examples(run.env[0], environments, config.num_examples)
    plan = EvaluatedEnvironment(run=run, params=params, examples=examples)
    # Scores of a group depend on its size, so evaluations with other numbers of samples can't share samples.
    of_groups = {"n": config.n} if environments.scores_groups else {}
    # Named only if it is not that of older roots, so that their evaluations keep their ids.
    of_ids = {"example_ids": root.example_ids} if is_questions(plan.name) and root.example_ids != "question" else {}
    evaluation = evaluation_of(plan.name, settings_of(run, params) | of_groups | of_ids, code)
    return _Opened(config=config, evaluation=evaluation, plan=plan, environments=environments, files=files)


def _check_weights(root: Root, versions: Iterable[int], opened: Sequence[_Opened]) -> None:
    """Raise MissingWeightsError, before anything is sampled, for all versions that need weights and have none."""
    missing = [
        version
        for version in versions
        if version != 0  # the first model, which may be elsewhere
        and not has_weights(root, version)
        and any(_blocks_left(root, each, version) for each in opened)
    ]
    if missing:
        raise unknown_versions(root, missing)


# --- Blocks that are left ------------------------------------------------------------------------------


def _blocks_left(root: Root, opened: _Opened, version: int) -> list[SampleBlock]:
    config = opened.config
    evaluation = opened.evaluation.evaluation
    stored = stored_blocks(root, evaluation, version)
    return missing_blocks(evaluation, list(opened.plan.examples), config.n, stored, config.examples_per_call)


@dataclass(slots=True, eq=False)
class _Block:
    """A block that is not stored: not begun, being sampled, or complete."""

    opened: _Opened
    samples: SampleBlock
    version: int
    numbers: Sequence[int] = ()
    """Numbers of its groups in the scheduler, in order."""
    groups: dict[int, RolloutGroup] = field(default_factory=dict)
    """Groups that are complete, by their numbers."""

    @property
    def name(self) -> str:
        """Name of its file."""
        return RolloutFile(self.version, self.opened.plan.name, self.samples.worker_id, 0, "evals").name

    @property
    def batch(self) -> RolloutBatch:
        groups = tuple(self.groups[number] for number in self.numbers)
        return RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=self.samples.worker_id))


class _Left:
    """Blocks of a version that were not stored when they were listed, and that this process has not begun."""

    def __init__(self, root: Root, opened: Sequence[_Opened], version: int, claims: BlockClaims) -> None:
        self._root, self._claims = root, claims
        blocks = [_Block(each, block, version) for each in opened for block in _blocks_left(root, each, version)]
        random.shuffle(blocks)  # random, so that concurrent processes rarely claim the same block
        self._blocks = {block.name: block for block in blocks}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def take(self) -> _Block | None:
        """Claim a block that no process samples, and return it; None if there is none. Raises StoreError."""
        of_others = self._claims.of_others() if self._blocks else ()
        for name in [name for name in self._blocks if name not in of_others]:
            if not self._root.exists(name):
                if not self._claims.take(name):
                    continue
                if not self._root.exists(name):  # a process that had claimed it may have stored it in between
                    return self._blocks.pop(name)
                self._claims.release(name)
            del self._blocks[name]
        return None


# --- The stream ----------------------------------------------------------------------------------------


class _Sampler:
    """Samples and stores the missing blocks of a version."""

    def __init__(
        self,
        root: Root,
        opened: Sequence[_Opened],
        weights: "_Weights",
        claims: BlockClaims,
        stop: threading.Event,
        *,
        in_flight: int | None,
        report: BatchCallback | None,
    ) -> None:
        self.root, self.claims, self.stop, self.in_flight, self.report = root, claims, stop, in_flight, report
        self._opened, self._weights = opened, weights
        self._failures = FailureLog(logger)

    def sample(self, version: int, *, wait: bool) -> None:
        """Sample until all is stored or `stop` is set. wait: also for blocks that others sample, which may fail."""
        while not self.stop.is_set():
            left = _Left(self.root, self._opened, version, self.claims)
            first = left.take()
            if first is not None:
                try:
                    agent = self._weights.agent(version)
                except MissingWeightsError:
                    self.claims.release(first.name)
                    raise
                event_loops.run(_Stream(self, left, agent, self._weights.calls).run(first))
            elif left and wait:
                self.stop.wait(_until_next_poll_s())
            else:
                return

    def store(self, block: _Block) -> RolloutBatch | None:
        """Store a complete block and release it; returns None if another process was first, whose samples count."""
        batch = block.batch
        self._failures.take(rollout for group in batch.groups for rollout in group.rollouts)
        is_stored = _store(self.root, batch)
        self.claims.release(block.name)
        return batch if is_stored else None


class _Stream:
    """Blocks in flight. Begins a block when the engine has room for it, and stores each one when it is complete.

    Each incomplete block except the newest has a running episode. So there are at most as many as running episodes plus
    one, and their complete answers have at most the tokens sampled during the longest episodes.
    """

    def __init__(self, sampler: _Sampler, left: _Left, agent: Agent, calls: EngineCalls) -> None:
        self._sampler, self._left, self._agent, self._calls = sampler, left, agent, calls
        self._run_episode: dict[LimitedEnvironments, RunEpisode] = {}
        self._numbers = itertools.count()
        self._open: dict[int, _Block] = {}
        """Blocks by the numbers of their groups that are not complete."""
        self._complete: list[_Block] = []
        self._storing: asyncio.Task[list[RolloutBatch]] | None = None
        self._claiming_thread, self._storing_thread = SideThread(), SideThread()
        self._next_poll_at = 0.0
        """Time of the event loop from which on blocks are claimed, after there was none to claim."""

    async def run(self, first: _Block) -> None:
        """Sample this block and all that can be claimed, or until stopped; complete blocks are stored in any case."""
        columns, in_flight = self._sampler.root.extra_columns, self._sampler.in_flight
        self._scheduler = Scheduler(self._play, {}, columns, in_flight=in_flight, calls=self._calls)
        self._stack = AsyncExitStack()
        try:
            await self._begin(first)
            while not self._sampler.stop.is_set():
                # One block per round, so that complete blocks are stored even if users' code blocks the loop.
                has_begun = await self._begin_block()
                if not self._open:
                    break
                self._collect(await self._scheduler.wait(0.0 if has_begun else _TICK_S))
                await self._store_complete()
            self._log_what_is_lost()
        finally:
            await self._scheduler.close()
            await self._stack.aclose()
            await self._store_rest()
            self._claiming_thread.close()
            self._storing_thread.close()

    async def _begin_block(self) -> bool:
        """Claim a block and begin it if there is room, and return whether one has begun."""
        clock = asyncio.get_running_loop().time
        has_room = self._scheduler.has_room and len(self._complete) < _MOST_COMPLETE
        if not has_room or not self._left or clock() < self._next_poll_at:
            return False
        block = await self._claiming_thread.run(self._left.take)
        if block is None:
            self._next_poll_at = clock() + _until_next_poll_s()
            return False
        await self._begin(block)
        return True

    async def _begin(self, block: _Block) -> None:
        opened = block.opened
        opened.environments.restart()
        if opened.environments not in self._run_episode:
            run_episode = episodes_of_run(
                opened.plan.run,
                self._agent,
                timeout_s=opened.config.episode_timeout_s,
                files=opened.files,
                root=self._sampler.root,
                params=opened.plan.params,
            )
            await self._stack.enter_async_context(opened_episodes(run_episode))
            self._run_episode[opened.environments] = run_episode
        groups = dict(zip(self._numbers, opened.plan.requests(block.samples), strict=False))
        block.numbers = tuple(groups)
        self._open |= dict.fromkeys(groups, block)
        for number, requests in groups.items():
            self._scheduler.start(number, requests, opened.environments)

    async def _play(self, environments: LimitedEnvironments, request: EpisodeRequest) -> Sequence[Rollout]:
        return await self._run_episode[environments](environments, request)

    def _collect(self, finished: Sequence[Finished]) -> None:
        for each in finished:
            block = self._open.pop(each.begun.number)
            block.groups[each.begun.number] = each.group
            if len(block.groups) == len(block.numbers):
                self._complete.append(block)

    async def _store_complete(self) -> None:
        """Begin to store the blocks that are complete, unless some are being stored; report those that are stored."""
        if self._storing is not None and self._storing.done():
            await self._end_storing()
        if self._complete and self._storing is None:
            blocks, self._complete = self._complete, []
            self._storing = asyncio.create_task(self._store(blocks))
            self._storing.add_done_callback(lambda _: self._scheduler.wake())

    async def _store_rest(self) -> None:
        await self._end_storing()
        await self._store_complete()
        await self._end_storing()

    async def _end_storing(self) -> None:
        storing, self._storing = self._storing, None
        for batch in await storing if storing is not None else ():
            if self._sampler.report is not None:
                self._sampler.report(batch)

    async def _store(self, blocks: Sequence[_Block]) -> list[RolloutBatch]:
        stored = [await self._storing_thread.run(partial(self._sampler.store, block)) for block in blocks]
        return [batch for batch in stored if batch is not None]

    def _log_what_is_lost(self) -> None:
        if blocks := set(self._open.values()):
            logger.info(
                "gave up %d episodes that ran, of %d blocks; the next `ludic eval` with these settings samples them",
                self._scheduler.num_running,
                len(blocks),
            )


def _until_next_poll_s() -> float:
    # Two processes that claimed the same block at once, and both released it, rarely meet again.
    return _POLL_S * random.uniform(0.5, 1.5)


def _store(root: Root, batch: RolloutBatch) -> bool:
    """Store a block; returns False if another process was first, whose samples then count."""
    try:
        with RolloutWriter(root, batch.metadata.worker_id, folder="evals") as writer:
            writer.append(batch)
    except NameTakenError:
        logger.info("%s was stored by another process", batch.metadata.worker_id)
        return False
    return True


# --- Weights -------------------------------------------------------------------------------------------


class _Weights:
    """Loads versions into one engine, on demand: stored samples are reported without loading."""

    def __init__(self, root: Root, make_engine: MakeEngine, model: str | None) -> None:
        self._root, self._make_engine, self._model = root, make_engine, model
        self._cache = make_folder("weights")
        self._calls: EngineCalls | None = None
        self._is_first_model = False
        self._agent: Agent | None = None

    def __enter__(self) -> "_Weights":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)

    @property
    def calls(self) -> EngineCalls:
        """The engine of the agent."""
        assert self._calls is not None, "no weights have been loaded yet"
        return self._calls

    def agent(self, version: int) -> Agent:
        """Return an agent with the weights of a version."""
        if self._agent is None or self._calls is None or self._calls.policy_version != version:
            try:
                with self._folder(version) as (folder, is_first_model):
                    self._load(folder, version, is_first_model)
            except (FileNotFoundError, ModelError, SchemaError):
                if version == 0 or has_weights(self._root, version):
                    raise
                raise unknown_versions(self._root, [version]) from None  # the trainer pruned it while it was loaded
        assert self._agent is not None
        return self._agent

    def _load(self, folder: str, version: int, is_first_model: bool) -> None:
        if self._calls is not None and is_first_model == self._is_first_model:
            self._calls.load_weights(folder, version)
            return
        # The first model is a whole one; later versions may be adapters, which need another engine.
        self._calls = EngineCalls(self._make_engine(folder, version))
        self._is_first_model = is_first_model
        self._agent = Agent(
            engine=self._calls,
            tokenizer=load_tokenizer(folder),
            model=self._root.record.model,
            vocab_size=vocabulary_of(self._root),
        )

    @contextmanager
    def _folder(self, version: int) -> Iterator[tuple[str, bool]]:
        """Yield the folder of a version, and whether it is the run's first model, which is version 0."""
        try:
            folder = fetch_policy(self._root, version, self._cache)
        except FileNotFoundError:
            if version != 0:
                raise unknown_versions(self._root, [version]) from None
            with first_model(self._root, self._model) as found:
                yield str(found), True
            return
        yield folder, False
