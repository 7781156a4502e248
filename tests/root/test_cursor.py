import json

from hypothesis import given
from hypothesis import strategies as st

from ludic.root.rows.reader import Cursor, Intervals

numbers = st.integers(0, 12) | st.integers(0, 2**62)
steps = st.lists(
    st.tuples(st.sampled_from(["w0", "w1-2"]), st.integers(0, 4), st.lists(st.sampled_from("abc")), st.booleans())
)


@given(st.lists(numbers))
def test_intervals_hold_what_was_added(added):
    intervals = Intervals()
    for number in added:
        intervals.add(number)
    assert len(intervals) == len(set(added))
    assert all(number in intervals for number in added)
    assert not any(number in intervals for other in added for number in (other - 1, other + 1) if number not in added)


@given(st.lists(numbers))
def test_intervals_are_disjoint_apart_and_in_order(added):
    intervals = Intervals()
    for number in added:
        intervals.add(number)
    bounds = [bound for pair in intervals.pairs for bound in pair]
    assert bounds == sorted(set(bounds))
    assert Intervals(intervals.pairs).pairs == intervals.pairs


def test_intervals_join_what_touches():
    intervals = Intervals()
    for number, pairs in [(5, [(5, 6)]), (3, [(3, 4), (5, 6)]), (6, [(3, 4), (5, 7)]), (4, [(3, 7)]), (2, [(2, 7)])]:
        intervals.add(number)
        assert intervals.pairs == pairs


def test_a_million_files_in_order_are_one_interval():
    intervals = Intervals([(0, 1_000_000)])
    intervals.add(1_000_000)
    assert intervals.pairs == [(0, 1_000_001)]


@given(steps, st.data())
def test_a_cursor_is_a_set_of_sources_and_of_groups_of_the_others(consumed, data):
    cursor, files, groups = Cursor(), set(), {}
    version = data.draw(st.none() | st.integers(0, 2))
    for worker_id, sequence, group_ids, whole in consumed:
        if data.draw(st.booleans()):
            cursor = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
        cursor.consume(worker_id, sequence, group_ids, whole=whole, version=version)
        if whole:
            files.add((worker_id, sequence))
            groups.pop((worker_id, sequence), None)
        else:
            groups.setdefault((worker_id, sequence), set()).update(group_ids)
    for worker_id in ("w0", "w1-2", "never"):
        for sequence in range(6):
            is_whole = (worker_id, sequence) in files
            assert cursor.has_source(worker_id, sequence) == is_whole
            for group_id in "abc":
                is_used = is_whole or group_id in groups.get((worker_id, sequence), set())
                assert cursor.has_group(worker_id, sequence, group_id) == is_used


def test_a_cursor_as_json_is_short():
    cursor = Cursor()
    for sequence in range(1000):
        cursor.consume("w0", sequence, ["a"], whole=True)
    cursor.consume("w0", 1001, ["b", "a"], whole=False)
    for number in range(8_000):
        cursor.finish_request(number)
    cursor.use_request(9_000, "c")
    assert cursor.to_dict() == {
        "files": {"w0": [(0, 1000)]},
        "groups": [["w0", 1001, ["a", "b"]]],
        "requests": [0, 8000],
        "in_use": [(9000, "c")],
    }


def test_a_cursor_of_an_older_ludic_is_the_same_cursor():
    state = {
        "files": {"w0": [[0, 3], [5, 6]]},
        "groups": [["w0", 4, ["a"]]],
        "requests": [[2, 4], [7, 8]],
        "in_use": [[9, "a"]],
    }
    cursor = Cursor.from_dict(state)
    assert [number for number in range(10) if number in cursor.requests] == [2, 3, 7]
    assert json.loads(json.dumps(cursor.to_dict())) == state | {"requests": [2, 2, 3, 1]}
    cursor.forget_before(7)
    assert [cursor.has_source("w0", sequence) for sequence in range(7)] == [True] * 3 + [False, False, True, False]
    assert cursor.has_group("w0", 4, "a")


@given(st.sets(st.integers(0, 60)))
def test_intervals_come_back_from_their_distances(numbers):
    intervals = Intervals()
    for number in numbers:
        intervals.add(number)
    assert Intervals.from_distances(intervals.distances).pairs == intervals.pairs


def test_versions_are_forgotten_whole():
    cursor = Cursor()
    for version in range(6):
        cursor.consume("w0", 2 * version, ["a"], whole=True, version=version)
        cursor.consume("w0", 2 * version + 1, ["b"], whole=False, version=version)
    cursor.forget_before(4)
    cursor.consume("w0", 0, ["a"], whole=True, version=3)
    cursor.forget_before(2)
    cursor = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    assert cursor.first_version == 4
    assert [sequence for sequence in range(12) if cursor.has_source("w0", sequence)] == [8, 10]
    assert [sequence for sequence in range(12) if cursor.has_group("w0", sequence, "b")] == [8, 9, 10, 11]


def test_a_cursor_with_a_window_does_not_grow_with_what_is_never_consumed():
    """One in ten sources stays; a version has 10 sources, and the window 4 versions."""
    cursor, sizes = Cursor(), []
    for version in range(2000):
        for sequence in range(10 * version, 10 * version + 9):
            cursor.consume("w0", sequence, ["a"], whole=True, version=version)
        cursor.forget_before(version - 4)
        sizes.append(len(json.dumps(cursor.to_dict())))
    assert sizes[-1] < sizes[9] + 50  # the numbers have more digits


def test_a_cursor_of_an_older_ludic_knows_no_requests_until_they_are_found():
    cursor = Cursor.from_dict({"files": {"w0": [[0, 1]]}, "groups": []})
    assert not cursor.knows_requests
    assert cursor.to_dict() == {"files": {"w0": [(0, 1)]}, "groups": []}
    assert Cursor.from_dict(Cursor().to_dict()).knows_requests


def test_a_request_is_the_first_groups_until_nobody_may_have_it():
    cursor = Cursor()
    cursor.use_request(3, "a")
    cursor.use_request(3, "b")
    cursor = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    assert cursor.in_use == {3: "a"}
    cursor.finish_request(3)
    cursor.use_request(3, "c")
    assert (cursor.in_use, cursor.requests.pairs) == ({}, [(3, 4)])
