"""Count the lines of a module that run: how work grows, without a clock."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any


@dataclass
class Lines:
    """Lines that have run; each round of a loop counts again."""

    num: int = 0


@contextmanager
def counted_lines(module: ModuleType) -> Iterator[Lines]:
    """Count the lines of a module that this thread runs within the block, in functions called in it."""
    lines, before = Lines(), sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        lines.num += event == "line"
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
