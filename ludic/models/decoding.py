"""Turn token ids into text: for byte-level BPE by a table of the bytes of each token, in a tenth of the library's time.

Answers are decoded when they arrive, by the thread that serves all episodes.
"""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ludic.models.tokenizer import Tokenizer

_OWN_DECODE = ("transformers.tokenization_utils", "ludic.models.tokenizer")
"""Beginnings of the modules whose `decode` is known: a tokenizer with code of its own decodes itself."""
_PROBE = "It 's n't a . test , of ? marks ! é 漢字 😀\n\n\tend "
_MOST_PROBED = 1_000


def decode(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Return the text of (length,) token ids, without special tokens."""
    ids = np.asarray(tokens).tolist()
    if tokenizer not in _tables:
        _tables[tokenizer] = _table_of(tokenizer)
    table = _tables[tokenizer]
    return tokenizer.decode(ids, skip_special_tokens=True) if table is None else table.text(ids)


class _Bytes(dict[int, bytes]):
    """Bytes of each token id that was asked for; none for special tokens and unknown ids."""

    def __init__(self, backend: Any) -> None:
        added = backend.get_added_tokens_decoder()
        super().__init__({token: b"" for token, each in added.items() if each.special})
        self._token_of = backend.id_to_token

    def __missing__(self, token: int) -> bytes:
        name = self._token_of(token)
        if name is None:
            return b""
        try:
            found = bytes(map(_BYTES.__getitem__, name))
        except KeyError:  # an added token, whose name is its text
            found = name.encode()
        self[token] = found
        return found

    def text(self, ids: list[int]) -> str:
        return b"".join(map(self.__getitem__, ids)).decode(errors="replace")


_tables: WeakKeyDictionary[Tokenizer, _Bytes | None] = WeakKeyDictionary()
"""None for tokenizers that decode otherwise."""


def _table_of(tokenizer: Any) -> _Bytes | None:
    """Return the table of a tokenizer; None unless it decodes byte-level BPE in the known way."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return None
    if not all(_defining_module(tokenizer, name).startswith(_OWN_DECODE) for name in ("decode", "_decode")):
        return None
    table = _Bytes(backend)
    # Shows whether blanks are cleaned up, and how the names of added tokens are read.
    added = [token for token, each in backend.get_added_tokens_decoder().items() if not each.special]
    for ids in (list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"]), added[:_MOST_PROBED]):
        if tokenizer.decode(ids, skip_special_tokens=True) != table.text(ids):
            return None
    return table


def _defining_module(tokenizer: Any, name: str) -> str:
    """Return the module of the class that defines a method; that of the tokenizer if it has none."""
    found = next((each for each in type(tokenizer).__mro__ if name in vars(each)), type(tokenizer))
    return found.__module__


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character in the names of byte-level tokens.

    Source: GPT-2's bytes_to_unicode, which all byte-level BPE keeps: printable bytes are their own characters, the
    others those from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (each for each in range(256) if each not in printable)
    return {chr(each): each for each in printable} | {chr(256 + at): each for at, each in enumerate(others)}


_BYTES = _bytes_of_characters()
