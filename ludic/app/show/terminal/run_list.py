"""List the runs below a folder in the terminal; Enter ends the app with the chosen run."""

from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from ludic.app.show.run_table import RunTable, tabulate
from ludic.base import Frame, column_format
from ludic.base.printable import printable
from ludic.errors import LudicError, one_line


class RunListApp(App[str]):
    """The runs below a folder; `run` returns the URL of the chosen one, None to quit."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "open", tooltip="open the run; q leads back here"),
        Binding("r", "reload", "reload", tooltip="read the runs again"),
        Binding("q,escape", "quit", "quit"),
    ]
    CSS = """
    #title, #problems { padding: 0 1; height: auto; max-height: 30%; }
    DataTable { height: 1fr; }
    """

    def __init__(self, folder: str, chosen: str | None = None) -> None:
        """chosen: URL of the run to begin at."""
        super().__init__()
        self._folder, self._chosen = folder, chosen
        self._urls: list[str] = []

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Static(id="problems")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.action_reload()

    @property
    def _table(self) -> "DataTable[Text]":
        return self.query_one(DataTable)

    def action_reload(self) -> None:
        self.query_one("#title", Static).update(Text(printable(f"{self._folder}: reading ..."), style="bold"))
        self._read()

    @work(thread=True, exclusive=True)
    def _read(self) -> None:
        try:
            found: RunTable | LudicError = tabulate(self._folder)
        except LudicError as error:
            found = error
        self.call_from_thread(self._show, found)

    def _show(self, found: RunTable | LudicError) -> None:
        """Show a table, or the reason why there is none, below the one that is there."""
        if isinstance(found, LudicError):
            self.query_one("#problems", Static).update(Text(printable(one_line(found)), style="bold red"))
            return
        at = self._urls[self._table.cursor_row] if self._urls else self._chosen
        self._table.clear(columns=True)
        problems: list[str] = []
        for part in found.parts():
            if isinstance(part, Frame):
                self._fill(part)
            else:
                problems.append(str(part))
        self._urls = [each.url for each in found.runs]
        self.query_one("#title", Static).update(
            Text(printable(f"{self._folder}: {len(self._urls):,} runs"), style="bold")
        )
        self.query_one("#problems", Static).update(Text(printable("\n".join(problems))))
        if at in self._urls:
            self._table.move_cursor(row=self._urls.index(at))
        self._table.focus()

    def _fill(self, frame: Frame) -> None:
        rows: list[dict[str, Any]] = [
            {**row, **{name: of(row) for name, of in frame.derived.items()}} for row in frame.rows
        ]
        formats = {name: column_format(name, (row[name] for row in rows)) for name in frame.shown}
        self._table.add_columns(
            *(Text(printable(frame.titles.get(name, each.title))) for name, each in formats.items())
        )
        for row in rows:
            self._table.add_row(*(each.text(row[name]) for name, each in formats.items()))

    def on_data_table_row_selected(self) -> None:
        self.action_choose()

    def action_choose(self) -> None:
        if self._urls:
            self.exit(self._urls[self._table.cursor_row])
