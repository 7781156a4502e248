"""Create a tiny causal language model for demos, tests and benchmarks, without a download.

Writes a Hugging Face folder: Qwen3 weights drawn from a seed, and a tokenizer with one entry per
word. With the default sizes and 256 entries it has 98,880 parameters (400 kB).

It is a Qwen3, not a Qwen2, because AutoTokenizer of transformers 5 replaces the pre-tokenizer of every folder of
model type qwen2 by Qwen2's own; it does not change Qwen3 folders.
"""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from ludic.errors import ConfigError

UNKNOWN, PAD, END = "<unk>", "<pad>", "<eos>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
ALWAYS = (*"0123456789", *".,!?:;'\"()[]{}<>+-*/=%_")
"""Entries of every tokenizer, in addition to the caller's words."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Smallest head size that every attention backend of vLLM supports (FlashInfer: 64, 128, 256).
HEAD_DIM = 64


def make_tiny_model(
    folder: str,
    words: Iterable[str],
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    max_position_embeddings: int = 512,
) -> None:
    """Write model and tokenizer to `folder`; the same arguments give the same bytes of weights.

    words: vocabulary of the model, as words or as whole texts; digits and common punctuation are added. For the others
    see `write_model`.
    """
    write_model(
        folder,
        _word_tokenizer(words, max_position_embeddings),
        seed=seed,
        hidden_size=hidden_size,
        num_layers=num_layers,
    )


def write_model(
    folder: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    hidden_size: int,
    num_layers: int,
    num_key_value_heads: int = 1,
    initializer_range: float = 0.02,
) -> None:
    """Write a model of random weights for a tokenizer, and the tokenizer; the same arguments give the same weights.

    Its context is the tokenizer's model_max_length. The embedding is padded to a multiple of 64 rows, and ids past the
    last entry decode to nothing. initializer_range: standard deviation of matrices. Raises ConfigError if hidden_size
    is not a multiple of 64.
    """
    if hidden_size < HEAD_DIM or hidden_size % HEAD_DIM:
        raise ConfigError(f"hidden_size is {hidden_size}, wanted a multiple of {HEAD_DIM}, the size of a head")
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=num_key_value_heads,
        initializer_range=initializer_range,
        head_dim=HEAD_DIM,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _word_tokenizer(words: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of lower-cased words, single digits and punctuation marks; decoding joins them with blanks."""
    normalizer = normalizers.Lowercase()
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    )
    pieces = (piece for text in words for piece, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    entries = dict.fromkeys((UNKNOWN, PAD, END, *ROLES, *ALWAYS, *pieces))
    tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
