"""A box for SQL: the first rows of a query's result as a table, the whole as CSV, and a plot if its columns allow one.

A query may only read, as in `ludic sql`, within limits of seconds, memory and rows. What is wrong with it is shown
beside the box.
"""

from collections.abc import Mapping
from typing import Any

import polars as pl
import pyarrow as pa

from ludic.app.show.figures import FigureData, Series
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, page
from ludic.base import plural, size
from ludic.errors import QueryError, one_line
from ludic.root.sql import to_frame

_MOST_ROWS = 1_000
"""Rows that are shown; the CSV has all."""
_MOST_POINTS = 20_000
"""Rows that are plotted."""
_MOST_BYTES = 64 << 20
_MOST_LINES = 24
_EXAMPLES: Mapping[str, str] = {
    "views": "select table_name as view, count(*) as columns from duckdb_columns() where schema_name = 'main' "
    "and not internal group by all order by 1",
    "columns of rollouts": "describe rollouts",
    "reward by step": "select step, reward_mean from metrics where kind = 'train' order by step",
    "reward by version and environment": "select version, env_name, avg(episode_reward) as reward\nfrom rollouts\n"
    "group by all order by 1",
    "drops by reason": "select reason, count(*) as rollouts from batches where not used group by all order by 2 desc",
}


@page("sql", "SQL", menu=200)
def sql(request: PageRequest) -> PageAnswer:
    """A query and its result."""
    query = request.query.get("q", "").strip()
    values: dict[str, Any] = {"query": query, "table": None, "figure": None, "problem": "", "said": ""}
    values["examples"] = {name: request.link("sql", q=text) for name, text in _EXAMPLES.items()}
    tables = []
    if query:
        try:
            frame, is_whole = _read(request, query)
        except QueryError as error:
            values["problem"] = one_line(error)
        else:
            rows = frame.head(_MOST_ROWS).to_dicts()
            table = PageTable(name="result", rows=rows, columns=frame.columns, query=(query, {}))
            tables = [table]
            values |= {"table": table, "figure": _figure(frame, is_whole), "said": _said(frame, is_whole)}
    return PageAnswer("sql.html.j2", values, tables=tables, status=400 if values["problem"] else 200)


def _read(request: PageRequest, query: str) -> tuple[pl.DataFrame, bool]:
    """Return the first rows of a result, and whether these are all."""
    with request.data.stream(query, {}) as reader:
        batches: list[pa.RecordBatch] = []
        num_rows = num_bytes = 0
        for batch in reader:
            batches.append(batch.slice(0, _MOST_POINTS - num_rows))
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            if num_rows > _MOST_POINTS or num_bytes > _MOST_BYTES:
                return to_frame(pa.Table.from_batches(batches, reader.schema).to_reader()), False
        return to_frame(pa.Table.from_batches(batches, reader.schema).to_reader()), True


def _said(frame: pl.DataFrame, is_whole: bool) -> str:
    """Return how many rows there are, and how many of them are shown."""
    if not is_whole:
        first = f"the first {min(frame.height, _MOST_ROWS):,} rows"
        return f"{first} of more; a page reads at most {plural(_MOST_POINTS, 'row')} or {size(_MOST_BYTES)}, CSV all"
    if frame.height > _MOST_ROWS:
        return f"the first {_MOST_ROWS:,} of {plural(frame.height, 'row')}; CSV has all"
    return plural(frame.height, "row")


def _figure(frame: pl.DataFrame, is_whole: bool) -> dict[str, Any] | None:
    """Return a plot of the numbers over the first column, if that has numbers; None if there is nothing to plot.

    A column of texts, if there is one, splits each number into lines by its values.
    """
    numbers = [name for name, kind in frame.schema.items() if kind.is_numeric()]
    if len(numbers) < 2 or numbers[0] != frame.columns[0] or frame.height < 2:
        return None
    x, columns = numbers[0], numbers[1:]
    names = next((name for name, kind in frame.schema.items() if kind in (pl.String, pl.Boolean)), None)
    notes = [] if is_whole else [f"Of the first {plural(frame.height, 'row')}."]
    lines: dict[str, dict[float, float | None]] = {}
    num_again = 0
    for row in frame.sort(x, nulls_last=True).filter(pl.col(x).is_not_null()).to_dicts():
        for column in columns:
            parts = [*([column] if len(columns) > 1 or names is None else []), *([str(row[names])] if names else [])]
            line = lines.setdefault(" ".join(parts), {})
            num_again += row[x] in line
            line[float(row[x])] = None if row[column] is None else float(row[column])
    if num_again:
        notes.append(f"{plural(num_again, 'point')} replaced by a later row with the same {x}.")
    if len(lines) > _MOST_LINES:
        notes.append(f"The first {_MOST_LINES} of {len(lines):,} lines.")
    series = [Series(name=name, values=values) for name, values in list(lines.items())[:_MOST_LINES]]
    return FigureData(name="result", title="", unit="", x_name=x, series=series, notes=notes).to_json()
