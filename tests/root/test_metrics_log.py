import itertools
import math
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ludic.errors import ConfigError, StoreError
from ludic.records.tables import arrow_schema
from ludic.root.rows.parquet import encode_plain
from ludic.root.rows.tables import MetricsLog, MetricsTail, steps_that_count
from ludic.run.run_json import put_run


def test_rows_come_back_with_their_kind_run_and_time(root):
    log = MetricsLog(root, "train", "attempt-1")
    log.write(step=1, policy_version=0, loss=0.5, drops={"drop_truncated": 2})
    log.close()
    (row,) = MetricsTail(root).poll()
    assert (row["kind"], row["run_id"], row["step"], row["loss"]) == ("train", root.run_id, 1, 0.5)
    assert row["drops"] == [("drop_truncated", 2)]
    assert row["created_at"].tzinfo is not None
    assert row["grad_norm"] is None


def test_numbers_that_are_not_finite_are_null(root):
    log = MetricsLog(root, "train", "t")
    log.write(policy_version=0, loss=math.nan, grad_norm=math.inf, entropy=-math.inf, ratio_mean=1.0)
    log.close()
    (row,) = MetricsTail(root).poll()
    assert [row[name] for name in ("loss", "grad_norm", "entropy", "ratio_mean")] == [None, None, None, 1.0]


def test_a_metric_that_is_not_in_the_schema_is_our_mistake(root):
    log = MetricsLog(root, "train", "t")
    with pytest.raises(AssertionError, match="no such metrics"):
        log.write(policy_version=0, accuracy=1.0)
    log.close()
    assert root.list("metrics") == []


def test_each_row_is_seen_once_by_a_tail(root):
    tail = MetricsTail(root)
    assert tail.poll() == []
    logs = [MetricsLog(root, "train", "t"), MetricsLog(root, "worker", "w0")]
    for log in logs:
        for step in range(3):
            log.write(policy_version=step, step=step)
        log.close()
    assert sorted((row["kind"], row["step"]) for row in tail.poll()) == [
        *(("train", step) for step in range(3)),
        *(("worker", step) for step in range(3)),
    ]
    assert tail.poll() == []


def test_many_rows_make_files_in_order(root):
    log = MetricsLog(root, "train", "t")
    for step in range(100):
        log.write(policy_version=0, step=step)
    log.close()
    rows = MetricsTail(root).poll()
    assert sorted(row["step"] for row in rows) == list(range(100))


def test_a_broken_file_is_left_out(root):
    log = MetricsLog(root, "train", "t")
    log.write(policy_version=0, step=1)
    log.close()
    root.put("metrics/train-x-0.parquet", b"PAR1 and no more")
    root.put("metrics/notes.txt", b"")
    tail = MetricsTail(root)
    assert [row["step"] for row in tail.poll()] == [1]
    assert tail.poll() == []


def test_a_failing_filesystem_hides_no_row(unreliable_root):
    log = MetricsLog(unreliable_root, "train", "t")
    log.write(policy_version=0, step=1)
    log.close()
    tail = MetricsTail(unreliable_root)
    unreliable_root.fs.failures_of_reads.append(ConnectionError("down"))
    with pytest.raises(StoreError, match="down"):
        tail.poll()
    assert [row["step"] for row in tail.poll()] == [1]


def test_two_logs_of_one_name_lose_nothing_unnoticed(root):
    first, second = MetricsLog(root, "train", "t"), MetricsLog(root, "train", "t")
    first.write(policy_version=0, step=1)
    first.close()
    second.write(policy_version=0, step=2)
    with pytest.raises(FileExistsError, match="exists with other content"):
        second.close()


def test_a_writer_id_that_is_no_file_name_is_refused(root):
    with pytest.raises(ConfigError, match="is not a file name"):
        MetricsLog(root, "train", "a/b")


def put_file(root, writer, sequence, step):
    """A file with one row, as a log writes it."""
    row = {"kind": "train", "run_id": root.run_id, "created_at": datetime.now(UTC), "policy_version": 0, "step": step}
    schema = arrow_schema("metrics")
    table = pa.Table.from_pylist([dict.fromkeys(schema.names) | row], schema=schema)
    root.put(f"metrics/{writer}-{sequence}.parquet", encode_plain(table))


class SlowListings(MemoryFileSystem):
    """memory://, with listings that take as long as those of a million files."""

    cachable = False
    num_listings = 0

    def find(self, path, maxdepth=None, withdirs=False, **options):
        self.num_listings += 1
        time.sleep(0.5)
        return super().find(path, maxdepth, withdirs, **options)


def test_between_two_listings_the_files_that_follow_are_found_by_name(run_config):
    root = put_run(f"memory://{uuid.uuid4()}", run_config)
    slow = replace(root, fs=SlowListings())
    tail = MetricsTail(slow)
    for step in range(4):
        put_file(root, "train-1", step, step)
        assert [row["step"] for row in tail.poll()] == [step]
    assert tail.poll() == []
    assert slow.fs.num_listings == 1


class SlowReads(SlowListings):
    """Reads take as long as those of a distant bucket; the most at a time are counted."""

    num_reading = 0
    most_reading = 0

    def cat_file(self, path, start=None, end=None, **options):
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        try:
            time.sleep(0.05)
            return super().cat_file(path, start, end, **options)
        finally:
            self.num_reading -= 1


@pytest.mark.slow
def test_the_next_files_of_many_workers_are_asked_for_together(run_config):
    root = put_run(f"memory://{uuid.uuid4()}", run_config)
    slow = replace(root, fs=SlowReads())
    tail = MetricsTail(slow)
    writers = [f"worker-w{slot}" for slot in range(80)]
    for step in range(2):
        for writer in writers:
            put_file(root, writer, step, step)
        slow.fs.most_reading = 0
        assert [row["step"] for row in tail.poll()] == [step] * 80
    assert slow.fs.num_listings == 1
    assert slow.fs.most_reading > 1


def test_the_first_look_may_be_at_the_newest_files_only(root):
    for step, writer in itertools.product(range(12), ("train-1", "train-2")):
        put_file(root, writer, step, step)
    tail = MetricsTail(root, newest_files=3)
    # Files are in order of their numbers: 9 comes before 10.
    assert sorted(row["step"] for row in tail.poll()) == [9, 9, 10, 10, 11, 11]
    assert tail.poll() == []
    for writer in ("train-1", "train-2"):
        put_file(root, writer, 12, 12)
    assert [row["step"] for row in tail.poll()] == [12, 12]


def test_steps_that_a_later_attempt_trained_again_do_not_count() -> None:
    # Attempt 1 reached step 5; attempt 2 went on from step 3 and has reached step 4.
    ids = [*((1, step) for step in range(1, 6)), (2, 4)]
    kept = steps_that_count({(attempt_id, step): {"attempt_id": attempt_id, "step": step} for attempt_id, step in ids})
    assert [(each["attempt_id"], each["step"]) for each in kept] == [(1, 1), (1, 2), (1, 3), (2, 4)]
