"""JSON files of a root that hold something else: each command says so in a line, and verify names the file."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ludic.root.json_records import (
    Attempt,
    CheckpointInfo,
    LatestPolicy,
    Lease,
    Policy,
    SlotClaim,
    Tombstone,
    decode_record,
    encode_json,
)
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.tombstones import read_tombstones
from ludic.root.weights.policies import latest_policy, publish_policy

WHOLE = [b"", b"[]", b"null", b"{}", b"7", b'"text"', b"[" * 100_000, b"\xff\xfe", b"{", b'{"config": ' + b"[" * 5_000]
FILES = (
    "run.json",
    "attempts/1.json",
    "attempts/1.lease",
    "policies/LATEST",
    "policies/version=1/policy.json",
    "checkpoints/attempt=1/step=1/checkpoint.json",
)


MISSHAPEN = (b"[]", b"[" * 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("names", [FILES[:1], FILES[1:]])
def test_files_of_another_shape_are_named_in_a_line_each(ludic, breakable: Path, names: Sequence[str]) -> None:
    for content in MISSHAPEN:
        for name in names:
            (breakable / name).write_bytes(content)
        result = ludic("verify", breakable)
        assert result.code == 1, content[:20]
        assert "Traceback" not in result.err, content[:20]
        assert [name for name in names if Path(name).name not in result.out + result.err] == [], content[:20]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_stats_of_a_run_with_a_file_of_another_shape_end_with_a_line(ludic, breakable: Path, name: str) -> None:
    for content in MISSHAPEN[: 2 if name == "run.json" else 1]:
        (breakable / name).write_bytes(content)
        result = ludic("watch", breakable, "--totals")
        assert result.code in (0, 1), content[:20]
        assert "Traceback" not in result.err, content[:20]


@pytest.mark.parametrize("content", WHOLE)
@pytest.mark.parametrize("record", [Attempt, Lease, LatestPolicy, Policy, CheckpointInfo, SlotClaim, Tombstone])
def test_what_is_no_record_is_refused(record: type, content: bytes) -> None:
    with pytest.raises(ValueError):
        decode_record(content, record)


@pytest.mark.parametrize("wrong", [[], {}, "text", -1, 1e300, None, 2**80])
def test_a_field_of_another_type_is_refused(wrong: object) -> None:
    values = {"version": 3, "budget": 4}
    assert decode_record(encode_json(values), LatestPolicy) == LatestPolicy(version=3, budget=4)
    # as trainers wrote it who asked for groups by version
    assert decode_record(encode_json({"version": 3, "groups_per_worker": 4}), LatestPolicy) == LatestPolicy(version=3)
    with pytest.raises(ValueError, match="version"):
        decode_record(encode_json(values | {"version": wrong}), LatestPolicy)


def test_a_lease_of_years_is_refused_and_not_waited_for(ludic, breakable: Path) -> None:
    lease = json.loads((breakable / "attempts/1.lease").read_text()) | {"lease_s": 1e9, "released": False}
    lease.pop("digest", None)
    (breakable / "attempts/1.lease").write_bytes(encode_json(lease))
    result = ludic("train", breakable, "--num-steps", "2")
    assert result.code == 1
    assert "attempts/1.lease is no lease that ludic can read" in result.err
    assert "lease_s" in result.err


def test_a_broken_latest_is_replaced_by_the_next_publish(breakable: Path) -> None:
    (breakable / "policies/LATEST").write_bytes(b"{")
    root = Root.open(str(breakable))
    # Versions 0 and 1 are there.
    assert publish(root) == 2
    assert latest_policy(root) == LatestPolicy(version=2, budget=4)


def publish(root: Root) -> int:
    def save(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    return publish_policy(root, save, step=2, attempt_id=1, parent_version=1, budget=4)


@pytest.mark.parametrize("content", [*WHOLE, b'{"created_at": "x", "rule": "y", "partitions": [{"folder": "../.."}]}'])
def test_a_tombstone_of_another_shape_counts_as_none(started: Root, content: bytes) -> None:
    started.put("expired/0.json", content)
    assert read_tombstones(started) == []


@pytest.mark.parametrize("content", WHOLE)
def test_a_compaction_plan_of_another_shape_plans_nothing(breakable: Path, content: bytes) -> None:
    root = Root.open(str(breakable))
    root.put("compactions/rollouts/version=0/env=moar_cats/0.json", content)
    assert compact(root).skipped == []
