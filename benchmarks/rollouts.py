"""Make rollouts that resemble those of real models in size and in compressibility.

There are two sources of tokens. `zipf`: ids drawn independently by Zipf's law over 150,000, low ids most frequent, as
in tokenizers; nothing repeats, so this source is harder to compress. `python`: text with natural repetition, the source
files of Python's standard library under a byte-level BPE that is trained on them. Logprobs resemble those of a
confident model: most are near 0, and all bits of their mantissas vary.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ludic.records import (
    AgentStep,
    EnvironmentStep,
    Message,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    new_id,
)

Source = Literal["zipf", "python"]
Passage = tuple[np.ndarray, str]
"""Tokens, (length,) int32, and their text."""

VOCABULARY_SIZE = 150_000
_ZIPF = np.cumsum(1 / (np.arange(VOCABULARY_SIZE) + 2.7))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_batch(
    num_groups: int,
    *,
    mean_length: int = 1000,
    prompt_length: int = 120,
    group_size: int = 8,
    seed: int = 0,
    source: Source = "zipf",
) -> RolloutBatch:
    """Return groups of one environment and version; the same arguments give the same data, except for ids."""
    rng = np.random.default_rng(seed)
    draw: Callable[[int], Passage] = partial(_zipf_passage if source == "zipf" else _python_passage, rng)
    groups = tuple(
        _make_group(rng, number, group_size, mean_length, draw, draw(prompt_length)) for number in range(num_groups)
    )
    return RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id="w0-benchmark", timestamp=datetime.now(UTC)))


def make_like(batch: RolloutBatch, worker_id: str, group_id: str, *, policy_version: int = 7) -> RolloutBatch:
    """Copy the only group of a batch under other ids, much faster than making a new group."""
    (group,) = batch.groups
    rollouts = tuple(
        replace(
            rollout,
            group_id=group_id,
            rollout_id=f"{group_id}-{index}",
            trajectory_id=f"{group_id}-{index}",
            episode_id=f"{group_id}-{index}",
            policy_version=policy_version,
            policy_version_last=policy_version,
        )
        for index, rollout in enumerate(group.rollouts)
    )
    return replace(
        batch, groups=(replace(group, rollouts=rollouts),), metadata=replace(batch.metadata, worker_id=worker_id)
    )


def with_own_requests(table: pa.Table, file_number: int) -> pa.Table:
    """Give the rollouts of a file request numbers that no other file has: a trainer uses each request once."""
    first = file_number * 1_000_000
    requests = pa.array(range(first, first + table.num_rows), pa.int64())
    index = table.schema.get_field_index("request_index")
    return table.set_column(index, table.schema.field(index), requests)


def _make_group(
    rng: np.random.Generator,
    number: int,
    group_size: int,
    mean_length: int,
    draw: Callable[[int], Passage],
    prompt: Passage,
) -> RolloutGroup:
    group_id = new_id()
    lengths = rng.integers(mean_length // 2, mean_length * 3 // 2 + 1, group_size).tolist()
    rollouts = tuple(
        _make_rollout(
            rng,
            prompt,
            draw(length),
            group_id=group_id,
            group_index=index,
            group_size=group_size,
            number=number,
        )
        for index, length in enumerate(lengths)
    )
    return RolloutGroup(key=f"moar_cats/prompt-{number}", rollouts=rollouts)


def _make_rollout(
    rng: np.random.Generator,
    prompt: Passage,
    response: Passage,
    *,
    group_id: str,
    group_index: int,
    group_size: int,
    number: int,
) -> Rollout:
    tokens, text = response
    length, reward = len(tokens), float(rng.random() < 0.4)
    return Rollout.of(
        rollout_id=(rollout_id := new_id()),
        trajectory_id=rollout_id,
        group_id=group_id,
        episode_id=new_id(),
        group_index=group_index,
        group_size=group_size,
        request_index=number * group_size + group_index,
        env_name="moar_cats",
        env_example_id=f"prompt-{number}",
        policy_version=7,
        policy_version_last=7,
        model="Qwen/Qwen3-8B",
        temperature=1.0,
        max_tokens=4096,
        seed=int(rng.integers(2**62)),
        prompt_tokens=prompt[0],
        response_tokens=tokens,
        response_logprobs=-rng.gamma(0.25, 2.0, length).astype(np.float32),
        token_rewards=np.append(np.zeros(length - 1, np.float32), np.float32(reward)),
        episode_reward=reward,
        reward_components={"correct": reward},
        terminated=True,
        truncated=False,
        finish_reason="stop",
        agent_steps=(AgentStep(turn=0, action_target="env", start=0, end=length, finish_reason="stop", action=text),),
        environment_steps=(
            EnvironmentStep(
                turn=0,
                agent_steps=(0,),
                observation=prompt[1],
                action=text,
                next_observation=None,
                reward=reward,
                terminated=True,
                truncated=False,
            ),
        ),
        messages=(
            Message(role="user", content=prompt[1]),
            Message(role="assistant", content=text),
        ),
    )


def _zipf_passage(rng: np.random.Generator, length: int) -> Passage:
    tokens = np.searchsorted(_ZIPF, rng.random(length) * _ZIPF[-1]).astype(np.int32)
    return tokens, " ".join(map(_word, tokens.tolist()))


def _word(token: int) -> str:
    """Return a word for a token; frequent tokens get short words, as in real text."""
    letters = ""
    while token >= 0:
        token, letter = divmod(token, len(_LETTERS))
        letters += _LETTERS[letter]
        token -= 1
    return letters


def _python_passage(rng: np.random.Generator, length: int) -> Passage:
    """Return a passage from a random position in the standard library."""
    texts, tokenizer = _python_library()
    text = texts[rng.integers(len(texts))]
    begin = int(rng.integers(max(1, len(text) - 8 * length)))
    tokens = tokenizer.encode(text[begin : begin + 8 * length]).ids[:length]
    return np.array(tokens, np.int32), tokenizer.decode(tokens)


@cache
def _python_library() -> tuple[list[str], Tokenizer]:
    """Return modules of at least 10,000 characters, and a tokenizer trained on them; takes about 5 s."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.py"))]
    texts = [text for text in texts if len(text) >= 10_000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return texts, tokenizer
