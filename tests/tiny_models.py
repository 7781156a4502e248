"""A tiny chat model on disk, runs that sample with it, and a plain look at what it believes and what they stored."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ludic.models.tiny import make_tiny_model
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns
from ludic.root.weights.policies import publish_policy

WORDS = "what is the sum of two end with a b c d"
"""All that Addition's prompts say, and little more: with a vocabulary of 64 an answer ends within some 60 tokens."""


def make_model(folder: Path, *, seed: int) -> str:
    """Qwen3 of 64 entries. Its last norm is random, so that logits spread by some 1.6 instead of 0.16."""
    make_tiny_model(str(folder), [WORDS], seed=seed, max_position_embeddings=256)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.normal_(std=10, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return str(folder)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a model that several ranks shard, or that one rank keeps whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def forward_logprobs(
    folder: str, prompt_tokens: np.ndarray, response_tokens: np.ndarray, *, temperature: float = 1.0
) -> np.ndarray:
    """(response_length,) nats: what one plain forward pass gives to each token of the response."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.from_numpy(np.concatenate([prompt_tokens, response_tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logprobs = (model(tokens).logits[0].float() / temperature).log_softmax(dim=-1)
    # The logits after token i are of token i + 1.
    positions = torch.arange(len(prompt_tokens) - 1, tokens.shape[1] - 1)
    return logprobs[positions, tokens[0, 1:][positions]].numpy()


def publish(root: Root, folder: str, *, budget: int) -> int:
    """Publish a model folder as the next version, as a trainer would; returns the version. budget: of open groups."""

    def save(target: Path) -> None:
        shutil.copytree(folder, target, dirs_exist_ok=True)

    return publish_policy(root, save, step=0, attempt_id=1, parent_version=None, budget=budget)


def committed_rows(root: Root, *columns: str) -> list[dict[str, Any]]:
    """Columns of all rows in the store, by request_index; raises for a file that can't be read."""
    names = ["request_index", *columns]
    rows = [row for file in list_files(root) for row in read_columns(root, file.name, names).to_pylist()]
    return sorted(rows, key=lambda row: row["request_index"])


def make_reward_model(folder: Path, *, seed: int, num_labels: int = 1, pad_token_id: int | None = None) -> str:
    """Qwen3 of 64 entries with a head of labels, LABEL_0 and so on; its logits spread by some 2."""
    make_model(folder, seed=seed)
    config = AutoConfig.from_pretrained(folder, num_labels=num_labels, pad_token_id=pad_token_id)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(std=0.03, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return str(folder)


def tokens_by_hand(folder: str, *messages: tuple[str, str]) -> Tensor:
    """(length,) int64: tokens of a conversation of roles and contents, which is first rendered as a text."""
    conversation = [{"role": role, "content": content} for role, content in messages]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]


def logits_by_hand(folder: str, *messages: tuple[str, str], tokens: Tensor | None = None) -> list[float]:
    """The logits that a plain call of a reward model gives to one conversation, or to tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model((tokens_by_hand(folder, *messages) if tokens is None else tokens)[None]).logits[0].tolist()
