"""A store that fails: the trainer goes on, within bounds of time and memory, and what was lost is counted and named."""

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from recorded import MODEL, claims_of, group, ledger_of, metrics_of, notes_of, problems_of, rows_of
from s3_proxy import SLOW_DOWN, S3Proxy

import ludic
from ludic.errors import ConfigError, StoreError
from ludic.root.storage.failures import RETRY_LIMIT
from ludic.run.recording import queue, recorder

FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")


class Store(MemoryFileSystem):
    """Files of memory:// below failing://; a test says how all connections fail."""

    protocol = "failing"
    cachable = False
    error: ClassVar[Exception | None] = None
    """Raised by each write."""
    lost_answers: ClassVar[list[str]] = []
    """Ends of names: an error follows the next write of each, although it was done."""
    dice: ClassVar[random.Random | None] = None
    """Draws for each write whether it fails before or after it is done, each with one chance in five."""
    is_up: ClassVar[threading.Event] = threading.Event()
    """Reads and writes wait for it."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("failing://", "memory://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.is_up.wait()
        fate = self.dice.random() if self.dice is not None else 1.0
        if self.error is not None or fate < 0.2:
            raise self.error or FULL
        super().pipe_file(path, value, mode=mode, **options)
        for end in filter(path.endswith, self.lost_answers):
            self.lost_answers.remove(end)
            raise FULL
        if fate < 0.4:
            raise FULL

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.is_up.wait()
        return super().cat_file(path, start, end, **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self.is_up.wait()
        return super().info(path, **options)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Store]]:
    monkeypatch.setattr(Store, "error", None)
    monkeypatch.setattr(Store, "lost_answers", [])
    monkeypatch.setattr(Store, "dice", None)
    Store.is_up.set()
    fsspec.register_implementation("failing", Store, clobber=True)
    yield Store
    Store.is_up.set()
    for thread in threading.enumerate():
        if thread.name in ("ludic-record", "ludic-lease"):
            thread.join(10)


@pytest.fixture
def url(store: type[Store]) -> str:
    return f"failing://{uuid.uuid4()}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of a test: seconds instead of minutes."""
    for name, value in {"OPEN_S": 0.3, "STEP_S": 5.0, "CLOSE_S": 0.5}.items():
        monkeypatch.setattr(recorder, name, value)
    for name, value in {
        "_FIRST_PAUSE_S": 0.01,
        "_LONGEST_PAUSE_S": 0.02,
        "_LAST_WORDS_S": 0.1,
        "_HANGS_S": 0.1,
    }.items():
        monkeypatch.setattr(queue, name, value)
    monkeypatch.setenv(RETRY_LIMIT, "0")


def train(recording: ludic.run.recording.recorder.Recorder, first: int, last: int, **columns: Any) -> list[str]:
    """Take steps as a trainer does; returns the ids of its rollouts."""
    ids: list[str] = []
    for n in range(first, last + 1):
        ids += recording.append([group(n, **columns)])
        recording.step(n, advantages=range(4), metrics={"loss": n})
    return ids


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        pytest.param(READ_ONLY, marks=pytest.mark.slow),
        pytest.param(PermissionError(errno.EACCES, "Permission denied"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_go_on_while_nothing_can_be_written_and_all_is_there_once_it_can(
    store: type[Store], url: str, error: OSError, caplog: pytest.LogCaptureFixture
):
    with ludic.record(url, model=MODEL) as recording:
        ids = train(recording, 1, 2)
        store.error = error
        since = time.monotonic()
        ids += train(recording, 3, 12)
        assert time.monotonic() - since < 2
        store.error = None
        assert recording.flush()
    assert [row["rollout_id"] for row in rows_of(url)] == ids
    assert [step for _, step in ledger_of(url)] == list(range(1, 13))
    assert [row["loss"] for row in metrics_of(url)] == list(range(1, 13))
    assert not recording.lost
    assert problems_of(url) == []
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "storing fails at the moment and is retried" in warning
    assert os.strerror(error.errno or 0).split()[0] in warning


def test_what_waits_while_nothing_can_be_stored_is_said_and_is_not_lost_once_it_is(store: type[Store], url: str):
    store.error = FULL
    with ludic.record(url, model=MODEL) as recording:
        train(recording, 1, 3)
        assert not recording.flush(0.05)
        lost = recording.lost
        assert lost
        assert lost.waiting == recording.waiting
        said = "12 rollouts in 3 groups and the ledger of 3 steps wait to be stored: "
        assert str(lost).startswith(said)
        assert "No space left on device" in str(lost)
        store.error = None
        assert recording.flush()
        assert (str(recording.lost), str(recording.waiting)) == ("nothing was lost", "nothing waits")
    assert [claim.lost for claim in claims_of(url)] == [None]


@pytest.mark.parametrize(
    "name", ["run.json", "slot=0/1.json", "0.parquet", "attempts/1.lease", "attempts/1.json", "step=3.parquet"]
)
def test_a_write_whose_answer_is_lost_is_not_done_twice(store: type[Store], url: str, name: str):
    store.lost_answers = [name, name]
    with ludic.record(url, model=MODEL) as recording:
        ids = train(recording, 1, 4)
        store.lost_answers.append("step=2.parquet")
        ids += train(recording, 2, 4)
    assert [row["rollout_id"] for row in rows_of(url)] == ids
    assert [step for _, step in ledger_of(url)] == [1, 2, 3, 4]
    assert [row["step"] for row in metrics_of(url)] == [1, 2, 3, 4, 2, 3, 4]
    assert len(claims_of(url)) == 1
    assert not recording.lost


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_writes_that_fail_at_random_lose_and_double_nothing(store: type[Store], url: str, seed: int):
    dice = store.dice = random.Random(seed)
    ids: list[str] = []
    kept: dict[int, list[str]] = {}
    for _ in range(4):
        with ludic.record(url, model=MODEL) as recording:
            for n in range(max(1, len(kept) - dice.randint(0, 3)), len(kept) + dice.randint(2, 9)):
                kept = {step: of_step for step, of_step in kept.items() if step < n}
                kept[n] = recording.append([group(n), group(n, size=2)])
                recording.append([group(n, purpose="eval")])
                recording.step(n, advantages=range(6), metrics={"loss": n})
                ids += kept[n]
            store.dice = None
        store.dice = dice
        assert not recording.lost
    store.dice = None
    assert sorted(row["rollout_id"] for row in rows_of(url)) == sorted(ids)
    ledger = {step: [row["rollout_id"] for row in rows] for (_, step), rows in ledger_of(url).items()}
    assert ledger == kept
    numbers = [(row["attempt_id"], row["step"]) for row in metrics_of(url)]
    assert len(numbers) == len(set(numbers)) == len(ids) // 6
    assert problems_of(url) == []


def test_what_was_not_stored_at_the_end_is_counted_and_named(store: type[Store], url: str):
    recording = ludic.record(url, model=MODEL)
    train(recording, 1, 2)
    assert recording.flush()
    store.error = FULL
    train(recording, 3, 6)
    since = time.monotonic()
    recording.close()
    assert time.monotonic() - since < 3
    lost = recording.lost
    recording.lose(1, 2, "its ranks did not agree")
    recording.lose(0, 2, "they could not be read")
    assert recording.lost.num_rollouts == 20
    assert recording.lost.reasons["they could not be read"] == 1
    assert "16 rollouts in 4 groups" in str(lost)
    assert (lost.num_rollouts, lost.num_groups, len(lost.group_ids)) == (16, 4, 4)
    assert (lost.steps, lost.steps_without_metrics) == (((3, 7),), ((2, 7),))
    assert "lost: 16 rollouts in 4 groups, the ledger of steps 3 to 6, the metrics of steps 2 to 6" in str(lost)
    assert "No space left on device" in str(lost)
    store.error = None
    assert [step for _, step in ledger_of(url)] == [1, 2]
    assert problems_of(url) == []


def test_more_than_the_memory_bound_is_lost_and_the_claim_says_so_when_the_store_is_back(
    store: type[Store], url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue, "MOST_BYTES", 100_000)
    with ludic.record(url, model=MODEL) as recording:
        train(recording, 1, 1)
        store.error = FULL
        for n in range(2, 30):
            recording.append([group(n, length=500)])
            recording.step(n)
        lost = recording.lost
        assert 0 < lost.num_groups < 28
        assert lost.num_rollouts == 4 * lost.num_groups
        store.error = None
        assert recording.flush()
        train(recording, 30, 30)
    [claim] = claims_of(url)
    assert claim.lost is not None
    assert claim.lost["num_groups"] == recording.lost.num_groups
    assert any("more than 0 MB waited" in reason for reason in claim.lost["reasons"])
    stored = {row["rollout_id"] for row in rows_of(url)}
    assert len(stored) == 4 * (30 - lost.num_groups)
    in_ledgers = {row["rollout_id"] for rows in ledger_of(url).values() for row in rows}
    assert in_ledgers <= stored
    assert problems_of(url) == []
    [note] = notes_of(url)
    assert note.startswith("lost_by_recorders: slot 0, life 1")


def test_rows_that_wait_for_company_make_room_for_a_large_group(
    store: type[Store], url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue, "MOST_BYTES", 50_000)
    with ludic.record(url, model=MODEL) as recording:
        recording.append([group(1)])
        since = time.monotonic()
        recording.append([group(2, length=2000)])
        assert time.monotonic() - since < 3
        assert not recording.lost
    assert len(rows_of(url)) == 8


def test_a_step_says_that_rows_which_it_names_were_lost(store: type[Store], url: str, monkeypatch: pytest.MonkeyPatch):
    with ludic.record(url, model=MODEL) as recording:
        train(recording, 1, 1)
        monkeypatch.setattr(queue, "MOST_BYTES", 1)
        store.error = FULL
        kept, lost = recording.append([group(2)]), recording.append([group(3)])
        store.error = None
        assert recording.flush()
        recording.step(2, advantages=dict.fromkeys([*kept, *lost], 1.0))
        recording.step(3, advantages=dict.fromkeys(lost, 1.0))
    assert [row["rollout_id"] for row in ledger_of(url)[1, 2]] == kept
    assert ledger_of(url)[1, 3] == []
    assert recording.lost.steps == ((2, 4),)
    assert recording.lost.num_rollouts == 4
    [claim] = claims_of(url)
    assert claim.lost is not None
    assert claim.lost["reasons"]["rows that it names were lost"] == 2
    assert problems_of(url) == []


def test_a_call_waits_no_longer_than_its_patience_in_all_whatever_other_threads_do(
    store: type[Store], url: str, monkeypatch: pytest.MonkeyPatch
):
    recording = ludic.record(url, model=MODEL)
    train(recording, 1, 1)
    assert recording.flush()
    monkeypatch.setattr(recorder, "STEP_S", 0.4)
    monkeypatch.setattr(queue, "MOST_BYTES", 1)
    store.is_up.clear()
    recording.append([group(2)])
    seconds: list[float] = []

    def append(seed: int) -> None:
        since = time.monotonic()
        recording.append([group(seed), group(seed + 1, purpose="eval")])
        seconds.append(time.monotonic() - since)

    threads = [threading.Thread(target=append, args=(seed,)) for seed in range(10, 18, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.3 < max(seconds) < 1.5  # one after the other they took 3.2
    since = time.monotonic()
    append(20)
    recording.step(2, advantages={"of another": 1.0})
    assert time.monotonic() - since < 0.35
    store.is_up.set()
    recording.close()


def test_a_short_flush_is_no_failure_of_the_store(store: type[Store], url: str):
    recording = ludic.record(url, model=MODEL, stop_on_failure=True)
    store.is_up.clear()
    recording.append([group(1)])
    assert not recording.flush(0.01)
    store.is_up.set()
    assert recording.flush()
    recording.close()


def test_an_interrupted_close_still_says_what_is_lost(
    store: type[Store], url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    recording = ludic.record(url, model=MODEL)
    recording.append([group(1)])
    store.is_up.clear()

    def interrupt(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recording._queue._thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            recording.close()
    assert recording.lost.num_rollouts == 4
    assert "lost: 4 rollouts in 1 group" in caplog.text


def test_a_store_that_hangs_holds_nobody_up(store: type[Store], url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "STEP_S", 0.3)
    recording = ludic.record(url, model=MODEL)
    train(recording, 1, 1)
    store.is_up.clear()
    since = time.monotonic()
    train(recording, 2, 30)
    assert not recording.flush(0.1)
    recording.close()
    assert time.monotonic() - since < 4
    assert recording.lost.steps == ((2, 31),)
    store.is_up.set()


def test_a_store_that_can_not_be_reached_at_first_is_tried_again(
    store: type[Store], url: str, caplog: pytest.LogCaptureFixture
):
    store.is_up.clear()
    store.error = READ_ONLY
    with pytest.raises(ConfigError, match="can't be reached, so the name of the model is needed"):
        ludic.record(url)
    with pytest.raises(StoreError, match="did not open within"):
        ludic.record(url, model=MODEL, stop_on_failure=True)
    with ludic.record(url, model=MODEL) as recording:
        train(recording, 1, 3)
        store.error = None
        store.is_up.set()
        assert recording.flush()
    assert [step for _, step in ledger_of(url)] == [1, 2, 3]
    assert not recording.lost


def test_a_version_that_was_set_before_the_root_was_open_stays(store: type[Store], url: str):
    with ludic.record(url, model=MODEL) as recording:
        recording.step(7)
    store.error = FULL
    with ludic.record(url, model=MODEL) as recording:
        recording.version = 2
        store.error = None
        while not recording._life.is_open:
            time.sleep(0.01)
        recording.append([group(1)])
        with pytest.raises(ConfigError, match=r"version is 1\.5, wanted a whole number from 0"):
            recording.version = 1.5  # type: ignore[assignment]
    assert {row["policy_version"] for row in rows_of(url)} == {2}


def test_rows_from_before_the_root_was_open_lack_its_extra_columns(store: type[Store], url: str):
    ludic.record(url, model=MODEL, extra_columns={"x_a": "string"}).close()
    store.error = FULL
    with ludic.record(url, model=MODEL) as recording:
        recording.append([group(1)])
        store.error = None
        while not recording._life.is_open:
            time.sleep(0.01)
        recording.append([group(2, x_a="web")])
    rows = ludic.open(url).sql("select x_a, count(*) from rollouts group by all order by all nulls first").rows()
    assert rows == [(None, 4), ("web", 4)]
    assert not recording.lost
    assert problems_of(url) == []


def test_a_mistake_that_shows_when_the_store_is_back_raises_at_the_next_call(store: type[Store], url: str):
    ludic.record(url, model=MODEL).close()
    store.is_up.clear()
    with ludic.record(url, model="another") as recording:
        train(recording, 1, 1, model="another")
        store.is_up.set()
        time.sleep(0.3)
        with pytest.raises(ConfigError, match="was started with model 'somebody/model', and 'another' was given"):
            recording.append([group(2)])
    assert recording.lost.num_rollouts == 4
    assert rows_of(url) == []


def test_a_caller_may_ask_to_be_stopped(store: type[Store], url: str, monkeypatch: pytest.MonkeyPatch):
    recording = ludic.record(url, model=MODEL, stop_on_failure=True)
    train(recording, 1, 1)
    monkeypatch.setattr(recorder, "STEP_S", 0.1)
    store.error = FULL
    with pytest.raises(StoreError, match="No space left on device"):
        train(recording, 2, 2)
    with pytest.raises(StoreError, match="lost: 4 rollouts in 1 group"):
        recording.close()


def test_a_root_that_is_deleted_or_made_again_meanwhile_gets_nothing(tmp_path: Path):
    url = str(tmp_path / "run")
    recording = ludic.record(url, model=MODEL)
    train(recording, 1, 2)
    assert recording.flush()
    shutil.rmtree(url)
    train(recording, 3, 4)
    assert not Path(url).exists()
    with ludic.record(url, model=MODEL) as other:
        train(other, 1, 1)
    train(recording, 5, 6)
    recording.close()
    assert "was deleted" in str(recording.lost)
    assert recording.lost.steps == ((3, 7),)
    assert len(rows_of(url)) == 4
    assert len(claims_of(url)) == 1
    assert problems_of(url) == []


@pytest.fixture
def s3_proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    proxy = S3Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


@pytest.mark.slow
def test_s3_that_goes_down_and_comes_back(s3_proxy: S3Proxy, s3_bucket: str):
    url = f"{s3_bucket}/{uuid.uuid4()}"
    with ludic.record(url, model=MODEL) as recording:
        ids = train(recording, 1, 2)
        s3_proxy.react = lambda method, path: SLOW_DOWN
        ids += train(recording, 3, 12)
        s3_proxy.react = lambda method, path: None
        assert recording.flush(20)
    assert [row["rollout_id"] for row in rows_of(url)] == ids
    assert [step for _, step in ledger_of(url)] == list(range(1, 13))
    assert not recording.lost
    assert problems_of(url) == []


# --- Forks and the end of a process ----------------------------------------------------------------------------------


def test_a_forked_process_is_refused_and_does_not_close_its_parents_recorder(tmp_path: Path):
    url = str(tmp_path / "run")
    with ludic.record(url, model=MODEL) as recording:
        train(recording, 1, 1)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                recording.append([group(9)])
            except ConfigError as error:
                status = 0 if "was forked; call ludic.record in each process" in str(error) else 2
            recording.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        train(recording, 2, 2)
    assert [step for _, step in ledger_of(url)] == [1, 2]
    assert not recording.lost


_ENDS = """
import sys
sys.path[:0] = sys.argv[3:]
import ludic
from recorded import MODEL, group
recorder = ludic.record(sys.argv[1], model=MODEL)
recorder.append([group(1)])
recorder.step(1, metrics={"loss": 0.5})
recorder.append([group(2)])
if sys.argv[2] == "error":
    raise KeyError("a mistake of the trainer")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "root_url"), [("exit", "local"), ("error", "local"), ("exit", "s3")], indirect=["root_url"]
)
def test_a_process_that_ends_without_close_loses_nothing(root_url: str, end: str):
    command = [sys.executable, "-c", _ENDS, root_url, end, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (end == "error"), done.stderr
    assert ("a mistake of the trainer" in done.stderr) == (end == "error")
    assert "warn" not in done.stderr.lower()
    assert len(rows_of(root_url)) == 8
    assert [row["loss"] for row in metrics_of(root_url)] == [0.5]
    assert claims_of(root_url)[0].ended_at is not None
