"""Read JSON that a model wrote, strictly by the standard: Python's json also accepts NaN, Infinity and 1e999.

A value that is read can be written as JSON again. Raises ValueError for other text, RecursionError for deep nesting.
"""

import json
import math
from typing import Any


def read_json(text: str) -> Any:
    """Return the value of a whole text."""
    return _DECODER.decode(text)


def find_json(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at an index of a text, and the index of its end.

    Line breaks inside strings are accepted: models write them, mostly in code.
    """
    return _LENIENT.raw_decode(text, start)


def finite_float(text: str) -> float:
    """Return the value of a JSON number. Raises ValueError for one that is larger than the largest float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is larger than the largest float")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=finite_float)
_LENIENT = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=finite_float)
