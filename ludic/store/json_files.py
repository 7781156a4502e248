"""JSON files that end with a digest of their own text, so that a flipped bit is seen when they are read.

    {
      "version": 3,
      "digest": "xxh3_64:0123456789abcdef"
    }

The digest is of all bytes before its line. A file without one, of an older ludic or written by hand, is read as it is.
A last line that looks nearly like a digest is a damaged one. Touches no file.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest

Record = TypeVar("Record")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A number of a file that becomes part of a name or of an int64 column."""

_BEGIN, _END = b',\n  "digest": "xxh3_64:', b'"\n}\n'
_DIGITS = 16
_LAST_LINE = len(_BEGIN) + _DIGITS + len(_END)
_FEW_BITS = 16


def encode_json(values: Mapping[str, Any], *, indent: int | None = 2, allow_nan: bool = True) -> bytes:
    """Text of a file that holds these values. Raises what json.dumps does."""
    assert values, "a file without values"
    assert "digest" not in values, "digest is the name of the file's own digest"
    head = json.dumps(values, indent=indent, allow_nan=allow_nan).removesuffix("}").rstrip().encode()
    return head + _last_line(head)


def decode_json(data: bytes) -> dict[str, Any]:
    """The values of a file. Raises ValueError for text that is no JSON object, or that does not match its digest."""
    last_line = data[-_LAST_LINE:]
    if last_line != _last_line(data[:-_LAST_LINE]) and _is_nearly_digest(last_line):
        raise ValueError(
            "it does not match its digest, so a disk, a copy or a person has changed it; put a sound copy in its "
            "place, or delete its entry 'digest' if the values are right"
        )
    try:
        values = json.loads(data)
    except RecursionError as error:
        raise ValueError("its values are nested too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"it holds a JSON {type(values).__name__}, wanted an object")
    values.pop("digest", None)  # of a file that another program has written again
    return values


def decode_record(data: bytes, record: type[Record]) -> Record:
    """A dataclass from the values of a file; keys that it does not know, of a newer ludic, are left out.

    Raises ValueError as decode_json does, and for a value that is absent or has another type than its field.
    """
    return convert(decode_json(data), record)


def convert(values: Any, record: type[Record]) -> Record:
    """A dataclass from JSON's values. Raises ValueError for one that is absent or has another type than its field."""
    try:
        return msgspec.convert(values, record)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _last_line(head: bytes) -> bytes:
    return _BEGIN + xxh3_64_hexdigest(head).encode() + _END


def _is_nearly_digest(last_line: bytes) -> bool:
    """Whether it is a digest, apart from a few bits."""
    if len(last_line) != _LAST_LINE:
        return False
    found, wanted = last_line[: len(_BEGIN)] + last_line[-len(_END) :], _BEGIN + _END
    different = np.frombuffer(found, np.uint8) ^ np.frombuffer(wanted, np.uint8)
    return int(np.unpackbits(different).sum()) <= _FEW_BITS
