"""The catalogue: each kind of file has one row, whose names are written and parsed back, and nothing else parses."""

import re
import string
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import make_whole_root

from ludic.root.catalogue import (
    ATTEMPTS,
    BATCHES,
    FILE_KINDS,
    LABELS,
    POLICIES,
    QUARANTINE,
    QUARANTINED,
    ROLLOUTS,
    SCORES,
    WEIGHT_FILES,
    WEIGHTS,
    WORKERS,
    FileKind,
    Quoted,
    RolloutsName,
    StepName,
    file_kind_of,
)
from ludic.root.root import Root

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The name that is refused of an environment (tests/records/test_validation.py) and of a scorer (test_scores.py)."""
WORDS = st.text(string.ascii_letters + string.digits + "-", min_size=1, max_size=9)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


def values_of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of a name may have."""
    pattern = hint.__metadata__[0].pattern
    if hint.__origin__ is int:
        return st.integers(0, 2**31 - 1)
    if "|" in pattern and re.fullmatch(r"[a-z|]+", pattern):
        return st.sampled_from(pattern.split("|"))
    if match := re.fullmatch(r"\[0-9a-f\]\{(\d+)\}", pattern):
        return HEX.map(lambda text: text[: int(match[1])])
    if name in ("uuid", "log"):
        return st.uuids().map(str)
    if name in ("env_name", "scorer"):
        return TEXTS
    if name == "partition":
        return st.sampled_from(["rollouts/version=3/env=a%2Fb", "evals/version=0/env=x", "requests"])
    if "compacted" in pattern and pattern.endswith(")"):
        return WORDS | st.integers(0, 99).map("compacted.{}".format)
    if name in ("file", "name"):
        return st.lists(WORDS, min_size=1, max_size=3).map(lambda parts: f"{'/'.join(parts)}.safetensors")
    return WORDS


@st.composite
def named(draw: st.DrawFn) -> tuple[FileKind[Any], Any]:
    row = draw(st.sampled_from(FILE_KINDS))
    hints = get_type_hints(row.fields, include_extras=True)
    return row, row.fields(**{name: draw(values_of(name, hint)) for name, hint in hints.items()})


@given(named())
def test_a_name_is_written_and_parsed_back_by_one_row(drawn: tuple[FileKind[Any], Any]) -> None:
    row, of = drawn
    name = row.name(of)
    assert row.parse(name) == of
    assert file_kind_of(name) is row or row.rest
    assert [each.kind for each in FILE_KINDS if not each.rest and each.parse(name) is not None] == [row.kind] * (
        not row.rest
    )
    assert name.startswith(row.below())


def test_names_are_spelled_as_ever() -> None:
    """Worked by hand: roots that exist have these names."""
    assert ROLLOUTS.name(RolloutsName(12, "a b/c", "w0-host-1-2", 3)) == (
        "rollouts/version=12/env=a%20b%2Fc/w0-host-1-2-3.parquet"
    )
    assert BATCHES.name(StepName(3, 120)) == "batches/attempt=3/step=120.parquet"
    assert BATCHES.below(attempt_id=3) == "batches/attempt=3"
    assert SCORES.below(scorer="a/b %ü") == "scores/scorer=a%2Fb%20%25%C3%BC"
    assert WEIGHT_FILES.below(version=4) == "policies/version=4"
    assert (ATTEMPTS.folder, ATTEMPTS.file, POLICIES.file) == ("attempts", "{attempt_id}.json", "policy.json")


HOSTILE = [
    *(f"rollouts/version={version}/env=a/w-0.parquet" for version in ("-1", "01", "+1", "1_0", "1" * 19, "٣", "")),
    "rollouts/version=1/env=%61/w-0.parquet",  # another spelling of a
    "rollouts/version=1/env=a%2fb/w-0.parquet",  # hexadecimal digits are upper case
    "rollouts/version=1/env=a%FF/w-0.parquet",  # no UTF-8
    *(f"rollouts/version=1/env=a/{worker}-0.parquet" for worker in (".w", "_w", "w w", "compacted.x", "w" * 201, "")),
    "rollouts/version=1/env=a/w-0.parquet.tmp",
    "rollouts/version=1/env=a/b/w-0.parquet",
    "rollouts//version=1/env=a/w-0.parquet",
    "batches/attempt=2147483648/step=1.parquet",  # beyond int32
    "batches/attempt=1/step=01.parquet",
    "workers/slot=0/1.json/2.json",
    "attempts/0x1.json",
    "attempts/1.JSON",
    "metrics/eval-1-0.parquet",
    "labels/------------------------------------.parquet",
    "evaluations/0123456789ABCDEF.json",
    "imports/import-0123.json",
    "imports/w.json",
    "compactions/batches/attempt=1/0.json",
    "code/0123.py",
    "policies/version=1/../LATEST",
    "policies/version=1//model.safetensors",
    "policies/version=1/a\\b",
    "policies/version=x/config.json",
    "model/..",
    "expired/1.json\n",
    "run.json/",
    "",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_ludic_does_not_write_has_no_row(name: str) -> None:
    assert file_kind_of(name) is None


def test_a_folders_named_files_come_before_its_other_files() -> None:
    assert file_kind_of("policies/version=1/policy.json") is POLICIES
    assert file_kind_of("policies/version=1/config.json") is WEIGHTS
    assert file_kind_of("policies/version=1/model-00001-of-00002.safetensors") is WEIGHT_FILES
    assert file_kind_of("quarantine/rollouts/version=1/env=a/w-0.parquet.json") is QUARANTINE
    assert file_kind_of("quarantine/rollouts/version=1/env=a/w-0.parquet") is QUARANTINED


@pytest.mark.slow
def test_each_file_of_a_whole_root_has_a_row(whole_root: Root) -> None:
    names = whole_root.list("")
    assert [name for name in names if file_kind_of(name) is None] == []
    kinds = {row.kind for name in names if (row := file_kind_of(name))}
    assert {"run", "rollouts", "batches", "leases", "workers", "checkpoints", "latest", "compactions"} <= kinds


@pytest.fixture
def whole_root(tmp_path: Any) -> Root:
    return make_whole_root(tmp_path)


def test_listings_have_first_fields_and_leave_out_foreign_names(root: Root) -> None:
    for name in (BATCHES.name(StepName(2, 11)), BATCHES.name(StepName(2, 9)), BATCHES.name(StepName(10, 1))):
        root.put(name, b"")
    root.put("batches/attempt=2/step=7.parquet.bak", b"")
    root.put("batches/attempt=x/step=7.parquet", b"")
    assert BATCHES.listed(root) == [(2, 9), (2, 11), (10, 1)]
    assert BATCHES.listed(root, attempt_id=2) == [(2, 9), (2, 11)]
    assert BATCHES.first_fields(root) == [2, 10]
    assert LABELS.listed(root) == WORKERS.listed(root, slot=0) == []


def test_free_names_in_folders_are_those_of_environments_and_scorers() -> None:
    hints = [get_type_hints(row.fields, include_extras=True) for row in FILE_KINDS]
    assert {name for each in hints for name, hint in each.items() if hint == Quoted} == {"env_name", "scorer"}


def test_a_stored_name_that_is_refused_today_reads_the_same() -> None:
    name = f"rollouts/version=0/env={NULL}/w0-0.parquet"
    fields = ROLLOUTS.parse(name)
    assert fields is not None
    assert (fields.env_name, ROLLOUTS.name(fields)) == (NULL, name)
