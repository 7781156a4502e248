"""Show a list of versions, groups or rollouts, to filter, sort, page and open; and the form of a label.

Queries run in a thread. A query that fails leaves the rows and the typed text as they were, and shows its error in a
line below the table. Cells are literal text: data of a run is never read as markup.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, cast

import polars as pl
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.suggester import SuggestFromList
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from ludic.app.show.data import TEXTS, Listing, Order, RunData, answers, groups, quote_name, rollouts, versions
from ludic.base import ColumnFormat, column_format
from ludic.base.printable import printable
from ludic.errors import LudicError, one_line
from ludic.root.rows import LABEL

_PLACEHOLDERS = {
    "filter": "SQL predicate over the columns, such as episode_reward > 0.5 and error is null; empty shows all",
    "sort": "SQL expression to sort by, such as reward_mean desc; empty is the first order",
}
ROLLOUT_KEYS: Sequence[BindingType] = (
    Binding("l", "label", "label", tooltip="label the rollout with a mark and a note"),
    Binding("v", "compare", "compare", tooltip="choose another answer to the example, to see both side by side"),
)
"""Keys for a rollout, in a list and in its own screen."""


class Viewer(Protocol):
    """The app, as its screens use it."""

    data: RunData
    most_rows: int
    """Rows that a list holds."""

    def facts(self) -> Text:
        """Return the run's settings in two lines."""
        ...

    def open_rollout(self, rollout_id: str, opened_from: "ListScreen | None" = None) -> None: ...

    def choose_other(self, env_name: str, example_id: str, rollout_id: str) -> None:
        """List the other answers to an example; the chosen one is shown beside this rollout."""
        ...

    def open_beside(self, first: str, second: str) -> None: ...


class ListScreen(Screen[None]):
    """A list of rows; Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open", tooltip="open the row"),
        Binding("escape", "back", "back", tooltip="back, or close the line without a change"),
        Binding("slash", "ask('filter')", "filter", key_display="/", tooltip="show the rows of a SQL predicate"),
        Binding("s", "ask('sort')", "sort", tooltip="sort by a column, or any SQL expression"),
        Binding("S", "reverse", "reverse the order", show=False),
        Binding("e", "evals", "evals", tooltip="evaluations instead of rollouts, and back"),
        Binding("a", "all", "all", tooltip="all rollouts of the version, without groups"),
        Binding("A", "whole_run", "whole run", tooltip="all rollouts of all versions"),
        Binding("t", "training", "training", tooltip="add step, advantage and reason of a drop; reads the ledger"),
        *ROLLOUT_KEYS,
        Binding("r", "reload", "reload", tooltip="read again, with rollouts stored since"),
    ]

    def __init__(self, listing: Listing) -> None:
        super().__init__()
        self.listing = listing
        self.where, self.order = "", listing.order
        self._asked: Literal["filter", "sort"] = "filter"
        self._total = 0
        self._has_loaded = False

    @property
    def _view(self) -> "Viewer":
        return cast("Viewer", self.app)

    def compose(self) -> ComposeResult:
        yield Static(id="facts")
        with VerticalScroll(id="warnings"):  # wrapped, since the advice is at their end
            yield Static(id="diagnostics")
        yield Static(id="title")
        yield PagedTable()
        yield Static(id="problem")
        yield Input(id="entry", select_on_focus=False, suggester=SuggestFromList(self.listing.stored))
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#entry").display = False
        facts = self.query_one("#facts", Static)
        facts.display = self.listing.kind == "version"
        facts.update(self._view.facts() if facts.display else "")
        self.query_one("#warnings").display = False
        self.table.focus()
        self.load()

    @property
    def table(self) -> "PagedTable":
        return self.query_one(PagedTable)

    # --- Load ---------------------------------------------------------------------------------------------

    def load(self, where: str | None = None, order: Order | None = None) -> None:
        """Show the rows that a predicate chooses, in an order; by default the previous ones."""
        self._view.data.stop()
        self.query_one("#title", Static).update(Text(f"{self._title()}: reading ...", style="bold"))
        self._load(self.where if where is None else where, order or self.order)
        if self.listing.kind == "version":
            self._load_diagnostics()

    @work(thread=True, exclusive=True, group="load")
    def _load(self, where: str, order: Order) -> None:
        worker, data = get_current_worker(), self._view.data
        try:
            frame = data.rows(self.listing, where, order)
            total = frame.height if frame.height < self._view.most_rows else data.count(self.listing, where)
        except LudicError as error:
            if not worker.is_cancelled:
                self.app.call_from_thread(self._refuse, one_line(error))
            return
        if not worker.is_cancelled:
            self.app.call_from_thread(self._accept, frame, total, where, order)

    @work(thread=True, exclusive=True, group="diagnostics")
    def _load_diagnostics(self) -> None:
        try:
            diagnostics = list(map(str, self._view.data.diagnostics()))
        except LudicError:  # the list reports unreadable files
            return
        if not get_current_worker().is_cancelled:
            self.app.call_from_thread(self._show_diagnostics, diagnostics)

    def _show_diagnostics(self, diagnostics: Sequence[str]) -> None:
        if self.is_mounted:
            text = "\n".join(f"warning: {printable(text)}" for text in diagnostics)
            self.query_one("#diagnostics", Static).update(Text(text, style="bold red"))
            self.query_one("#warnings").display = bool(diagnostics)

    def _accept(self, frame: pl.DataFrame, total: int, where: str, order: Order) -> None:
        if not self.is_mounted:
            return
        is_same = (where, order) == (self.where, self.order)
        position = self.table.position if is_same and self._has_loaded else 0
        self.where, self.order, self._total, self._has_loaded = where, order, total, True
        self.table.show_rows(frame, self._informative_columns(frame), position)
        self._say("")
        self._close_entry()
        self._show_title()

    def _informative_columns(self, frame: pl.DataFrame) -> list[str]:
        """Return the informative columns: those whose value is not null or equal in all rows."""
        listing = self.listing
        names = [name for name in listing.columns if name != "prompt" or "group_id" not in listing.params]
        return [name for name in names if name in listing.kept or _says_something(frame, name)]

    def on_paged_table_turned(self, event: "PagedTable.Turned") -> None:
        self._load_texts(event.rows)

    @work(thread=True, exclusive=True, group="texts")
    def _load_texts(self, rows: Sequence[dict[str, Any]]) -> None:
        try:
            texts = self._view.data.texts(self.listing, rows)
        except LudicError:  # the list was closed or filtered, or a file was deleted: its rows stay without texts
            return
        if not get_current_worker().is_cancelled:
            self.app.call_from_thread(self._accept_texts, texts)

    def _accept_texts(self, texts: Mapping[str, Mapping[str, str | None]]) -> None:
        if self.is_mounted:
            self.table.fill(texts)

    def _refuse(self, problem: str) -> None:
        if self.is_mounted:
            self._say(problem)
            self._show_title()

    def _say(self, problem: str) -> None:
        line = self.query_one("#problem", Static)
        line.update(Text(printable(problem), style="bold red"))
        line.display = bool(problem)

    def _title(self) -> str:
        return printable(self.listing.title)

    def _show_title(self) -> None:
        first, last = self.table.bounds
        held = self.table.num_rows
        rows = f"{first:,} to {last:,} of {held:,}" if held else "no rows"
        more = f", the first of {self._total:,}" if self._total > held else ""
        parts = [rows + more, f"by {self.order}", *([f"where {self.where}"] if self.where else [])]
        line = " ".join(f"{self.listing.title}: {'; '.join(parts)}".split())
        self.query_one("#title", Static).update(Text(printable(line), style="bold"))

    def on_data_table_row_highlighted(self) -> None:
        self._show_title()

    # --- Filter and sort ----------------------------------------------------------------------------------

    def action_ask(self, what: Literal["filter", "sort"]) -> None:
        """Open the line for a predicate or an order."""
        self._asked = what
        entry = self.query_one("#entry", Input)
        entry.placeholder = _PLACEHOLDERS[what]
        entry.border_title = what
        entry.border_subtitle = f"columns: {', '.join(self.listing.stored)}"
        entry.value = self.where if what == "filter" else ""
        entry.display = True
        entry.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if self._asked == "filter":
            self.load(where=text)
        else:
            self.load(order=Order.parse(text) if text else self.listing.order)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        if event.column_key.value in TEXTS:  # they are read for the rows of a page only
            return
        by = quote_name(str(event.column_key.value))
        self.load(order=Order(by, descending=not self.order.descending if self.order.by == by else True))

    def action_reverse(self) -> None:
        self.load(order=Order(self.order.by, not self.order.descending))

    def action_reload(self) -> None:
        self._view.data.refresh()
        self.load()

    def _close_entry(self) -> None:
        entry = self.query_one("#entry", Input)
        if entry.display:
            entry.display = False
            self.table.focus()

    def action_back(self) -> None:
        if self.query_one("#entry").display:
            self._close_entry()
            self._say("")
        elif len(self.app.screen_stack) > 2:  # below the first list is the app's own empty screen
            self._view.data.stop()
            self.dismiss()

    # --- Open ---------------------------------------------------------------------------------------------

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        row = self.table.row(self.table.position)
        if row is None:
            return
        if self.listing.kind == "rollout":
            self._view.open_rollout(row["rollout_id"], self)
        elif self.listing.kind == "group":
            title = f"group {row['group_id']}"
            self.app.push_screen(ListScreen(rollouts("rollouts", title=title, group_id=row["group_id"])))
        elif self.listing.table == "evals":
            self.app.push_screen(ListScreen(rollouts("evals", version=row["version"], env=row["env"])))
        else:
            self.app.push_screen(ListScreen(groups(version=row["version"], env=row["env"])))

    def action_all(self) -> None:
        """Open the rollouts of the version, or of the list of groups, without groups."""
        row = self.table.row(self.table.position) if self.listing.kind == "version" else self.listing.params
        if row is not None:
            scope = {"version": row["version"], "env": row["env"]}
            self.app.push_screen(ListScreen(rollouts(self.listing.table, **scope)))

    def action_whole_run(self) -> None:
        """Open the rollouts, or those of evaluations, of all versions."""
        self.app.push_screen(ListScreen(rollouts(self.listing.table)))

    def action_evals(self) -> None:
        """Show evaluations instead of rollouts, or the reverse."""
        other: Literal["rollouts", "evals"] = "evals" if self.listing.table == "rollouts" else "rollouts"
        self.app.switch_screen(ListScreen(versions(other)))

    def action_training(self) -> None:
        """Show columns of training, which reads the whole ledger."""
        columns = ListScreen(rollouts(self.listing.table, with_training=True, **self.listing.params))
        self.app.switch_screen(columns)

    def action_label(self) -> None:
        row = self._rollout()
        if row is not None:
            self.app.push_screen(LabelForm(row["rollout_id"]), self._after_label)

    def _after_label(self, is_stored: bool | None) -> None:
        if is_stored:
            self.load()

    def action_compare(self) -> None:
        """List the other answers to the example of this rollout."""
        row = self._rollout()
        if row is not None and "env_example_id" in row:
            self._view.choose_other(row["env_name"], row["env_example_id"], row["rollout_id"])

    def _rollout(self) -> dict[str, Any] | None:
        return self.table.row(self.table.position) if self.listing.kind == "rollout" else None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys without a function in this list."""
        kind, names = self.listing.kind, self.listing.columns
        allowed = {
            "all": kind == "group" or (kind == "version" and self.listing.table == "rollouts"),
            "whole_run": kind == "version",
            "evals": kind == "version",
            "training": kind == "rollout" and "found_in" not in names and "step" not in names,
            "label": kind == "rollout",
            "compare": kind == "rollout" and "env_example_id" in names,
            "back": len(self.app.screen_stack) > 2 or self.query_one("#entry").display,
        }
        return allowed.get(action, True)


class CompareList(ListScreen):
    """The answers to one example; Enter shows one beside the first."""

    def __init__(self, env_name: str, example_id: str, first: str) -> None:
        super().__init__(answers(env_name, example_id, first))
        self._first = first

    def action_open(self) -> None:
        row = self.table.row(self.table.position)
        if row is not None:
            self._view.open_beside(self._first, row["rollout_id"])


# --- A table of any number of rows, one page at a time; arrow keys go on to the next page ----------------------------

PAGE = 100
"""Rows of a page. The widget measures each of its rows, so a page opens in milliseconds."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-([0-9a-f]{12})")
_MOST = 40


def _says_something(frame: pl.DataFrame, name: str) -> bool:
    if name in TEXTS or frame.height == 0:
        return True
    values = frame[name]
    return values.null_count() < frame.height and (frame.height == 1 or values.n_unique() > 1)


class PagedTable(DataTable[Text]):
    """Rows of a DataFrame, page by page. Columns of texts are filled in when a page is there."""

    class Turned(Message):
        """Another page is shown, whose rows may need texts."""

        def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
            super().__init__()
            self.rows = rows

    def __init__(self) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self._frame = pl.DataFrame()
        self._formats: dict[str, ColumnFormat] = {}
        """Format of each column that is shown."""
        self._start = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of all pages."""
        return self._frame.height

    @property
    def position(self) -> int:
        """Index of the row with the cursor, from 0 over all pages."""
        return self._start + max(0, self.cursor_row)

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last row of this page, counted from 1."""
        return self._start + 1, min(self._start + PAGE, self.num_rows)

    def row(self, position: int) -> dict[str, Any] | None:
        """Return a row by its index; None if there is no such row."""
        return self._frame.row(position, named=True) if 0 <= position < self.num_rows else None

    def show_rows(self, frame: pl.DataFrame, shown: Sequence[str], position: int = 0) -> None:
        """Show other rows, with the cursor at this index. shown: columns, those of the frame and TEXTS."""
        self._frame = frame
        self.clear(columns=True)
        self._formats = {name: _format(frame, name) for name in shown}
        for name, column in self._formats.items():
            title = Text(column.title, justify="right" if column.is_number else "left")
            self.add_column(title, key=name, width=_MOST if name in TEXTS else None)
        self.go_to(position)

    def fill(self, texts: Mapping[str, Mapping[str, str | None]]) -> None:
        """Write texts into the rows of the page. texts: of a row, by the value of its first column, and by column."""
        for number, row in enumerate(self._frame.slice(self._start, PAGE).iter_rows()):
            for name, value in texts.get(row[0], {}).items():
                if name in self._formats:
                    column = list(self._formats).index(name)
                    self.update_cell_at(Coordinate(number, column), _cell(self._formats[name], value))

    def go_to(self, position: int) -> None:
        """Move the cursor to a row by its index over all pages."""
        position = max(0, min(position, self.num_rows - 1))
        start = position - position % PAGE
        if start != self._start or not self.row_count:
            self._start = start
            self.clear()
            page = self._frame.slice(start, PAGE).rows(named=True)
            self.add_rows([_cell(each, row.get(name, "")) for name, each in self._formats.items()] for row in page)
            if page and any(name in TEXTS for name in self._formats):
                self.post_message(self.Turned(page))
        self.move_cursor(row=position - start)

    def action_cursor_down(self) -> None:
        self._turn(self.position + 1) or super().action_cursor_down()

    def action_cursor_up(self) -> None:
        self._turn(self.position - 1) or super().action_cursor_up()

    def action_page_down(self) -> None:
        self._turn(self.position + self._height) or super().action_page_down()

    def action_page_up(self) -> None:
        self._turn(self.position - self._height) or super().action_page_up()

    def action_scroll_top(self) -> None:
        self.go_to(0)

    def action_scroll_bottom(self) -> None:
        self.go_to(self.num_rows - 1)

    def action_scroll_home(self) -> None:
        self.go_to(0)

    def action_scroll_end(self) -> None:
        self.go_to(self.num_rows - 1)

    @property
    def _height(self) -> int:
        return max(1, self.size.height - 2)

    def _turn(self, position: int) -> bool:
        """Go to a row of another page; returns whether that was needed."""
        position = max(0, min(position, self.num_rows - 1))
        is_here = self._start <= position < self._start + PAGE
        if not is_here:
            self.go_to(position)
        return not is_here


def _format(frame: pl.DataFrame, name: str) -> ColumnFormat:
    """Return the format of a column, also of one without values."""
    kind = frame.schema.get(name, pl.String())
    return column_format(name, [0 if kind.is_integer() else 0.0] if kind.is_numeric() else [])


def _cell(column: ColumnFormat, value: Any) -> Text:
    """Return a value for a cell: numbers on the right, long ids by their end."""
    match = _UUID.fullmatch(value) if isinstance(value, str) else None
    text = Text(f"…{match[2]}") if match else column.text(value, most=_MOST)
    text.justify = "right" if column.is_number else "left"
    if value is None:
        text.stylize("dim")
    return text


# --- The form of a label ---------------------------------------------------------------------------------------------


class LabelForm(ModalScreen[bool]):
    """Asks for a mark and a note, and stores them. Returns True if it stored a label."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, rollout_id: str) -> None:
        super().__init__()
        self._rollout_id = rollout_id

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(f"label of {printable(self._rollout_id)}", style="bold"))
            yield Input(placeholder="mark: a number such as 1 or 0.5, or a text such as good", id="mark")
            yield Input(placeholder="note", id="note")
            yield Input(LABEL, placeholder="name of the label", id="name")
            yield Static(Text("enter stores, tab moves, escape cancels; without mark and note it withdraws", "dim"))
            yield Static(id="refused")

    def on_input_submitted(self) -> None:
        self._store(*(self.query_one(f"#{name}", Input).value for name in ("mark", "note", "name")))

    @work(thread=True, exclusive=True)
    def _store(self, mark: str, note: str, name: str) -> None:
        try:
            cast("Viewer", self.app).data.label(self._rollout_id, mark, note, name)
        except LudicError as error:
            self.app.call_from_thread(self._refuse, one_line(error))
        else:
            self.app.call_from_thread(self.dismiss, True)

    def _refuse(self, problem: str) -> None:
        self.query_one("#refused", Static).update(Text(printable(problem), style="bold red"))

    def action_cancel(self) -> None:
        self.dismiss(False)
