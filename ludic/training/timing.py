"""Where a step's time goes: the seconds of its phases, without a wait for the device inside of them.

Kernels run after the call that asked for them has returned. So phases within a step are measured on CUDA by events in
the device's stream, which are looked at once, at the end; phases of the loop by this process's clock.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Seconds by phase of one step. A phase may hold others; one that is entered again adds up."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def host(self, phase: str) -> Iterator[None]:
        """Until the device has done what was asked of it in here."""
        started = time.perf_counter()
        yield
        if self._is_cuda:
            torch.cuda.synchronize()
        self._seconds[phase] += time.perf_counter() - started

    @contextmanager
    def device(self, phase: str) -> Iterator[None]:
        """On CUDA from when the device begins with what is asked of it in here; nobody waits for it."""
        if not self._is_cuda:
            with self.host(phase):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((phase, start, end))

    def seconds(self) -> dict[str, float]:
        """By phase; waits for the device."""
        for phase, start, end in self._events:
            end.synchronize()
            self._seconds[phase] += start.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)
