"""Values on a line, in JSON, and in front of people."""

import datetime as dt
import math
import uuid
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ludic
from ludic.base.results import FORMATS, ColumnFormat, Frame, cell, column_format, plural, printable, size
from ludic.base.row_files import to_plain


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1234567, "1234567"),
        (0.1 + 0.2, "0.3"),
        (Decimal("1.50"), "1.5"),
        ("two\nlines\t\x07", "two\\nlines\t\\x07"),
        (dt.datetime(2026, 1, 2, 3, 4, 5, 678), "2026-01-02 03:04:05"),
        ([0.5, None], "[0.5, null]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, … 9 in all]"),
        ({"a": [1], "b": {}}, "{a: [1], b: {}}"),
    ],
)
def test_a_value_is_shown_on_one_line(value: object, shown: str) -> None:
    assert cell(value).plain == shown


def test_a_long_value_is_cut() -> None:
    assert cell("x" * 61, most=60).plain == "x" * 59 + "…"
    assert cell("x" * 60, most=60).plain == "x" * 60


@given(st.text())
def test_nothing_that_moves_the_cursor_is_left(text: str) -> None:
    assert all(
        ord(letter) >= 32 and not 127 <= ord(letter) < 160 for letter in cell(text, most=10**6).plain if letter != "\t"
    )
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.nan, None),
        (-math.inf, None),
        (Decimal(2**70), 2**70),
        (Decimal("0.25"), 0.25),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (b"\x00\xff", "00ff"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({1: (math.nan,)}, {"1": [None]}),
    ],
)
def test_foreign_values_become_json(value: object, plain: object) -> None:
    assert to_plain(value) == plain


def test_sizes_and_counts_read_well() -> None:
    assert [size(n) for n in (0, 9_999, 10_000, 12_345_678, 5e14)] == [
        "0 B",
        "9,999 B",
        "10.0 kB",
        "12.3 MB",
        "500,000.0 GB",
    ]
    assert [plural(n, "turn") for n in (0, 1, 2000)] == ["0 turns", "1 turn", "2,000 turns"]


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        (ColumnFormat("a", "count"), 12345, "12,345"),
        (ColumnFormat("a", "index"), 12345, "12345"),
        (ColumnFormat("a", "number", 3), 0.123456, "0.123"),
        (ColumnFormat("a", "signed"), 0.5, "+0.5"),
        (ColumnFormat("a", "mean"), 1234.56, "1,234.6"),
        (ColumnFormat("a", "share", 1), 0.3333, "33.3%"),
        (ColumnFormat("a", "bytes"), 12_345_678, "12.3 MB"),
        (ColumnFormat("a", "digest", 4), "abcdefgh", "abcd"),
        (ColumnFormat("a"), None, "-"),
        (ColumnFormat("a", "number"), None, "-"),
        (ColumnFormat("a", "count"), None, ""),
    ],
)
def test_a_format_shows_a_value(form: ColumnFormat, value: object, shown: str) -> None:
    assert form.text(value).plain == shown


def test_a_column_without_a_format_has_that_of_its_first_value() -> None:
    assert column_format("reward_mean") is FORMATS["reward_mean"]
    assert column_format("num_cats", [None, 3]) == ColumnFormat("cats", "count")
    assert column_format("cat_share", [0.5]) == ColumnFormat("cat share", "number")
    assert column_format("is_cat", [True]) == ColumnFormat("is cat")


def test_a_frame_as_html_is_escaped_and_aligned_and_counts_the_rows_that_it_leaves_out() -> None:
    rows = [{"env_name": "<b>\x1b[2J", "num_rollouts": 1234, "error": "a & b\n" + "x" * 99, "half": 0.5}] * 3
    columns = ("env_name", "num_rollouts", "error", "double")
    frame = Frame(
        "it", rows, columns, most=1, titles={"env_name": "<i>"}, derived={"double": lambda row: 2 * row["half"]}
    )
    assert frame.to_html().splitlines() == [
        "<table>",
        '<tr><th>&lt;i&gt;</th><th class="n">rollouts</th><th class="text">error</th><th class="n">double</th></tr>',
        '<tr><td>&lt;b&gt;\\x1b[2J</td><td class="n">1,234</td><td class="text">a &amp; b',
        "x" * 99 + '</td><td class="n">1</td></tr>',
        '<tr><td colspan="4">… 3 in all</td></tr>',
        "</table>",
    ]


def test_one_module_prints_results() -> None:
    """The rooms of screens draw for themselves; the demos talk while they run; a report is a page of its own."""
    package = Path(ludic.__file__).parent
    homes = {
        "from rich.table import": {"base/results.py", "app/show/", "app/demos/"},
        "def _repr_html_": {"base/results.py", "app/operations/run.py", "app/show/report/page.py"},
    }
    for words, wanted in homes.items():
        files = (path for path in package.rglob("*.py") if words in path.read_text())
        found = {path.relative_to(package).as_posix() for path in files}
        assert {name if name in wanted else f"{'/'.join(name.split('/')[:2])}/" for name in found} == wanted, words
