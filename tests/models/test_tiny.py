"""The model that demos and tests make on the spot."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.errors import ConfigError
from ludic.models.tiny import make_tiny_model


def test_the_default_sizes_have_as_many_parameters_as_the_docs_say(tmp_path: Path) -> None:
    # 200 words and 40 entries that are always there: 256 rows, the next multiple of 64.
    make_tiny_model(str(tmp_path), (f"{a}{b}" for a in "abcdefghij" for b in "abcdefghijklmnopqrst"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == 256
    # A layer: 4 x 64 x 64 attention, 3 x 64 x 128 MLP, 4 x 64 norms. Then one last norm, and the tied embedding.
    assert model.num_parameters() == 2 * (16_384 + 24_576 + 256) + 64 + 256 * 64 == 98_880
    assert model.config.max_position_embeddings == 512


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in {"one": 3, "same": 3, "other": 4}.items():
        make_tiny_model(str(tmp_path / name), ["cats and dogs"], seed=seed)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_making_a_model_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    make_tiny_model(str(tmp_path), ["cats"])
    assert torch.rand(3).tolist() == expected.tolist()


def test_auto_tokenizer_splits_lower_cased_words_single_digits_and_punctuation(tmp_path: Path) -> None:
    make_tiny_model(str(tmp_path), ["the cat", "Don't PANIC"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("The cat: don't panic, 42 zebras!") == (
        ["the", "cat", ":", "don", "'", "t", "panic", ",", "4", "2", "<unk>", "!"]
    )


def test_text_of_known_words_survives_encoding_and_decoding(tmp_path: Path) -> None:
    make_tiny_model(str(tmp_path), ["how many cats"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer.encode("how many cats ? 4 2 + 1")
    assert len(tokens) == 8
    assert tokenizer.decode(tokens) == "how many cats ? 4 2 + 1"


def test_the_embedding_is_padded_and_padding_decodes_to_nothing(tmp_path: Path) -> None:
    make_tiny_model(str(tmp_path), ["cats"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(tokenizer) < model.config.vocab_size == 64
    assert tokenizer.decode([tokenizer.convert_tokens_to_ids("cats"), 63, 62]) == "cats"


def test_model_and_tokenizer_agree_on_the_end_of_sequence(tmp_path: Path) -> None:
    make_tiny_model(str(tmp_path), ["cats"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.encode("<eos>")[0]


@pytest.mark.parametrize("hidden_size", [0, 32, 96])
def test_a_hidden_size_that_heads_do_not_divide_is_refused(tmp_path: Path, hidden_size: int) -> None:
    with pytest.raises(ConfigError, match=f"hidden_size is {hidden_size}, wanted a multiple of 64"):
        make_tiny_model(str(tmp_path), ["cats"], hidden_size=hidden_size)
