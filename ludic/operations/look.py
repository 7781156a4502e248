"""Look at a run: figures, rollouts, SQL, the live state, the viewer, reports; ask its policy a question."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from ludic.defaults import Track, untracked
from ludic.eval.config import MeasureConfig
from ludic.rollouts.config import Question
from ludic.settings import Index, PositiveCount, SecondsOfADay, SettingsError, Shown, convert, operation
from ludic.show.terminal.options import ViewOptions

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import polars as pl
    import pyarrow as pa

    from ludic.operations.run import Run
    from ludic.operations.typed import ReportSettings, SampleSettings, ViewSettings, WriteReportSettings
    from ludic.rollouts.sample import Answers
    from ludic.show.found import Lookup
    from ludic.show.report.page import Report
    from ludic.show.stats import Stats
    from ludic.show.status import RunStatus
    from ludic.sql.connect import RootLike

ReadingColor = Literal["logprob", "advantage", "none"]
OutputFormat = Literal["table", "json", "csv", "parquet"]


@operation()
def stats(run: "Run", *, track: Track = untracked) -> "Stats":
    """Summarize a run: environments, versions, steps and files.

    Returns DataFrames: folders, rollouts, environments, versions, evals, attempts. Files that can't be read are listed
    and left out. Raises QueryError.
    """
    from ludic.show.stats import collect_stats

    return collect_stats(run.root, track)


# --- The live state ------------------------------------------------------------------------------------------------


@operation()
def status(run: "Run") -> "RunStatus":
    """Return the current state: trainer, newest steps, rates, policy, checkpoint, diagnostics.

    Later calls can tell if the trainer is alive, since they see whether its lease is renewed. A damaged file is named
    in `unreadable`.
    """
    return run.watcher.poll()


@operation()
def watch(run: "Run", interval_s: SecondsOfADay = 2.0, *, once: bool = False) -> None:
    """Show the live state of a run.

    Runs until Ctrl-C, from any machine that can read the run's files; writes nothing. While the filesystem fails, the
    last frame stays, with the reason below it. Raises MissingRootError if the run is deleted.

    Args:
        interval_s: Seconds between two looks at the files.
        once: Print one frame and exit.
    """
    from ludic.results import stdout_console
    from ludic.show.watch import watch

    if once:
        status(run).print_to(stdout_console())
    else:
        watch(run.watcher, stdout_console(), interval_s)


# --- Rollouts and groups -------------------------------------------------------------------------------------------


@operation()
def show(
    run: "Run",
    any_id: Annotated[str, Shown("ID", by_position=True)],
    *,
    color: ReadingColor = "logprob",
    tokens: bool = False,
    full: bool = False,
) -> "Lookup":
    """Show one rollout or group.

    Raises UnknownIdError.

    Args:
        any_id: rollout_id or group_id; its beginning or end is enough if no other id matches. It may be in quotes.
        color: Colour the response's tokens by their probability (logprob) or by the advantage used in training.
        tokens: List the tokens, one per line, with ids, logprobs and rewards.
        full: Show long texts and responses whole, and all answers of a group; by default the middle of a text is left
            out, and a group has its best and its worst answer.
    """
    from ludic.show.found import look_up
    from ludic.show.transcript import PrintOptions

    return look_up(run.root, any_id, options=PrintOptions(color=color, tokens=tokens, full=full))


@operation()
def rollout(run: "Run", rollout_id: str) -> "Lookup":
    """Find a rollout by its id, or by a beginning or an end that no other rollout_id has.

    Its `record` is the rollout, `tokens()` a table of its response. Raises UnknownIdError.
    """
    from ludic.show.found import look_up

    return look_up(run.root, rollout_id, "rollout")


@operation()
def group(run: "Run", group_id: str) -> "Lookup":
    """Find a group by its id, or a beginning or an end of it.

    Its `records` are its rollouts. Raises UnknownIdError.
    """
    from ludic.show.found import look_up

    return look_up(run.root, group_id, "group")


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
    from ludic.store.tables import put_label

    found = rollout(run, rollout_id).record.rollout_id
    put_label(run.root.writable(), found, value, note, name=name, author=author)


@operation(view=ViewOptions)
def view(run: "Run", rollout_id: str | None = None, **options: Unpack["ViewSettings"]) -> None:
    """Look at a run in the terminal or a browser: versions, groups, rollouts, tokens, labels.

    Returns when the user quits. options: fields of ViewOptions. Raises ConfigError if textual is not installed or the
    port is taken, UnknownIdError.
    """
    from ludic.show.terminal.start import view_run

    view_run(run.root, convert(ViewOptions, {"rollout_id": rollout_id, **options}))


@operation(measure=MeasureConfig)
def report(
    run: "Run",
    output: str | PathLike[str] | None = None,
    *,
    versions: str | None = None,
    compare: Sequence[int | str] = (),
    overwrite: bool = False,
    **measure: Unpack["ReportSettings"],
) -> "Report":
    """Show the run, its stored evaluations and a comparison in one HTML file that needs no network (docs/reports.md).

    output: path of the file, which must not exist unless `overwrite`; None writes nothing, and the result's `html` is
    the page. The other arguments are those of `write_report`. Raises ConfigError if versions or sides have no samples
    or the file can't be written, QueryError.
    """
    from ludic.show.report.page import make_report

    return make_report(
        run.root,
        None if output is None else str(output),
        versions=versions,
        sides=[str(side) for side in compare],
        measure=convert(MeasureConfig, measure),
        overwrite=overwrite,
    )


@operation(measure=MeasureConfig)
def write_report(
    run: "Run",
    *,
    output: str = "report.html",
    versions: str | None = None,
    compare: Annotated[tuple[str, ...], Shown("SIDE")] = (),
    overwrite: bool = False,
    **measure: Unpack["WriteReportSettings"],
) -> "Report":
    """Write a run, its evaluations and a comparison as one HTML file.

    Args:
        output: File to write, on this machine; must not exist.
        versions: Evaluated versions to show, joined by commas: numbers, latest, and ranges such as 10-latest. None is
            all.
        compare: The baseline, then what to compare it with, as in `ludic eval compare`: VERSION or latest of this run,
            or ROOT@VERSION. None given: the last evaluated version is compared with the first.
        overwrite: Replace the output if it exists.
    """
    return report(run, output, versions=versions, compare=compare, overwrite=overwrite, **measure)


# --- SQL -----------------------------------------------------------------------------------------------------------


@operation()
def sql(run: "Run", query: str, *params: Any, also: "Iterable[RootLike]" = (), unsafe: bool = False) -> "pl.DataFrame":
    """Return the rows of a SQL query over the run's views (docs/reading.md) as a Polars DataFrame.

    params: values of the query's ? in order, or one mapping for its $names. also: more runs to query. unsafe: run
    any statement, which may read and write files; without it, a query may only read, and only these runs.
    Raises QueryError.
    """
    from ludic.sql.query import to_frame

    with sql_stream(run, query, *params, also=also, unsafe=unsafe) as reader:
        return to_frame(reader)


@operation()
def sql_stream(
    run: "Run", query: str, *params: Any, also: "Iterable[RootLike]" = (), unsafe: bool = False
) -> "AbstractContextManager[pa.RecordBatchReader]":
    """Give the result of a query as a stream of Arrow batches of 10,000 rows, for results larger than memory.

    The arguments are those of `sql`. Raises QueryError, also while the stream is read.
    """
    from ludic.sql.connect import open_roots
    from ludic.sql.query import open_result

    values = params[0] if len(params) == 1 and isinstance(params[0], Mapping) else params
    return open_result(open_roots([run.root, also]), query, values, unsafe=unsafe)


@operation()
def write_sql(
    run: "Run",
    also: Annotated[tuple[str, ...], Shown("ROOT", by_position=True, has_flag=True)] = (),
    *,
    query: Annotated[str, Shown("QUERY", by_position=True)],
    format: OutputFormat | None = None,
    out: Path | None = None,
    max_rows: PositiveCount = 40,
    unsafe: bool = False,
) -> None:
    """Query rollouts, batches and metrics in SQL.

    Raises QueryError.

    Args:
        also: More runs to query, here or with --also.
        query: SQL over the views rollouts, groups, steps, evals, batches, all_batches, requests, attempts, workers,
            code, policies, metrics, reference, token_stats, trained_tokens, mismatch, scores and labels. Column root is
            the run of a row; in batches and all_batches, ledger_root is.
        format: Output format; None derives it from the suffix of --out, else prints a table.
        out: File to write; None writes to stdout.
        max_rows: Maximum number of rows that a table shows.
        unsafe: Run any statement, not queries only: it may read and write files, attach databases and load extensions.
    """
    from ludic.show.tables import write_rows

    suffixes: dict[str, OutputFormat] = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
    chosen = format or suffixes.get(out.suffix if out else "", "table")
    with sql_stream(run, query, also=also, unsafe=unsafe) as result:
        write_rows(result, chosen, out, max_rows)


# --- A question to the policy ----------------------------------------------------------------------------------------


@operation(trains="ludic sample", question=Question)
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
    from ludic.rollouts.sample import sample_model, sample_run

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
    from ludic.models.first_model import is_hub_id
    from ludic.store import Root
    from ludic.store.filesystem import Storage

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
