"""Which groups a slot makes, and what it finds of its earlier lives."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_batch

from ludic.errors import ConfigError
from ludic.rollouts import group_schedule as schedule
from ludic.rollouts.group_schedule import MAX_SLOT, Schedule, new_slot, new_worker_id, read_earlier_lives
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.reader import Intervals
from ludic.root.rows.tombstones import expire, stored_files
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

GROUPS_A_SLOT = 2**32
GROUP_SIZE = 2


def run_of(num_workers: int) -> RunConfig:
    return RunConfig(model="tiny", env=("addition",), group_size=GROUP_SIZE, num_workers=num_workers)


def first_numbers(schedule: Schedule, count: int) -> list[int]:
    return list(islice(schedule.missing(Intervals()), count))


# --- The partition ---------------------------------------------------------------------------------------


def test_the_slots_of_a_run_of_three_take_turns() -> None:
    run = run_of(3)
    assert [first_numbers(Schedule.of_slot(run, slot), 3) for slot in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_a_slot_beyond_them_has_numbers_of_its_own() -> None:
    # Slot 3 is the first one beyond: (3 + 1) * 2**32.
    start = 17_179_869_184
    assert first_numbers(Schedule.of_slot(run_of(3), 3), 3) == [start, start + 1, start + 2]


@given(num_workers=st.integers(1, 64), number=st.integers(0, 10**9))
def test_each_number_belongs_to_one_of_the_runs_slots(num_workers: int, number: int) -> None:
    schedules = [Schedule.of_slot(run_of(num_workers), slot) for slot in range(num_workers)]
    owners = [slot for slot, schedule in enumerate(schedules) if schedule.position(number) is not None]
    assert owners == [number % num_workers]


@given(
    num_workers=st.integers(1, 64),
    slots=st.lists(st.integers(0, 200) | st.integers(0, MAX_SLOT - 1), min_size=2, max_size=2, unique=True),
    position=st.integers(0, GROUPS_A_SLOT - 1),
)
def test_no_number_of_a_slot_belongs_to_another(num_workers: int, slots: list[int], position: int) -> None:
    mine, other = (Schedule.of_slot(run_of(num_workers), slot) for slot in slots)
    number = mine.start + position * mine.stride
    assert mine.position(number) == position
    assert other.position(number) is None


@given(num_workers=st.integers(1, 64), slot=st.integers(0, MAX_SLOT - 1))
def test_request_indexes_of_groups_of_a_thousand_fit_the_int64_column(num_workers: int, slot: int) -> None:
    schedule = Schedule.of_slot(run_of(num_workers), slot)
    last = schedule.start + (GROUPS_A_SLOT - 1) * schedule.stride
    assert last * 1000 + 999 < 2**63


@pytest.mark.parametrize("slot", [-1, MAX_SLOT])
def test_a_slot_out_of_range_is_refused(slot: int) -> None:
    with pytest.raises(ConfigError, match=f"slot is {slot}, wanted 0 to 1048575"):
        Schedule.of_slot(run_of(1), slot)


def test_random_slots_are_far_from_those_that_are_dealt_out() -> None:
    assert all(MAX_SLOT // 2 <= new_slot() < MAX_SLOT for _ in range(100))


def test_worker_ids_of_one_slot_differ_from_life_to_life() -> None:
    lives = {new_worker_id(3) for _ in range(100)}
    assert len(lives) == 100
    assert all(worker_id.startswith("w3-") for worker_id in lives)


# --- What is missing -------------------------------------------------------------------------------------


def test_what_was_never_committed_comes_first() -> None:
    # Slot 1 of 2 makes 1, 3, 5, 7, 9, 11, ...; places 0, 1 and 3 are numbers 1, 3 and 7.
    schedule = Schedule.of_slot(run_of(2), 1)
    assert list(islice(schedule.missing(Intervals([(0, 2), (3, 4)])), 4)) == [5, 9, 11, 13]


@given(
    num_workers=st.integers(1, 8),
    slot=st.integers(0, 12),
    positions=st.sets(st.integers(0, 60)),
    count=st.integers(0, 30),
)
def test_missing_gives_all_numbers_but_the_committed_ones_lowest_first(
    num_workers: int, slot: int, positions: set[int], count: int
) -> None:
    schedule, committed = Schedule.of_slot(run_of(num_workers), slot), Intervals()
    for position in positions:
        committed.add(position)
    expected = [number for position, number in enumerate(first_numbers(schedule, 100)) if position not in positions]
    assert list(islice(schedule.missing(committed), count)) == expected[:count]


# --- Earlier lives ---------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path), run_of(2))


@pytest.fixture
def commit(root: Root) -> Callable[..., None]:
    """One group of two in a file of its own."""

    def commit(worker_id: str, group_number: int, **options: object) -> None:
        batch = make_batch(worker_id=worker_id, num_groups=1, group_size=GROUP_SIZE, seed=group_number, **options)
        with RolloutWriter(root, worker_id) as writer:
            writer.append(batch)

    return commit


def test_a_slot_without_a_past_has_committed_nothing(root: Root) -> None:
    lives = read_earlier_lives(root, 0)
    assert (lives.positions.pairs, lives.files) == ([], [])


def test_all_lives_of_a_slot_count_and_no_other_slots(root: Root, commit: Callable[..., None]) -> None:
    # make_batch's seed is the group's number here: request_index begins at number * group_size.
    commit("w1-host-10-a", 1)
    commit("w1-host-11-b", 3, policy_version=4)
    commit("w1-host-12-c", 7, policy_version=4, env_name="moar cats/ü")
    commit("w0-host-10-a", 4)
    commit("w11-host-10-a", 5)
    lives = read_earlier_lives(root, 1)
    # Slot 1 of 2: numbers 1, 3 and 7 are positions 0, 1 and 3.
    assert lives.positions.pairs == [(0, 2), (3, 4)]
    files = {(file.worker_id, file.sequence, file.version, file.num_groups) for file in lives.files}
    assert files == {("w1-host-10-a", 0, 0, 1), ("w1-host-11-b", 0, 4, 1), ("w1-host-12-c", 0, 4, 1)}


def test_a_broken_file_counts_as_never_committed(root: Root, commit: Callable[..., None]) -> None:
    for number in (0, 2, 4):
        commit(f"w0-host-{number}-a", number)
    cut, empty, _ = (Path(root.at(file.name)) for file in list_files(root))
    cut.write_bytes(cut.read_bytes()[:-20])
    empty.write_bytes(b"")
    lives = read_earlier_lives(root, 0)
    assert lives.positions.pairs == [(2, 3)]


def test_what_was_compacted_and_what_expired_counts_as_committed(root: Root, commit: Callable[..., None]) -> None:
    for number in (0, 1, 2, 4):
        commit(f"w{number % 2}-host-{number}-a", number)
    commit("w0-host-6-a", 6, policy_version=1)
    compact(root)
    before = read_earlier_lives(root, 0)
    assert before.positions.pairs == [(0, 4)]
    assert [file.worker_id for file in before.files] == ["w0-host-6-a"]
    expire(root, [stored for stored in stored_files(root) if stored.file.version == 0], rule="test")
    after = read_earlier_lives(root, 0)
    assert after.positions.pairs == before.positions.pairs
    assert read_earlier_lives(root, 1).positions.pairs == [(0, 1)]


def test_a_file_that_is_compacted_while_it_is_read_is_found_in_its_replacement(
    root: Root, commit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 2):
        commit(f"w0-host-{number}-a", number)
    listed = list_files(root)
    compact(root)
    monkeypatch.setattr(schedule, "list_files", lambda root: listed)
    assert read_earlier_lives(root, 0).positions.pairs == [(0, 2)]
