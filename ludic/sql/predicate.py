"""Evaluate a user's SQL predicate over the rows of a table in memory; it may be an aggregate. Reads no files."""

from collections.abc import Sequence

import pyarrow as pa

from ludic.errors import QueryError
from ludic.sql.connect import open_duckdb, seal
from ludic.sql.library import SqlText, required_columns, run_query, where_filter


class Predicate:
    """A predicate over the rows of one table: an aggregate such as avg(x) > 1, or an expression of a row."""

    def __init__(self, text: str, table: str, schema: pa.Schema) -> None:
        """Check the predicate over no rows. Raises QueryError if it is not one expression that is true or false."""
        self.text, self._table = text, table
        parsed = where_filter(text)
        if parsed.parameters:
            raise QueryError(f"({text}): takes ${min(parsed.parameters)}; write the value into the predicate")
        self.columns = _columns_of(parsed, schema.names)
        self._con = open_duckdb()
        seal(self._con)
        type_ = self._run(schema.empty_table()).schema.field("hit").type
        if not (pa.types.is_boolean(type_) or pa.types.is_null(type_)):
            raise QueryError(f"({text}): is {type_}, not true or false; wanted a predicate such as {_EXAMPLES[table]}")

    def is_true_of(self, rows: pa.Table) -> bool | None:
        """Return whether the predicate is true of the rows, or of any one row; None if it is NULL for all."""
        hits = self._run(rows)["hit"].to_pylist()
        return True if True in hits else False if False in hits else None

    def _run(self, rows: pa.Table) -> pa.Table:
        self._con.register(self._table, rows)
        try:
            # The text is one expression (where_filter), over a connection that reaches nothing but this table.
            return run_query(self._con, f"select (\n{self.text}\n) as hit from {self._table}")  # noqa: S608
        except QueryError as error:
            raise QueryError(f"({self.text}): {error}") from error
        finally:
            self._con.unregister(self._table)


_EXAMPLES = {
    "metrics": "reward_mean > 0.5",
    "batches": "count(*) filter (not used) > 10",
    "rollouts": "avg(episode_reward) > 0.5",
    "evals": "avg(episode_reward) > 0.5",
}


def _columns_of(parsed: SqlText, names: Sequence[str]) -> list[str]:
    """Return the columns that the text mentions; the first one if it mentions none, so that rows can be counted."""
    mentioned = required_columns([parsed], names)
    return [name for name in names if name in mentioned] or [names[0]]
