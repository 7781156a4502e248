"""A worker whose environment can't be interrupted is ended from outside, with the name of the call."""

import signal
import subprocess
import sys

import pytest

from ludic.app.launch.guard import guarded

HANGS = """
import ctypes, sys
from ludic.app.launch import guard
guard._GRACE_S = 0.1
with guard.guarded(0.1) as announce:
    announce("reset")()
    announce(sys.argv[1])
    # PyDLL keeps Python's lock, so that no thread and no signal handler of this process runs again.
    ctypes.PyDLL(None).sleep(1000)
"""


def test_a_worker_that_hangs_in_c_ends_with_the_name_of_the_call():
    result = subprocess.run([sys.executable, "-c", HANGS, "score on\nexample 'a'"], capture_output=True, text=True)
    assert result.returncode == -signal.SIGABRT
    assert result.stderr == "ludic: score on example 'a' did not end within 0.2 s, so this worker ends\n"


def test_calls_that_go_on_side_by_side_are_all_named():
    script = HANGS.replace(
        "announce(sys.argv[1])", "ends = announce('step'); announce(sys.argv[1]); announce('x'); ends()"
    )
    result = subprocess.run([sys.executable, "-c", script, "score"], capture_output=True, text=True)
    assert result.returncode == -signal.SIGABRT
    assert result.stderr == "ludic: score and x did not end within 0.2 s, so this worker ends\n"


def test_any_number_of_calls_goes_on_at_once_in_any_thread():
    script = HANGS.replace(
        "announce(sys.argv[1])",
        "from concurrent.futures import ThreadPoolExecutor as Pool;"
        "ends = [*Pool(8).map(announce, ['\u00e4' * 300] * 3000)]; announce(sys.argv[1]); [end() for end in ends]",
    )
    result = subprocess.run([sys.executable, "-c", script, "the last"], capture_output=True, text=True)
    assert result.returncode == -signal.SIGABRT
    assert result.stderr == "ludic: the last did not end within 0.2 s, so this worker ends\n"


@pytest.mark.slow
def test_a_call_that_waits_is_not_late_while_others_are_told():
    script = """
import time
from ludic.app.launch import guard
guard._GRACE_S = 0.5
with guard.guarded(0.5) as announce:
    waits = announce("waits")  # its own limit can't end it while others hold up its event loop
    for _ in range(8):
        ends = announce("blocks")
        time.sleep(0.4)
        ends()
    waits()
print("went on")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr


def test_a_guard_ends_with_what_it_guards():
    with guarded(0.1) as announce:
        announce("score")()


def test_a_guard_that_was_killed_is_missed_by_nobody():
    script = """
import os, signal, subprocess
from ludic.app.launch.guard import guarded
kept = []
start = subprocess.Popen
subprocess.Popen = lambda *args, **options: kept.append(start(*args, **options)) or kept[0]
with guarded(60.0) as announce:
    kept[0].kill(); kept[0].wait()
    announce("score")
print("went on")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr
