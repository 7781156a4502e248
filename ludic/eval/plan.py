"""Plan an evaluation: its versions, examples and settings, and the blocks of samples that are not stored yet.

Reads names in policies/ and evals/, and policies/LATEST. The plan depends only on settings and stored names, so any
number of processes plan the same blocks, and a restarted process continues where the last one was killed. Raises
ConfigError if there is nothing to evaluate.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from ludic.agents import EpisodeRequest, derive_seed, repeat
from ludic.base import MAX_OBSERVATION_CHARACTERS
from ludic.engines import SamplingParams
from ludic.environments import Example, LimitedEnvironments
from ludic.errors import ConfigError, SchemaError, StoreError
from ludic.eval.config import LATEST, EvalConfig, parse_versions
from ludic.records import example_columns, new_id
from ludic.root import Root, stored_options
from ludic.root.rows import MOST_SAMPLES, SampleBlock, list_versions
from ludic.root.weights import latest_policy, stored_versions
from ludic.run import SAMPLING, RunConfig, run_of
from ludic.settings import names_of, overridden

logger = logging.getLogger(__name__)

_OF_AGENTS = names_of(RunConfig, "of_episodes")
"""Settings of a run that decide its agents' episodes."""
_OF_PROGRAMS = names_of(RunConfig, "of_program")
_FEWEST_REPEATS = 100
"""Consecutive repeated examples after which an environment counts as exhausted; more if it had more examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEnvironment:
    """Samples of one environment: its held-out examples and the settings, without the weights."""

    run: RunConfig
    """Settings of the run, with this environment, and the seed of the evaluation."""
    params: SamplingParams
    examples: Mapping[int, Example]
    """Different examples by their index in the environment, in order."""

    @property
    def name(self) -> str:
        return self.run.env[0]

    def requests(self, block: SampleBlock) -> list[Sequence[EpisodeRequest]]:
        """Return the requests of a block, those of an example together; the same for the same seed."""
        return [self._requests(index, block.samples) for index in block.examples if index in self.examples]

    def _requests(self, index: int, samples: range) -> Sequence[EpisodeRequest]:
        request = EpisodeRequest(
            env_name=self.name,
            example=(example := self.examples[index]),
            params=self.params,
            seed=0,
            group_id=new_id(),
            request_index=index * MOST_SAMPLES,
            purpose="eval",
            example_columns=example_columns(example.columns, self.run.max_column_characters),
        )
        # The seed of a sample must not depend on how many samples there are.
        wanted = repeat(request, samples.stop, derive_seed(self.run.seed, index))[samples.start :]
        size = len(samples)
        return [replace(each, group_index=number, group_size=size) for number, each in enumerate(wanted)]


def environment_settings(root: Root, config: EvalConfig) -> list[RunConfig]:
    """Return the run's settings for each environment of an evaluation. Raises ConfigError."""
    run = run_of(root)
    names = tuple(dict.fromkeys(config.env or run.env))
    options = {**run.env_options, **config.env_options}
    for name, of_run in run.env_options.items():  # other options do not change the data
        if name in config.env_options and isinstance(options[name], Mapping):
            options[name] = {**stored_options(of_run), **options[name]}
    for name in config.env_options:
        if name not in names:
            raise ConfigError(f"env_options has options of {name!r}, which is not in env ({', '.join(names)})")
    return [
        replace(
            run,
            env=(name,),
            env_options={name: options[name]} if name in options else {},
            seed=config.seed,
            sweep={},
            curriculum=None,
            **overridden(run, _OF_AGENTS, config.run),
        )
        for name in names
    ]


def sampling_params(run: RunConfig, config: EvalConfig) -> SamplingParams:
    """Return the sampling settings: the evaluation's, else the run's."""
    return SamplingParams(**overridden(run, SAMPLING, config.run))


def settings_of(run: RunConfig, params: SamplingParams) -> dict[str, object]:
    """Return all settings that decide the samples of an environment, as JSON values."""
    # Those of programs, and max_observation_characters, are named only if they are set, so that evaluations from before
    # these settings keep their ids.
    agents = {name: getattr(run, name) for name in _OF_AGENTS if name not in _OF_PROGRAMS or getattr(run, name)}
    if run.max_observation_characters != MAX_OBSERVATION_CHARACTERS:
        agents["max_observation_characters"] = run.max_observation_characters
    sampling = {name: asdict(params)[name] for name in SAMPLING}
    return {"env_options": dict(run.env_options.get(run.env[0], {})), "seed": run.seed, **sampling, **agents}


def heldout_examples(name: str, make: LimitedEnvironments, num_examples: int) -> dict[int, Example]:
    """Return the first different held-out examples by index; fewer, with a warning, if there are no more."""
    environment, found = make(), dict[str, tuple[int, Example]]()
    index = num_repeats = 0
    while len(found) < num_examples and num_repeats < max(_FEWEST_REPEATS, len(found)):
        example = environment.example(index, "heldout")
        num_repeats = num_repeats + 1 if example.example_id in found else 0
        found.setdefault(example.example_id, (index, example))
        index += 1
    if len(found) < num_examples:
        logger.warning("environment %s has %d held-out examples, not %d", name, len(found), num_examples)
    return dict(found.values())


def choose_versions(root: Root, text: str) -> list[int]:
    """Return the versions that `EvalConfig.versions` names, in order. Raises ConfigError if there are none."""
    chosen: set[int] = set()
    for part in parse_versions(text):
        if isinstance(part, tuple):
            first, last = part[0], _newest(root) if part[1] == LATEST else int(part[1])
            inside = [version for version in stored_versions(root) if first <= version <= last]
            if not inside:
                raise ConfigError(f"{root.url} holds no weights of versions {first} to {last}; it has {_stored(root)}")
            chosen.update(inside)
        else:
            chosen.add(_newest(root) if isinstance(part, str) else part)
    return sorted(chosen)


def _newest(root: Root, before_first: int = 0) -> int:
    """Return the newest version; before_first if none was published. Version 0 is the first model."""
    latest = latest_policy(root)
    return latest.version if latest else before_first


def _stored(root: Root) -> str:
    versions = stored_versions(root)
    if not versions:
        return "none"
    found = f"{len(versions)} from {versions[0]} to {versions[-1]}"
    if len(versions) == versions[-1] - versions[0] + 1:
        return found
    listed = [*versions[: _MOST_LISTED // 2], "...", *versions[-_MOST_LISTED // 2 :]]
    return f"{found}: {', '.join(map(str, versions if len(versions) <= _MOST_LISTED else listed))}"


_MOST_LISTED = 20
"""Maximum versions that an error lists."""


class MissingWeightsError(ConfigError):
    """The weights of a version are not stored."""


def unknown_versions(root: Root, versions: Sequence[int]) -> MissingWeightsError:
    """Return the error of versions without weights."""
    what = f"version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}"
    return MissingWeightsError(f"{root.url} holds no weights of {what}; it has {_stored(root)}")


def missing_blocks(
    evaluation: str, examples: Sequence[int], n: int, stored: Sequence[SampleBlock], examples_per_call: int
) -> list[SampleBlock]:
    """Return the blocks that are not stored. examples: indexes in order. n: samples of each.

    The examples of a block are consecutive ones with the same missing samples, at most `examples_per_call`, and begin
    at fixed positions, so that processes that began at different times make the same blocks.
    """
    done: dict[int, set[int]] = {}
    for block in stored:
        for index in block.examples:
            done.setdefault(index, set()).update(block.samples)
    blocks: list[SampleBlock] = []
    for start in range(0, len(examples), examples_per_call):
        chunk = examples[start : start + examples_per_call]
        for missing, indexes in groupby(chunk, lambda index: tuple(_gaps(n, done.get(index, set())))):
            first, *rest = indexes
            of_block = range(first, ([first, *rest])[-1] + 1)
            blocks += [SampleBlock(evaluation=evaluation, examples=of_block, samples=samples) for samples in missing]
    return blocks


def _gaps(n: int, done: set[int]) -> Iterator[range]:
    """Yield the ranges of samples from 0 to n that are not done."""
    start = 0
    for end in [*sorted(index for index in done if index < n), n]:
        if start < end:
            yield range(start, end)
        start = end + 1


# --- Versions that are due while a run trains ----------------------------------------------------------
# Writes nothing and delays no other process: if several versions are published while an older one is evaluated, only
# the newest is evaluated next, and a version whose weights are gone is left out. A restarted process first finishes the
# versions that it had begun.

_POLL_S, _RETRY_S = 0.5, 5.0


def due_versions(root: Root, every: int, is_over: Callable[[], bool], stop: threading.Event) -> Iterator[int]:
    """Yield version 0, multiples of `every` as they are published, and the last version once training is over.

    is_over: returns whether no version will be published any more. Ends after the last version, or when `stop` is set.
    Skipped versions are logged.
    """
    taken: int | None = None
    while not stop.is_set():
        try:
            over = is_over()  # checked before the newest version is read, which is then the last one
            newest = _newest(root, -1)
            if taken is None and newest >= 0:
                begun = _begun(root, newest, every)
                taken = begun[-1]
                yield from begun
                continue
        except (SchemaError, StoreError) as error:
            logger.warning("checking again for new versions: %s", error)
            stop.wait(_RETRY_S)
            continue
        due = newest if over else newest - newest % every
        if taken is not None and due > taken:
            if skipped := range(taken - taken % every + every, due, every):
                logger.warning("skipped %s, since version %d is newer", describe_versions(skipped), due)
            taken = due
            yield due
        elif over:
            return
        else:
            stop.wait(_POLL_S)


def _begun(root: Root, newest: int, every: int) -> list[int]:
    """Return version 0 and the versions that have samples, which may be complete, in order."""
    return sorted(
        {0, *(version for version in list_versions(root, "evals") if version <= newest and version % every == 0)}
    )


def missed_versions(root: Root, every: int) -> list[int]:
    """Return the multiples of `every` below the newest version that have no samples."""
    stored = set(list_versions(root, "evals"))
    return [version for version in range(0, _newest(root, -1), every) if version not in stored]


def describe_versions(versions: Sequence[int]) -> str:
    """Return text such as: version 10; versions 10, 20 and 30; 37 versions from 10 to 370."""
    if len(versions) == 1:
        return f"version {versions[0]}"
    if len(versions) > 4:
        return f"{len(versions)} versions from {versions[0]} to {versions[-1]}"
    return f"versions {', '.join(map(str, versions[:-1]))} and {versions[-1]}"
