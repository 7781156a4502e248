"""Render docs/schemas.md from schemas/ and the catalogue of arrays."""

from collections.abc import Iterator

import pyarrow as pa

from ludic.records.columns import ArrayColumn, array_columns
from ludic.records.tables import Column, TableSchema, load_table, table_names, type_name

_INTRODUCTION = """\
# Tables

Made from `schemas/` by `python -m ludic.records`, as `make format` does; edit those files instead.
A minor version adds nullable columns, or renames one: older files read under the new name. Anything else is a new
major version. Elements of lists and values of maps are never null. Fields of structs follow their column, as
`column[].field`.

The table calls includes the arrays of rollouts that the sampler sets, so a new one of these is also in calls.

A run may declare columns of its own for rollouts, `x_` and a name, in `extra_columns` of `run.json`; they come last,
any may be null, and their types are string, int64, double, bool and lists of these.

Records of `ludic.records` in Python, and what first designs called them:

| record | first called |
| --- | --- |
| `Rollout`, a row of rollouts | NewRollout |
| `RolloutGroup` | NewRolloutGroup |
| `RolloutMetadata` | NewRolloutMetadata |
| `RolloutBatch` | NewRolloutBatch |
"""

_TABLE_HEAD = "| name | type | null | meaning |\n| --- | --- | --- | --- |\n"


def render() -> str:
    """Return docs/schemas.md: name, type, nullability and meaning of each column of ludic's tables, and its arrays."""
    arrays = _ARRAYS + "".join(map(_render_array, array_columns().values()))
    return "\n".join([_INTRODUCTION, *(_render_table(load_table(name)) for name in table_names()), arrays])


def _render_table(table: TableSchema) -> str:
    head = f"## {table.name} {table.version}\n\n{table.doc}\n\n{_TABLE_HEAD}"
    return head + "".join(line for column in table.columns for line in _render_column(column, ""))


def _render_column(column: Column, prefix: str) -> Iterator[str]:
    name = prefix + column.name
    doc = column.doc.replace("|", "\\|")
    yield f"| `{name}` | `{type_name(column.type)}` | {'null' if column.nullable else ''} | {doc} |\n"
    path = f"{name}[]." if pa.types.is_list(column.type) else f"{name}."
    for child in column.children:
        yield from _render_column(child, path)


_ARRAYS = """\
## Arrays of a row

What ludic knows of the arrays of `rollouts`: keys of their rows in `schemas/rollouts.v1.json` that the stored schema
does not have. A new array is a new row there, with `"nullable": true`, and a new minor version.

With `"set_by": "sampler"` that row is all it needs: a completion may have the array (`Completion.columns`), and it is
checked, assembled, stored, vetted, cut, packed and handed to the loss (`terms.columns`) by what its row says, and
`ludic verify` checks its length and its range. With another `set_by`, code must give it its values:
`agents/transcript.py` and the episode name the arrays that they set.
With `"trained": "on request"`, a setting must ask for it, and only `experts` has one.

A row of several calls has the value of the last call that gave one if the array is along the `row`, of the first call
if it is along the `prompt`; an array along other tokens must come with every call, or the row is without it.

| key | meaning |
| --- | --- |
| `along` | the tokens with a value each: `prompt`; `response`; `read`, all but the last; or `row`: one value or list |
| `ragged` | whether the numbers of a token are a list of any length; without it, all tokens of a batch have as many |
| `ascending` | whether the numbers of a token must rise |
| `holds_token` | whether the numbers of a sampled token must include its id |
| `fill` | the value at response tokens that were not sampled; without it, any passes, and a row assembled here has 0 |
| `null` | value in a batch for a row without the array, best outside of the range; by default NaN, or 0 |
| `range` | the least and the greatest number, or `token ids`; without it, all finite ones |
| `wanted` | the range in words, for messages |
| `set_by` | who gives the values: the `transcript` that is assembled, the `sampler` of each completion, the `episode` |
| `trained` | whether training reads it: `always`, or `on request`; without it, never |
| `encoding` | of its numbers in Parquet |

| name | along | fill | null | range | set by | training reads it |
| --- | --- | --- | --- | --- | --- | --- |
"""


def _render_array(column: ArrayColumn) -> str:
    values = ["" if value is None else f"`{str(value).lower()}`" for value in (column.fill, column.null)]
    wanted = "" if column.dtype.kind == "b" else column.wanted_number().removeprefix("wanted ")
    wanted = "token ids" if column.is_token_ids else wanted
    cells = (f"`{column.name}`", column.along, *values, wanted, column.set_by, column.trained or "never")
    return f"| {' | '.join(cells)} |\n"
