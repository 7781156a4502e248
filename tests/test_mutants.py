"""The command that measures the tests by mutants: which places it finds, and that it finds them after a move."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / ".ci" / "mutants.py"

FUNCTION = b'''
class Queue:
    def take(self, number: int = 1):
        """Take from the queue."""
        if not self.rows or number > len(self.rows):
            raise ValueError(f"{number + 1} rows")
        self.taken += number
        return self.rows[-1]
'''

MOVED = b"""
def put(rows):
    if rows > 3:
        return min(rows, 3)

class Queue:
    def take(self, number=1):
        if (
            not self.rows  # an empty queue
            or number > len(self.rows)
        ):
            raise ValueError("too few")
        self.taken += number
        return self.rows[-1]
"""

QUERY = b"""-- where a = 1 and b > 2
select '1 + 1' as text, n + 1 as next
from \xc3\xa4rows
where reward >= 0 and kind is not null
"""


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_places_of_a_function_leave_out_texts_annotations_and_defaults(mutants):
    found = [(site.mutant.operator, site.mutant.before, site.mutant.after) for site in mutants.python_sites(FUNCTION)]
    condition = "not self.rows or number > len(self.rows)"
    assert sorted(found) == [
        ("and or swapped", condition, "not self.rows and number > len(self.rows)"),
        ("comparison flipped", "number > len(self.rows)", "number <= len(self.rows)"),
        ("comparison off by one", "number > len(self.rows)", "number >= len(self.rows)"),
        ("condition negated", condition, f"not ({condition})"),
        ("constant changed", "1", "2"),
        ("not removed", "not self.rows", "self.rows"),
        ("return value dropped", "self.rows[-1]", "None"),
        ("statement removed", "raise ValueError(f'{number + 1} rows')", "pass"),
        ("statement removed", "self.taken += number", "pass"),
    ]


def test_the_places_of_a_query_leave_out_comments_and_strings(mutants):
    found = [
        (site.mutant.operator, site.mutant.before, site.mutant.after) for site in mutants.sql_sites(QUERY, "q.sql")
    ]
    assert sorted(found) == [
        ("and or swapped", "and", "or"),
        ("arithmetic swapped", "+", "-"),
        ("comparison flipped", ">=", "<"),
        ("comparison off by one", ">=", ">"),
        ("constant changed", "0", "1"),
        ("constant changed", "1", "2"),
        ("predicate dropped", "kind is not null", "true"),
        ("predicate dropped", "reward >= 0", "true"),
    ]
    text = {site.mutant.operator: mutants.mutated(QUERY, site).decode() for site in mutants.sql_sites(QUERY, "q.sql")}
    assert text["predicate dropped"].endswith("from ärows\nwhere reward >= 0 and true\n")


def test_a_mutant_is_found_where_its_function_went(mutants, tmp_path, monkeypatch):
    drawn = tmp_path / "mutants.json"
    monkeypatch.setattr(mutants, "DRAWN", drawn)
    sites = [site for site in mutants.python_sites(FUNCTION) if "raise" not in site.mutant.statement]
    entries = [mutants.asdict(site.mutant) | {"number": i, "occurrence": 0} for i, site in enumerate(sites)]
    drawn.write_text(json.dumps({"mutants": entries}))
    file = tmp_path / "ludic" / "elsewhere" / "queues.py"
    file.parent.mkdir(parents=True)
    file.write_bytes(MOVED)

    _, found = mutants.find(tmp_path)

    assert {number: (place, site.mutant) for number, (place, site) in found.items()} == {
        number: (file, site.mutant) for number, site in enumerate(sites)
    }
    swapped = next(site for _, site in found.values() if site.mutant.operator == "and or swapped")
    assert b"if (\n            (not self.rows and number > len(self.rows))\n" in mutants.mutated(MOVED, swapped)


def test_a_statement_that_was_rewritten_is_lost(mutants, tmp_path, monkeypatch):
    drawn = tmp_path / "mutants.json"
    monkeypatch.setattr(mutants, "DRAWN", drawn)
    raised = next(site.mutant for site in mutants.python_sites(FUNCTION) if "raise" in site.mutant.statement)
    drawn.write_text(json.dumps({"mutants": [mutants.asdict(raised) | {"number": 1, "occurrence": 0}]}))
    (tmp_path / "ludic").mkdir()
    (tmp_path / "ludic" / "queues.py").write_bytes(MOVED)
    assert mutants.find(tmp_path)[1] == {}


@pytest.mark.parametrize("source", [FUNCTION, MOVED])
def test_a_probe_changes_no_result(mutants, monkeypatch, source):
    monkeypatch.setitem(sys.modules, "mutants_probe", mutants)
    hits = []
    monkeypatch.setattr(mutants, "hit", hits.append)
    for number, site in reversed(list(enumerate(mutants.python_sites(source)))):
        namespace = {}
        exec(mutants.probed(source, site, number), namespace)
        queue = namespace["Queue"]()
        queue.rows, queue.taken = [5, 6], 0
        assert (queue.take(1), queue.taken) == (6, 1)
    assert hits


def test_a_test_reaches_what_its_file_and_its_shared_fixtures_reach(mutants):
    lines = [
        ["hit", 1, "tests/a.py", ""],  # while the file was collected
        ["hit", 2, "", "trained"],  # in a fixture of the session
        ["hit", 3, "tests/a.py::test_x", ""],
        ["hit", 3, "tests/b.py::test_z", ""],
        ["test", "tests/a.py::test_x", "passed", 0.5, []],
        ["test", "tests/a.py::test_x_y", "passed", 0.25, ["trained"]],
        ["test", "tests/b.py::test_z", "failed", 1.0, ["trained"]],
    ]
    x, y, z = (line[1] for line in lines[4:])
    assert mutants.summary([json.dumps(line) for line in lines]) == {
        "seconds": {x: 0.5, y: 0.25},
        "failed": [z],
        "tests": {"1": [x, y], "2": [y], "3": [x]},
    }
