"""docs/troubleshooting.md: its queries run on a root, and it names settings that there are."""

import re
from pathlib import Path

import pytest

from ludic.app.cli.docs import settings_pages
from ludic.root.sql.connection import connect

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_each_query_runs() -> None:
    queries = re.findall(r'ludic sql runs/mine "([^"]*)"', PAGE)
    assert len(queries) > 9
    with connect(str(REPOSITORY / "tests/golden/v1.8")) as con:
        for query in queries:
            assert con.sql(query).columns, query


def test_each_flag_is_a_setting() -> None:
    known = {*re.findall(r"`(\w+)`", "\n".join(settings_pages().values()))}
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z0-9-]+)", PAGE)} - {"version"}
    assert {flag.removeprefix("no_") for flag in flags} <= known
