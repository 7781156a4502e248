"""The registry of pages of `ludic view --web`, what a page is given, and what it returns.

To add a page, write a function in a module of this folder that answering.py imports, and its template in templates/:

    @page("group", "Group")                         # at /group?id=..., or of a folder of runs at /r/LABEL/group?id=...
    def group(request: PageRequest) -> PageAnswer:
        rows = request.data.ask(figure("rollouts_of_groups"), {"ids": [request.required("id")]}).to_dicts()
        links = {"rollout_id": lambda row: request.link("rollout", id=row["rollout_id"])}
        rollouts = PageTable(name="rollouts", rows=rows, columns=("rollout_id", "episode_reward"), links=links)
        return PageAnswer("group.html.j2", {"rollouts": rollouts}, title="group ...", tables=[rollouts])

    {% extends "base.html.j2" %}
    {% import "macros.html.j2" as show %}
    {% block content %}{{ show.table(rollouts) }}{% endblock %}

- A name of a page is one word; all state is in the query of the address, so that each view has a link. `request.link`
  makes all addresses: it adds the run and escapes values. Ids of an example or an environment may hold any character.
- A page with a `menu` is in the menu of a run, in that order; it takes no parameters that it can't do without.
- `request.data` (ludic.app.show.data.RunData) is of this request alone: its queries end if the browser goes away. SQL
  of this package is in ludic/root/sql/figures/. A user's SQL goes only through `ask`, `rows` and `stream` of it.
- A page may also return a Result, whose parts are shown, JsonAnswer for a script, or a Redirect. Errors of ludic
  that it raises become a page with that line: 404 for UnknownIdError, else 400.
- Each PageTable in `tables` downloads as CSV from the same address with csv=NAME.
- Templates escape every value. The page's policy forbids inline scripts and style attributes, so colours are classes
  of static/page.css, and behaviour is in static/page.js. Nothing comes from a network.
- Only pages with `posts=True` get POST requests, with `request.form`; the server has checked their origin.

answering.py runs a page in a thread of its own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from ludic.app.show.data import RunData
from ludic.app.show.web.site import Site
from ludic.base import Frame, Result, column_format
from ludic.base.printable import printable
from ludic.errors import ConfigError
from ludic.records import Row

_MOST_CHARACTERS = 120
"""Characters of a text in a cell of a table; its CSV has the whole text."""
_ID_DIGITS = 12

Kept = TypeVar("Kept")


# --- Requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request for a page, as the page's function sees it."""

    site: Site
    page: "Page"
    label: str
    """Label of the run in a folder of runs; "" if the site has one run, or the page is of no run."""
    pairs: Sequence[tuple[str, str]]
    """Names and values of the address, in order."""
    form: Mapping[str, str] = field(default_factory=dict)
    """Fields of a POST request."""
    opened: dict[str, RunData] = field(default_factory=dict)
    """Runs that the page has opened, by label."""

    @property
    def query(self) -> Mapping[str, str]:
        """Values of the address by name; the last one of a name that is given again."""
        return dict(self.pairs)

    def values(self, name: str) -> list[str]:
        """Return all values of a name in the address."""
        return [value for known, value in self.pairs if known == name]

    def open(self, label: str) -> RunData:
        """Return a run of the site, for this request alone. Raises UnknownIdError, StoreError."""
        if label not in self.opened:
            self.opened[label] = self.site.run(label)
        return self.opened[label]

    @property
    def data(self) -> RunData:
        """The run of the page."""
        assert self.page.of_run, f"{self.page.name} is a page of no run"
        return self.open(self.label)

    def kept(self, name: str, version: Any, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned before for this name of this run and an equal version, or call it."""
        return self.site.kept((self.label, name), version, make)

    def stop(self, reason: str = "") -> None:
        """End the queries of this request."""
        for run in list(self.opened.values()):
            run.stop(reason)

    def required(self, name: str) -> str:
        """Return a parameter of the address. Raises ConfigError if it is missing."""
        if not self.query.get(name):
            raise ConfigError(f"the address has no {name}; {self.page.name} needs one")
        return self.query[name]

    def whole_number(self, name: str, default: int) -> int:
        """Return a parameter of the address that is a whole number, at least 0. Raises ConfigError for other text."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise ConfigError(f"{name} is {text!r}, wanted a whole number of at least 0")
        return int(text)

    def link(self, page: str, /, **query: Any) -> str:
        """Return the address of a page of this run. query: values or lists of them, without None and empty ones."""
        return self.site.link(self.label, page, query)

    def here(self, **changes: Any) -> str:
        """Return the address of this page with other values; None leaves one out."""
        return self.link(self.page.name, **{**{name: self.values(name) for name in self.query}, **changes})


# --- Answers ---------------------------------------------------------------------------------------------------------

RowLink = Callable[[Row], str | None]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table as it is shown."""

    text: str
    html_class: str = ""
    """n for numbers, text for long texts."""
    href: str | None = None
    whole: str | None = None
    """The whole text, if `text` is its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table of a page, which downloads as CSV."""

    name: str
    """One word; the address of the CSV has csv=NAME."""
    rows: Sequence[Row]
    columns: Sequence[str]
    """Columns that are shown; ludic.base.results.FORMATS has their titles and formats."""
    heading: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Titles of columns that differ from those of FORMATS."""
    links: Mapping[str, RowLink] = field(default_factory=dict)
    """Address that a column's cell leads to, by column."""
    sorts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Address that sorts by a column, and an arrow if it is sorted by that column, by column."""
    query: tuple[str, Mapping[str, Any]] | None = None
    """SQL and parameters of the rows of the CSV; None: `rows` are all rows, and the CSV has all of their columns."""

    @classmethod
    def of(cls, frame: Frame, links: Mapping[str, RowLink] | None = None) -> "PageTable":
        """Return the table of a frame of a Result. Its CSV has all columns of all rows."""
        rows = [{**row, **{name: of(row) for name, of in frame.derived.items()}} for row in frame.rows]
        heading = frame.heading or (frame.name if frame.has_heading else "")
        return cls(
            name=frame.name,
            rows=rows,
            columns=frame.shown,
            heading=heading,
            titles=frame.titles,
            links=links or {},
        )

    def head(self) -> list[Cell]:
        """Return the titles of the shown columns."""
        formats = {name: column_format(name, (row.get(name) for row in self.rows)) for name in self.columns}
        return [
            Cell(
                self.titles.get(name, each.title) + self.sorts.get(name, ("", ""))[1],
                "n" if each.is_number else "",
                self.sorts[name][0] if name in self.sorts else None,
            )
            for name, each in formats.items()
        ]

    def body(self) -> list[list[Cell]]:
        """Return the shown cells of each row."""
        formats = {name: column_format(name, (row.get(name) for row in self.rows)) for name in self.columns}
        return [
            [_cell(each, row.get(name), self.links[name](row) if name in self.links else None)
             for name, each in formats.items()]
            for row in self.rows
        ]  # fmt: skip


def with_values(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[str]:
    """Return the columns, of these or of the rows, that have a value in any row."""
    names = (rows[0] if rows else ()) if columns is None else columns
    return [name for name in names if any(row[name] is not None for row in rows)]


def short_id(id_: str) -> str:
    """Return an id as titles show it: ids differ most at their end."""
    return f"…{id_[-_ID_DIGITS:]}"


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _cell(format: Any, value: Any, href: str | None) -> Cell:
    if isinstance(value, str) and _UUID.fullmatch(value):
        return Cell(short_id(value), "", href, value)
    text = format.text(value, most=_MOST_CHARACTERS).plain
    is_cut = isinstance(value, str) and len(value) > _MOST_CHARACTERS
    kind = "n" if format.is_number else "text" if isinstance(value, str) and len(text) > 24 else ""
    return Cell(text, kind, href, printable(value) if is_cut else None)


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """A page: a template of templates/ and its values. Every template also has `request`, `title` and `menu`."""

    template: str
    values: Mapping[str, Any]
    title: str = ""
    """What is shown, such as "rollout 0199..."; the title of the page by default."""
    tables: Sequence[PageTable] = ()
    """Tables that download as CSV."""
    status: int = 200


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """Values for a script of the page; the server adds an ETag, and answers 304 if nothing is new."""

    value: Any


@dataclass(frozen=True, slots=True)
class Redirect:
    """Another address of this site, from `request.link`; what a POST request returns."""

    href: str


AnyAnswer = PageAnswer | Result | JsonAnswer | Redirect
PageFunction = Callable[[PageRequest], AnyAnswer]


# --- The registry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the site."""

    name: str
    title: str
    function: PageFunction
    menu: int | None
    """Place in the menu of a run; None: not in the menu."""
    of_run: bool
    posts: bool


PAGES: dict[str, Page] = {}
"""All pages by name."""


def page(
    name: str, title: str, *, menu: int | None = None, of_run: bool = True, posts: bool = False
) -> Callable[[PageFunction], PageFunction]:
    """Register a page. of_run: False for a page of the whole site. posts: it also takes POST requests."""
    assert name not in PAGES, f"there are two pages {name}"
    assert quote(name, safe="") == name, f"{name} is not one word"

    def register(function: PageFunction) -> PageFunction:
        PAGES[name] = Page(name, title, function, menu, of_run, posts)
        return function

    return register


def menu() -> list[Page]:
    """Return the pages of the menu of a run, in order."""
    return sorted((each for each in PAGES.values() if each.menu is not None), key=lambda each: each.menu or 0)
