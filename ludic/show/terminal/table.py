"""A table of any number of rows, which shows one page of them at a time; arrow keys go on to the next page.

Cells are literal text: data of a run is never read as markup.
"""

import re
from typing import Any

import polars as pl
from rich.text import Text
from textual.widgets import DataTable

from ludic.results import cell, number
from ludic.show.terminal.listings import FRACTIONS

PAGE = 100
"""Rows of a page. The widget measures each of its rows, so a page opens in milliseconds."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-([0-9a-f]{12})")
_DIGITS = 4
_MOST = 40


class PagedTable(DataTable[Text]):
    """Rows of a DataFrame, page by page."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self._frame = pl.DataFrame()
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

    def show_rows(self, frame: pl.DataFrame, position: int = 0) -> None:
        """Show other rows, with the cursor at this index."""
        self._frame = frame
        self.clear(columns=True)
        for name, kind in frame.schema.items():
            self.add_column(Text(name, justify="right" if kind.is_numeric() else "left"), key=name)
        self.go_to(position)

    def go_to(self, position: int) -> None:
        """Move the cursor to a row by its index over all pages."""
        position = max(0, min(position, self.num_rows - 1))
        start = position - position % PAGE
        if start != self._start or not self.row_count:
            self._start = start
            self.clear()
            names = self._frame.columns
            page = self._frame.slice(start, PAGE).rows()
            self.add_rows([_cell(*pair) for pair in zip(names, row, strict=True)] for row in page)
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


def _cell(name: str, value: Any) -> Text:
    """Return a value for a cell: numbers on the right, long ids by their end."""
    if value is None:
        return Text("-", style="dim", justify="center")
    if isinstance(value, float):
        return Text(f"{value:.1%}" if name in FRACTIONS else number(value, _DIGITS), justify="right")
    if isinstance(value, int) and not isinstance(value, bool):
        return Text(f"{value:,}", justify="right")
    match = _UUID.fullmatch(value) if isinstance(value, str) else None
    return Text(f"…{match[2]}") if match else cell(value, most=_MOST)
