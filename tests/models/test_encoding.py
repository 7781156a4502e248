"""Texts that are encoded together, in parts, have the tokens that they have alone."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from chat_models import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ludic.models import encoding
from ludic.models.encoding import encode, encode_all

_LETTERS = ["a", "b", "ab", "Ba", " ", "  ", "\n", "\n\n", "é", "e\u0301", "日", "🦊", "▁", "<", ">", "."]


def _tokenizer(model: Any, *added: str | AddedToken, **parts: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([each for each in added if isinstance(each, str)])
    tokenizer.add_tokens([each for each in added if isinstance(each, AddedToken)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def _unigram() -> models.Unigram:
    return models.Unigram([("[UNK]", 0.0), ("▁", -1.0), ("▁a", -1.5), ("a", -2.0), ("b", -2.0), ("ab", -2.5)], 0)


def _words() -> models.WordLevel:
    return models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "ba": 4}, unk_token="[UNK]")


@cache
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """Each with names of added tokens that may begin or end within each other."""
    first = {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first"), "decoder": decoders.Metaspace()}
    return {
        "bytes": chat_tokenizer(),
        "a mark before the first word": _tokenizer(_unigram(), "<x>", "<x>b", "x><", "<x", "\n\n", **first),
        "a mark before each text": _tokenizer(
            _unigram(),
            *("<x>", "a", "▁"),
            normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        ),
        "words": _tokenizer(
            _words(),
            *("<x>", AddedToken("AB", normalized=True), AddedToken("<y>", normalized=False, special=False)),
            normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()]),
            pre_tokenizer=pre_tokenizers.WhitespaceSplit(),
            post_processor=processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 5)]),
        ),
        "blanks go with a name": _tokenizer(
            _words(), "<x>", AddedToken("<y>", rstrip=True, normalized=False), AddedToken("<z>", lstrip=True)
        ),
        "whole words": _tokenizer(_words(), "<x>", AddedToken("ab", single_word=True, normalized=False)),
    }


_PIECES = st.sampled_from([*_LETTERS, "<x>", "<x>b", "x><", "<y>", "<z>", "AB", "<|im_start|>", "<|im_end|>"])
_TEXTS = st.lists(st.lists(_PIECES, max_size=12).map("".join), min_size=1, max_size=4)


@pytest.mark.parametrize("name", tokenizers())
@settings(max_examples=50, deadline=None)
@given(texts=_TEXTS)
def test_tokens_of_texts_together_are_those_of_each_alone(name: str, texts: list[str]) -> None:
    tokenizer = tokenizers()[name]
    texts = [*texts, texts[0] + texts[-1]]  # as a conversation goes on
    assert [tokens.tolist() for tokens in encode_all(tokenizer, texts)] == [
        encode(tokenizer, text).tolist() for text in texts
    ]


def test_texts_are_split_unless_a_name_takes_what_is_around_it() -> None:
    split = {name for name, tokenizer in tokenizers().items() if encoding._borders(tokenizer) is not None}
    assert tokenizers().keys() - split == {"blanks go with a name", "whole words"}


def test_a_tokenizer_that_cuts_pads_or_spells_out_special_tokens_gets_whole_texts() -> None:
    tokenizer = _tokenizer(_words(), "<x>", pre_tokenizer=pre_tokenizers.WhitespaceSplit())
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert encoding._borders(tokenizer) is None
    assert [each.tolist() for each in encode_all(tokenizer, ["a b ab", "a"])] == [[1, 2, 3], [1]]
    tokenizer.split_special_tokens = True
    assert [each.tolist() for each in encode_all(tokenizer, ["a <x>"])] == [encode(tokenizer, "a <x>").tolist()]
    assert encoding._borders(tokenizer) is None


def test_a_part_that_texts_share_is_encoded_once() -> None:
    asked: list[list[str]] = []

    def encode_batch_fast(texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        asked.append(texts)
        return [SimpleNamespace(ids=[len(text)]) for text in texts]

    name = SimpleNamespace(content="<x>", normalized=False, lstrip=False, rstrip=False, single_word=False)
    backend = SimpleNamespace(
        truncation=None,
        padding=None,
        encode_special_tokens=False,
        get_added_tokens_decoder=lambda: {1: name},
        encode_batch_fast=encode_batch_fast,
    )
    tokenizer: Any = SimpleNamespace(backend_tokenizer=backend, split_special_tokens=False)
    tokens = encode_all(tokenizer, ["s<x>q", "s<x>q<x>answer", "s<x>q<x>answer<x>q"])
    assert asked == [["s", "<x>q", "<x>answer"]]
    assert [each.tolist() for each in tokens] == [[1, 4], [1, 4, 9], [1, 4, 9, 4]]
