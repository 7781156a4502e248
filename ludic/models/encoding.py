"""Encode many texts in one call, on all cores; a part that several texts share is encoded once.

The calls of a conversation repeat it, since each prompt holds all turns before it. A tokenizer of Hugging Face's
tokenizers first takes the names of added tokens out of a text, and encodes what is between them apart. So a text is
encoded in parts, from one such name to the next. Texts are encoded whole where an added token also takes the blanks
around it, or only whole words, and with any other tokenizer.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ludic.models.chat import Names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> np.ndarray:
    """Return (length,) int32: the tokens of a text, without those that the tokenizer adds around texts."""
    return np.asarray(_ids(tokenizer, text), np.int32)


def encode_all(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[np.ndarray]:
    """Return what `encode` returns for each text, of at least one. Raises any error if one can't be encoded."""
    borders = _borders(tokenizer)
    if borders is None:
        return [np.asarray(ids, np.int32) for ids in _ids(tokenizer, texts)]
    parts_of = [_parts(borders, text) for text in texts]
    parts = list(dict.fromkeys(part for parts in parts_of for part in parts))
    # Without the offsets of tokens in a text, which take a fifth of the time.
    found = tokenizer.backend_tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    tokens = {part: np.asarray(each.ids, np.int32) for part, each in zip(parts, found, strict=True)}
    return [np.concatenate([tokens[part] for part in parts]) for parts in parts_of]


def _ids(tokenizer: "PreTrainedTokenizerBase", texts: Any) -> Any:
    """Return the ids of a text, or of each of several."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(texts, **options)["input_ids"]


def _parts(borders: Names, text: str) -> list[str]:
    """Return the parts of a text; each but the first begins with the name of an added token, as in the whole text."""
    starts = [start for start in borders.starts(text) if start]
    return [text[start:end] for start, end in pairwise([0, *starts, len(text)])]


def _borders(tokenizer: "PreTrainedTokenizerBase") -> Names | None:
    """Return the names at which texts may be split; None if they must be encoded whole."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast") or tokenizer.split_special_tokens:
        return None
    if backend.truncation or backend.padding or backend.encode_special_tokens:
        return None
    # Those that are normalized are looked for later, in what is between the others.
    first = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    if any(token.lstrip or token.rstrip or token.single_word for token in first):
        return None
    return _names(frozenset(token.content for token in first))


@lru_cache(maxsize=4)
def _names(names: frozenset[str]) -> Names:
    return Names(names, shortest=1)
