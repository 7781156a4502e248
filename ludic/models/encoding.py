"""Encode many texts in one call, on all cores; parts that several texts share are encoded once.

Each prompt of a conversation repeats all earlier turns. Hugging Face's tokenizers first split a text at the names of
added tokens, and encode the pieces separately. So a text is encoded here in parts, from one such name to the next.
Texts are encoded as a whole if an added token strips blanks around it or matches only whole words, and with any other
tokenizer. Raises any error of the tokenizer.

A QUOTE of ludic.models.chat in the name of a special token is removed, and the name is encoded as plain text. In texts
that are encoded as a whole, both sides of it are encoded separately, which gives other tokens of the same text.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from ludic.models.chat import QUOTE, Names
from ludic.models.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return (length,) int32: the tokens of a text, without those that the tokenizer adds around texts."""
    if QUOTE in text:
        return encode_all(tokenizer, [text])[0]
    return np.asarray(_ids(tokenizer, text), np.int32)


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Return `encode` of each text; there must be at least one. Raises any error if a text can't be encoded."""
    borders = _borders(tokenizer)
    parts_of = [text.split(QUOTE) if borders is None else _parts(borders, text) for text in texts]
    parts = list(dict.fromkeys(part for parts in parts_of for part in parts))
    if borders is None:
        tokens = {part: np.asarray(ids, np.int32) for part, ids in zip(parts, _ids(tokenizer, parts), strict=True)}
    else:
        tokens = _tokens_of_parts(_backend(tokenizer), borders, parts)
    return [np.concatenate([tokens[part] for part in parts]) for parts in parts_of]


def _tokens_of_parts(backend: Any, borders: Names, parts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the tokens of each part: the added token at its start, and the tokens of the text after it."""
    quoting = [part for part in parts if QUOTE in part]
    heads = {part: part[: next((end for start, end in borders.spans(part) if not start), 0)] for part in quoting}
    plain = list(dict.fromkeys([*(part for part in parts if QUOTE not in part), *heads.values()]))
    # Without token offsets, which take a fifth of the time.
    found = backend.encode_batch_fast(plain, add_special_tokens=False)
    tokens = {part: np.asarray(each.ids, np.int32) for part, each in zip(plain, found, strict=True)}
    if quoting:
        backend.encode_special_tokens = True  # the names of special tokens are text
        try:
            rests = [part.removeprefix(heads[part]).replace(QUOTE, "") for part in quoting]
            found = backend.encode_batch_fast(rests, add_special_tokens=False)
        finally:
            backend.encode_special_tokens = False
        for part, rest in zip(quoting, found, strict=True):
            tokens[part] = np.concatenate([tokens[heads[part]], np.asarray(rest.ids, np.int32)])
    return tokens


def _ids(tokenizer: Tokenizer, texts: Any) -> Any:
    """Return the ids of a text, or of each of several."""
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _parts(borders: Names, text: str) -> list[str]:
    """Return the parts of a text; each but the first begins with the name of an added token, as in the whole text."""
    starts = [start for start, _ in borders.spans(text) if start]
    return [text[start:end] for start, end in pairwise([0, *starts, len(text)])]


def _backend(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer of the package tokenizers; None if there is none."""
    return getattr(tokenizer, "backend_tokenizer", None)


def _borders(tokenizer: Tokenizer) -> Names | None:
    """Return the names at which texts may be split; None if they must be encoded whole."""
    backend = _backend(tokenizer)
    if not hasattr(backend, "encode_batch_fast") or tokenizer.split_special_tokens:
        return None
    if backend.truncation or backend.padding or backend.encode_special_tokens:
        return None
    # Normalized names are searched for later, between the others.
    first = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    if any(token.lstrip or token.rstrip or token.single_word for token in first):
        return None
    return _names(frozenset(token.content for token in first))


@lru_cache(maxsize=4)
def _names(names: frozenset[str]) -> Names:
    return Names(names, shortest=1)
