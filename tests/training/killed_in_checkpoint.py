"""Trainers for test_checkpoint_kill.py, each of which dies by SIGKILL while it writes step 4's checkpoint or version.

    python killed_in_checkpoint.py ROOT POINT [ROOT POINT ...]

A POINT is an audit event of Python's and the end of a path, such as os.rename:model.safetensors: the trainer dies
before the thread that writes checkpoints, or policies/version=V, does that. Prints the signal that ended each.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from lives import paths_of
from tiny_runs import train_here

from ludic.root.root import Root


def kill_at(point: str) -> None:
    wanted, _, ending = point.partition(":")
    thread = "ludic-publish" if "version=" in ending else "ludic-checkpoint"
    marker = ""

    def look(event: str, args: tuple[object, ...]) -> None:
        nonlocal marker
        if event not in ("open", "os.rename", "os.link"):
            return
        paths = paths_of(event, args)
        is_here = event == wanted and any(path.endswith(ending) for path in paths)
        if is_here and threading.current_thread().name.startswith(thread):
            while thread == "ludic-publish" and not (marker and Path(marker).exists()):  # another thread writes it
                time.sleep(0.01)
            if marker:
                os.kill(os.getpid(), signal.SIGKILL)
        if event == "os.link" and paths[-1].endswith("step=2/checkpoint.json"):
            marker = paths[-1]

    sys.addaudithook(look)


def main(*args: str) -> None:
    for url, point in zip(args[::2], args[1::2], strict=True):
        child = os.fork()  # the imports take longer than all trainers
        if child == 0:
            kill_at(point)
            train_here(Root.open(url), num_steps=5, checkpoint_every=2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
