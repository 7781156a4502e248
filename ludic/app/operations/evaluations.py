"""Evaluate: sample held-out examples, measure stored samples, compare in pairs, score with a function or a judge."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from ludic.app.operations.operation import operation
from ludic.app.operations.start import TrainerDevice
from ludic.base import ENGINE, TRAIN, Track, require, untracked
from ludic.engines import EngineConfig
from ludic.errors import ConfigError
from ludic.eval import DIFFERENCE, WINDOW, EvalConfig, IntervalMethod, MeasureConfig, ScoreOptions
from ludic.settings import (
    CodeSettings,
    FromFlag,
    PositiveCount,
    Range,
    Role,
    Seed,
    SettingsError,
    Shown,
    convert,
    split,
)

if TYPE_CHECKING:
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import CompareSettings, EvalSettings, ScoreSettings
    from ludic.app.show.evaluations import Comparison, Contamination, Evaluation
    from ludic.engines import Engine, MakeEngine
    from ludic.eval import ScoreReport
    from ludic.records import RolloutBatch
    from ludic.root.sql import RootLike


@operation(
    group="First",
    place=6,
    samples=EvalConfig,
    measure=MeasureConfig,
    code=CodeSettings,
)
def eval_(
    run: "Run | str",
    versions: int | str | Sequence[int] | None = None,
    *,
    stored: Annotated[bool, Role(first_page=True)] = False,
    suite: Annotated[str | PathLike[str] | None, Role(first_page=True)] = None,
    interval: IntervalMethod = "korn_graubard",
    engine: Annotated["str | EngineConfig | Engine | MakeEngine | None", FromFlag(EngineConfig)] = None,
    device: TrainerDevice = None,
    model: Annotated[str | None, Role(first_page=True)] = None,
    stop: threading.Event | None = None,
    report: "Callable[[RolloutBatch], None] | None" = None,
    **settings: Unpack["EvalSettings"],
) -> "Evaluation":
    """Evaluate versions of a run, or a model, on held-out examples.

    Samples them into evals/. What is stored is not sampled again, so an interrupted call is continued by the same call,
    and any number of processes may share one. Ctrl-C ends the call after the samples that are being made are stored,
    and raises KeyboardInterrupt. With the setting `every`, follows a run while it trains, until training has reached
    the step `until_step`. versions: numbers, or a text such as "0,10,latest" or "10-latest"; None is the latest, and
    with `stored` all. settings: fields of EvalConfig and MeasureConfig; trust_code and update_code. Raises ConfigError
    for weights or samples that are not stored, an unknown environment or a bad suite, QueryError, ConsentError,
    TimeLimitError.

    Args:
        run: Folder or URL of the run; created if it does not exist and --model is given.
        stored: Sample nothing: measure the samples that are stored, by settings, version and environment; those of all
            versions and environments, or of --versions and --env.
        suite: TOML file that lists environments with their settings and measures (docs/evaluation.md), instead of --env
            and the settings of samples.
        interval: Kind of interval: Korn and Graubard's for shares and clustered by example for other measures, or
            clustered for all.
        engine: Engine by name, path/to/file.py:ClassName, its settings, an engine, or a function that makes one.
        device: Device to sample on; None uses CUDA if available.
        model: Folder, Hugging Face id or URL of the model to evaluate, for a root that is created; for another root,
            another location of the run's first model.
    """
    parts = split(settings, samples=EvalConfig, measure=MeasureConfig, code=CodeSettings)
    if isinstance(parts["samples"].get("env"), str):
        parts["samples"]["env"] = (parts["samples"]["env"],)
    if stored:
        own_engine = None if engine == EngineConfig() else engine  # a command gives the default one
        sampling = {"suite": suite, "engine": own_engine, "device": device, "model": model}
        _refuse_sampling(sampling | parts["samples"] | parts["code"])
        return _measure_stored(run, versions, parts["samples"].get("env"), interval, parts["measure"])
    require("torch", TRAIN, "ludic eval")

    from ludic.app.launch.evaluate import evaluate_in_process, open_to_evaluate
    from ludic.app.launch.process import interruptible_unless, is_supervised
    from ludic.app.show.evaluations import Evaluation, measure_stored
    from ludic.eval import check_measures, numbers_of_entries, read_suite, try_measures

    measure, code = convert(MeasureConfig, parts["measure"]), convert(CodeSettings, parts["code"])
    own = {} if versions is None else {"versions": _as_text(versions)}
    config = convert(EvalConfig, own | parts["samples"])
    if suite is None:
        check_measures(measure, config.n)  # before a root is made
    elif measure.measures or measure.params:
        raise SettingsError(f"measures and params do not apply beside a suite; write them into {suite}")
    with interruptible_unless(stop) as stopped:
        beside = None if suite is None else str(suite)
        root = open_to_evaluate(run, config, model, code, beside) if isinstance(run, str) else run.root.writable()
        if suite is None:
            try_measures(root, measure, config.n)
        entries = [] if suite is None else read_suite(suite, config, measure.confidence)
        configs = {each.label: each.config for each in entries} or {"": config}
        options: dict[str, Any] = {"engine": engine or ENGINE, "device": device, "model": model, "report": report}
        done = evaluate_in_process(root, configs, stopped, code=code, guard=is_supervised(), **options)
    if suite is None:
        return measure_stored(root, measure, done.chosen(""), interval)
    chosen = {entry.name: (entry.measure, done.chosen(entry.label)) for entry in entries}
    return Evaluation(url=root.url, numbers=numbers_of_entries(root, chosen, interval), confidence=measure.confidence)


def _refuse_sampling(settings: Mapping[str, Any]) -> None:
    """Raise SettingsError for a setting of samples, of which `stored` takes env alone."""
    for name, value in settings.items():
        if name != "env" and value is not None:
            raise SettingsError(f"{name} is for sampling, and stored samples nothing; leave out one of them")


def _measure_stored(
    run: "Run | str",
    versions: int | str | Sequence[int] | None,
    env: Sequence[str] | None,
    interval: IntervalMethod,
    measure: Mapping[str, Any],
) -> "Evaluation":
    """Return the numbers of stored samples. Raises ConfigError if there are none."""
    from ludic.app.show.evaluations import measure_stored
    from ludic.eval import Chosen, parse_versions
    from ludic.root import Root

    numbers = None if versions is None else parse_versions(_as_text(versions))
    if numbers is not None and not all(isinstance(each, int) for each in numbers):
        raise ConfigError(f"versions is {versions!r}, wanted numbers of versions with stored samples")
    chosen = Chosen(versions=numbers, envs=env)  # type: ignore[arg-type]
    root = Root.open(run) if isinstance(run, str) else run.root
    return measure_stored(root, convert(MeasureConfig, measure), chosen, interval)


def _as_text(versions: int | str | Sequence[int]) -> str:
    if isinstance(versions, str):
        return versions
    return ",".join(map(str, versions if isinstance(versions, Sequence) else [versions]))


# --- Stored evaluations side by side ---------------------------------------------------------------------------------


@operation(group="Evaluate", place=1, measure=MeasureConfig)
def compare(
    run: "Run | None",
    *sides: Annotated[int | str, Shown("ROOT|ROOT@VERSION", by_position=True)],
    env: str | Sequence[str] = (),
    evaluation: str | None = None,
    difference: Annotated[float, Range(0, 10**6, above=True)] = DIFFERENCE,
    seed: Seed = 0,
    by: str | None = None,
    window: PositiveCount = WINDOW,
    output: str | PathLike[str] | None = None,
    overwrite: bool = False,
    **measure: Unpack["CompareSettings"],
) -> "Comparison":
    """Compare whole runs, or two evaluations on the same examples in pairs.

    If no side names a version, the sides are whole runs: one table says what differs in settings, code, data and
    machine, and shows steps, training reward at equal steps and at equal tokens, tokens, seconds, and the newest
    evaluations in pairs (docs/compare.md). If a side names a version, evaluations are compared. Each side is compared
    with the first one, the baseline. Of a run, a side is another run, a version of it, "latest" (its newest version
    with samples), or ROOT@VERSION. measure: fields of MeasureConfig; by default the mean reward. Raises ConfigError,
    MissingRootError, QueryError.

    Args:
        sides: The baseline, then what to compare it with. Whole runs: ROOT, a folder of runs, or a pattern such as
            'runs/lr*'. Evaluations: ROOT@VERSION, @VERSION of the root before, and beside these ROOT, its newest
            version with samples.
        env: Environments to compare; none are all that both sides have.
        evaluation: Id of the settings to compare (view evaluations). None takes the newest that both sides were sampled
            with, or the newest of each side, with warnings of what differs.
        difference: The difference that should be found, for power and the number of examples needed.
        seed: Seed of the permutation test.
        by: Setting whose equal values make a group of runs, such as learning_rate: shows means over runs that differ in
            nothing else but the seed, with intervals over runs.
        window: Number of steps over which the training reward of a run is averaged.
        output: File to write a report of the runs to, as HTML; must not exist.
        overwrite: Replace the output if it exists.
    """
    from ludic.app.show.evaluations import Comparison
    from ludic.eval import compare as comparing

    config = convert(MeasureConfig, measure)
    names = [env] if isinstance(env, str) else env
    own: dict[str, Any] = {"evaluation": evaluation, "difference": difference, "seed": seed}
    if not any(isinstance(side, int | str) and comparing.is_version(side) for side in sides):
        return _compare_runs(run, sides, config, names, own, by=by, window=window, output=output, overwrite=overwrite)
    for_runs = {"by": by, "output": output, "window": None if window == WINDOW else window}
    if given := [name for name, value in for_runs.items() if value is not None]:
        raise SettingsError(f"{given[0]} is for whole runs, and a side names a version; leave out one of them")
    baseline, *others = comparing.parse_sides(sides, None if run is None else run.root)
    compared = comparing.compare(baseline, others, config, env=names, **own)
    return Comparison(compared=compared, difference=difference, confidence=config.confidence)


def compare_runs(runs: "Iterable[RootLike]", **settings: Any) -> "Comparison":
    """Compare runs in one table, the first one with all others: `ludic.compare(["runs/a", run_b], by="learning_rate")`.

    runs: folders or URLs of runs, folders of runs, patterns such as runs/lr*, roots, or what `ludic.open` returned; or
    evaluations as ROOT@VERSION. settings: those of `Run.compare`. Raises ConfigError, MissingRootError, QueryError.
    """
    from ludic.eval import compare as comparing
    from ludic.root import Root

    given: list[Any] = [runs] if isinstance(runs, str | PathLike) else list(runs)
    if not given:
        raise ConfigError("there is no run to compare; name two or more")
    sides = [fspath(each) if isinstance(each, str | PathLike) else getattr(each, "root", each) for each in given]
    if any(isinstance(each, str) and comparing.is_version(each) for each in sides):
        sides = [each.url if isinstance(each, Root) else each for each in sides]
    return compare(None, *sides, **settings)


def _compare_runs(
    run: "Run | None",
    sides: Sequence[Any],
    config: MeasureConfig,
    env: Sequence[str],
    own: Mapping[str, Any],
    *,
    by: str | None,
    window: int,
    output: str | PathLike[str] | None,
    overwrite: bool,
) -> "Comparison":
    """Compare whole runs. sides: texts or roots. own: settings of the comparison of evaluations."""
    from dataclasses import replace

    from ludic.app.show.comparison import open_runs
    from ludic.app.show.evaluations import compare_whole_runs
    from ludic.root.sql import Connections

    if output is not None:
        from ludic.app.show.report.page import checked_output

        checked_output(fspath(output), overwrite)  # before the runs are read
    roots = open_runs([*([] if run is None else [run.root]), *sides])
    with Connections() as connections:
        runs, found = compare_whole_runs(roots, connections, config, by=by, window=window, env=env, **own)
        if output is None:
            return found
        from ludic.app.show.report.page import write_page
        from ludic.app.show.report.runs_page import render_runs

        page = write_page(fspath(output), overwrite, lambda: render_runs(runs, found, connections))
    return replace(found, page=page.location)


@operation(group="Evaluate", place=3)
def contamination(
    run: "Run",
    *,
    also: Annotated["Sequence[str | RootLike]", FromFlag(tuple[str, ...])] = (),
    env: str | Sequence[str] = (),
    evaluation: str | None = None,
    query: str = "ngrams",
    params: Mapping[str, Any] | None = None,
) -> "Contamination":
    """Find prompts of an evaluation in texts that a run trained on.

    Returns how much of the prompts of stored evaluations occurs in texts that gradient steps trained on. Raises
    ConfigError if nothing is evaluated or trained on, QueryError.

    Args:
        also: More runs: those that trained, or that hold the rollouts of this run's offline training.
        env: Environments whose prompts are compared; none are all.
        evaluation: Id of the evaluation whose prompts are compared (view evaluations); None is all.
        query: A name in ludic/root/sql/contamination/, or the path of a .sql file.
        params: Values of the query's parameters as JSON, such as {"n": 13, "common": 0.5}.
    """
    from ludic.app.show.evaluations import Contamination
    from ludic.eval import Chosen, find_overlaps

    envs = [env] if isinstance(env, str) else list(env) or None
    chosen = Chosen(envs=envs, evaluations=None if evaluation is None else [evaluation])
    return Contamination(overlaps=find_overlaps(run.root, also, chosen, query, params or {}))


@operation(group="Evaluate", place=2, options=ScoreOptions)
def score(
    run: "Run",
    scorer: str | None = None,
    *,
    track: Track = untracked,
    **options: Unpack["ScoreSettings"],
) -> "ScoreReport":
    """Score stored rollouts, by a function, a reward model or an LLM judge.

    Appends the values to scores/. A rollout that this version of the scorer has scored is left out. scorer:
    path/to/file.py:function, model:PATH_OR_ID or pooling:URL, or None for a judge. options: fields of ScoreOptions.
    Raises ConfigError, QueryError; TimeLimitError if a scorer hangs.
    """
    from ludic.eval import score_rollouts

    return score_rollouts(run.root.writable(), convert(ScoreOptions, {"scorer": scorer, **options}), track)
