"""Methods of `ludic.Run` that evaluate: sample held-out examples, measure stored samples, compare in pairs.

Each imports what it needs when it is called, so that `import ludic` stays light.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ludic.code.consent import CodeSettings
from ludic.defaults import ENGINE
from ludic.eval.config import Interval
from ludic.settings import arguments, check_names

if TYPE_CHECKING:
    from os import PathLike

    from ludic.engines.config import EngineConfig
    from ludic.engines.engine import Engine
    from ludic.engines.registry import MakeEngine
    from ludic.eval.samples import Chosen
    from ludic.eval.suite import Entry
    from ludic.records import RolloutBatch
    from ludic.sql.roots import HasRoot, RootLike
    from ludic.viewer.contamination import Contamination
    from ludic.viewer.evaluation import Comparison, Evaluation


def evaluate(
    self: "HasRoot",
    versions: int | str | Sequence[int] = "latest",
    *,
    suite: "str | PathLike[str] | None" = None,
    measures: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    confidence: float = 0.95,
    interval: Interval = "korn_graubard",
    engine: "str | EngineConfig | Engine | MakeEngine" = ENGINE,
    device: str | None = None,
    model: str | None = None,
    stop: threading.Event | None = None,
    report: "Callable[[RolloutBatch], None] | None" = None,
    trust_code: bool = False,
    update_code: bool = False,
    **settings: Any,
) -> "Evaluation":
    """Sample held-out examples with versions of the policy into evals/, and return their numbers.

    What is stored is not sampled again, so an interrupted call is continued by the same call, and any number of
    processes may share one. Ctrl-C ends the call after the samples that are being made are stored, and raises
    KeyboardInterrupt.

    versions: numbers, or a text such as "0,10,latest" or "10-latest". suite: TOML file that lists what to evaluate and
    to measure (docs/evaluation.md); the tables have a column `entry` then. settings: fields of
    ludic.eval.config.EvalConfig: env, env_options, num_examples, n, temperature, top_p, top_k, max_tokens, seed and
    others. measures, params, confidence, interval: see `evaluation`. engine, device, model, stop, report: see `work`.
    trust_code, update_code: see `ludic.create`. With the setting `every`, follows a run while it trains, until training
    has reached the step `until_step`, and returns the numbers of all its versions.

    Raises ConfigError for weights that are not stored, an unknown environment or a bad suite, ConsentError,
    TimeLimitError.
    """
    from ludic.errors import ConfigError
    from ludic.eval.config import EvalConfig
    from ludic.eval.suite import read_suite
    from ludic.launch.evaluation import evaluate_here
    from ludic.launch.process import interruptible_unless, is_supervised
    from ludic.store import Root

    check_names(settings, EvalConfig, "setting of an evaluation")
    if isinstance(settings.get("env"), str):
        settings["env"] = (settings["env"],)
    config = EvalConfig(**arguments(EvalConfig, {"versions": _as_text(versions), **settings}))
    if suite is not None and (measures or params):
        raise ConfigError(f"measures and params do not apply beside a suite; write them into {suite}")
    entries = [] if suite is None else read_suite(suite, config, confidence)
    configs = {entry.label: entry.config for entry in entries} or {"": config}
    options: dict[str, Any] = {"engine": engine, "device": device, "model": model, "report": report}
    code = CodeSettings(trust_code=trust_code, update_code=update_code)
    with interruptible_unless(stop) as stopped:
        root = Root.open(self.root.url, writable=True)
        done = evaluate_here(root, configs, stopped, code=code, guard=is_supervised(), **options)
    if suite is None:
        return _numbers(self, done.chosen(""), measures, params, confidence, interval)
    return _numbers_of_entries(self, [(entry, done.chosen(entry.label)) for entry in entries], confidence, interval)


def evaluation(
    self: "HasRoot",
    versions: int | str | Sequence[int] | None = None,
    *,
    env: str | Sequence[str] | None = None,
    measures: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    confidence: float = 0.95,
    interval: Interval = "korn_graubard",
) -> "Evaluation":
    """Return the numbers of stored evaluations, by settings, version and environment; samples nothing.

    versions, env: those to measure; None is all. measures: names in ludic/sql/measures/ or paths of .sql files
    (docs/evaluation.md); by default mean reward, success rate, pass@k and pass^k for several samples, length, unscored
    samples. params: values of their parameters, such as {"k": 4, "threshold": 0.5, "unscored": 0}. interval:
    korn_graubard or wilson for shares, of which other measures get clustered; clustered by example; or bootstrap of
    examples. Raises ConfigError if nothing is stored, QueryError.
    """
    from ludic.errors import ConfigError
    from ludic.eval.config import parse_versions
    from ludic.eval.samples import Chosen

    numbers = None if versions is None else parse_versions(_as_text(versions))
    if numbers is not None and not all(isinstance(each, int) for each in numbers):
        raise ConfigError(f"versions is {versions!r}, wanted numbers of versions with stored samples")
    chosen = Chosen(versions=numbers, envs=[env] if isinstance(env, str) else env)  # type: ignore[arg-type]
    return _numbers(self, chosen, measures, params, confidence, interval)


def compare(
    self: "HasRoot",
    *sides: int | str,
    env: str | Sequence[str] = (),
    evaluation: str | None = None,
    measures: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    confidence: float = 0.95,
    difference: float = 0.05,
    seed: int = 0,
) -> "Comparison":
    """Compare stored evaluations in pairs: of the same examples, each side with the first one, the baseline.

    sides: versions of this run, or ROOT@VERSION of another one; "latest" is the newest version with samples. env:
    environments; () is all that both sides have. evaluation: id of the settings (view evaluations); None takes the
    newest that both sides were sampled with, or the newest of each side, with warnings of what differs. measures,
    params: see `evaluation`; by default the mean reward. difference: the difference that should be found, for power and
    the number of examples needed. seed: of the permutation test. Raises ConfigError, QueryError.
    """
    from ludic.eval import compare as comparing
    from ludic.eval.config import MeasureConfig
    from ludic.viewer.evaluation import Comparison

    config = MeasureConfig(measures=tuple(measures), params=params or {}, confidence=confidence)
    baseline, *others = comparing.parse_sides(sides, self.root)
    names = [env] if isinstance(env, str) else env
    compared = comparing.compare(
        baseline, others, config, env=names, evaluation=evaluation, difference=difference, seed=seed
    )
    return Comparison(compared=compared, difference=difference, confidence=confidence)


def contamination(
    self: "HasRoot",
    *,
    also: "Sequence[RootLike]" = (),
    env: str | Sequence[str] = (),
    evaluation: str | None = None,
    query: str = "ngrams",
    params: Mapping[str, Any] | None = None,
) -> "Contamination":
    """Return how much of the prompts of stored evaluations occurs in texts that gradient steps trained on.

    also: more runs, whose ledgers and rollouts are read too. env: environments; () is all. evaluation: id of the
    settings (view evaluations); None is all. query: a name in ludic/sql/contamination/, or the path of a .sql file.
    params: values of its parameters, such as {"n": 13, "common": 0.5}. Raises ConfigError if nothing is evaluated or
    trained on, QueryError.
    """
    from ludic.eval.contamination import find_overlaps
    from ludic.eval.samples import Chosen
    from ludic.viewer.contamination import Contamination

    envs = [env] if isinstance(env, str) else list(env) or None
    chosen = Chosen(envs=envs, evaluations=None if evaluation is None else [evaluation])
    return Contamination(overlaps=find_overlaps(self.root, also, chosen, query, params or {}))


def _as_text(versions: int | str | Sequence[int]) -> str:
    return (
        versions
        if isinstance(versions, str)
        else ",".join(map(str, [versions] if isinstance(versions, int) else versions))
    )


def _numbers_of_entries(
    run: "HasRoot",
    chosen: "Sequence[tuple[Entry, Chosen]]",
    confidence: float,
    interval: Interval,
) -> "Evaluation":
    from ludic.eval.numbers import numbers_of_entries
    from ludic.viewer.evaluation import Evaluation

    entries = {entry.name: (entry.measure, samples) for entry, samples in chosen}
    found = numbers_of_entries(run.root, entries, interval)
    return Evaluation(url=run.root.url, numbers=found, confidence=confidence)


def _numbers(
    run: "HasRoot",
    chosen: "Chosen",
    measures: Sequence[str],
    params: Mapping[str, Any] | None,
    confidence: float,
    interval: Interval,
) -> "Evaluation":
    from ludic.eval.config import MeasureConfig
    from ludic.eval.numbers import numbers
    from ludic.viewer.evaluation import Evaluation

    config = MeasureConfig(measures=tuple(measures), params=params or {}, confidence=confidence)
    found = numbers(run.root, config, chosen, interval)
    return Evaluation(url=run.root.url, numbers=found, confidence=confidence)
