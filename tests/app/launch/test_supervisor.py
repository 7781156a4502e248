"""Processes that `ludic run` starts again: when, and when no more."""

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from ludic.app.launch.local import was_replaced
from ludic.app.launch.process import ENVIRONMENT, stop_variables
from ludic.app.launch.supervisor import ChildProcess, ProcessDiedError, finish, supervise
from ludic.errors import LASTING_EXIT_CODE, SlotTakenError
from ludic.root.claims import claim_slot

# Each life leaves a line; the worker ends at once, the trainer when the file `over` is there.
LIFE = """
import sys, time
from pathlib import Path
folder, name, code = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with (folder / name).open("a") as lives:
    lives.write("life\\n")
while name == "trainer" and not (folder / "over").exists():
    time.sleep(0.01)
print("another worker took slot 0")
sys.exit(code)
"""


def num_lives(folder: Path, name: str) -> int:
    return len((folder / name).read_text().splitlines()) if (folder / name).exists() else 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Supervise a trainer, and a worker that another one has replaced, until a condition holds."""
    monkeypatch.setattr("ludic.app.launch.supervisor._POLL_EVERY_S", 0.2)
    (tmp_path / "life.py").write_text(LIFE)

    def child(name: str, code: int, **options) -> ChildProcess:
        args = ["life", str(tmp_path), name, str(code)]
        return ChildProcess(name=name, args=lambda: args, log=tmp_path / f"{name}.log", **options)

    def run(is_free, until) -> None:
        def tick() -> None:
            if until():
                (tmp_path / "over").touch()

        trainer, worker = child("trainer", 0), child("worker", SlotTakenError.exit_code, is_free=is_free)
        supervise(trainer, [worker], environment={"PYTHONPATH": str(tmp_path)}, tick=tick)

    return run


@pytest.mark.slow
def test_a_worker_that_was_replaced_is_not_started_while_the_other_lives(run, tmp_path: Path, caplog) -> None:
    looks = []
    run(is_free=lambda: looks.append(time.monotonic()), until=lambda: len(looks) >= 3)
    assert num_lives(tmp_path, "worker") == 1
    warnings = [record.message for record in caplog.records]
    assert warnings == [
        f"worker was replaced and waits: another worker took slot 0 ({tmp_path / 'worker.log'} has more)"
    ]


BARS = """
from huggingface_hub.utils import tqdm as of_the_hub
from tqdm.auto import tqdm
from transformers.utils import logging
for bar in (tqdm, of_the_hub, logging.tqdm):
    list(bar(range(3), desc="drawn"))
print("done")
"""


@pytest.mark.slow
def test_libraries_draw_no_progress_bar_into_a_log(tmp_path: Path) -> None:
    (tmp_path / "bars.py").write_text(BARS)
    child = ChildProcess(name="bars", args=lambda: ["bars"], log=tmp_path / "bars.log")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    finish(child, environment=environment, tick=lambda: None)
    assert child.log.read_text() == "done\n"


@pytest.mark.slow
def test_it_is_started_again_as_often_as_the_part_gets_free(run, tmp_path: Path) -> None:
    run(is_free=lambda: True, until=lambda: num_lives(tmp_path, "worker") >= 5)
    assert num_lives(tmp_path, "worker") >= 5


# A trainer that writes its last file slowly when it is told to stop.
SLOW = """
import signal, sys, time
from pathlib import Path
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
def write(*_):
    with (folder / "file").open("w") as file:
        for _ in range(20):
            time.sleep(seconds / 20)
            file.write("x")
            file.flush()
    sys.exit()
signal.signal(signal.SIGTERM, write)
(folder / "began").touch()
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stop_within_s", "is_kept"), [(1, False), (60, True)])
def test_a_child_has_the_time_to_stop_that_its_variables_say(tmp_path: Path, monkeypatch, stop_within_s, is_kept):
    monkeypatch.setattr("ludic.app.launch.supervisor.KILL_AFTER_S", 0.0)
    (tmp_path / "slow.py").write_text(SLOW)
    child = ChildProcess(name="trainer", args=lambda: ["slow", str(tmp_path), "3"], log=tmp_path / "log")

    def interrupt() -> None:
        if (tmp_path / "began").exists():
            raise KeyboardInterrupt

    environment = {"PYTHONPATH": str(tmp_path), **stop_variables(stop_within_s)}
    with pytest.raises(KeyboardInterrupt):
        supervise(child, [], environment=environment, tick=interrupt)
    assert (len((tmp_path / "file").read_text()) == 20) == is_kept
    assert child.process.returncode == (0 if is_kept else -signal.SIGKILL)


# --- Who dies alike ------------------------------------------------------------------------------------------

# A life that ends with 1 and says why: `changing` differs from life to life, `alike` but for the time before it.
FAILING = """
import sys
from pathlib import Path
lives, words = Path(sys.argv[1]), sys.argv[2]
with lives.open("a") as file:
    file.write("life\\n")
number = len(lives.read_text().splitlines())
if words == "alike":
    print(f"12:00:{number:02} ludic: the model has no head")
elif words in ("changing", "reported"):
    print(f"ludic: step {number} failed")
if words == "reported":
    print("Root Cause (first observed failure):\\n  traceback : To enable traceback see: https://pytorch.org\\n====")
sys.exit(1)
"""


@pytest.fixture
def fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Supervise one that fails, on a machine where no start is quick; returns how it ended and how often it lived."""
    monkeypatch.setattr("ludic.app.launch.supervisor._QUICK_S", 0.0)
    (tmp_path / "failing.py").write_text(FAILING)

    def fail(words: str, most_lives: int = 5, **options) -> tuple[str, int]:
        args = ["failing", str(tmp_path / "lives"), words]
        child = ChildProcess(name="trainer", args=lambda: args, log=tmp_path / "trainer.log", **options)

        def tick() -> None:
            if num_lives(tmp_path, "lives") >= most_lives:
                raise KeyboardInterrupt

        with pytest.raises((ProcessDiedError, KeyboardInterrupt)) as ended:
            supervise(child, [], environment={"PYTHONPATH": str(tmp_path)}, tick=tick)
        return str(ended.value), num_lives(tmp_path, "lives")

    return fail


def test_three_deaths_with_equal_last_words_end_the_run_however_slow_the_machine(fail, tmp_path: Path) -> None:
    message, lives = fail("alike")
    assert message == (
        "trainer died 3 times with the same last words: 12:00:03 ludic: the model has no head "
        f"({tmp_path / 'trainer.log'} has more)"
    )
    assert lives == 3


def test_a_life_that_says_nothing_does_not_repeat_the_words_of_the_one_before(fail, tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text("of another run\n")
    message, lives = fail("nothing")
    assert message.startswith("trainer died 3 times with the same last words: (no output)")
    assert lives == 3


def test_deaths_with_other_words_each_time_are_no_reason_to_stop(fail) -> None:
    assert fail("changing")[1] >= 5


def test_torchruns_report_below_the_reason_does_not_make_deaths_alike(fail, tmp_path: Path) -> None:
    assert fail("reported")[1] >= 5
    child = ChildProcess(name="trainer", args=list, log=tmp_path / "trainer.log")
    assert child.last_words().startswith("ludic: step 5 failed (")


REPORT = "Root Cause (first observed failure):\\n  rank      : 0 (local_rank: 0)\\n  exitcode  : 78 (pid: 5)\\n===="


@pytest.mark.parametrize(("code", "report"), [(78, ""), (2, ""), (1, REPORT)])
def test_a_mistake_that_a_new_start_would_meet_again_gets_one_life(fail, tmp_path: Path, code: int, report: str):
    (tmp_path / "failing.py").write_text(
        FAILING.replace("sys.exit(1)", f'print("12:00:01 ludic: no key ***\\n{report}")\nsys.exit({code})')
    )
    message, lives = fail("nothing")
    log = tmp_path / "trainer.log"
    assert message == (f"no key *** (trainer ended with {code} and is not started again; {log} has more)")
    assert lives == 1


def test_each_death_is_told_with_its_last_words_without_secrets(fail, tmp_path: Path, caplog) -> None:
    words = "{number} of https://me:hidden@host failed"
    (tmp_path / "failing.py").write_text(FAILING.replace("{number} failed", words))
    fail("changing", most_lives=2)
    log = tmp_path / "trainer.log"
    assert caplog.messages[0] == (
        "trainer ended with 1; started again; its last words: ludic: step 1 of https://***@host failed "
        f"({log} has more)"
    )


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("[rank0]: ValueError: no head\n  traceback : To enable\n====\n", "[rank0]: ValueError: no head"),
        ("12:00:00 ludic: first\n12:00:01 ludic.root: retried\n", "12:00:00 ludic: first"),
        ("ValueError: no head\n-----\n 12 \n", "ValueError: no head"),
    ],
)
def test_the_last_words_are_the_line_that_says_why(tmp_path: Path, log: str, words: str) -> None:
    path = tmp_path / "trainer.log"
    path.write_text(log)
    assert ChildProcess(name="trainer", args=list, log=path).last_words() == f"{words} ({path} has more)"


@pytest.mark.slow
def test_a_new_checkpoint_or_a_long_life_ends_a_row_of_deaths(fail, tmp_path: Path, monkeypatch) -> None:
    assert fail("alike", progress=lambda: num_lives(tmp_path, "lives"))[1] >= 5
    (tmp_path / "lives").unlink()
    monkeypatch.setattr("ludic.app.launch.supervisor._HEALTHY_S", 0.0)
    assert fail("alike")[1] >= 5


def test_the_exit_status_of_a_replaced_worker_is_not_believed_without_a_newer_claim(fail, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(f"{FAILING.replace('sys.exit(1)', f'sys.exit({SlotTakenError.exit_code})')}")
    message, lives = fail("alike", was_replaced=lambda pid: False)
    assert message.startswith("trainer died 3 times")
    assert lives == 3


def test_a_worker_was_replaced_where_a_claim_follows_its_own(started, monkeypatch) -> None:
    def claim(pid: int) -> None:
        monkeypatch.setattr("ludic.root.claims.owner_name", lambda: f"{socket.gethostname()}-{pid}")
        claim_slot(started, 0, f"w0-{pid}")

    assert not was_replaced(started, 0, 7)
    claim(6)
    assert not was_replaced(started, 0, 7)
    claim(7)
    assert not was_replaced(started, 0, 7)
    claim(8)
    assert was_replaced(started, 0, 7)


# --- Who stands aside ------------------------------------------------------------------------------------------


@pytest.fixture
def aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Supervise a trainer and a child aside that exits with a code; returns the child, after the trainer has ended."""
    monkeypatch.setattr("ludic.app.launch.supervisor._REST_S", 1.0)
    (tmp_path / "life.py").write_text(LIFE)

    def child(name: str, code: int, **options) -> ChildProcess:
        args = ["life", str(tmp_path), name, str(code)]
        return ChildProcess(name=name, args=lambda: args, log=tmp_path / f"{name}.log", **options)

    def aside(code: int, until) -> ChildProcess:
        evaluator = child("evaluator", code, is_aside=True)
        end = tmp_path / "over"
        tick = lambda: until() and end.touch()  # noqa: E731
        supervise(child("trainer", 0), [evaluator], environment={"PYTHONPATH": str(tmp_path)}, tick=tick)
        return evaluator

    return aside


@pytest.mark.slow
def test_a_child_aside_that_keeps_dying_never_ends_the_run(aside, tmp_path: Path, caplog) -> None:
    evaluator = aside(1, until=lambda: num_lives(tmp_path, "evaluator") >= 5)
    deaths = [record.message for record in caplog.records if "died" in record.message]
    assert deaths[0] == (
        "evaluator died 3 times soon after its start: another worker took slot 0 "
        f"({tmp_path / 'evaluator.log'} has more); it is restarted every 1 s, and the others continue"
    )
    # Alone, after the others, it gets three lives, and then its failure is the run's.
    before = num_lives(tmp_path, "evaluator")
    with pytest.raises(
        ProcessDiedError, match="evaluator died 3 times soon after its start: another worker took slot 0"
    ):
        finish(evaluator, environment={"PYTHONPATH": str(tmp_path)}, tick=lambda: None)
    assert num_lives(tmp_path, "evaluator") == before + 3


@pytest.mark.slow
def test_a_child_aside_with_a_lasting_mistake_has_one_life_beside_the_others(aside, tmp_path: Path, caplog) -> None:
    began = time.monotonic()
    evaluator = aside(78, until=lambda: num_lives(tmp_path, "evaluator") and time.monotonic() - began > 1.5)
    said = f"another worker took slot 0 (evaluator ended with 78 and is not started again; {evaluator.log} has more)"
    assert [record.message for record in caplog.records] == [f"{said}; the others continue"]
    assert num_lives(tmp_path, "evaluator") == 1
    with pytest.raises(ProcessDiedError, match="evaluator ended with 78 and is not started again"):
        finish(evaluator, environment={"PYTHONPATH": str(tmp_path)}, tick=lambda: None)
    assert num_lives(tmp_path, "evaluator") == 2


@pytest.mark.slow
def test_a_child_aside_that_is_done_is_not_started_again(aside, tmp_path: Path) -> None:
    began = time.monotonic()
    evaluator = aside(0, until=lambda: num_lives(tmp_path, "evaluator") and time.monotonic() - began > 1.5)
    finish(evaluator, environment={}, tick=lambda: None)
    assert num_lives(tmp_path, "evaluator") == 1


# --- Who asks not to be started again ------------------------------------------------------------------------

HOPELESS = f"""
import os, sys, time
from pathlib import Path
from ludic.app.cli.main import fail
from ludic.app.launch.process import stop_on_signals
stop_on_signals()  # as `ludic train`: torchrun ends a rank when another one has ended
ready = Path(__file__).with_name("ready")
if os.environ.get("RANK", "0") == "0":
    ready.touch()
while not ready.exists():  # ranks have met before they find that all fails; rank 0 alone says so
    time.sleep(0.01)
fail("step 1: each rollout failed", {LASTING_EXIT_CODE}, "Traceback (most recent call last):\\n\\n  File own.py")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")])
def test_a_process_that_says_that_all_fails_ends_the_run_at_once_with_its_traceback(tmp_path: Path, ranks) -> None:
    (tmp_path / "hopeless.py").write_text(HOPELESS)
    child = ChildProcess(name="trainer", args=lambda: [*ranks, "hopeless"], log=tmp_path / "trainer.log")
    with pytest.raises(ProcessDiedError) as ended:
        supervise(child, [], environment={"PYTHONPATH": str(tmp_path)}, tick=lambda: None)
    more = re.escape(f"{tmp_path / 'trainer.log'} has more")
    ending = rf"\(trainer ended with \d+ and is not started again; {more}\)"
    assert re.fullmatch(rf"step 1: each rollout failed {ending}", str(ended.value))
    assert ended.value.detail == "Traceback (most recent call last):\n\n  File own.py"
    assert child.num_restarts == 0
