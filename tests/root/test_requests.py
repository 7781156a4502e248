"""A request is delivered as one group, whatever its workers, the listing, a restart or compaction do."""

import itertools
import json
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from strategies import make_batch

from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.root.maintenance.compaction import compact
from ludic.root.rows.files import RolloutFile, list_files
from ludic.root.rows.ledger import recall_requests
from ludic.root.rows.parquet import encode
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.root.rows.tombstones import expire, stored_files

GROUP_SIZE = 2
_seeds = itertools.count(1)


def put(root, worker_id: str, number: int, *, sequence: int = 0, at_s: int = 0, version: int = 0) -> str:
    """Commit a new group with a number of the schedule, sampled at a time; its group_id."""
    seed = next(_seeds)
    groups = make_batch(
        num_groups=1, group_size=GROUP_SIZE, response_length=4, seed=seed, policy_version=version
    ).groups
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=at_s)
    batch = RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=worker_id, timestamp=at))
    table = to_table(batch, run_id=root.run_id, sequence=sequence)
    column = table.schema.get_field_index("request_index")
    indexes = [number * GROUP_SIZE + index for index in range(GROUP_SIZE)]
    field = table.schema.field(column)
    table = table.set_column(column, field, pa.array(indexes, field.type))
    file = RolloutFile(version, "moar_cats", worker_id, sequence)
    assert root.put_if_absent(file.name, encode(table))
    return groups[0].rollouts[0].group_id


def delivered(rows) -> dict[str, bool]:
    """group_id, and whether it is a duplicate."""
    if rows is None:
        return {}
    refusals = rows["refusal"].to_pylist()
    return dict(zip(rows["group_id"].to_pylist(), [why == "duplicate_request" for why in refusals], strict=True))


def reader_of(root, cursor: Cursor | None = None) -> RolloutReader:
    """From a cursor that was in a checkpoint."""
    return RolloutReader(root, [], Cursor.from_dict(json.loads(json.dumps((cursor or Cursor()).to_dict()))))


@pytest.fixture
def root_url(tmp_path) -> str:
    return str(tmp_path / "run")


def test_what_is_delivered_first_has_the_request(root):
    reader = reader_of(root)
    late = put(root, "w0-late", 7, at_s=9)
    assert delivered(reader.poll(None)) == {late: False}
    early = put(root, "w0-early", 7, at_s=1)
    assert delivered(reader.poll(None)) == {early: True}


@pytest.mark.parametrize("names", [("w0-a", "w0-b"), ("w0-b", "w0-a")])
def test_of_groups_that_come_at_once_the_one_sampled_first_has_the_request(root, names):
    early, late = put(root, names[0], 7, at_s=1), put(root, names[1], 7, at_s=9)
    assert delivered(reader_of(root).poll(None)) == {early: False, late: True}


def test_groups_of_equal_times_are_told_apart_by_name(root):
    groups = {name: put(root, name, 7) for name in ("w0-b", "w0-a", "w0-c")}
    assert delivered(reader_of(root).poll(None)) == {name: groups["w0-a"] != name for name in groups.values()}


def test_other_requests_and_rows_without_one_are_left_alone(root):
    groups = [put(root, "w0-a", 0), put(root, "w0-b", 1), put(root, "import-a", 0), put(root, "import-b", 0)]
    groups += [put(root, "w0-c", -3), put(root, "w0-d", -3)]
    assert delivered(reader_of(root).poll(None)) == dict.fromkeys(groups, False)


def test_a_request_that_was_consumed_stays_so_over_restarts(root):
    put(root, "w0-a", 7)
    reader = reader_of(root)
    reader.consume(reader.poll(None))
    duplicate = put(root, "w0-b", 7)
    reader = reader_of(root, reader.cursor)
    rows = reader.poll(None)
    assert delivered(rows) == {duplicate: True}
    reader.consume(rows)
    assert reader_of(root, reader.cursor).poll(None) is None


def test_a_duplicate_that_was_dropped_takes_nothing_from_the_group_that_waits(root):
    first = put(root, "w0-a", 7)
    reader = reader_of(root)
    reader.poll(None)
    put(root, "w0-b", 7)
    reader.consume(reader.poll(None))
    assert delivered(reader_of(root, reader.cursor).poll(None)) == {first: False}


def test_a_group_that_is_used_again_keeps_its_request_over_restarts(root):
    used = put(root, "w0-b", 7, at_s=9)
    reader = reader_of(root)
    reader.use(reader.poll(None))
    duplicate = put(root, "w0-a", 7, at_s=1)
    assert delivered(reader_of(root, reader.cursor).poll(None)) == {used: False, duplicate: True}


@pytest.mark.parametrize("num_compacted", [1, 2])
def test_compaction_changes_nothing(root, num_compacted):
    first = put(root, "w0-a", 7)
    other = put(root, "w0-c", 8)
    duplicate = put(root, "w0-b", 7, at_s=1)
    if num_compacted == 1:
        reader = reader_of(root)
        reader.poll(None)
    compact(root)
    assert len(list_files(root)) == 1
    if num_compacted == 1:
        assert reader.poll(None) is None
    assert delivered(reader_of(root).poll(None)) == {first: False, other: False, duplicate: True}


def old_cursor(reader: RolloutReader) -> Cursor:
    state = reader.cursor.to_dict()
    return Cursor.from_dict({name: state[name] for name in ("files", "groups")})


@pytest.mark.parametrize("is_compacted", [False, True])
def test_requests_of_an_older_cursor_are_found_in_the_store(root, is_compacted):
    """Consumed: 7 and 9. Used and to come again: 8. Not seen: 10."""
    put(root, "w0-a", 7)
    put(root, "w0-a", 9, sequence=1)
    reader = reader_of(root)
    reader.consume(reader.poll(None))
    used = put(root, "w0-b", 8, at_s=5)
    new = put(root, "w0-b", 10, sequence=1)
    if is_compacted:
        compact(root)
    cursor = old_cursor(reader)
    recall_requests(root, cursor, [used])
    assert cursor.knows_requests
    assert (cursor.requests.pairs, cursor.in_use) == ([(7, 8), (9, 10)], {8: used})
    doubles = [put(root, "w0-z", number, sequence=number, at_s=1) for number in (7, 8, 9)]
    assert delivered(reader_of(root, cursor).poll(None)) == {used: False, new: False} | dict.fromkeys(doubles, True)


def test_requests_that_expired_count_as_consumed_for_an_older_cursor(root):
    put(root, "w0-a", 7)
    reader = reader_of(root)
    reader.consume(reader.poll(None))
    expire(root, stored_files(root), rule="test")
    cursor = old_cursor(reader)
    recall_requests(root, cursor, [])
    assert cursor.requests.pairs == [(7, 8)]
