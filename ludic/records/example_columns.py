"""Write the columns of an example in its data set as JSON text, cut to a length, for the column example_columns.

A value that JSON does not have becomes a near one: dates, decimals and UUIDs their text, bytes base64, NaN and
infinities null, tuples and sets lists, NumPy's values Python's, half characters question marks, keys texts, and any
other object the name of its type, such as "<Image>". Pure; raises nothing, whatever the values are.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import msgspec

from ludic.base import storable
from ludic.records.extra_columns import FEWEST_COLUMN_CHARACTERS

_CUT, _LENGTH = "cut", "characters"
_NOTE, _LEFT_OUT = "__ludic__", "left_out"
_SHORTEST_CUT = 60
"""Characters of the shortest value that is cut: cut, it takes 40 and more."""
_DEEPEST = 50


def example_columns(columns: Mapping[str, Any], most: int) -> str | None:
    """Return columns as a JSON object of at most `most` characters; None if `most` is 0 or there are no columns.

    If the text is too long, the longest values are cut to one length: each becomes {"cut": its beginning, "characters":
    the length of the text, or of the JSON text of another value}. If the names alone are too long, the last columns are
    left out, and "__ludic__": {"left_out": their number} comes last. Text that was cut before can be cut again.
    most: 0, or at least FEWEST_COLUMN_CHARACTERS.
    """
    if not most or not columns:
        return None
    assert most >= FEWEST_COLUMN_CHARACTERS, f"{most} characters have no room for the note"
    num_left_out = _number_left_out(columns.get(_NOTE))
    values = {name: value for name, value in columns.items() if name != _NOTE or not num_left_out}
    names = {name: _text(storable(str(name))) for name in values}
    texts = {name: _text(value) for name, value in values.items()}

    def length(longest: int) -> int:
        return sum(len(names[name]) + 2 + min(len(text), longest) for name, text in texts.items()) + 1

    note = f'"{_NOTE}":{{"{_LEFT_OUT}":{num_left_out}}}' if num_left_out else ""
    room = most - (len(note) + 1 if note else 0)
    longest = max(_SHORTEST_CUT, bisect_right(range(most), room, key=length) - 1)
    parts = [f"{names[name]}:{_cut(values[name], text, longest)}" for name, text in texts.items()]
    if sum(len(part) + 1 for part in parts) + 1 > room:
        parts, note = _first_parts(parts, num_left_out, most)
    return f"{{{','.join([*parts, *([note] if note else [])])}}}"


def cut_columns(given: Any, most: int) -> Any:
    """Return columns of another program, a mapping or its JSON text, as `example_columns` does; others unchanged."""
    if isinstance(given, str) and len(given) > most and is_json_object(given):
        given = msgspec.json.decode(given)
    if isinstance(given, Mapping):
        return example_columns({str(name): value for name, value in given.items()}, most)
    return given if most else None


def _first_parts(parts: list[str], num_left_out: int, most: int) -> tuple[list[str], str]:
    """Return as many parts of a JSON object as fit beside the note on the others, and the note."""
    widest = f'"{_NOTE}":{{"{_LEFT_OUT}":{num_left_out + len(parts)}}}'
    room, kept = most - len(widest) - 2, list[str]()
    for part in parts:
        room -= len(part) + 1
        if room < 0:
            break
        kept.append(part)
    return kept, f'"{_NOTE}":{{"{_LEFT_OUT}":{num_left_out + len(parts) - len(kept)}}}'


def _number_left_out(note: Any) -> int:
    """Return the number in a note of an earlier cut, 0 for any other value."""
    found = note.get(_LEFT_OUT) if isinstance(note, Mapping) and len(note) == 1 else None
    return found if type(found) is int and 0 < found < 10**9 else 0


def _cut(value: Any, text: str, longest: int) -> str:
    """Return the JSON text of a value, in at most `longest` characters. text: all of it."""
    if len(text) <= longest:
        return text
    whole, length = (storable(value), len(value)) if isinstance(value, str) else (text, len(text))
    if isinstance(value, Mapping) and value.keys() == {_CUT, _LENGTH}:
        begin, of_whole = value[_CUT], value[_LENGTH]
        if isinstance(begin, str) and type(of_whole) is int and 0 < of_whole < 10**12:
            whole, length = storable(begin), of_whole
    num_fitting = bisect_right(range(longest), longest, key=lambda number: len(_of_cut(whole[:number], length)))
    return _of_cut(whole[: num_fitting - 1], length)


def _of_cut(begin: str, length: int) -> str:
    return _encoded({_CUT: begin, _LENGTH: length})


def _text(value: Any) -> str:
    """Return the JSON text of a value."""
    try:
        return _encoded(value)
    except Exception:  # such as half characters, and whatever a user's object raises
        try:
            return _encoded(_plain(value, 0))
        except Exception:
            return _encoded(_name_of(value))


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=_near).decode()


def _near(value: Any) -> Any:
    """Return a value that JSON can hold in the place of one of another type."""
    if isinstance(value, str):
        return str.__str__(value)
    if hasattr(value, "tolist"):  # of NumPy or PyTorch
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else _name_of(value)


def _plain(value: Any, depth: int) -> Any:
    """Return a value part by part: what can't be written is replaced alone."""
    try:
        if isinstance(value, str):
            return storable(value)
        if isinstance(value, Mapping | list | tuple | set | frozenset) and depth == _DEEPEST:
            return "<nested too deep>"
        if isinstance(value, Mapping):
            return {storable(str(key)): _plain(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(each, depth + 1) for each in value]
        return msgspec.Raw(_encoded(value).encode())
    except Exception:
        return _name_of(value)


def _name_of(value: Any) -> str:
    return f"<{type(value).__name__}>"


def is_json_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
