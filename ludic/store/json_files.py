"""Encode and decode JSON files that end with a digest of their own text, so that reading detects a flipped bit.

    {
      "version": 3,
      "digest": "xxh3_64:0123456789abcdef"
    }

The digest covers all bytes before its line. A file without a digest, from an older ludic or written by hand, is read
unchecked. A last line that is nearly a digest line counts as damaged. Only `read_record` opens a file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest

from ludic.errors import SchemaError

if TYPE_CHECKING:
    from ludic.store.filesystem import Storage

Record = TypeVar("Record")

_BEGIN, _END = b',\n  "digest": "xxh3_64:', b'"\n}\n'
_DIGITS = 16
_LAST_LINE = len(_BEGIN) + _DIGITS + len(_END)
_FEW_BITS = 16


def encode_json(values: Mapping[str, Any], *, indent: int | None = 2, allow_nan: bool = True) -> bytes:
    """Return the text of a file with these values. Raises json.dumps's errors."""
    assert values, "a file without values"
    assert "digest" not in values, "digest is the name of the file's own digest"
    head = json.dumps(values, indent=indent, allow_nan=allow_nan).removesuffix("}").rstrip().encode()
    return head + _last_line(head)


def encode_record(record: Any, *, indent: int | None = 2) -> bytes:
    """Return the text of a file with the fields of a dataclass."""
    return encode_json(asdict(record), indent=indent)


def decode_json(data: bytes) -> dict[str, Any]:
    """Return the values of a file. Raises ValueError if it is not a JSON object or does not match its digest."""
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
    values.pop("digest", None)  # another program may have rewritten the file and kept this entry
    return values


def decode_record(data: bytes, record: type[Record]) -> Record:
    """Return the values of a file as a dataclass; unknown keys, written by a newer ludic, are ignored.

    Raises ValueError as decode_json does, and if a value is missing or has another type than its field.
    """
    return convert(decode_json(data), record)


def read_record(root: "Storage", name: str, record: type[Record], what: str, advice: str = "") -> Record | None:
    """Return a file as a dataclass, as decode_record does; None if the file does not exist.

    Raises SchemaError, which names the file and says that it is no `what`, why, and what to do (`advice`).
    """
    try:
        return decode_record(root.read(name), record)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError(
            f"{root.url}/{name} is no {what} that ludic can read: {error}{advice and f'; {advice}'}"
        ) from error


def convert(values: Any, record: type[Record]) -> Record:
    """Convert JSON values to a dataclass. Raises ValueError if one is missing or has another type than its field."""
    try:
        return msgspec.convert(values, record)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _last_line(head: bytes) -> bytes:
    return _BEGIN + xxh3_64_hexdigest(head).encode() + _END


def _is_nearly_digest(last_line: bytes) -> bool:
    """Return whether a last line is a digest line except for at most _FEW_BITS bits outside its digits."""
    if len(last_line) != _LAST_LINE:
        return False
    found, wanted = last_line[: len(_BEGIN)] + last_line[-len(_END) :], _BEGIN + _END
    different = np.frombuffer(found, np.uint8) ^ np.frombuffer(wanted, np.uint8)
    return int(np.unpackbits(different).sum()) <= _FEW_BITS
