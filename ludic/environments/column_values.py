"""Convert column values such as NaN, dates, decimals and bytes for JSON and MessagePack, and restore them exactly.

A value that neither format can represent exactly becomes {MARK: [kind, text]}. All other values are unchanged. Raises
nothing: a value of an unknown type is left for the encoder.
"""

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

MARK = "__ludic__"
"""Key of an object that represents a value."""


def spelled(value: Any) -> Any:
    """Return a value that JSON and MessagePack can represent."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {MARK: ["float", str(float(value))]}
    if isinstance(value, Mapping):
        if MARK not in value and all(isinstance(key, str) for key in value):
            return {key: spelled(each) for key, each in value.items()}
        return {MARK: ["mapping", [[spelled(key), spelled(each)] for key, each in value.items()]]}
    if isinstance(value, list):
        return [spelled(each) for each in value]
    if isinstance(value, tuple):
        return {MARK: ["tuple", [spelled(each) for each in value]]}
    return next(({MARK: [kind, write(value)]} for kind, (own, write) in _WRITERS.items() if own(value)), value)


def read_back(value: Any) -> Any:
    """Return the original of a converted value."""
    if isinstance(value, list):
        return [read_back(each) for each in value]
    if not isinstance(value, dict):
        return value
    stored = value.get(MARK) if len(value) == 1 else None
    if isinstance(stored, list) and len(stored) == 2 and stored[0] in [*_READERS]:
        with suppress(ValueError, TypeError, ArithmeticError, AttributeError):  # an object that a person wrote
            return _READERS[stored[0]](stored[1])
    return {key: read_back(each) for key, each in value.items()}


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_of_pandas(name: str) -> Callable[[Any], bool]:
    """Return whether a value is pandas', which Arrow returns for nanoseconds if pandas is installed."""
    return lambda value: type(value).__name__ == name and type(value).__module__.startswith("pandas")


def _write_time(value: Any) -> list[str | None]:
    zone = getattr(value.tzinfo, "key", None) or getattr(value.tzinfo, "zone", None)
    return [value.isoformat(), zone]


def _in_zone(value: Any, zone: str | None) -> Any:
    return value if zone is None else value.astimezone(ZoneInfo(zone))


def _of_pandas(name: str, text: str) -> Any:
    import pandas as pd

    return getattr(pd, name)(text)


# The order matters: values of pandas are datetime values, too, and a datetime is a date.
_WRITERS: Mapping[str, tuple[Callable[[Any], bool], Callable[[Any], Any]]] = {
    "Timestamp": (_is_of_pandas("Timestamp"), _write_time),
    "Timedelta": (_is_of_pandas("Timedelta"), lambda value: value.isoformat()),
    "datetime": (_is(datetime), _write_time),
    "date": (_is(date), date.isoformat),
    "time": (_is(time), time.isoformat),
    "timedelta": (_is(timedelta), lambda value: [value.days, value.seconds, value.microseconds]),
    "Decimal": (_is(Decimal), str),
    "bytes": (_is(bytes), lambda value: b64encode(value).decode()),
    "UUID": (_is(UUID), str),
}
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "mapping": lambda pairs: {read_back(key): read_back(each) for key, each in pairs},
    "tuple": lambda items: tuple(map(read_back, items)),
    "Timestamp": lambda stored: _in_zone(_of_pandas("Timestamp", stored[0]), stored[1]),
    "Timedelta": lambda stored: _of_pandas("Timedelta", stored),
    "datetime": lambda stored: _in_zone(datetime.fromisoformat(stored[0]), stored[1]),
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda stored: timedelta(*stored),
    "Decimal": Decimal,
    "bytes": b64decode,
    "UUID": UUID,
}
