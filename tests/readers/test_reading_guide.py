"""The code of docs/reading.md, block by block: it reads all that is there, and opens no file of another version."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from readers.conftest import MAKERS, mixed

from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns

GUIDE = Path(__file__).parents[2] / "docs/reading.md"
WITH_LUDIC = ("Several runs at once, with ludic", "Plots in one line")
"""Sections that tests/root/sql/test_several_roots.py and tests/app/show/test_figures.py run."""
NEEDS = {"Ray Data": "ray_session", "PySpark": "spark_session"}
"""Fixtures by the heading of a section."""

# What Ray says of its own code.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*is deprecated.*:DeprecationWarning:ray\.data\.context")

Tokens = dict[str, list[int]]


def blocks(*, remote: bool) -> list[Any]:
    """Code with its section, as parameters of a test; those of the section on object storage, or all others."""
    sections = re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = [
        (section.partition("\n")[0], code)
        for section in sections
        for code in re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    ]
    wanted = [pair for pair in found if (pair[0] == "On object storage") == remote and pair[0] not in WITH_LUDIC]
    return [
        pytest.param(section, code, id=f"{section}-{index}")
        for section, pairs in groupby(wanted, key=lambda pair: pair[0])
        for index, (_, code) in enumerate(pairs)
    ]


def run(code: str, root: Root, version: int) -> Any:
    names: dict[str, Any] = {"root": root.url, "version": version}
    exec(code, names)
    return names["rows"]


def tokens_in(rows: Any) -> Tokens:
    """response_tokens by rollout_id, of whatever a tool calls its rows."""
    match type(rows).__module__.partition(".")[0]:
        case "duckdb" | "_duckdb":
            pairs = rows.select("rollout_id", "response_tokens").fetchall()
        case "polars":
            pairs = rows.select("rollout_id", "response_tokens").rows()
        case "pyarrow":
            pairs = zip(*(rows.column(name).to_pylist() for name in ("rollout_id", "response_tokens")), strict=True)
        case "pandas":
            pairs = zip(rows["rollout_id"], rows["response_tokens"], strict=True)
        case "pyspark":
            pairs = [(row.rollout_id, row.response_tokens) for row in rows.collect()]
        case "ray":
            pairs = [(row["rollout_id"], row["response_tokens"]) for row in rows.take_all()]
        case "datasets":
            pairs = [(row["rollout_id"], row["response_tokens"]) for row in rows]
        case module:
            raise AssertionError(f"no idea what rows of {module} are")
    found = [(rollout_id, [int(token) for token in tokens]) for rollout_id, tokens in pairs]
    assert len(dict(found)) == len(found), "a rollout came twice"
    return dict(found)


def stored_tokens(root: Root, version: int) -> Tokens:
    tables = [read_columns(root, file.name, ["rollout_id", "response_tokens"]) for file in list_files(root)]
    files = zip(list_files(root), tables, strict=True)
    return {
        row["rollout_id"]: row["response_tokens"]
        for file, table in files
        if file.version == version
        for row in table.to_pylist()
    }


def spoil(root: Root, version: int) -> None:
    """Whoever opens a file of this version fails from now on."""
    names = root.list(f"rollouts/version={version}")
    assert names
    for name in names:
        root.put(name, b"PAR1 this is no Parquet file PAR1")


@pytest.mark.parametrize(
    ("root", "section", "code"),
    [
        pytest.param(make, *block.values, id=f"{make.__name__}-{block.id}")
        for block in blocks(remote=False)
        for make in MAKERS
        # Each read of the slow ones takes seconds; the mixed root has files of every age.
        if make is mixed or block.values[0] not in NEEDS
    ],
    indirect=["root"],
)
def test_the_guides_code_reads_one_version_and_opens_no_other(
    request: pytest.FixtureRequest, root: Root, section: str, code: str
):
    if section in NEEDS:
        request.getfixturevalue(NEEDS[section])
    wanted, others = stored_tokens(root, 3), stored_tokens(root, 4)
    assert tokens_in(run(code, root, 4)) == others
    spoil(root, 4)
    assert tokens_in(run(code, root, 3)) == wanted
    with pytest.raises(Exception, match=r"(?i)parquet|magic|footer|spec"):
        tokens_in(run(code, root, 4))


@pytest.mark.parametrize(("section", "code"), blocks(remote=True))
def test_the_guides_code_reads_from_object_storage(s3_root: Root, section: str, code: str):
    wanted = stored_tokens(s3_root, 3)
    spoil(s3_root, 4)
    assert tokens_in(run(code, s3_root, 3)) == wanted
