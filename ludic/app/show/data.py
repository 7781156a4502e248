"""Read the data of the viewers, in a terminal and as web pages: lists by SQL, single rollouts, and labels.

A list selects few columns and no tokens, so that it opens fast; texts are read a page at a time. The user's predicate
and order may name every column of its relation; they are part of a query that may only read (ludic.root.sql.query).
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import duckdb
import polars as pl
import pyarrow as pa

from ludic.app.show.figures import read_diagnostics
from ludic.app.show.lookup import look_up
from ludic.app.show.stats import FRACTIONS
from ludic.app.show.status import RunStatus
from ludic.app.show.transcript import Lookup, TokenReader, load_token_reader
from ludic.app.show.watch import Watcher
from ludic.errors import LudicError, QueryError
from ludic.records import WITHOUT_LOGPROBS
from ludic.root import Root
from ludic.root.rows import LABEL, put_label
from ludic.root.sql import (
    columns_to_group,
    connect,
    figure,
    means,
    quote,
    refresh,
    renew,
    result_of,
    rows_of,
    texts,
    to_frame,
    value_of_example,
)
from ludic.run import Diagnostic

RolloutTable = Literal["rollouts", "evals"]
RowLevel = Literal["version", "environment", "example", "group", "rollout"]

_END = "ended_by(truncation_reason, finish_reason, parse_error) as ended_by"
WHOLE_TEXTS = (
    "list_filter(messages, lambda message: message.role = 'user')[1].content as prompt, "
    "list_filter(messages, lambda message: message.role = 'assistant')[-1].content as answer, reward_components"
)
"""SQL of the question and the last answer of a rollout, without a cut, and of the components of its reward."""
TEXTS = ("prompt", "answer")
"""Columns of texts, which are read only for the rows of a page, since messages are most of the stored data."""
_FIRST_COLUMNS = ("rollout_id", "episode_reward", "correct", "marks")
_LAST_COLUMNS = (
    *TEXTS,
    "wanted",
    "response_length",
    "num_turns",
    "ended_by",
    "error",
    "env_example_id",
    "agent_id",
    "version",
    "env_name",
)
_SHOWN_KEYS, _MOST_KEYS, _LONGEST_KEY = 6, 50, 40
"""Columns of the data set that a list of rollouts shows, those that its predicate may name, and characters of one."""
_KEPT = ("rollout_id", "episode_reward", *TEXTS, "response_length")
_TRAINING_COLUMNS = ("step", "advantage", "dropped_by")
_TAKEN = (*_FIRST_COLUMNS, *_LAST_COLUMNS, *_TRAINING_COLUMNS, "num_listed", "reward_components", "components")
"""Names in a list of rollouts besides the columns of the table."""
_GROUP_COLUMNS = (
    "group_id",
    "reward_mean",
    "accuracy",
    "prompt",
    "wanted",
    "reward_min",
    "reward_max",
    "reward_std",
    "num_rollouts",
    "num_scored",
    "version",
    "env",
    "response_length_mean",
    "num_incomplete_completions",
    "num_unparsed",
    "num_at_other_limits",
    "num_errors",
)
_KEPT_MEANS = ("num_rollouts", "num_groups", "reward_mean", "response_length_mean")
_MEANS = ("num_rollouts", "num_groups", "reward_mean", "accuracy", "response_length_mean", *FRACTIONS)


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rows: a SQL expression over the columns, and its direction. Missing values are last."""

    by: str
    descending: bool = False

    @classmethod
    def parse(cls, text: str) -> "Order":
        """Read an expression with an optional asc or desc at its end."""
        expression, _, direction = text.strip().rpartition(" ")
        if expression and direction.lower() in ("asc", "desc"):
            return cls(expression.strip(), direction.lower() == "desc")
        return cls(text.strip())

    def __str__(self) -> str:
        return f"{self.by} desc" if self.descending else self.by


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A list of rows of one kind."""

    title: str
    kind: RowLevel
    relation: str
    """SQL of the rows; predicates may name all of its columns."""
    columns: tuple[str, ...]
    """Columns that are shown; the first one identifies the row, and breaks ties of the order."""
    kept: tuple[str, ...] = ()
    """Columns that are shown even if they are the same in all rows."""
    order: Order
    params: Mapping[str, Any] = field(default_factory=dict)
    table: RolloutTable = "rollouts"

    @property
    def text_id(self) -> str:
        """Column with the id of the rollout or group whose texts a row shows."""
        return "rollout_id" if self.kind == "example" else self.columns[0]

    @property
    def stored(self) -> tuple[str, ...]:
        """Columns of the rows, without texts."""
        return tuple(name for name in self.columns if name not in TEXTS)

    def query(self, where: str, order: Order, limit: int | None, more: str = "", offset: int = 0) -> str:
        """Return the SQL of the first rows that a predicate chooses; an empty one chooses all.

        more: expressions of further columns. offset: rows to leave out before them.
        """
        # The user's texts have their own lines, so that a comment at their end does not hide a parenthesis.
        direction = "desc" if order.descending else "asc"
        columns = ", ".join([*map(quote_name, self.stored), *([more] if more else [])])
        part = "" if limit is None else f" limit {limit} offset {offset}"
        return (
            f"select {columns} from (\n{self.relation}\n) as listed "  # noqa: S608
            f"where (\n{where or 'true'}\n) order by (\n{order.by}\n) {direction} nulls last, "
            f"{quote_name(self.columns[0])}{part}"
        )

    def count_query(self, where: str) -> str:
        return f"select count(*) from (\n{self.relation}\n) as listed where (\n{where or 'true'}\n)"  # noqa: S608


def quote_name(name: str) -> str:
    """Return a name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def versions(table: RolloutTable) -> Listing:
    """The policy versions that sampled rollouts, or evaluations, by environment."""
    return Listing(
        title="versions" if table == "rollouts" else "versions in evals",
        kind="version",
        relation=means("version, env", table),
        columns=("version", "env", *_MEANS),
        kept=("version", "env", *_KEPT_MEANS),
        order=Order("version", descending=True),
        table=table,
    )


def environments(table: RolloutTable) -> Listing:
    """The environments of rollouts, or of evaluations."""
    return Listing(
        title="environments" if table == "rollouts" else "environments in evals",
        kind="environment",
        relation=means("env_name", table),
        columns=("env_name", *_MEANS),
        kept=("env_name", *_KEPT_MEANS),
        order=Order("env_name"),
        table=table,
    )


def examples(**equal: Any) -> Listing:
    """The examples of rollouts whose columns equal these values: each over all versions that sampled it."""
    return Listing(
        title="examples",
        kind="example",
        relation=f"select * from (\n{figure('examples')}\n) where {_scope(equal)}",  # noqa: S608
        columns=(
            "env_example_id",
            "env_name",
            "reward_mean",
            "first_reward",
            "last_reward",
            "accuracy",
            "wanted",
            "num_rollouts",
            "num_groups",
            "num_versions",
            "response_length_mean",
            "num_errors",
            "rollout_id",
            "version",
        ),
        kept=("env_example_id", "env_name", "reward_mean", "num_rollouts"),
        order=Order("reward_mean"),
        params=equal,
    )


def groups(**equal: Any) -> Listing:
    """The groups whose columns equal these values, such as version and env."""
    named = ", ".join(f"{name} {value}" for name, value in equal.items())
    return Listing(
        title=f"groups of {named}" if named else "all groups",
        kind="group",
        relation=f"select * from groups where {_scope(equal)}",  # noqa: S608
        columns=_GROUP_COLUMNS,
        kept=("group_id", "reward_mean", "prompt"),
        order=Order("created_at"),
        params=equal,
    )


def _scope(equal: Mapping[str, Any]) -> str:
    return " and ".join(f"{quote_name(name)} = ${name}" for name in equal) or "true"


def rollouts(
    table: RolloutTable, *, title: str = "", with_training: bool = False, keys: Sequence[str] = (), **equal: Any
) -> Listing:
    """Rollouts, or rollouts of evaluations, whose columns equal these values.

    with_training: also show the newest step that considered each, its advantage, and the filter that dropped it.
    keys: columns of the data set, of `RunData.keys`, which become columns of the list.
    """
    named = title or ", ".join(f"{name} {value}" for name, value in equal.items())
    training = _joined("newest_uses") if with_training else ""
    texts, others = _LAST_COLUMNS[: len(TEXTS) + 1], _LAST_COLUMNS[len(TEXTS) + 1 :]
    values = "".join(f"{value_of_example(key)} as {quote_name(key)}, " for key in keys)
    return Listing(
        title=f"{table} of {named}" if named else f"all {table}",
        kind="rollout",
        relation=f"select *, {values}{_END} from {table}\n{_joined('marks')}{training}where {_scope(equal)}",  # noqa: S608
        columns=(*_FIRST_COLUMNS, *(_TRAINING_COLUMNS if with_training else ()), *texts, *keys[:_SHOWN_KEYS], *others),
        kept=_KEPT + (_TRAINING_COLUMNS if with_training else ()),
        order=Order("created_at"),
        params=equal,
        table=table,
    )


def searched(listing: Listing, text: str) -> Listing:
    """Return the rollouts of a list one of whose messages holds a text, in upper or lower case."""
    return replace(
        listing,
        relation=f"select * from (\n{listing.relation}\n) as all_of_it where len(list_filter(messages, "  # noqa: S608
        "lambda message: contains(lower(message.content), lower($search)))) > 0",
        params={**listing.params, "search": text},
    )


def _joined(name: str) -> str:
    """Return the SQL that adds the columns of a figure to rollouts."""
    return f"left join (\n{figure(name)}\n) using (rollout_id)\n"


def answers(env_name: str, example_id: str, but: str) -> Listing:
    """All answers to one example, in rollouts and evals, but one."""
    parts = " union all by name ".join(
        f"select {quote(table)} as found_in, * from {table} where env_name = $env_name "  # noqa: S608
        "and env_example_id = $example_id and rollout_id <> $but"
        for table in ("rollouts", "evals")
    )
    return Listing(
        title=f"answers to {env_name} {example_id}: choose one to compare",
        kind="rollout",
        relation=f"select *, {_END} from ({parts})\n{_joined('marks')}",  # noqa: S608
        columns=(
            "rollout_id",
            "found_in",
            "version",
            "agent_id",
            "temperature",
            "episode_reward",
            "correct",
            "answer",
            "response_length",
            "num_turns",
            "ended_by",
            "marks",
        ),
        kept=("rollout_id", "found_in", "version", "episode_reward", "answer"),
        order=Order("version", descending=True),
        params={"env_name": env_name, "example_id": example_id, "but": but},
    )


# --- One run ---------------------------------------------------------------------------------------------------------

MOST_ROWS = 200_000
"""Maximum rows of a list in memory, the first ones in its order; about 20 MB."""

_MOST_LOG_RATIO = 20.0


class RunData:
    """The data of one run for the viewers.

    Reads the root through one sealed connection, which lets users' predicates only read. Threads may share it; each
    query has a cursor of its own, so none waits for another. Raises QueryError for a wrong predicate, UnknownIdError,
    StoreError.
    """

    def __init__(self, root: Root, author: str | None = None, memory_bytes: int | None = None) -> None:
        """author: of labels; None is the user of this machine. memory_bytes: of all queries; None: DuckDB's limit."""
        self.root, self._author = root, author
        self._opened = _Opened(root, memory_bytes)
        self._lock = threading.Lock()
        self._running: set[duckdb.DuckDBPyConnection] = set()
        self._stopped_by = ""
        """Reason of the last `stop`."""

    def session(self) -> "RunData":
        """Return the same data for one caller, whose queries `stop` ends alone."""
        session = copy(self)
        session._lock, session._running = threading.Lock(), set()
        return session

    def rows(self, listing: Listing, where: str, order: Order) -> pl.DataFrame:
        """Return the first MOST_ROWS rows of a list that a SQL predicate chooses, in an order."""
        return self.ask(listing.query(where, order, MOST_ROWS), listing.params)

    def count(self, listing: Listing, where: str) -> int:
        """Return the number of all rows that a predicate chooses."""
        return int(self.ask(listing.count_query(where), listing.params).item())

    def texts(self, listing: Listing, rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, str | None]]:
        """Return the beginnings of question and answer of rows of a list, by their `text_id`."""
        ids = [row[listing.text_id] for row in rows]
        versions = sorted({row.get("version", listing.params.get("version")) for row in rows})
        tables: Sequence[RolloutTable] = ("rollouts", "evals") if "found_in" in listing.columns else (listing.table,)
        match listing.kind:
            case "group":
                queries = [figure("texts_of_groups")]
            case "example":
                queries = [f"select id, prompt from (\n{texts('rollouts')}\n)"]  # noqa: S608
            case _:
                queries = [texts(table) for table in tables]
        found = [self.ask_rows(query, {"ids": ids, "versions": versions}) for query in queries]
        return {row["id"]: row for rows in found for row in rows}

    def ask(self, query: str, params: Mapping[str, Any]) -> pl.DataFrame:
        """Return the rows of a query that may only read."""
        with self.stream(query, params) as reader:
            return to_frame(reader)

    def ask_rows(self, query: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of a query that may only read as dicts, for few rows; their columns have different names."""
        with self._stoppable(), self.reading() as con:
            return rows_of(con, [self.root], query, params)

    @contextmanager
    def stream(self, query: str, params: Mapping[str, Any]) -> Iterator[pa.RecordBatchReader]:
        """Yield the rows of a query that may only read as a stream, open until the block ends."""
        with self._stoppable(), self.reading() as con, result_of(con, [self.root], query, params) as reader:
            yield reader

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        try:
            yield
        except QueryError as error:
            if self._stopped_by and isinstance(error.__cause__, duckdb.InterruptException):
                raise QueryError(f"the query was stopped: {self._stopped_by}") from error
            raise

    @contextmanager
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Yield a connection for ludic's own queries, which `stop` ends."""
        with self._opened.connection().cursor() as con:
            with self._lock:
                self._running.add(con)
            try:
                yield con
            finally:
                with self._lock:
                    self._running.discard(con)

    def diagnostics(self) -> list[Diagnostic]:
        """Return the diagnostics of the run, and since when, as `ludic watch` does."""
        with self.reading() as con:
            return read_diagnostics(con, self.root)

    def status(self) -> RunStatus:
        """Return the state of the run now, as `ludic watch` shows it."""
        with self._opened.watching:
            return self._opened.watcher.poll()

    def columns_to_group(self, table: RolloutTable = "rollouts") -> tuple[list[str], list[str]]:
        """Return the keys of the data set's columns, and the columns of a table with one value a row."""
        with self._stoppable(), self.reading() as con:
            return columns_to_group(con, table)

    def keys(self, table: RolloutTable) -> list[str]:
        """Return the columns of the data set that can be columns of a list of rollouts, under their own names."""
        keys, columns = self.columns_to_group(table)
        taken = {name.lower() for name in (*columns, *_TAKEN)}
        found: dict[str, str] = {}
        for key in keys:
            if key.strip() == key != "" and key.isprintable() and len(key) <= _LONGEST_KEY and key.lower() not in taken:
                found.setdefault(key.lower(), key)
        return list(found.values())[:_MOST_KEYS]

    def stop(self, reason: str = "") -> None:
        """End the queries that are running; their callers get a QueryError, with this reason if there is one."""
        with self._lock:
            self._stopped_by = reason
            for con in self._running:
                con.interrupt()

    def refresh(self) -> None:
        """Let later queries show rollouts that are stored by then."""
        refresh(self._opened.connection())

    def renew(self) -> None:
        """Do as `refresh` does, but list the files in this call, so that no query waits for it."""
        with suppress(LudicError):  # the pages show it
            renew(self._opened.connection())

    def find(self, rollout_id: str, *, trained: bool = True, near: Lookup | None = None) -> Lookup:
        """Return a rollout, or one that the end of its id identifies.

        trained: its row also has lists of `ratios` and `token_advantages`, if training stored them. near: a rollout
        that is probably of the same version, which saves listing the others.
        """
        version = near.rows[0]["version"] if near is not None else self._version_of(rollout_id)
        with self.reading() as con:
            found = look_up(self.root, rollout_id, "rollout", con=con, version=version)
        row = found.rows[0]
        if not (trained and found.uses):
            return found
        tokens = self.ask(figure("trained_tokens_of_rollout"), {"id": row["rollout_id"]}).to_dicts()
        if not tokens:
            return found
        logprobs = tokens[0]["trainer_logprobs"] or []
        sampled_with = () if row["capture"] in WITHOUT_LOGPROBS else row["response_logprobs"]
        ratios = [_ratio(*pair) for pair in zip(logprobs, sampled_with, strict=False)]
        return replace(found, rows=[row | {"ratios": ratios, "token_advantages": tokens[0]["token_advantages"]}])

    def _version_of(self, rollout_id: str) -> int | None:
        """Return the partition of a rollout in a bucket, whose listings are slow.

        None on a disk, if it is new, and if only a part of its id is given.
        """
        for table in () if self.root.is_local else ("rollouts", "evals"):
            found = self.ask(f"select version from {table} where rollout_id = $id limit 1", {"id": rollout_id})  # noqa: S608
            if not found.is_empty():
                return int(found.item())
        return None

    def labels(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return the labels of a rollout, oldest first."""
        return self.ask(figure("labels_of_rollout"), {"id": rollout_id}).to_dicts()

    def label(self, rollout_id: str, mark: str, note: str, name: str = LABEL, author: str | None = None) -> None:
        """Store a label. mark: read as a number if it is one; an empty mark and note withdraw the label.

        author: None is the author of this viewer, or else the user of this machine.
        """
        root = Root.open(self.root.url, writable=True)
        author = author or self._author
        put_label(root, rollout_id, _as_mark(mark.strip()), note.strip() or None, name=name, author=author)

    @property
    def token_reader(self) -> TokenReader:
        return self._opened.token_reader


class _Opened:
    """What the sessions of a run share: its connection and its token reader, each opened when it is needed."""

    def __init__(self, root: Root, memory_bytes: int | None) -> None:
        self._root, self._memory_bytes = root, memory_bytes
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self.watching = threading.Lock()
        """Held by whoever uses `watcher`."""

    @cached_property
    def watcher(self) -> Watcher:
        return Watcher(self._root.url)

    def connection(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if self._connection is None:
                self._connection = connect(self._root, sealed=True, memory_bytes=self._memory_bytes)
            return self._connection

    @cached_property
    def token_reader(self) -> TokenReader:
        return load_token_reader(self._root)


def _as_mark(text: str) -> float | str | None:
    try:
        number = float(text)
    except ValueError:
        return text or None
    return number if math.isfinite(number) else text


def _ratio(trainer_logprob: float, sampler_logprob: float) -> float:
    difference = trainer_logprob - sampler_logprob
    return math.exp(max(-_MOST_LOG_RATIO, min(_MOST_LOG_RATIO, difference)))
