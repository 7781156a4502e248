"""Arrays of experts that a server sends: their header says shape and type, and may say anything."""

import io
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest

from ludic.engines.server_http import BadAnswerError, Server


def file_of(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def with_header(text: str, data: bytes = b"\0" * 8) -> bytes:
    header = text.encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3, np.int16))
    return file.getvalue()


def header(shape: str, descr: str = "'<i2'") -> bytes:
    return with_header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n")


HOSTILE = {
    "an archive": archive(),
    "8 GB": header("(4294967296,)"),
    "2**70": header("(1180591620717411303424,)"),
    "negative": header("(-4,)"),
    "2**70 of nothing": header("(0, 1180591620717411303424)"),
    "too short": file_of(np.zeros((3, 2), np.int16))[:-1],
    "too long": file_of(np.zeros((3, 2), np.int16)) + b"\0",
    "objects": file_of(np.array([{}], dtype=object), allow_pickle=True),
    "a pickle": pickle.dumps([1]),
    "floats": file_of(np.zeros(3)),
    "fields": file_of(np.zeros(3, [("a", "<i2")])),
    "texts": file_of(np.array(["a"])),
    "no dictionary": with_header("[1, 2]\n"),
    "no Python": with_header("{{{{\n"),
    "deep": with_header("(" * 5_000 + "\n"),
    "long": with_header(" " * 60_000 + "\n"),
    "another version": b"\x93NUMPY\x09\x00" + b"\0" * 20,
    "half of the beginning": b"\x93NUM",
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_array_of_integers_is_an_answer_that_cant_be_used(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadAnswerError, match=r"http://a answered with experts that are not a NumPy array: "):
            Server("http://a", None, 1.0)._experts(data)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["uint8", "<i2", ">i4", "int64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_as_it_was_sent(dtype: str, order: Any) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)
    found = Server("http://a", None, 1.0)._experts(file_of(array))  # type: ignore[arg-type]
    assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
