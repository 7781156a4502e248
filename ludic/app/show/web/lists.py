"""Lists of a run: versions, environments, examples, groups and rollouts, to filter, sort, search, page and download.

A list's address holds its scope (env_name=..., version=...), the user's predicate (where), order, search and first row.
A predicate or an order that fails is shown beside its box.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludic.app.show.data import (
    WHOLE_TEXTS,
    Listing,
    Order,
    RolloutTable,
    environments,
    examples,
    groups,
    quote,
    quote_name,
    rollouts,
    searched,
    versions,
)
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, RowLink, page
from ludic.errors import ConfigError, QueryError, one_line
from ludic.records import Row

_ROWS = 50
_MOST_ROWS = 500
"""Rows of a page of a list."""
_ARROWS = {True: " ↓", False: " ↑"}
_SCOPES: Mapping[str, Callable[[str], Any]] = {
    "version": int,
    "env": str,
    "env_name": str,
    "env_example_id": str,
    "group_id": str,
    "episode_id": str,
    "agent_id": str,
}
"""Columns that an address may fix to a value, and how the value is read."""
_HINTS = ("error is not null", "incomplete_completion", "marks is not null")
_HINTS_ON_CORRECT = ("correct", "not correct and episode_reward > 0")
"""Predicates over rollouts that people often ask for."""
_MOST_COMPONENTS = 3
"""Components of the reward that hints name where it is not known which answers are correct."""
_KEYS_S = 30.0
"""Seconds after which the columns of the data set are looked up again."""
_COMPONENTS = "components"
"""Column of the reward's components, which is read for the rows of a page, as texts are."""
_HIDDEN = ("rollout_id", "version")
"""Columns of examples that only serve to find their texts."""


@page("versions", "versions", menu=20)
def show_versions(request: PageRequest) -> PageAnswer:
    """The policy versions that sampled rollouts, or evaluations, by environment."""
    table = _table(request)

    def here(row: Row) -> str:
        return request.link("rollouts", of=_of(table), version=row["version"], env=row["env"])

    def of_groups(row: Row) -> str | None:
        return None if table == "evals" else request.link("groups", version=row["version"], env=row["env"])

    links = {"version": here, "num_rollouts": here, "num_groups": of_groups}
    return _listed(request, versions(table), links, others=_other_table(request, table))


@page("environments", "environments", menu=30)
def show_environments(request: PageRequest) -> PageAnswer:
    """The environments, each over all versions."""
    table = _table(request)

    def here(row: Row) -> str:
        return request.link("rollouts", of=_of(table), env_name=row["env_name"])

    links = {
        "env_name": lambda row: request.link("examples", env_name=row["env_name"]),
        "num_rollouts": here,
    }
    return _listed(request, environments(table), links, others=_other_table(request, table))


@page("examples", "examples", menu=40)
def show_examples(request: PageRequest) -> PageAnswer:
    """The examples, each over all versions; the worst first."""
    listing = examples(**_scope(request, "env_name"))

    def here(row: Row) -> str:
        return request.link("example", env=row["env_name"], id=row["env_example_id"])

    def of_rollouts(row: Row) -> str:
        return request.link("rollouts", env_name=row["env_name"], env_example_id=row["env_example_id"])

    links = {"env_example_id": here, "prompt": here, "num_rollouts": of_rollouts}
    columns = [name for name in listing.columns if name not in _HIDDEN]
    columns.insert(2, "prompt")
    titles = {"first_reward": "first version", "last_reward": "last version"}
    return _listed(request, listing, links, columns=columns, titles=titles)


@page("groups", "groups", menu=50)
def show_groups(request: PageRequest) -> PageAnswer:
    """The groups: rollouts of one example that share a baseline. Of the newest version, unless the address says."""
    scope = _scope(request, "version", "env", "env_name")
    of_all = request.query.get("versions") == "all"
    if not of_all and "version" not in scope:
        newest = request.data.ask_rows("select max(version) as version from rollouts", {})[0]["version"]
        scope |= {} if newest is None else {"version": newest}
    listing = groups(**scope)
    others = {} if of_all else {"of all versions": request.here(versions="all", version=None, **_FIRST)}

    def here(row: Row) -> str:
        return request.link("group", id=row["group_id"])

    title = "groups" if of_all else f"groups of version {scope.get('version', 0)}"
    return _listed(request, listing, {"group_id": here, "prompt": here}, others=others, title=title)


@page("rollouts", "rollouts", menu=60)
def show_rollouts(request: PageRequest) -> PageAnswer:
    """The rollouts, or those of evaluations, with their texts and rewards."""
    table = _table(request)
    with_training = table == "rollouts" and request.query.get("training") == "1"
    keys = request.kept(f"keys of {table}", int(time.monotonic() // _KEYS_S), lambda: request.data.keys(table))
    listing = rollouts(table, with_training=with_training, keys=keys, **_scope(request, *_SCOPES))
    if text := request.query.get("search", ""):
        listing = searched(listing, text)

    def here(row: Row) -> str:
        return request.link("rollout", id=row["rollout_id"])

    links: dict[str, RowLink] = {
        "rollout_id": here,
        "prompt": here,
        "answer": here,
        "env_example_id": lambda row: request.link("example", env=row["env_name"], id=row["env_example_id"]),
        "env_name": lambda row: request.here(env_name=row["env_name"], **_FIRST),
        "version": lambda row: request.here(version=row["version"], **_FIRST),
    }
    columns = list(listing.columns)
    columns.insert(columns.index("correct") + 1, _COMPONENTS)
    others = _other_table(request, table)
    if table == "rollouts":
        name = "without training" if with_training else "with step, advantage and reason of a drop"
        others = {**others, name: request.here(training=None if with_training else "1")}
    return _listed(request, listing, links, columns=columns, others=others, can_search=True)


_FIRST: Mapping[str, Any] = {"first": None}
"""Change of an address that begins the list again."""


def _table(request: PageRequest) -> RolloutTable:
    given = request.query.get("of", "rollouts")
    if given not in ("rollouts", "evals"):
        raise ConfigError(f"of is {given!r}, wanted rollouts or evals")
    return "evals" if given == "evals" else "rollouts"


def _of(table: RolloutTable) -> str | None:
    return None if table == "rollouts" else table


def _other_table(request: PageRequest, table: RolloutTable) -> dict[str, str]:
    """Return the link to evaluations instead of rollouts, or back, by its name."""
    other: RolloutTable = "evals" if table == "rollouts" else "rollouts"
    changes = {**_FIRST, "of": _of(other), "training": None}
    return {"of evaluations" if other == "evals" else "of training": request.here(**changes)}


def _scope(request: PageRequest, *names: str) -> dict[str, Any]:
    """Return the columns that the address fixes. Raises ConfigError for a version that is no number."""
    found = {}
    for name in names:
        if text := request.query.get(name):
            found[name] = request.whole_number(name, 0) if _SCOPES[name] is int else text
    return found


# --- One list --------------------------------------------------------------------------------------------------------


def _listed(
    request: PageRequest,
    listing: Listing,
    links: Mapping[str, RowLink],
    *,
    columns: Sequence[str] | None = None,
    titles: Mapping[str, str] | None = None,
    others: Mapping[str, str] | None = None,
    can_search: bool = False,
    title: str = "",
) -> PageAnswer:
    """Return the page of a list. columns: shown, also those that are read for the rows of the page alone.

    others: addresses of related lists by their names. can_search: whether the list has a box for a search in texts.
    """
    where = request.query.get("where", "")
    given = request.query.get("order", "")
    order = Order.parse(given) if given.strip() else listing.order
    first = request.whole_number("first", 0)
    num_rows = min(_MOST_ROWS, max(1, request.whole_number("rows", _ROWS)))
    rows, total, problem = _rows(request, listing, where, order, first, num_rows)
    shown = _informative(columns or listing.columns, listing, rows)
    whole = WHOLE_TEXTS if listing.kind == "rollout" else ""
    table = PageTable(
        name=listing.kind + "s",
        rows=rows,
        columns=shown,
        titles=titles or {},
        links=links,
        sorts={name: _sort(request, listing, order, name) for name in shown if name in listing.stored},
        query=(
            listing.query(where, order, None, more=whole),
            listing.params,
        ),
    )
    scopes = {name: request.here(**{name: None}, **_FIRST) for name in _SCOPES if request.query.get(name)}
    hints, note = _hints(request, listing, where) if listing.kind == "rollout" else ([], "")
    values = {
        "table": table,
        "where": where,
        "order": order,
        "problem": problem,
        "total": total,
        "first": first,
        "last": first + len(rows),
        "before": request.here(first=max(0, first - num_rows) or None) if first else None,
        "after": request.here(first=first + num_rows) if first + len(rows) < total else None,
        "scopes": scopes,
        "others": others or {},
        "can_search": can_search,
        "hints": {text: request.here(where=text, **_FIRST) for text in hints},
        "note": note,
        "names": listing.stored,
        "kept": {name: value for name, value in request.query.items() if name not in ("where", "search", "first")},
    }
    named = title or request.page.title + (" of evaluations" if listing.table == "evals" else "")
    return PageAnswer("list.html.j2", values, title=named, tables=[table], status=400 if problem else 200)


def _hints(request: PageRequest, listing: Listing, where: str) -> tuple[list[str], str]:
    """Return predicates that people often ask for, and what has to be said of the one that was given."""

    def read() -> tuple[bool, list[str]]:
        (row,) = request.data.ask_rows(_OF_CORRECT.format(table=listing.table), {})
        return row["num_rollouts"] > 0 and row["num_known"] == 0, row["components"] or []

    is_unknown, components = request.kept(f"correct of {listing.table}", int(time.monotonic() // _KEYS_S), read)
    if not is_unknown:
        return [*_HINTS_ON_CORRECT, *_HINTS], ""
    of_components = [
        f"reward_components[{quote(name)}] = 0 and episode_reward > 0" for name in components[:_MOST_COMPONENTS]
    ]
    uses_it = re.search(r"\bcorrect\b", where, re.IGNORECASE) is not None
    return [*of_components, *_HINTS], "correct is not known in this run: its environments do not say" if uses_it else ""


_OF_CORRECT = """
select
    count(*) as num_rollouts,
    count(correct) as num_known,
    list_sort(list_distinct(flatten(list(distinct map_keys(reward_components))))) as components
from {table}
"""


def _rows(
    request: PageRequest, listing: Listing, where: str, order: Order, first: int, num_rows: int
) -> tuple[list[dict[str, Any]], int, str]:
    """Return the rows of a page with their texts, the number of rows of all pages, and what is wrong with the query."""
    data = request.data
    query = listing.query(where, order, num_rows, more="count(*) over () as num_listed", offset=first)
    try:
        rows = data.ask_rows(query, listing.params)
        total = rows[0]["num_listed"] if rows else data.count(listing, where) if first else 0
    except QueryError as error:
        return [], 0, one_line(error)
    if listing.kind in ("rollout", "group", "example") and rows:
        texts = data.texts(listing, rows)
        rows = [{**row, **texts.get(row[listing.text_id], {})} for row in rows]
    return rows, total, ""


def _informative(columns: Sequence[str], listing: Listing, rows: Sequence[Row]) -> list[str]:
    """Return the columns that have a value in any of the rows, and those that are always kept."""
    fixed = listing.params
    return [
        name
        for name in columns
        if name in listing.kept or (name not in fixed and any(row.get(name) is not None for row in rows))
    ]


def _sort(request: PageRequest, listing: Listing, order: Order, name: str) -> tuple[str, str]:
    """Return the address that sorts by a column, and an arrow if the list is sorted by it."""
    is_by_it = order.by in (name, quote_name(name))
    text = str(Order(quote_name(name), descending=not (is_by_it and order.descending)))
    return request.here(order=text, **_FIRST), _ARROWS[order.descending] if is_by_it else ""
