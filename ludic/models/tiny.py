"""Create tiny causal language models for demos, tests and benchmarks, without a download.

Writes a Hugging Face folder: Qwen3 weights drawn from a seed, and a tokenizer of words or of bytes. Raises ConfigError
for a size that no model can have.

The model is a Qwen3, not a Qwen2, because AutoTokenizer of transformers 5 replaces the pre-tokenizer of every folder of
model type qwen2 by Qwen2's own; it does not change Qwen3 folders.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from ludic.errors import ConfigError
from ludic.models.chat import render_text
from ludic.records import Message

# --- Words: one entry per word -------------------------------------------------------------------------
# With the default sizes and 256 entries the model has 98,880 parameters (400 kB).

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


# --- Bytes: models that can be taught to think and call tools ------------------------------------------
# The chat template belongs to the ChatML family and has the markup of Qwen3: schemas of tools in the system message,
# tool calls in Hermes format, tool results as a user's message, and thinking only after the last question.

CHAT_PAD, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call tools:
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>{{ '\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- if loop.index0 < last.user and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
<|im_start|>assistant
{{ content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' if content or not loop.first }}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>{{ '\\n' }}
{%- elif message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>{{ '\\n' }}
{%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{{ '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


_GENERATION_PROMPT = re.compile(r"(?<=<\|im_start\|>assistant\n)")


def make_tiny_chat_model(
    folder: str,
    conversations: Iterable[Sequence[Message]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    vocab_size: int = 1024,
    hidden_size: int = 128,
    num_layers: int = 3,
    max_length: int = 512,
) -> None:
    """Write model and tokenizer to `folder`; the same arguments give the same bytes of weights.

    conversations: texts on which the tokenizer is trained, as the chat template shows them. tools: schemas of the tools
    in all of them. max_length: context of the model, in tokens. For the others see `train_tokenizer` and
    `write_model`.
    """
    untrained = train_tokenizer((), vocab_size=0)
    texts = (render_text(untrained, one, tools=tools, add_generation_prompt=False) for one in conversations)
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size, max_length=max_length)
    write_model(
        folder,
        tokenizer,
        seed=seed,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_key_value_heads=hidden_size // HEAD_DIM,
        # Near 1 / sqrt(hidden_size). With the usual 0.02, this small model does not learn to copy a number in 375
        # steps.
        initializer_range=0.08,
    )


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_length: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most vocab_size entries, trained on texts.

    It encodes any text. Digits are entries of their own. All other text may merge, across spaces and line breaks too
    (SuperBPE, Liu et al. 2025, arXiv 2503.13423), so that text which is in every conversation, such as schemas of
    tools, takes few tokens. Turns of the assistant are taken alone, since they are tokenized alone when they are
    sampled.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[CHAT_PAD, CHAT_START, CHAT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _GENERATION_PROMPT.split(text)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=CHAT_END,
        pad_token=CHAT_PAD,
        additional_special_tokens=[CHAT_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=TOOL_TEMPLATE,
    )
