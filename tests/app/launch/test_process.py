"""A process whose parent was killed stops, and ends where it can't stop; every process here is real."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ludic.app.launch.process import LAUNCHER, SUPERVISED, interruptible, stop_variables

CHILD = """
import sys, time
from ludic.app.launch import process
process._LAST_WORDS_S, process._POLL_S = 0.4, 0.05
{patch}
stop = process.stop_on_signals()
print("ready", flush=True)
{body}
"""
WAIT = "stop.wait(); print('stopped', flush=True)"
LOOP = "while True: pass"
HANG_AFTER_PYTHON = (
    "import ctypes; c = ctypes.CDLL(None); c.__cxa_atexit(ctypes.cast(c.pause, ctypes.c_void_p), None, None); " + WAIT
)
ONLY_POLL = "process.signal_when_parent_ends = lambda number: None"
ONLY_SIGNAL = "process._POLL_S = 1e6"

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""


def outlived(child: str, environment: dict[str, str]) -> str:
    """Start a child in a process that is killed once the child is ready; what the child printed until its end."""
    command = [sys.executable, "-c", PARENT, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        # The child holds the other end of the pipe: this returns when it has ended.
        printed = parent.stdout.read()
    gone, _ = psutil.wait_procs([process], timeout=30)
    assert gone
    return printed


AT_ONCE = stop_variables(1)
RANK = {"TORCHELASTIC_RUN_ID": "none", **AT_ONCE}


@pytest.mark.slow
@pytest.mark.parametrize("patch", [ONLY_SIGNAL, ONLY_POLL], ids=["signal", "poll"])
def test_a_rank_stops_when_its_launcher_was_killed(patch):
    if patch == ONLY_SIGNAL and sys.platform != "linux":
        pytest.skip("prctl is Linux's")
    assert outlived(CHILD.format(patch=patch, body=WAIT), RANK) == "stopped\n"


@pytest.mark.slow
def test_a_rank_in_an_endless_loop_ends_too():
    assert outlived(CHILD.format(patch="", body=LOOP), RANK) == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="calls glibc")
def test_a_rank_that_hangs_after_its_interpreter_ended_is_ended_by_the_kernel():
    assert outlived(CHILD.format(patch="", body=HANG_AFTER_PYTHON), RANK) == "stopped\n"


def test_a_rank_whose_launcher_was_gone_before_it_looked_stops():
    environment = os.environ | RANK | {LAUNCHER: str(2**22)}
    result = subprocess.run(
        [sys.executable, "-c", CHILD.format(patch="", body=WAIT)], env=environment, capture_output=True, text=True
    )
    assert result.stdout == "ready\nstopped\n", result.stderr


@pytest.mark.slow
def test_a_child_of_ludic_run_in_an_endless_loop_ends_when_its_input_does():
    command = [sys.executable, "-c", CHILD.format(patch="", body=LOOP)]
    environment = os.environ | {SUPERVISED: "1"} | AT_ONCE
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (1, "ludic: the parent process ended 1 s ago, so this one ends\n")


@pytest.mark.parametrize(("variables", "seconds"), [({}, 120), (stop_variables(900), 900), (stop_variables(2), 2)])
def test_a_rank_has_the_time_to_stop_that_its_launcher_gives(variables, seconds):
    """Asks the kernel for the seconds that are left, rather than to wait for them."""
    left = "stop.wait(); import signal; print(signal.alarm(0))"
    script = CHILD.format(patch="process._LAST_WORDS_S = 5.0", body=left)
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "none"} | variables
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as rank:
        assert rank.stdout.readline() == "ready\n"
        rank.terminate()
        left_s = int(rank.stdout.read())
    assert seconds + 5 < left_s <= seconds + 10  # torchrun kills first


def test_torchrun_waits_as_long_for_its_ranks(monkeypatch):
    from torch.distributed.launcher.api import LaunchConfig

    for name, value in stop_variables(900).items():
        monkeypatch.setenv(name, value)
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 900


def test_a_process_that_nobody_started_for_us_does_not_look_for_a_parent():
    script = CHILD.format(patch="", body="time.sleep(0.5); print('lives', stop.is_set())")
    result = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert result.stdout == "ready\nlives False\n"


def block(*signals: signal.Signals) -> Iterator[str]:
    """Send signals to this process in a block; yields where it got to."""
    with interruptible() as stop:
        for number in signals:
            signal.raise_signal(number)
        assert stop.is_set()
        yield "the end"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_block_by_itself_and_then_interrupts(number: signal.Signals) -> None:
    before, steps = signal.getsignal(number), block(number)
    assert next(steps) == "the end"
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_interrupts_a_block_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        next(block(signal.SIGINT, signal.SIGINT))


def test_a_block_that_stops_by_itself_raises_nothing() -> None:
    with interruptible() as stop:
        stop.set()  # as a trainer does that another one fences
