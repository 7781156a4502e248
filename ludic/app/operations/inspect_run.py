"""Look at a run: the live state, figures, rollouts, SQL, the viewer, reports; ask its policy a question."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, overload

from ludic.app.operations.operation import operation
from ludic.app.show.terminal.options import ViewOptions
from ludic.base import Track, untracked
from ludic.eval import MeasureConfig
from ludic.rollouts import Question
from ludic.settings import FromFlag, Index, PositiveCount, SecondsOfADay, SettingsError, Shown, convert

if TYPE_CHECKING:
    import polars as pl

    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import ReportSettings, SampleSettings, ViewSettings
    from ludic.app.show.report.page import Report
    from ludic.app.show.run_table import RunTable
    from ludic.app.show.status import RunStatus
    from ludic.app.show.transcript import Lookup
    from ludic.rollouts import Answers
    from ludic.root.sql import RootLike

ReadingColor = Literal["logprob", "advantage", "none"]
OutputFormat = Literal["table", "json", "csv", "parquet"]


# --- The live state ------------------------------------------------------------------------------------------------


@overload
def watch(
    run: "Run",
    interval_s: float = 2.0,
    *,
    once: bool = False,
    totals: bool = False,
    json: bool = False,
    track: Track = untracked,
) -> "RunStatus": ...
@overload
def watch(run: str, interval_s: float = 2.0, *, once: bool = False) -> "RunStatus | RunTable": ...
@operation(group="First", place=4)
def watch(
    run: "Run | str",
    interval_s: SecondsOfADay = 2.0,
    *,
    once: bool = False,
    totals: bool = False,
    json: bool = False,
    track: Track = untracked,
) -> "RunStatus | RunTable":
    """Show the live state of a run, or of all runs below a folder.

    Runs until Ctrl-C, from any machine that can read the run's files; writes nothing. While the filesystem fails, the
    last frame stays, with the reason below it. Returns the newest state: trainer, newest steps, rates, policy,
    checkpoint, diagnostics. A later call can tell if the trainer is alive, since it sees whether its lease is renewed.
    A damaged file is named in `unreadable`. Raises MissingRootError if the run is deleted.

    Args:
        run: Folder or URL of a run, or a folder with runs below it, which are shown as a table, as by `ludic runs`.
        interval_s: Seconds between two reads of the files.
        once: Print one frame and exit; in Python, return the state without printing it.
        totals: Summarize all that is stored as well: environments, versions, steps and files. Implies --once.
        json: Print the state as JSON. Implies --once.
    """
    from dataclasses import replace

    from ludic.app.show.watch import watch
    from ludic.base import stdout_console

    if isinstance(run, str):
        opened = _open_or_find(run)
        if isinstance(opened, list):
            return _watch_runs(run, interval_s, once=once or json, totals=totals)
        run = opened
    if not (once or totals or json):
        watch(run.watcher, stdout_console(), interval_s)
        return replace(run.watcher.newest or run.watcher.poll(), is_out=True)
    state = run.watcher.poll()
    if totals:
        from ludic.app.show.stats import collect_stats

        state = replace(state, read_totals=collect_stats(run.root, track))
    return state


def _open_or_find(url: str) -> "Run | list[str]":
    """Return the run at a place, or the runs below it. Raises MissingRootError if there is none."""
    from ludic.app.operations.run import Run
    from ludic.app.show.runs import open_or_find

    found = open_or_find(url)
    return found if isinstance(found, list) else Run(found)


def _watch_runs(folder: str, interval_s: float, *, once: bool, totals: bool) -> "RunTable":
    from ludic.app.show.run_table import tabulate, watch_runs
    from ludic.base import stdout_console

    if totals:
        raise SettingsError(f"totals is of one run, and {folder} has runs below it; name one of them")
    return tabulate(folder) if once else watch_runs(folder, stdout_console(), interval_s)


# --- Rollouts and groups -------------------------------------------------------------------------------------------


@overload
def view(
    run: "Run",
    rollout_id: str,
    *,
    text: Literal[True],
    color: ReadingColor | None = None,
    tokens: bool = False,
    full: bool = False,
) -> "Lookup": ...
@overload
def view(
    run: "Run",
    rollout_id: str | None = None,
    *,
    text: bool = False,
    color: ReadingColor | None = None,
    tokens: bool = False,
    full: bool = False,
    json: bool = False,
    **options: Unpack["ViewSettings"],
) -> "Lookup | None": ...
@operation(group="First", place=5, view=ViewOptions)
def view(
    run: "Run | str",
    rollout_id: str | None = None,
    *,
    text: bool = False,
    color: ReadingColor | None = None,
    tokens: bool = False,
    full: bool = False,
    json: bool = False,
    **options: Unpack["ViewSettings"],
) -> "Lookup | None":
    """Look at a run in the terminal or a browser: versions, groups, rollouts, tokens, labels.

    With an ID and where there is no terminal, and with --text, it is one rollout or group as text. In Python this is
    returned: `record` is the rollout, `records` are the rollouts of a group, and `tokens()` is a table of a response.
    Otherwise it returns when the user quits. options: fields of ViewOptions. Raises ConfigError if textual is not
    installed or the port is taken, UnknownIdError.

    Args:
        run: Folder or URL of a run, or a folder with runs below it, of which the viewer opens the chosen one.
        text: Show the rollout or group of ID as text, also in a terminal.
        color: Colour the response's tokens by their probability (logprob, the default) or by the advantage used in
            training; none is no colour. Implies --text.
        tokens: List the tokens, one per line, with ids, logprobs and rewards. Implies --text.
        full: Show long texts and responses whole, and all answers of a group; by default the middle of a text is left
            out, and a group has its best and its worst answer. Implies --text.
        json: Print the rollout or group as JSON. Implies --text.
    """
    from ludic.app.show.terminal.start import has_terminal, view_run, view_runs

    chosen = convert(ViewOptions, {"rollout_id": rollout_id, **options})
    if isinstance(run, str):
        opened = _open_or_find(run)
        if isinstance(opened, list):
            view_runs(run, chosen)
            return None
        run = opened
    as_text = text or tokens or full or json or color is not None
    if not as_text and (rollout_id is None or chosen.web or chosen.picture is not None or has_terminal()):
        view_run(run.root, chosen)
        return None
    if rollout_id is None:
        raise SettingsError("text needs ID; name a rollout or a group")
    if as_text and options:
        raise SettingsError(f"{next(iter(options))} is for the viewer, and text is asked for; leave out one of them")
    from ludic.app.show.lookup import look_up
    from ludic.app.show.transcript import PrintOptions

    return look_up(run.root, rollout_id, options=PrintOptions(color=color or "logprob", tokens=tokens, full=full))


@operation()
def label(
    run: "Run",
    rollout_id: str,
    value: float | str | None = None,
    *,
    note: str | None = None,
    name: str = "label",
    author: str | None = None,
) -> None:
    """Label a stored rollout: append a mark and a note to labels/, which the view `labels` shows.

    rollout_id: of rollouts or evals; a beginning or an end of it is enough. value: a number, or a mark in words. Of one
    name and author the newest label counts; a call without value and note withdraws it. author: None takes the name of
    this machine's user. Raises UnknownIdError, ConfigError.
    """
    from ludic.app.show.lookup import look_up
    from ludic.root.rows import put_label

    found = look_up(run.root, rollout_id, "rollout").record.rollout_id
    put_label(run.root.writable(), found, value, note, name=name, author=author)


@operation(group="Look", place=2, defaults={"output": "report.html"}, measure=MeasureConfig)
def report(
    run: "Run | str",
    output: str | PathLike[str] | None = None,
    *,
    also: Annotated[
        "Iterable[RootLike]", FromFlag(Annotated[tuple[str, ...], Shown("ROOT", by_position=True, has_flag=True)])
    ] = (),
    by: str | None = None,
    versions: str | None = None,
    compare: Annotated["Sequence[int | str]", FromFlag(Annotated[tuple[str, ...], Shown("SIDE")])] = (),
    overwrite: bool = False,
    **measure: Unpack["ReportSettings"],
) -> "Report":
    """Write a run, its evaluations and a comparison, or several runs, as one HTML file.

    The file needs no network (docs/reports.md). measure: fields of MeasureConfig. Raises ConfigError if versions or
    sides have no samples, a name is unknown, or the file can't be written; QueryError.

    Args:
        run: Folder or URL of a run, a folder of runs, or a pattern such as 'runs/lr*'.
        also: More runs, folders or patterns, here or with --also: the file then has the curves of all runs over each
            other, what differs, and their comparison.
        by: Of one run: column of its rollouts or of the data set, for whose values the curves have a line each. Of
            several: setting whose equal values make a group, drawn as its mean and a band.
        output: File to write, on this machine; must not exist. None, the default in Python, writes nothing, and the
            result's `html` is the page.
        versions: Evaluated versions to show, joined by commas: numbers, latest, and ranges such as 10-latest. None is
            all.
        compare: The baseline, then what to compare it with, as in `ludic compare`: VERSION or latest of this run, or
            ROOT@VERSION. None given: the last evaluated version is compared with the first.
        overwrite: Replace the output if it exists.
    """
    from ludic.app.show.comparison import open_runs
    from ludic.app.show.report.page import make_report

    file, config = None if output is None else str(output), convert(MeasureConfig, measure)
    also = [also] if isinstance(also, str | PathLike) else [*also]
    roots = open_runs([run if isinstance(run, str) else run.root, also])
    if len(roots) == 1 and also:
        raise SettingsError(f"{roots[0].url} is given twice; name each run once")
    if len(roots) > 1:
        from ludic.app.show.report.runs_page import make_runs_report

        if given := [name for name, value in (("versions", versions), ("compare", compare)) if value]:
            raise SettingsError(f"{given[0]} is for a report of one run, and there are several; leave out one of them")
        return make_runs_report(roots, file, by=by, overwrite=overwrite, measure=config)
    sides = [str(side) for side in compare]
    return make_report(roots[0], file, by=by, versions=versions, sides=sides, measure=config, overwrite=overwrite)


# --- SQL -----------------------------------------------------------------------------------------------------------


@operation(group="First", place=7, defaults={"out": Path("-")})
def sql(
    run: "Run",
    query: Annotated[str, Shown("QUERY", by_position=True, last=True)],
    *params: Any,
    also: Annotated[
        "Iterable[RootLike]", FromFlag(Annotated[tuple[str, ...], Shown("ROOT", by_position=True, has_flag=True)])
    ] = (),
    format: OutputFormat | None = None,
    out: Path | str | None = None,
    max_rows: PositiveCount = 40,
    unsafe: bool = False,
) -> "pl.DataFrame":
    """Query rollouts, batches and metrics in SQL.

    Returns the rows of a query over the run's views (docs/reading.md) as a Polars DataFrame. With `out`, writes them
    instead, as a stream of any size, and returns an empty DataFrame. params: values of the query's ? in order, or one
    mapping for its $names. `ludic.connect` gives a stream of Arrow batches. Raises QueryError.

    Args:
        query: SQL over the views rollouts, groups, steps, evals, batches, all_batches, requests, attempts, workers,
            code, policies, metrics, reference, token_stats, trained_tokens, mismatch, scores and labels. Column root is
            the run of a row; in batches and all_batches, ledger_root is.
        also: More runs to query, here or with --also.
        format: Output format; None derives it from the suffix of --out, else prints a table.
        out: File to write; - is stdout. None, the default in Python, returns the rows.
        max_rows: Maximum number of rows that a table shows.
        unsafe: Run any statement, not queries only: it may read and write files, attach databases and load extensions.
            Without it, a query reads these runs only.
    """
    from ludic.root.sql import open_result, open_roots, to_frame

    values = params[0] if len(params) == 1 and isinstance(params[0], Mapping) else params
    with open_result(open_roots([run.root, also]), query, values, unsafe=unsafe) as reader:
        if out is None:
            if format is not None:
                raise SettingsError(f"format is {format}, and out is None; name a file, or - for stdout")
            return to_frame(reader)
        import polars as pl

        from ludic.app.show.tables import write_rows

        suffixes: dict[str, OutputFormat] = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
        file = None if str(out) == "-" else Path(out)
        write_rows(reader, format or suffixes.get(file.suffix if file else "", "table"), file, max_rows)
        return pl.DataFrame()


# --- A question to the policy ----------------------------------------------------------------------------------------


@operation(group="Look", place=1, trains=True, question=Question)
def sample(
    run: Annotated["Run | str", Shown("ROOT|MODEL", by_position=True)],
    prompt: str,
    n: int = 1,
    *,
    version: Index | None = None,
    track: Track = untracked,
    **question: Unpack["SampleSettings"],
) -> "Answers":
    """Sample answers from a run's policy or from a model.

    Nothing is stored. Each answer has text, tokens, logprobs (nats) and finish_reason. question: fields of Question;
    sampling settings that are None are the run's. Raises ConfigError if there are no such weights or the prompt is too
    long, ModelError for broken weights.

    Args:
        run: Folder or URL of a run, or folder, Hugging Face id or URL of a model.
        version: Policy version of the run; None uses the latest.
    """
    from ludic.rollouts import sample_model, sample_run

    asked = convert(Question, {"prompt": prompt, "n": n, **question})
    root = _root_of(run) if isinstance(run, str) else run.root
    if root is None and version is not None:
        raise SettingsError(f"{run} is a model, not a run, so it has no version {version}")
    ask = partial(sample_model, str(run), asked) if root is None else partial(sample_run, root, asked, version)
    (answers,) = track((ask() for _ in range(1)), 1, f"sampling {asked.n}")
    return answers


def _root_of(source: str) -> Any:
    """Open the run; returns None if the source may be a model. Raises MissingRootError if it can be neither."""
    import logging

    from ludic.errors import MissingRootError, StoreError
    from ludic.root import Root
    from ludic.root.storage import Storage
    from ludic.root.weights import is_hub_id

    try:
        return Root.open(source)
    except (MissingRootError, StoreError) as error:
        if Storage.connect(source).exists("config.json"):
            return None
        if is_hub_id(source):
            logging.getLogger(__name__).info(
                "there is no folder %s here; asking Hugging Face for a model of that name", source
            )
            return None
        if isinstance(error, StoreError):
            raise
        raise MissingRootError(f"{source} holds neither a run (run.json) nor a model (config.json)") from None
