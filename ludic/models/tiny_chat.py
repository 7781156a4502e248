"""Create a tiny model that can be taught to think and call tools: a byte-level tokenizer and a chat template for both.

Writes a Hugging Face folder, as `ludic.models.tiny` does. The chat template belongs to the ChatML family and has the
markup of Qwen3: schemas of tools in the system message, tool calls in Hermes format, tool results as a user's message,
and thinking only after the last question.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ludic.models.chat import render_text
from ludic.models.tiny import HEAD_DIM, write_model
from ludic.records import Message

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
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
    `ludic.models.tiny.write_model`.
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
        # Near 1 / sqrt(hidden_size). With the usual 0.02, 375 steps do not teach so small a model to copy a number.
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
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _GENERATION_PROMPT.split(text)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
