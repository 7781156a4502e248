"""The text of token ids is the one that the tokenizer itself gives, whichever way it is made."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.test_encoding import tokenizers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ludic.models.decoding import _table_of, decode
from ludic.models.tiny import train_tokenizer
from ludic.models.tokenizer import read_folder


def _byte_level(cls: type[Any] = PreTrainedTokenizerFast, **settings: Any) -> Any:
    backend = train_tokenizer(["it is n't the tests . 漢字 é é 😀 😀"] * 3, vocab_size=300)._tokenizer
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("Ġé 漢", special=False)])
    return cls(tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<é>"], **settings)


class _Upper(PreTrainedTokenizerFast):
    def decode(self, *args: Any, **named: Any) -> str:
        return str(super().decode(*args, **named)).upper()


_BY_TABLE = ("byte level", "cleans no bytes up", "folder")


@cache
def _all(folder: Path) -> dict[str, Any]:
    cleaned = {"clean_up_tokenization_spaces": True}
    forced = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    _byte_level().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return {
        "byte level": _byte_level(),
        "cleans no bytes up": _byte_level(**cleaned),
        "cleans bytes up": _byte_level(**cleaned, **forced),
        "a decode of its own": _byte_level(_Upper),
        "folder": read_folder(folder),
        **tokenizers(),
    }


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _all(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 320), max_size=12))
def test_the_text_is_that_of_the_tokenizer(known: dict[str, Any], ids: list[int]) -> None:
    for name, tokenizer in known.items():
        of_library = tokenizer.decode(ids, skip_special_tokens=True)
        assert decode(tokenizer, np.array(ids, np.int32)) == of_library, name


@pytest.mark.parametrize("data", [b"\xf0\x80\x80a", b"\xe2\x82", b"\xed\xa0\x80\xed", b"\xff\xc3\xa9\xc3", b"\xf4\x90"])
def test_bytes_that_are_no_text_are_replaced_as_the_library_does(known: dict[str, Any], data: bytes) -> None:
    tokenizer = known["byte level"]
    table = _table_of(tokenizer)
    assert table is not None
    token_of = {table[token]: token for token in range(300)}
    ids = [token_of[bytes([each])] for each in data]
    assert decode(tokenizer, np.array(ids)) == tokenizer.decode(ids) == data.decode(errors="replace")


def test_only_byte_level_tokenizers_of_the_known_code_are_read_by_the_table(known: dict[str, Any]) -> None:
    tables = {name for name, tokenizer in known.items() if _table_of(tokenizer) is not None}
    assert tables == {*_BY_TABLE, "bytes"}


def test_a_token_that_is_added_later_has_its_text() -> None:
    tokenizer = _byte_level()
    new = len(tokenizer)
    assert decode(tokenizer, np.array([new])) == ""
    tokenizer.add_tokens(["later"])
    assert decode(tokenizer, np.array([new])) == "later"
