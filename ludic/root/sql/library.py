"""Load the SQL of advantages, filters, selections, measures and checks, by name or from a user's file, and run it.

An advantage is one SELECT over `rollouts` that returns rollout_id with advantage (or token_advantages, or advantage and
pair_id), or a Python function that returns these (see "Advantages in Python"). A filter is one predicate over a row of
`rollouts`; a row is dropped if it is true. Both may read `scores`, the scores of these rollouts; an advantage also has
the views `trajectory_rows`, `trajectories` and `rewards_of_peers` of ludic/root/sql/views/ over its rollouts. A
selection is one SELECT over `groups` (ludic/root/sql/plan/groups.sql) that returns group_id, in the order in which
groups are wanted.
Parameters are $names; a header line `-- default: NAME = VALUE` (VALUE is JSON) sets a parameter's default; in training,
`-- history: N` adds the newest N scored rows of earlier batches to the `rollouts` of an advantage. Reads
ludic/root/sql/{advantages,filters,selections,measures,checks,notes}/ and users' files. Raises QueryError with the file,
DuckDB's reason and the wanted form.
"""

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import packaged_names, read_packaged
from ludic.errors import ConfigError, QueryError, unknown_name
from ludic.records import NUM_TOKEN_IDS, SCALAR_COLUMNS, ArrayColumn, names_not_in_sql, select
from ludic.settings import (
    ADVANTAGE,
    FILTER,
    MEASURE,
    NO_FILES,
    SELECTION,
    Files,
    Kind,
    describe_failure,
    file_of,
    find,
    find_own,
    only_exceptions,
    python_file_of,
)

_COMMENT = re.compile(r"--[^\n]*")
_DEFAULT = re.compile(r"^--\s*default:\s*(\w+)\s*=\s*(.+?)\s*$", re.MULTILINE)
_HISTORY = re.compile(r"^--\s*history:\s*(\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlText:
    """An advantage, a filter, a selection or a measure, parsed but not run."""

    name: str
    """Name in file names and in the ledger's `reason`."""
    source: str
    """File or expression that it was read from, for error messages."""
    text: str
    parameters: frozenset[str]
    """Names after $ in the text."""
    defaults: Mapping[str, Any]
    """Default values of optional parameters."""
    history: int = 0
    """Number of rows of earlier batches that an advantage reads."""
    is_packaged: bool = False
    """True if the text is one of ludic's files."""
    function: Callable[..., pa.Table] | None = None
    """Function of a Python advantage, whose `text` is its file; None for SQL."""

    def bind(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for each of this text's parameters. Raises QueryError if one has no value and no default."""
        known = {**self.defaults, **values}
        missing = sorted(self.parameters - known.keys())
        if missing:
            raise QueryError(
                f"{self.source}: no value for {_dollars(missing)}; give it as a parameter, to a trainer in sql_params; "
                f"there are {_dollars(known) or 'none'}"
            )
        return {name: known[name] for name in self.parameters}


# --- Load a text ---------------------------------------------------------------------------------------


def load_text(kind: Kind, name_or_path: str, template: str, wanted: str, files: Files = NO_FILES) -> SqlText:
    """Load a name in the kind's folder, or the path of a .sql file. template: makes a statement of it; wanted: form."""
    text = find(kind, name_or_path, files)
    is_own = file_of(name_or_path) is not None
    source = name_or_path if is_own else f"ludic/root/sql/{kind.folder}/{name_or_path}.sql"
    return replace(_parse(PurePath(source).stem, source, text, template, wanted), is_packaged=not is_own)


def _parse(name: str, source: str, text: str, template: str, wanted: str) -> SqlText:
    defaults = {param: _parse_default(source, param, value) for param, value in _DEFAULT.findall(text)}
    history = int(found[1]) if (found := _HISTORY.search(text)) else 0
    text = _without_last_semicolon(text)
    try:
        statements = duckdb.extract_statements(template.format(text))
    except duckdb.Error as error:
        raise QueryError(f"{source}: {reason_of(error)}; {wanted}") from error
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
        raise QueryError(f"{source}: holds {kinds}; {wanted}")
    parameters = frozenset(statements[0].named_parameters)
    return SqlText(name=name, source=source, text=text, parameters=parameters, defaults=defaults, history=history)


def _parse_default(source: str, name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise QueryError(f'{source}: default of {name} is {value}, wanted JSON such as 0.5 or "text"') from error


def _without_last_semicolon(text: str) -> str:
    """Remove a final semicolon, which a subquery may not have; DuckDB's tokens ignore those in strings and comments."""
    starts = [start for start, kind in duckdb.tokenize(text) if kind != duckdb.token_type.comment]
    raw = text.encode()  # tokens are counted in bytes
    if starts and raw[starts[-1] :].startswith(b";"):
        raw = raw[: starts[-1]] + raw[starts[-1] + 1 :]
    return raw.decode()


def check_parameters(texts: Iterable[SqlText], given: Mapping[str, Any], *, known: Iterable[str]) -> None:
    """Raise ConfigError if no text takes a given parameter. known: parameters that are always set, for the hint."""
    texts = list(texts)
    taken = {name: text for text in texts for name in text.parameters}
    for name in given:
        if name in taken:
            continue
        takes = ", ".join(f"{text.source} takes {_dollars(text.parameters)}" for text in texts if text.parameters)
        unknown = unknown_name("parameter", name, sorted(taken.keys() - set(known)))
        raise ConfigError(f"{unknown}{f' ({takes})' if takes else ''}")


def required_columns(texts: Iterable[SqlText], columns: Iterable[str]) -> list[str]:
    """Return the columns whose names occur in the texts, outside of SQL comments; may include too many."""
    code = (text.text if text.function else _COMMENT.sub("", text.text) for text in texts)
    return mentioned(code, columns)


def mentioned(code: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that occur as words in texts of SQL or Python; may include too many."""
    words = {word.lower() for text in code for word in re.findall(r"\w+", text)}
    return [name for name in names if name in words]


def _dollars(names: Iterable[str]) -> str:
    return ", ".join(f"${name}" for name in sorted(names))


# --- Macros --------------------------------------------------------------------------------------------


def create_macros(con: duckdb.DuckDBPyConnection) -> None:
    """Create the macros of ludic/root/sql/macros/, such as is_success: packaged SQL calls them, and users' SQL may."""
    for name in packaged_names("macros"):
        con.execute(read_packaged("macros", name))


# --- Run SQL -------------------------------------------------------------------------------------------


def run_query(con: duckdb.DuckDBPyConnection, sql: str, params: Mapping[str, Any] | None = None) -> pa.Table:
    """Return the result of a user's SQL. Raises QueryError with DuckDB's reason in one line if it fails."""
    try:
        relation = con.sql(sql, params=dict(params) if params else None)
        return pa.table({}) if relation is None else relation.to_arrow_table()
    except duckdb.Error as error:
        raise QueryError(reason_of(error)) from error


def make_table(
    con: duckdb.DuckDBPyConnection, sql: str, params: Mapping[str, Any] | None = None, *, name: str
) -> pa.Table:
    """Keep the rows of a SELECT as the temporary table `name`, and return them. Raises QueryError as `run_query`.

    For few rows: DuckDB plans the SELECT once here, but twice in `run_query`, which first requests its columns.
    """
    try:
        con.execute(f"create or replace temp table {name} as\n{sql}", dict(params) if params else None)
        return con.table(name).to_arrow_table()
    except duckdb.Error as error:
        raise QueryError(reason_of(error)) from error


def has_rows(con: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """Return whether a SELECT finds any row. If not, this takes half the time of `run_query`, which binds views twice.

    Raises QueryError with DuckDB's reason in one line if it fails.
    """
    try:
        return bool(con.execute(f"from (\n{sql}\n) limit 1").fetchall())
    except duckdb.Error as error:
        raise QueryError(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Return DuckDB's message on one line, without its excerpt of the SQL."""
    text = " ".join(str(error).split("\n\nLINE ")[0].split())
    for letter, escaped in _ESCAPED.items():
        text = text.replace(escaped, letter)
    unknown = {name for pair in _UNKNOWN_COLUMN.findall(text) for name in pair}
    renamed = [f"SQL calls {old} {new}" for old, new in names_not_in_sql().items() if old in unknown]
    return "; ".join([text, *renamed])


_UNKNOWN_COLUMN = re.compile(r'column "(\w+)" not found|column named "(\w+)"')


_MOST_OF_A_PATH = 4096
"""Maximum bytes of a path on Linux; macOS allows 1024."""
_ESCAPED = {letter: f"[{letter * _MOST_OF_A_PATH}]" for letter in "[*?"}
_ESCAPES = str.maketrans(_ESCAPED)


def escape_glob(path: str) -> str:
    """Return a DuckDB pattern that matches this path only and can't be the name of a file.

    DuckDB compares patterns with the folders that a sealed connection may read, and treats a pattern without matches as
    a file name. So a file named like an allowed pattern could be read; a pattern that is longer than any path prevents
    that.
    """
    return path.translate(_ESCAPES)


def quote(text: str) -> str:
    """Return a quoted SQL string, for statements that take no parameters."""
    return "'" + text.replace("'", "''") + "'"


def quote_list(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(quote, texts))}]::varchar[]"


# --- Advantages ----------------------------------------------------------------------------------------

_ADVANTAGE_WANTED = (
    "wanted one SELECT over rollouts that returns rollout_id with advantage (double) or token_advantages (float list), "
    "and with an advantage of pairs pair_id (string)"
)
_SELECT_ALL = "select * from (\n{}\n)"
# A connection may lack the table; DuckDB looks it up only if the text reads it.
_THEIR_SCORES = "scores as (select * from main.scores where rollout_id in (select rollout_id from rollouts))"
_ALL_ROLLOUTS = "select * from main.rollouts"
# Far fewer rows are dropped than kept, so an anti join builds the smaller hash table.
_NOT_DROPPED = """
with dropped as (
    select rollout_id
    from rollouts
    where {hits}
),

estimated as (
    {advantage}
)

select estimated.*
from estimated
anti join dropped using (rollout_id)
"""
_ADVANTAGES = pa.schema([("rollout_id", pa.string()), ("advantage", pa.float64())])
_PAIRS = _ADVANTAGES.append(pa.field("pair_id", pa.string()))
_TOKEN_ADVANTAGES = pa.schema([("rollout_id", pa.string()), ("token_advantages", pa.list_(pa.float32()))])
_EVERY_ROW = SqlText(
    name="every_row",
    source="every_row",
    text="select rollout_id, 0 as advantage from rollouts",
    parameters=frozenset(),
    defaults={},
)


def load_advantage(name_or_path: str, files: Files = NO_FILES) -> SqlText:
    """Load an advantage: a name in ludic/root/sql/advantages/, the path of a .sql file, or path/to/file.py:function.

    files: contents that replace those on disk, by the path in the name; the same for filters and selections.
    """
    if python_file_of(name_or_path) is not None:
        function = load_function(name_or_path, files)
        return SqlText(
            name=name_or_path.rpartition(":")[2],
            source=name_or_path,
            text=function.text,
            parameters=function.parameters,
            defaults=function.defaults,
            function=function,
        )
    return load_text(ADVANTAGE, name_or_path, "{}", _ADVANTAGE_WANTED, files)


def advantages(
    con: duckdb.DuckDBPyConnection, advantage: str | SqlText, *, filters: Iterable[str | SqlText] = (), **params: Any
) -> pa.Table:
    """Compute advantages over `rollouts` of `con`.

    Returns rollout_id with advantage (float64) or token_advantages (list of float), and pair_id (text) if the advantage
    makes pairs. If `con` reads several runs, each run has its own baselines.

    filters: names in ludic/root/sql/filters/, or paths of .sql files; rows that a filter hits are left out, after the
    baseline was computed over whole groups. Raises QueryError if a parameter is missing, DuckDB refuses the SQL, or it
    returns other columns.
    """
    create_macros(con)  # a user's own connection does not have them
    text = load_advantage(advantage) if isinstance(advantage, str) else advantage
    drops = [load_filter(filter_) if isinstance(filter_, str) else filter_ for filter_ in filters]
    return pa.concat_tables([_advantages_over(con, over, text, drops, params) for over in _runs(con)])


def _runs(con: duckdb.DuckDBPyConnection) -> list[str]:
    """Return a SELECT of the rollouts of each run."""
    try:
        roots = [root for (root,) in con.sql("select root from main.roots").fetchall()]
    except duckdb.CatalogException:  # a user's own connection, without the table `roots`
        roots = []
    if len(roots) < 2:
        return [_ALL_ROLLOUTS]
    return [f"{_ALL_ROLLOUTS} where root = {quote(root)}" for root in roots]


def _advantages_over(
    con: duckdb.DuckDBPyConnection, over: str, text: SqlText, drops: Sequence[SqlText], params: Mapping[str, Any]
) -> pa.Table:
    if text.function is None or not drops:
        values = {name: value for each in (text, *drops) for name, value in each.bind(params).items()}
        return run_advantage(con, _without(text, drops) if drops else text, values, over=over)
    table = run_advantage(con, text, text.bind(params), over=over)
    kept = _advantages_over(con, over, _EVERY_ROW, drops, params)
    return table.filter(pc.is_in(table["rollout_id"], kept["rollout_id"]))


def _without(text: SqlText, drops: Iterable[SqlText]) -> SqlText:
    """Return the advantage's SQL, restricted to rows that no filter hits."""
    hits = " or ".join(f"coalesce((\n{drop.text}\n), false)" for drop in drops)
    source = " and ".join([text.source, *(drop.source for drop in drops)])
    return replace(text, source=source, text=_NOT_DROPPED.format(hits=hits, advantage=text.text))


def run_advantage(
    con: duckdb.DuckDBPyConnection,
    text: SqlText,
    params: Mapping[str, Any],
    *,
    over: str = _ALL_ROLLOUTS,
    run: Callable[[duckdb.DuckDBPyConnection, str, Mapping[str, Any]], pa.Table] = run_query,
) -> pa.Table:
    """Compute advantages as `advantages` does, over the SELECT `over`.

    params: for the advantage and for `over`. run: runs SQL, such as `make_table`.
    """
    if text.function is not None:
        return _conform_advantages(_call_function(con, text, params, over), text.source, FUNCTION_WANTED)
    parts = ",\n".join([f"rollouts as (\n{over}\n)", *_views_of(text.text), _THEIR_SCORES])
    sql = f"with {parts}\n{_SELECT_ALL.format(text.text)}"
    try:
        table = run(con, sql, params)
    except QueryError as error:
        raise QueryError(f"{text.source}: {error}; {_ADVANTAGE_WANTED}") from error
    return _conform_advantages(table, text.source, _ADVANTAGE_WANTED)


_VIEWS = ("trajectory_rows", "trajectories", "rewards_of_peers")
"""Views that an advantage may read; each reads only those before it."""


def _views_of(text: str) -> list[str]:
    """Return the views that a text reads, as parts of a WITH over the rollouts that an advantage sees.

    The others are left out, so that DuckDB need not parse them in each plan.
    """
    last = mentioned([text], _VIEWS)[-1:]
    names = _VIEWS[: _VIEWS.index(last[0]) + 1] if last else ()
    return [f"{view} as (\n{read_packaged('views', view)}\n)" for view in names]


def _call_function(con: duckdb.DuckDBPyConnection, text: SqlText, params: Mapping[str, Any], over: str) -> pa.Table:
    """Call a Python advantage with the rows of `over`; returns an empty table, without a call, if there are none."""
    assert text.function is not None
    rows = con.sql(over)
    columns = {*SCALAR_COLUMNS, *required_columns([text], rows.columns)}
    rows = rows.select(*(duckdb.ColumnExpression(name) for name in rows.columns if name in columns))
    rollouts = rows.order("rollout_id").to_arrow_table()
    return text.function(rollouts, **params) if rollouts.num_rows else _PAIRS.empty_table()


def _conform_advantages(table: pa.Table, source: str, wanted: str) -> pa.Table:
    """Cast a table to one of the three schemas of advantages. Raises QueryError if it has other columns."""
    match sorted(table.column_names):
        case ["advantage", "rollout_id"] if _is_number(table.schema.field("advantage").type):
            return table.select(_ADVANTAGES.names).cast(_ADVANTAGES)
        case ["advantage", "pair_id", "rollout_id"] if _is_number(table.schema.field("advantage").type):
            return table.select(_PAIRS.names).cast(_PAIRS)
        case ["rollout_id", "token_advantages"] if _is_number_list(table.schema.field("token_advantages").type):
            if pc.list_flatten(table["token_advantages"]).null_count:  # a whole list may be null
                raise QueryError(
                    f"{source}: returns token_advantages with nulls, wanted a number for each response token"
                )
            return table.select(_TOKEN_ADVANTAGES.names).cast(_TOKEN_ADVANTAGES)
    found = ", ".join(f"{field.name} {field.type}" for field in table.schema)
    raise QueryError(f"{source}: returns {found or 'no columns'}; {wanted}")


def _is_number(type_: pa.DataType) -> bool:
    return any(check(type_) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))


def _is_number_list(type_: pa.DataType) -> bool:
    return (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and _is_number(type_.value_type)


# --- Advantages in Python ------------------------------------------------------------------------------
# A function over an Arrow table of rollouts, for rules that are hard to write in SQL.
#
#     def shrunk(rollouts: pa.Table, *, weight: float = 0.5) -> pa.Table
#
# is named as path/to/file.py:shrunk. Its table has a row for each rollout that SQL would see, sorted by rollout_id. It
# has all scalar columns, and those lists, structs and maps whose names occur in the file. Keyword arguments are the
# function's $parameters. It returns rollout_id with advantage or token_advantages, as an Arrow table or an object that
# exports one (Polars). It is never called without rollouts. Runs the user's file; QueryError names file and line.

FUNCTION_WANTED = (
    "wanted a function of an Arrow table of rollouts that returns one of rollout_id with advantage (double) or "
    "token_advantages (float list), and with an advantage of pairs pair_id (string)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowFunction:
    """A function from a user's file."""

    source: str
    """Text path/to/file.py:function, for error messages."""
    path: Path
    function: Callable[..., Any]
    text: str
    """Text of the whole file."""
    defaults: Mapping[str, Any]
    """Default values of optional keyword arguments."""
    parameters: frozenset[str]
    """Names of all keyword arguments."""

    def __call__(self, rollouts: pa.Table, **params: Any) -> pa.Table:
        """Call the function and return its result as an Arrow table. Raises QueryError if that fails."""
        try:
            with only_exceptions():
                result = self.function(rollouts, **params)
        except Exception as error:
            raise QueryError(f"{self.source}: {describe_failure(self.path, error)}") from error
        if not hasattr(result, "__arrow_c_stream__"):
            raise QueryError(f"{self.source}: returns {type(result).__name__}; {FUNCTION_WANTED}")
        return pa.table(result)


def load_function(source: str, files: Files = NO_FILES) -> ArrowFunction:
    """Load the function path/to/file.py:function; runs its file. Raises QueryError.

    files: contents that replace those on disk, by path.
    """
    own = find_own(ADVANTAGE, source, files)
    keywords = _keywords(source, own.value)
    return ArrowFunction(
        source=source,
        path=own.file.path,
        function=own.value,
        text=importlib.util.decode_source(own.file.source),
        defaults={key: value for key, value in keywords.items() if value is not inspect.Parameter.empty},
        parameters=frozenset(keywords),
    )


def _keywords(source: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters with defaults. Raises QueryError unless there is one other parameter."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    keywords = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 1 or len(positional) + len(keywords) < len(parameters):
        raise QueryError(f"{source}: takes {signature}, wanted (rollouts, *, parameter=default, ...)")
    return {keyword.name: keyword.default for keyword in keywords}


# --- Filters and selections ----------------------------------------------------------------------------

_FILTER_WANTED = (
    "wanted one predicate over a row of rollouts, without a SELECT; rows for which it is true are dropped, so that "
    "response_length < 8 drops short answers"
)
_SELECTION_WANTED = "wanted one SELECT over groups that returns group_id, in the order in which groups are wanted"


def load_filter(name_or_path: str, files: Files = NO_FILES) -> SqlText:
    """Load a filter: a name in ludic/root/sql/filters/, or the path of a .sql file."""
    return load_text(FILTER, name_or_path, "select\n{}", _FILTER_WANTED, files)


def where_filter(predicate: str) -> SqlText:
    """Return the filter `where`, which drops every row for which a user's predicate is not true."""
    wanted = "wanted one predicate over a row of rollouts, such as: episode_reward > 0.5"
    source = f"where ({predicate})"
    _parse("where", source, predicate, "select\n{}", wanted)
    return _parse("where", source, f"not coalesce((\n{predicate}\n), false)", "select\n{}", wanted)


def check_filter(con: duckdb.DuckDBPyConnection, text: SqlText, values: Mapping[str, Any]) -> None:
    """Raise QueryError unless the filter runs over `rollouts` of `con` and returns a boolean."""
    try:
        table = run_query(con, f"select (\n{text.text}\n) as hit from rollouts limit 0", text.bind(values))  # noqa: S608
    except QueryError as error:
        raise QueryError(f"{text.source}: {error}; {_FILTER_WANTED}") from error
    if not pa.types.is_boolean(table.schema.field("hit").type):
        raise QueryError(f"{text.source}: is {table.schema.field('hit').type}, not true or false; {_FILTER_WANTED}")


def load_selection(name_or_path: str, files: Files = NO_FILES) -> SqlText:
    """Load a selection: a name in ludic/root/sql/selections/, or the path of a .sql file."""
    return load_text(SELECTION, name_or_path, "{}", _SELECTION_WANTED, files)


def run_selection(
    con: duckdb.DuckDBPyConnection, text: SqlText, params: Mapping[str, Any], candidates: pa.ChunkedArray
) -> pa.ChunkedArray:
    """Run a selection over `groups` of `con`; returns group_ids in the wanted order. Raises QueryError.

    candidates: the group_ids of `groups`.
    """
    try:
        table = run_query(con, text.text, params)
    except QueryError as error:
        raise QueryError(f"{text.source}: {error}; {_SELECTION_WANTED}") from error
    if table.column_names != ["group_id"] or not pa.types.is_string(table.schema.field("group_id").type):
        found = ", ".join(f"{field.name} {field.type}" for field in table.schema)
        raise QueryError(f"{text.source}: returns {found}; {_SELECTION_WANTED}")
    group_ids = table["group_id"]
    if pc.count_distinct(group_ids, mode="all").as_py() < len(group_ids):
        raise QueryError(f"{text.source}: returns a group_id more than once; {_SELECTION_WANTED}")
    if not pc.all(pc.is_in(group_ids, candidates), min_count=0).as_py():
        raise QueryError(f"{text.source}: returns a group_id that is not in groups; {_SELECTION_WANTED}")
    return group_ids


# --- Measures of evaluations ---------------------------------------------------------------------------
# A measure gives each episode or each example a value, whose mean an evaluation reports.
#
# A measure is one SELECT over `eval_episodes` that returns evaluation, policy_version, env_name, env_example_id and
# value (a number; NULL is left out and counted), and `part` if it measures several things. A measure is a share if all
# its values are 0 or 1. The column `num_trials` overrides this: the number of independent trials behind a value between
# 0 and 1, or NULL for values that are never a share, such as a count.

_MEASURE_WANTED = (
    "wanted one SELECT over eval_episodes that returns evaluation, policy_version, env_name, env_example_id and value "
    "(a number), and may return part (text) if it measures several things, and num_trials (an integer)"
)
MEASURE_KEYS = ("evaluation", "policy_version", "env_name", "part")
"""Columns that distinguish the figures of one measure."""
_ONE_IF_BINARY = "if(value in (0, 1), 1, null)"
_BY_EXAMPLE = """
with eval_episodes as (
    {over}
),

measured as (
    -- a share of successes may not depend on the rounding of a reward
    select * replace (if(comparable_reward(value) in (0, 1), comparable_reward(value), value) as value)
    from (
        {measure}
    )
)

select
    evaluation,
    policy_version,
    env_name,
    {part} as part,
    env_example_id,
    sum(value)::double as total,
    count(value) as num_values,
    count(*) - count(value) as num_missing,
    if(
        bool_and(({trials}) is not null) filter (value is not null),
        sum({trials}) filter (value is not null),
        null
    )::double as num_trials
from measured
group by all
order by all
"""


def load_measure(name_or_path: str) -> SqlText:
    """Load a measure: a name in ludic/root/sql/measures/, or the path of a .sql file."""
    return load_text(MEASURE, name_or_path, "{}", _MEASURE_WANTED)


def check_measure_parameters(measures: Iterable[SqlText], given: Mapping[str, Any]) -> None:
    """Raise ConfigError if no measure takes a given parameter."""
    check_parameters(measures, given, known=())


def run_measure(con: duckdb.DuckDBPyConnection, measure: SqlText, params: Mapping[str, Any], *, over: str) -> pa.Table:
    """Return a measure's values, added up for each example.

    Columns: MEASURE_KEYS, env_example_id, total, num_values, num_missing, and num_trials, NULL unless the values are a
    share. Rows are sorted. over: SELECT of the episodes to measure.
    """
    values = measure.bind(params)
    try:
        columns = _columns(con, measure, values, over)
        part = "part" if "part" in columns else "null::varchar"
        trials = "num_trials" if "num_trials" in columns else _ONE_IF_BINARY
        sql = _BY_EXAMPLE.format(over=over, measure=measure.text, part=part, trials=trials)
        return run_query(con, sql, values)
    except QueryError as error:
        raise QueryError(f"{measure.source}: {error}; {_MEASURE_WANTED}") from error


_columns_of_packaged: dict[str, Sequence[str]] = {}
"""Columns of packaged measures that have run, by their text: they are the same in all runs, unlike those of a user's
`select *`."""


def _columns(con: duckdb.DuckDBPyConnection, measure: SqlText, values: Mapping[str, Any], over: str) -> Sequence[str]:
    """Return the columns of a measure. Raises QueryError if they are not the wanted ones."""
    if measure.text in _columns_of_packaged:
        return _columns_of_packaged[measure.text]
    sql = f"with eval_episodes as (\n{over}\n)\nselect * from (\n{measure.text}\n) limit 0"
    columns = run_query(con, sql, values).column_names
    wanted = {"evaluation", "policy_version", "env_name", "env_example_id", "value"}
    if set(columns) - {"part", "num_trials"} != wanted:
        raise QueryError(f"returns {', '.join(columns)}")
    if measure.is_packaged:
        _columns_of_packaged[measure.text] = columns
    return columns


# --- Data checks, and notes on harmless facts ----------------------------------------------------------
# Each check is a SQL file in ludic/root/sql/checks/ that returns the offending rows; none means that the data is sound.
# It reads the views of `ludic.connect`, with token lists; `connect(root, without=...)` leaves out a broken file. One
# check is generated from the catalogue of arrays: it covers those that unequal_lengths.sql does not name.


def load_checks() -> dict[str, str]:
    """Return the SQL of the data checks by name; see ludic/root/sql/checks/."""
    checks = {name: read_packaged("checks", name) for name in packaged_names("checks")}
    by_name = re.findall(r"\blen\((\w+)\)", checks["unequal_lengths"])
    return {**checks, "unsound_arrays": _array_check(select(lambda column: column.name not in by_name))}


def _array_check(columns: Sequence[ArrayColumn]) -> str:
    """Return the check that arrays are as long as their tokens and their numbers in range, from the catalogue."""
    return (
        "-- unsound_arrays: an array that is not as long as its tokens, or has a number out of its range\n"
        "-- grain: one row per such rollout_id and array | reads: rollouts | the variable vocab_size, if it is known\n"
        + "\nunion all by name\n".join(map(_unsound_rows, columns))
    )


def _unsound_rows(column: ArrayColumn) -> str:
    """Return the SELECT of rows whose array is unsound. DuckDB treats NaN as the greatest number."""
    numbers, wanted = f'"{column.name}"', "null::bigint"
    for _ in range(column.num_dimensions - 1):
        numbers = f"flatten({numbers})"
    lowest, highest = column.bounds() if column.dtype.kind != "b" else (0, 1)
    highest_sql = f"{highest!r}::double"
    if column.is_token_ids:
        highest_sql = f"coalesce(getvariable('vocab_size')::bigint - 1, {NUM_TOKEN_IDS - 1})"
    if column.along != "row":
        of_read = "greatest(prompt_length::bigint + response_length - 1, 0)"
        wanted = {"prompt": "prompt_length", "response": "response_length", "read": of_read}[column.along]
    of_lists = f"list_min({numbers})", f"list_max({numbers})"
    least, most = of_lists if column.num_dimensions else (numbers, numbers)
    length = f'len("{column.name}")' if column.num_dimensions else "null::bigint"
    return f"""select
    rollout_id,
    '{column.name}' as array_name,
    {length} as num_values,
    {wanted} as num_wanted,
    {least}::double as lowest_number,
    {most}::double as highest_number
from rollouts
where num_values <> num_wanted or lowest_number < {lowest!r}::double or highest_number > {highest_sql}"""  # noqa: S608


def load_notes() -> dict[str, str]:
    """Return the SQL of notes, which report harmless facts, by name; see ludic/root/sql/notes/."""
    return {name: read_packaged("notes", name) for name in packaged_names("notes")}


def run_checks(con: duckdb.DuckDBPyConnection) -> dict[str, pa.Table]:
    """Return the offending rows by the name of the check; a check without findings has an empty table."""
    findings = {}
    for name, sql in load_checks().items():
        try:
            findings[name] = run_query(con, sql)
        except QueryError as error:
            raise QueryError(f"check {name}: {error}") from error
    return findings
