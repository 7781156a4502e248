"""Seconds of a step's phases, measured without waiting for the device inside a step.

CUDA kernels run after their call has returned. So phases inside a step are measured on CUDA by events in the device's
stream, which are read once at the end. Phases of the loop are measured by this process's clock.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Seconds of one step by phase. Phases may be nested; the times of a repeated phase add up."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def host(self, phase: str) -> Iterator[None]:
        """Measure the block by the clock, until the device has finished its work."""
        started = time.perf_counter()
        yield
        if self._is_cuda:
            torch.cuda.synchronize()
        self._seconds[phase] += time.perf_counter() - started

    @contextmanager
    def device(self, phase: str) -> Iterator[None]:
        """Measure the device's work in the block, on CUDA by events without waiting, elsewhere like `host`."""
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
        """Return the seconds of each phase; waits for the device."""
        for phase, start, end in self._events:
            end.synchronize()
            self._seconds[phase] += start.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)
