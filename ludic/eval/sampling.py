"""Sample an evaluation: what is missing in evals/ is sampled and stored, block by block.

Reads policies/ and evals/, writes evals/ and evaluations/. Any number of processes may evaluate the same: each takes
the blocks in an order of its own, and the first one that stores a block wins. A killed process loses the block that it
was sampling; the next one samples it. Raises ConfigError for weights that are not stored, ConsentError for code of the
root that the user has not agreed to, TimeLimitError if an environment is not made or returns no example in time.
"""

import logging
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from ludic.agents.agent import Agent
from ludic.engines.engine import Engine
from ludic.engines.registry import MakeEngine
from ludic.environments.limits import Announce, LimitedEnvironments, TimeLimit
from ludic.errors import ModelError, NameTakenError, SchemaError
from ludic.eval.config import EvalConfig
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
from ludic.eval.samples import Chosen
from ludic.eval.suite import labelled
from ludic.models.chat import load_tokenizer
from ludic.models.first_model import first_model, vocabulary_of
from ludic.records import RolloutBatch, RolloutMetadata
from ludic.rollouts.pump import sample_groups
from ludic.rollouts.sampler import episodes_of_run
from ludic.rollouts.sampling_code import open_code
from ludic.store import RolloutWriter, Root, RunConfig, fetch_policy
from ludic.store.evaluations import Evaluation, SampleBlock, put_evaluation, stored_blocks
from ludic.store.files import RolloutFile
from ludic.store.policy_files import has_weights
from ludic.temporary import make_folder
from ludic.user_files import Files

logger = logging.getLogger(__name__)

Report = Callable[[RolloutBatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """An environment that is ready to be sampled."""

    config: EvalConfig
    evaluation: Evaluation
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
    report: Report | None = None,
    announce: Announce | None = None,
) -> "Sampled":
    """Sample until everything is stored or `stop` is set; returns the evaluations' ids of each of the settings.

    configs: settings of the same versions, by the label that begins their errors. model: location of the run's first
    model, if it is not where run.json says. versions: those to evaluate, which may come over time; one whose weights
    are gone is skipped with a warning. None evaluates the versions of the settings. report: called with each sampled
    batch. announce: as in ludic.rollouts.worker.
    """
    chosen = choose_versions(root, next(iter(configs.values())).versions) if versions is None else versions
    opened = {label: _open_all(root, label, config, announce, stop) for label, config in configs.items()}
    if versions is None:
        _check_weights(root, chosen, [*chain(*opened.values())])
    for each in chain(*opened.values()):
        put_evaluation(root, each.evaluation)
    done: list[int] = []
    with _Weights(root, make_engine, model) as weights:
        for version in chosen:
            try:
                for each in chain(*opened.values()):
                    _sample_missing(root, each, version, weights, stop, report)
            except MissingWeightsError as error:
                if versions is None:
                    raise
                logger.warning("skipped version %d: %s", version, error)
            else:
                done.append(version)
    ids = {label: [each.evaluation.evaluation for each in some] for label, some in opened.items()}
    return Sampled(versions=done if versions is None else None, evaluations=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What `evaluate` sampled."""

    versions: Sequence[int] | None
    """None: all that are stored, after a run was followed."""
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
    evaluation = Evaluation.of(plan.name, settings_of(run, params) | of_groups, code)
    return _Opened(config=config, evaluation=evaluation, plan=plan, environments=environments, files=files)


def _check_weights(root: Root, versions: Iterable[int], opened: Sequence[_Opened]) -> None:
    """Raise MissingWeightsError, before anything is sampled, for all versions that need weights and have none."""
    missing = [
        version
        for version in versions
        if version != 0  # the first model, which may lie elsewhere
        and not has_weights(root, version)
        and any(_blocks_left(root, each, version) for each in opened)
    ]
    if missing:
        raise unknown_versions(root, missing)


def _sample_missing(
    root: Root,
    opened: _Opened,
    version: int,
    weights: "_Weights",
    stop: threading.Event,
    report: Report | None,
) -> None:
    blocks = _blocks_left(root, opened, version)
    random.shuffle(blocks)  # so that processes that began together rarely sample the same block
    for block in blocks:
        if stop.is_set():
            return
        file = RolloutFile(version, opened.plan.name, block.worker_id, 0, "evals")
        if root.exists(file.name):
            continue
        opened.environments.restart()
        batch = _sample(opened, block, weights.agent(version))
        if _store(root, batch) and report is not None:
            report(batch)


def _blocks_left(root: Root, opened: _Opened, version: int) -> list[SampleBlock]:
    config = opened.config
    evaluation = opened.evaluation.evaluation
    stored = stored_blocks(root, evaluation, version)
    return missing_blocks(evaluation, list(opened.plan.examples), config.n, stored, config.examples_per_call)


def _sample(opened: _Opened, block: SampleBlock, agent: Agent) -> RolloutBatch:
    run = opened.plan.run
    run_episode = episodes_of_run(run, agent, timeout_s=opened.config.episode_timeout_s, files=opened.files)
    environments = {opened.plan.name: opened.environments}
    groups = sample_groups(opened.plan.requests(block), run_episode, environments, run.extra_columns)
    return RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=block.worker_id))


def _store(root: Root, batch: RolloutBatch) -> bool:
    """Store a block; returns False if another process was first, whose samples then count."""
    try:
        with RolloutWriter(root, batch.metadata.worker_id, folder="evals") as writer:
            writer.append(batch)
    except NameTakenError:
        logger.info("%s was stored by another process", batch.metadata.worker_id)
        return False
    return True


class _Weights:
    """Loads versions into one engine, when they are needed: what is stored is reported without them."""

    def __init__(self, root: Root, make_engine: MakeEngine, model: str | None) -> None:
        self._root, self._make_engine, self._model = root, make_engine, model
        self._cache = make_folder("weights")
        self._engine: Engine | None = None
        self._is_first_model = False
        self._agent: Agent | None = None

    def __enter__(self) -> "_Weights":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)

    def agent(self, version: int) -> Agent:
        """Return an agent with the weights of a version."""
        if self._agent is None or self._engine is None or self._engine.policy_version != version:
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
        if self._engine is not None and is_first_model == self._is_first_model:
            self._engine.load_weights(folder, version)
            return
        # The first model is a whole one; later versions may be adapters, which need another engine.
        self._engine = self._make_engine(folder, version)
        self._is_first_model = is_first_model
        self._agent = Agent(
            engine=self._engine,
            tokenizer=load_tokenizer(folder),
            model=self._root.run.model,
            vocab_size=vocabulary_of(self._root),
        )

    @contextmanager
    def _folder(self, version: int) -> Iterator[tuple[str, bool]]:
        """Give the folder of a version, and whether it is the run's first model, which is version 0."""
        try:
            folder = fetch_policy(self._root, version, self._cache)
        except FileNotFoundError:
            if version != 0:
                raise unknown_versions(self._root, [version]) from None
            with first_model(self._root, self._model) as found:
                yield str(found), True
            return
        yield folder, False
