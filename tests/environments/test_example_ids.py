"""What identifies an example: a unique column, else all columns; in old roots question and answer.

Equal ids are equal examples, in every environment.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from environments.test_qa import WRITERS, make, write_jsonl

from ludic.environments.environment import Example, MultiAgentEnvironment, Split
from ludic.environments.qa_rows import ID_COLUMNS
from ludic.environments.registry import make_environment
from ludic.settings.kinds import ENVIRONMENT

LEVELS = [{"question": "Write a sort.", "answer": "-", "level": level} for level in range(4)]
"""Four different rows with one question and answer."""


def ids(source: str, split: Split = "train", num: int = 40, **options: Any) -> list[str]:
    environment = make(f"qa/{source}", **{"heldout_share": 0, **options})
    return sorted({environment.example(index, split).example_id for index in range(num)})


def notes(source: str, **options: Any) -> list[str]:
    return make(f"qa/{source}", **{"heldout_share": 0, **options}).notes


def with_column(name: str, values: Iterable[Any]) -> list[dict[str, Any]]:
    return [{**row, name: value} for row, value in zip(LEVELS, values, strict=True)]


def test_rows_that_differ_in_any_column_are_other_examples(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", LEVELS)
    assert len(ids(source)) == 4
    assert notes(source) == []


@pytest.mark.parametrize("name", ID_COLUMNS)
@pytest.mark.parametrize("values", [["HumanEval/0", "b", "c", "d"], [7, 8, 9, 10]])
def test_a_unique_column_is_the_id_itself(tmp_path: Path, name: str, values: Sequence[Any]) -> None:
    for file, writer in WRITERS.items():
        rows = with_column(name, values)
        assert ids(writer(tmp_path / file, rows)) == sorted(map(str, values))


def test_the_first_of_several_columns_counts_and_one_that_is_not_unique_does_not(tmp_path: Path) -> None:
    both = [{**row, "id": f"i{index}", "uid": f"u{index}"} for index, row in enumerate(LEVELS)]
    source = write_jsonl(tmp_path / "rows.jsonl", both)
    assert ids(source) == ["i0", "i1", "i2", "i3"]
    both[3]["id"] = "i1"
    source = write_jsonl(tmp_path / "rows.jsonl", both)
    assert ids(source) == ["u0", "u1", "u2", "u3"]
    assert notes(source) == ["column 'uid' identifies an example; column 'id': line 2 and line 4 both have 'i1'"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["a", "b", "a", "c"], "line 1 and line 3 both have 'a'"),
        ([1, 2, "2", 3], "line 2 and line 3 both have '2'"),
        (["a", None, "b", "c"], "line 2 has None, wanted a text or a whole number"),
        ([None, "a", "b", "c"], "line 1 has None, wanted a text or a whole number"),
        (["a", "b", "  ", "c"], "line 3 has '  ', wanted a text or a whole number"),
        ([1, 2, 3, 4.5], "line 4 has 4.5, wanted a text or a whole number"),
        ([True, False, 1, 2], "line 1 has True, wanted a text or a whole number"),
        (["a", "b", "x" * 257, "c"], "line 3 has a value of 257 characters, wanted at most 256"),
        ([{"a": 1}, 1, 2, 3], "line 1 has {'a': 1}, wanted a text or a whole number"),
    ],
)
def test_a_column_that_can_not_be_the_id_is_named_with_its_rows(tmp_path: Path, values: list, why: str) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", with_column("id", values))
    assert len(ids(source)) == 4
    assert notes(source) == [f"all columns identify an example; column 'id': {why}"]


def test_a_column_that_only_later_rows_have_is_not_the_id(tmp_path: Path) -> None:
    rows = [LEVELS[0], *({**row, "id": str(index)} for index, row in enumerate(LEVELS[1:]))]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert notes(source) == ["all columns identify an example; column 'id': line 2 is the first to have it"]
    assert len(ids(source)) == 4


def test_copies_are_one_example_and_counted(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [*LEVELS, LEVELS[0], LEVELS[0], dict(reversed(LEVELS[1].items()))])
    assert len(ids(source)) == 4
    assert notes(source) == [f"{source}: 3 of 7 rows are copies of an earlier row, and count as the same example"]


def test_all_formats_and_nulls_that_tables_add_give_the_same_ids(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a", "meta": {"level": 1}}, {"question": "q", "answer": "a", "tests": ["x"]}]
    filled = [{"meta": None, "tests": None, **row} for row in rows]
    found = [ids(writer(tmp_path / name, filled)) for name, writer in WRITERS.items()]
    found.append(ids(write_jsonl(tmp_path / "rows.jsonl", rows)))
    assert len(found[0]) == 2
    assert all(each == found[0] for each in found)


def test_rows_of_both_files_share_no_id(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", with_column("id", range(4)))
    others = [{**row, "question": "Write a search."} for row in LEVELS]
    heldout = write_jsonl(tmp_path / "heldout.jsonl", [{**row, "id": index + 4} for index, row in enumerate(others)])
    options: dict[str, Any] = {"heldout_share": None, "heldout": heldout}
    assert ids(train, **options) == ["0", "1", "2", "3"]
    assert ids(train, "heldout", **options) == ["4", "5", "6", "7"]
    write_jsonl(tmp_path / "heldout.jsonl", [{**row, "id": index} for index, row in enumerate(others)])
    both = ids(train, **options) + ids(train, "heldout", **options)
    assert len(set(both)) == 8
    said = "all columns identify an example; column 'id': held-out rows have values of the rows to train on"
    assert notes(train, **options) == [said]


def test_an_old_root_keeps_question_and_answer(tmp_path: Path) -> None:
    rows = [{"question": "What is 1+1?", "answer": "2", "id": "one", "level": level} for level in range(2)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    digest = sha256(b"What is 1+1?\x002").hexdigest()[:16]
    assert ids(source, example_ids="question") == [digest]
    assert notes(source, example_ids="question") == []


def test_the_split_and_the_order_are_those_of_an_old_root(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number}?", "answer": str(number), "id": number % 3} for number in range(60)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    old, new = (make(f"qa/{source}", example_ids=each) for each in ("question", "row"))
    for split in ("train", "heldout"):
        asked = [[each.example(index, split).messages for index in range(80)] for each in (old, new)]
        assert asked[0] == asked[1]


def all_environments() -> list[str]:
    """The built-in ones, and of each package one that needs nothing but the package."""
    of_packages = {"reasoning_gym/": "gcd", "textarena/": "GuessTheNumber-v0", "gymnasium/": "", "verifiers/": ""}
    assert of_packages.keys() == ENVIRONMENT.packages.keys()
    # verifiers digests the whole row (tests/adapters/environments); an id of gymnasium is the seed of its reset.
    return [*ENVIRONMENT.names(), *(prefix + name for prefix, name in of_packages.items() if name)]


@pytest.mark.parametrize("name", all_environments())
def test_equal_ids_are_equal_examples(name: str) -> None:
    if name.startswith("textarena/"):
        pytest.importorskip("textarena")
    environment = make_environment(name, seed=7)()
    found: dict[str, Example] = {}
    for index in range(300 if not isinstance(environment, MultiAgentEnvironment) else 60):
        example = environment.example(index, "train")
        before = found.setdefault(example.example_id, example)
        assert json.dumps([before.wanted, dict(before.data)], default=str) == json.dumps(
            [example.wanted, dict(example.data)], default=str
        )
        assert before.messages == example.messages


def test_fields_of_messages_that_are_not_used_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    asked = [{"role": "user", "content": f"What is {number}?", "mood": "calm"} for number in range(4)]
    path.write_text("".join(json.dumps({"prompt": [each], "answer": "1"}) + "\n" for each in asked))
    assert notes(str(path)) == [f"{path}: fields of messages that are not used: messages[].mood (4)"]
