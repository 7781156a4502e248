"""Look at the runs of a folder, and run a grid of them."""

import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from ludic.app.launch.config import LaunchConfig
from ludic.app.operations.operation import operation
from ludic.app.operations.start import GROUPS, Algorithm, check, run, start_of
from ludic.base import ENGINE
from ludic.errors import ConfigError, LudicError, one_line
from ludic.settings import Processes, Role, Shown, convert, refuse, settings_of, split

if TYPE_CHECKING:
    from ludic.app.launch.grid import GridRun, GridTable
    from ludic.app.operations.typed import RunSettings
    from ludic.app.show.run_table import RunTable

logger = logging.getLogger(__name__)

SortKey = Literal["name", "began", "state", "step", "reward", "tokens", "seconds"]


@operation(group="Look", place=0)
def runs(
    folder: Annotated[str | PathLike[str], Shown("FOLDER", by_position=True)], sort: SortKey = "name"
) -> "RunTable":
    """List the runs below a folder: state, step, reward, and the settings in which they differ.

    Three levels of folders are searched, or of a bucket's prefixes. A branch comes below the run that it left. A run
    that can't be read is listed with the reason. Reads a few small files of each run. In Python, `frame()` of the
    result is a Polars DataFrame with a row for each run. Raises ConfigError for a folder that is none.

    Args:
        folder: Folder or URL with runs below it, or a run.
        sort: Column to sort by. Names, times and states go up, figures down; a branch stays below its run.
    """
    from ludic.app.show.run_table import tabulate

    return tabulate(folder, sort)


# --- Grids ---------------------------------------------------------------------------------------------------------


@operation(
    group="Start",
    place=1,
    on_sigterm="interrupt",
    trains=True,
    **GROUPS,
)
def grid(
    config: Annotated[str, Shown("FILE", by_position=True)],
    set_: Annotated[tuple[str, ...], Shown("NAME=VALUE,VALUE", is_repeated=True), Role(first_page=True)],
    jobs: Annotated[Processes, Role(first_page=True)] = 1,
    *,
    root: Annotated[str | None, Role(first_page=True)] = None,
    algorithm: Algorithm = None,
    engine: str = ENGINE,
    **settings: Unpack["RunSettings"],
) -> "GridTable":
    """Run a grid: one run for each combination of settings, in a root of its own.

    The same command continues: runs that have reached their last step are left, all others are started. All
    combinations are checked before the first one starts. Ctrl-C stops all processes after a checkpoint. Other settings
    of the file, or flags, are those of all runs.

    Args:
        config: TOML file with the settings of all runs, as for `ludic run --config`.
        set_: Values of a setting; give --set once for each setting. Their combinations are the runs.
        jobs: Number of runs at the same time. Each has its share of this machine's GPUs.
        root: Folder or URL below which the roots are; None is runs/ and the file's name without its ending.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        engine: Engine of the workers, by name or path/to/file.py:ClassName.
    """
    from ludic.app.launch.grid import GridProcesses, GridTable, combinations, run_grid
    from ludic.app.show.runs import summarise
    from ludic.base import visible_gpus

    folder, gpus = root or f"runs/{Path(config).stem}", visible_gpus()
    shared: dict[str, Any] = {**settings, "engine": engine, "algorithm": algorithm}
    chosen = combinations(folder, set_, {each.name: each for each in settings_of(run) if each.may_be_in_file})
    jobs = min(jobs, len(chosen))
    if gpus and jobs > len(gpus):
        raise ConfigError(f"jobs is {jobs}, wanted at most {len(gpus)}, one for each of this machine's GPUs")
    launch = convert(LaunchConfig, split(settings, **GROUPS)["launch"])
    waiting = _unfinished(chosen, shared)
    processes = GridProcesses(waiting, shared, jobs, gpus=gpus, stop_within_s=launch.stop_within_s)
    try:
        run_grid(processes, chosen)
    except KeyboardInterrupt:
        logger.info("all runs have stopped; the same command continues")
        raise
    return GridTable(folder=folder, runs=summarise([each.url for each in chosen], folder), failed=processes.failed)


def _unfinished(runs: "Sequence[GridRun]", shared: Mapping[str, Any]) -> "list[GridRun]":
    """Check all runs, and return those that are to start. Raises ConfigError with all mistakes, by run."""
    found: list[GridRun] = []
    problems: dict[str, list[str]] = {}
    for each in runs:
        try:
            if _is_finished(each, shared):
                continue
            rows = check(each.url, **{**shared, **each.settings}).rows
        except LudicError as error:
            problems.setdefault(one_line(error), []).append(each.name)
            continue
        found.append(each)
        for row in rows:
            if row["state"] == "wrong":
                problems.setdefault(f"{row['check']}: {row['found']}", []).append(each.name)
    names = {text: "all runs" if len(of) == len(runs) > 1 else "; ".join(of) for text, of in problems.items()}
    refuse([f"{names[text]}: {text}" for text in problems], what="mistakes in the settings of the runs")
    return found


def _is_finished(run: "GridRun", shared: Mapping[str, Any]) -> bool:
    """Return whether nothing is left to do in a root. Raises ConfigError if it was started with other settings."""
    from ludic.app.show.runs import summarise
    from ludic.root.rows import list_versions
    from ludic.root.weights import latest_policy
    from ludic.run import run_of

    settings = {**shared, **run.settings}
    named = {name: settings.pop(name) for name in ("algorithm", "engine")}
    start, _ = start_of(run.url, None, named["algorithm"], named["engine"], split(settings, **GROUPS))
    if start.root is None:
        return False
    if differing := start.run.differences(run_of(start.root)):
        raise ConfigError(f"{run.url} was started with other settings ({differing}); keep them, or give another --root")
    (summary,) = summarise([run.url])
    if summary.state != "finished" or summary.step < start.train.num_steps:
        return False
    latest = latest_policy(start.root)
    is_evaluated = latest is None or latest.version in list_versions(start.root, "evals")
    return is_evaluated or start.processes.eval_every is None
