"""docs/evaluation.md: its SQL runs, and its table names every measure."""

import re
from pathlib import Path

import pytest
from eval.conftest import StoreSamples

import ludic
from ludic.base.by_name import packaged_names
from ludic.environments.registry import make_environment
from ludic.eval.config import EvalConfig
from ludic.eval.suite import _SHARED, read_suite
from ludic.root.root import Root

GUIDE = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", GUIDE, re.DOTALL)


def test_the_table_names_every_measure() -> None:
    table = GUIDE.partition("\n## Measures\n")[2].partition("\n## Intervals\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    named = [name for row in rows for name in row.split("|")[1].strip().split(", ")]
    assert sorted(named) == packaged_names("measures")


SUITE = re.search(r"```toml\n(.*?)```", GUIDE, re.DOTALL)


def test_the_suite_is_read(tmp_path: Path) -> None:
    assert SUITE is not None
    (tmp_path / "sums.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (tmp_path / "math.toml").write_text(SUITE[1])
    entries = read_suite(tmp_path / "math.toml", EvalConfig())
    assert [(entry.name, entry.config.num_examples, entry.config.n) for entry in entries] == [
        ("sums", 100, 1),
        ("questions", 100, 8),
        ("with a tool", 100, 1),
    ]
    for entry in entries:
        make_environment(entry.env, entry.config.env_options[entry.env])().example(0, "heldout")


def test_the_table_of_a_suite_names_every_setting() -> None:
    table = GUIDE.partition("\n## Suites\n")[2].partition("\n## Measures\n")[0]
    assert [name for name in _SHARED if f"`{name}`" not in table] == []


def test_the_measure_of_your_own_runs(root: Root, store_samples: StoreSamples, tmp_path: Path) -> None:
    store_samples({"a": [1.0, 0.0], "b": [1.0, 1.0]})
    file = tmp_path / "short.sql"
    file.write_text(QUERIES[0])
    run = ludic.Run(root)
    assert run.eval(stored=True, measures=[str(file)]).measures["estimate"].to_list() == [0.75]
    assert run.eval(stored=True, measures=[str(file)], params={"most": 2}).measures["estimate"].to_list() == [0.0]


@pytest.mark.parametrize(("number", "num_rows"), [(1, 2), (2, 4), (3, 0)])
def test_a_query_runs(root: Root, store_samples: StoreSamples, number: int, num_rows: int) -> None:
    store_samples({"a": [1.0, 0.0], "b": [1.0, 1.0]})
    assert len(ludic.Run(root).sql(QUERIES[number])) == num_rows
