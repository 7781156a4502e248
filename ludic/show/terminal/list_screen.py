"""A list of versions, groups or rollouts: filter, sort, page, open.

Queries run in a thread. A query that fails leaves the rows and the typed text as they were, and shows its error in a
line below the table.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import polars as pl
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.suggester import SuggestFromList
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from ludic.errors import LudicError, one_line
from ludic.printable import printable
from ludic.show.terminal.dialogs import LabelForm
from ludic.show.terminal.listings import Listing, Order, answers, groups, quote_name, rollouts, versions
from ludic.show.terminal.table import PagedTable

if TYPE_CHECKING:
    from ludic.show.terminal.app import ViewApp

_PLACEHOLDERS = {
    "filter": "SQL predicate over the columns, such as episode_reward > 0.5 and error is null; empty shows all",
    "sort": "SQL expression to sort by, such as reward_mean desc; empty is the first order",
}
ROLLOUT_KEYS: Sequence[BindingType] = (
    Binding("l", "label", "label", tooltip="label the rollout with a mark and a note"),
    Binding("v", "compare", "compare", tooltip="choose another answer to the example, to see both side by side"),
)
"""Keys for a rollout, in a list and in its own screen."""


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
    def _view(self) -> "ViewApp":
        return cast("ViewApp", self.app)

    def compose(self) -> ComposeResult:
        yield Static(id="facts")
        yield Static(id="title")
        yield PagedTable()
        yield Static(id="problem")
        yield Input(id="entry", select_on_focus=False, suggester=SuggestFromList(self.listing.columns))
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#entry").display = False
        facts = self.query_one("#facts", Static)
        facts.display = self.listing.kind == "version"
        facts.update(self._view.facts() if facts.display else "")
        self.table.focus()
        self.load()

    @property
    def table(self) -> PagedTable:
        return self.query_one(PagedTable)

    # --- Load ---------------------------------------------------------------------------------------------

    def load(self, where: str | None = None, order: Order | None = None) -> None:
        """Show the rows that a predicate chooses, in an order; by default those of before."""
        self._view.data.stop()
        self.query_one("#title", Static).update(Text(f"{self._title()}: reading ...", style="bold"))
        self._load(self.where if where is None else where, order or self.order)

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

    def _accept(self, frame: pl.DataFrame, total: int, where: str, order: Order) -> None:
        if not self.is_mounted:
            return
        is_same = (where, order) == (self.where, self.order)
        position = self.table.position if is_same and self._has_loaded else 0
        self.where, self.order, self._total, self._has_loaded = where, order, total, True
        self.table.show_rows(frame, position)
        self._say("")
        self._close_entry()
        self._show_title()

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
            self.app.push_screen(ListScreen(groups(row["version"], row["env"])))

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
        """Hide the keys that mean nothing in this list."""
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
