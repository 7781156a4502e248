"""What passes by itself is tried again, over a real connection; and what each operation costs when nothing fails."""

import itertools
import subprocess
import sys
import threading
import uuid
from dataclasses import replace

import fsspec
import pytest
from s3_proxy import SLOW_DOWN, Delay, Refuse, Reset

from ludic.errors import ConfigError, StoreError
from ludic.root.storage import failures
from ludic.root.storage.s3 import S3
from ludic.run.run_json import put_run

MANY_TIMES = 4
"""More often than the clients themselves try a request."""

OPERATIONS = {
    "read": lambda root, file: root.read("there.bin") == b"there",
    "open_file": lambda root, file: root.open_file("there.bin").read() == b"there",
    "list": lambda root, file: root.list("") == ["run.json", "there.bin"],
    "put": lambda root, file: root.put("new.bin", b"new") is None and root.read("new.bin") == b"new",
    "put_if_absent": lambda root, file: (
        root.put_if_absent("new.bin", b"new") and not root.put_if_absent("new.bin", b"x")
    ),
    "put_file_if_absent": lambda root, file: (
        root.put_file_if_absent(file, "new.bin") and root.read("new.bin") == b"new"
    ),
    "delete": lambda root, file: root.delete("there.bin") is None and not root.exists("there.bin"),
}
"""What each does, and that it did it."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(failures, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def s3_root(s3_proxy, s3_bucket, run_config):
    root = put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
    root.put("there.bin", b"there")
    s3_proxy.requests.clear()
    return root


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_bytes(b"new")
    return tmp_path / "file"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reaction", "operation"),
    [
        *itertools.product([SLOW_DOWN], OPERATIONS),
        *itertools.product([Reset(after=True)], ["put", "put_if_absent", "put_file_if_absent", "delete"]),
        *itertools.product(
            [Refuse(500, "InternalError"), Refuse(429, "TooMany"), Refuse(503, "ServiceUnavailable"), Reset()],
            ["put_if_absent"],
        ),
        (Refuse(409, "ConditionalRequestConflict"), "put_if_absent"),
    ],
    ids=lambda value: getattr(value, "code", value) if not isinstance(value, Reset) else f"reset-{value.after}",
)
def test_what_passes_by_itself_is_tried_again(s3_proxy, s3_root, file, monkeypatch, reaction, operation):
    monkeypatch.setenv("LUDIC_RETRY_S", "60")
    s3_proxy.once(*[reaction] * MANY_TIMES)
    assert OPERATIONS[operation](s3_root, file)
    assert len(s3_proxy.requests) > MANY_TIMES


@pytest.mark.slow
def test_an_answer_that_comes_too_late_is_asked_for_again(s3_proxy, s3_bucket, run_config, monkeypatch):
    """With the user's own time-out, in fsspec's configuration."""
    S3.clear_instance_cache()
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 0.3}})
    monkeypatch.setenv("LUDIC_RETRY_S", "60")
    s3_proxy.once(*[Delay(1.0)] * MANY_TIMES)
    assert put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config).list("") == ["run.json"]


@pytest.mark.slow
def test_the_error_comes_after_the_limit_and_says_how_long_was_tried(s3_proxy, s3_root, monkeypatch):
    monkeypatch.setenv("LUDIC_RETRY_S", "0.5")
    s3_proxy.react = lambda method, path: SLOW_DOWN
    with pytest.raises(
        StoreError, match=r"there\.bin: SlowDown \(HTTP 503\): Please reduce your request rate; retried for 0\.5 s"
    ):
        s3_root.read("there.bin")


@pytest.mark.slow
def test_a_long_wait_is_logged(s3_proxy, s3_root, monkeypatch, caplog):
    monkeypatch.setenv("LUDIC_RETRY_S", "60")
    s3_proxy.react = lambda method, path: None if caplog.text else SLOW_DOWN
    assert s3_root.read("there.bin") == b"there"
    assert f"{s3_root.url}/there.bin: SlowDown (HTTP 503): Please reduce your request rate; trying again" in caplog.text


@pytest.mark.parametrize(
    "reaction",
    [
        Refuse(403, "AccessDenied"),
        Refuse(404, "NoSuchBucket"),
        Refuse(400, "InvalidRequest"),
        Refuse(405, "MethodNotAllowed"),
    ],
    ids=lambda reaction: reaction.code,
)
def test_what_does_not_pass_is_asked_once(s3_proxy, s3_root, monkeypatch, reaction):
    monkeypatch.setenv("LUDIC_RETRY_S", "60")
    s3_proxy.react = lambda method, path: reaction
    for act in (lambda: s3_root.read("there.bin"), lambda: s3_root.put_if_absent("new.bin", b"")):
        s3_proxy.requests.clear()
        with pytest.raises(StoreError, match=reaction.code):
            act()
        assert len(s3_proxy.requests) == 1


def test_a_limit_that_is_no_number_is_refused_by_name(root, monkeypatch):
    monkeypatch.setenv("LUDIC_RETRY_S", "soon")
    with pytest.raises(ConfigError, match="LUDIC_RETRY_S is 'soon', wanted a number of seconds"):
        root.list("")


@pytest.mark.slow
def test_nothing_is_tried_again_once_told_to_stop(s3_proxy, s3_root, monkeypatch):
    monkeypatch.setenv("LUDIC_RETRY_S", "100000")
    stop = threading.Event()

    def stop_at_the_fifth(method: str, path: str) -> Refuse:
        if len(s3_proxy.requests) == 5:
            stop.set()
        return SLOW_DOWN

    s3_proxy.react = stop_at_the_fifth
    with pytest.raises(StoreError, match="SlowDown"):
        replace(s3_root, stop=stop).read("there.bin")


@pytest.mark.slow
def test_each_operation_is_one_request_or_two(s3_proxy, s3_root, file):
    costs = {
        lambda: s3_root.read("there.bin"): 1,
        lambda: s3_root.read_range("there.bin", 1, 2): 1,
        lambda: s3_root.open_file("there.bin").read(): 1,
        lambda: s3_root.list("rollouts/version=7"): 1,
        lambda: s3_root.list(""): 1,
        lambda: s3_root.sizes(""): 1,
        lambda: s3_root.folders(""): 1,
        lambda: s3_root.put_if_absent("a/new.bin", b"1"): 1,
        lambda: s3_root.put("a/new.bin", b"2"): 1,
        lambda: s3_root.put_file_if_absent(file, "a/newer.bin"): 1,
        lambda: s3_root.exists("there.bin"): 1,
        lambda: s3_root.put_if_absent("a/new.bin", b"3"): 2,  # and a look at what is there
        lambda: s3_root.exists("nowhere.bin"): 2,  # it might be a folder
        lambda: s3_root.delete("a"): 2,  # a listing, and the deletion
    }
    for act, cost in costs.items():
        s3_proxy.requests.clear()
        act()
        assert len(s3_proxy.requests) == cost, s3_proxy.requests


LARGE_BYTES = 11 << 20


@pytest.fixture
def small_parts(monkeypatch):
    """A large file has three parts, of the smallest size that S3 takes."""
    monkeypatch.setattr("ludic.root.storage.s3._PART_BYTES", 5 << 20)
    monkeypatch.setattr("ludic.root.storage.filesystem._COMPARED_BYTES", 5 << 20)


@pytest.mark.slow
def test_a_large_file_is_created_in_parts_once(s3_proxy, s3_root, small_parts, tmp_path):
    for name in ("mine", "theirs"):
        with (tmp_path / name).open("wb") as file:
            file.write(name.encode())
            file.truncate(LARGE_BYTES)
    assert s3_root.put_file_if_absent(tmp_path / "mine", "large.bin")
    assert sum("partNumber" in request for request in s3_proxy.requests) == 3
    assert s3_root.put_file_if_absent(tmp_path / "mine", "large.bin")
    assert not s3_root.put_file_if_absent(tmp_path / "theirs", "large.bin")
    assert s3_root.sizes("") == {"large.bin": LARGE_BYTES, "run.json": len(s3_root.read("run.json")), "there.bin": 5}
    s3_root.download("", tmp_path / "copy")
    assert (tmp_path / "copy" / "large.bin").read_bytes() == (tmp_path / "mine").read_bytes()


@pytest.mark.slow
def test_a_lost_answer_to_the_last_part_is_no_other_file(s3_proxy, s3_root, small_parts, tmp_path, monkeypatch):
    monkeypatch.setenv("LUDIC_RETRY_S", "60")
    (tmp_path / "large").write_bytes(bytes(LARGE_BYTES))
    lost = []

    def lose_the_completion(method: str, path: str) -> Reset | None:
        if method == "POST" and "uploadId" in path and not lost:
            lost.append(path)
            return Reset(after=True)
        return None

    s3_proxy.react = lose_the_completion
    assert s3_root.put_file_if_absent(tmp_path / "large", "large.bin")
    assert lost


@pytest.mark.slow
def test_a_forked_child_is_told_to_open_the_root_again(s3_bucket, run_config):
    """obstore's threads are not forked with the rest: a call in the child would wait for ever."""
    root = put_run(f"{s3_bucket}/{uuid.uuid4()}", run_config)
    script = f"""
import multiprocessing
from ludic.errors import StoreError
from ludic.root.root import Root

root = Root.open({root.url!r})
def child():
    try:
        root.read("run.json")
    except StoreError as error:
        assert "open the root again in the child" in str(error)
        assert Root.open({root.url!r}).run_id == {root.run_id!r}
        raise SystemExit(7)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
raise SystemExit(process.exitcode)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=120).returncode == 7
