"""Tokens as text, and the colours that say how likely they were."""

import math

import pytest
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ludic.app.show.transcript import TokenRow, coloured, token_texts


def byte_tokenizer() -> Tokenizer:
    """A token a byte, as byte-level BPE without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["two words", "déjà vu", "🐈 cats\n\n🐈", "", "   "])
def test_what_tokens_add_makes_the_whole_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode(text).ids
    texts = token_texts(tokenizer.decode, token_ids)
    assert len(texts) == len(token_ids) == len(text.encode())
    assert "".join(texts) == text


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    tokenizer = byte_tokenizer()
    assert token_texts(tokenizer.decode, tokenizer.encode("aé!").ids) == ["a", "", "é", "!"]


def test_a_response_that_ends_inside_a_character_keeps_its_last_token() -> None:
    tokenizer = byte_tokenizer()
    assert token_texts(tokenizer.decode, tokenizer.encode("aé").ids[:2]) == ["a", "\N{REPLACEMENT CHARACTER}"]


def row(probability: float, *, sampled: bool = True) -> TokenRow:
    return TokenRow(token_id=1, text="x", logprob=math.log(probability), reward=0.0, sampled=sampled)


def styles(text: Text) -> list[str]:
    return [str(span.style) for span in text.spans]


def test_the_less_likely_the_redder() -> None:
    tokens = [row(1.0), row(0.6), row(0.2), row(0.05), row(0.001)]
    assert styles(coloured(tokens, "logprob", None)) == ["green", "bright_green", "yellow", "bright_red", "bold red"]


def test_what_was_not_sampled_has_no_colour() -> None:
    assert styles(coloured([row(1.0, sampled=False)], "logprob", None)) == ["dim italic"]
    assert styles(coloured([row(1.0, sampled=False)], "advantage", 1.0)) == ["dim italic"]


def test_an_advantage_colours_by_its_sign() -> None:
    assert [styles(coloured([row(0.5)], "advantage", value)) for value in (0.5, -0.5, 0.0)] == [
        ["green"],
        ["red"],
        ["dim"],
    ]
    assert styles(coloured([row(0.5)], "advantage", None)) == []
    assert styles(coloured([row(0.5)], "none", 1.0)) == []
