"""Trainers for test_checkpoint_kill.py, each of which dies by SIGKILL inside of the write of step 4's checkpoint.

    python killed_in_checkpoint.py ROOT POINT [ROOT POINT ...]

A POINT is an audit event of Python's and the end of a path, such as os.rename:model.safetensors: the trainer dies
before the writing thread does that. Prints the signal that ended each.
"""

import os
import signal
import sys
import threading

from tiny_runs import train_here

from ludic.store import Root


def kill_at(point: str) -> None:
    wanted, _, ending = point.partition(":")
    is_second = False

    def look(event: str, args: tuple[object, ...]) -> None:
        nonlocal is_second
        if not threading.current_thread().name.startswith("ludic-checkpoint"):
            return
        paths = [os.fspath(arg) for arg in args if isinstance(arg, str | os.PathLike)]
        if is_second and event == wanted and any(path.endswith(ending) for path in paths):
            os.kill(os.getpid(), signal.SIGKILL)
        is_second = is_second or (event == "os.link" and paths[-1].endswith("step=2/checkpoint.json"))

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
