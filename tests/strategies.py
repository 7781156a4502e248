"""Rollouts for tests: `make_group` and `make_batch` build plausible ones, the strategies draw odd but valid ones.

`as_plain` turns records into values that `==` compares bit for bit.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ludic.records.columns import Ragged, with_columns
from ludic.records.rollout import (
    ROLES,
    AgentStep,
    EnvironmentStep,
    Message,
    Purpose,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    ToolCall,
    WeightSpan,
)

_EPOCH = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
_VOCABULARY_SIZE = 256


def make_batch(
    *,
    worker_id: str = "worker-0",
    num_groups: int = 2,
    group_size: int = 4,
    rewards: Sequence[Sequence[float | None]] | None = None,
    seed: int = 0,
    seed_of_ids: int | None = None,
    **options: Any,
) -> RolloutBatch:
    """A valid batch, the same for the same arguments; another seed gives other ids and tokens.

    rewards: for each group those of its episodes, instead of num_groups and group_size.
    options: as make_group's. Request indexes count up from seed * num_groups * group_size. seed_of_ids: other ids and
    tokens for the same requests, as another worker of the slot would sample them.
    """
    if rewards is None:
        rewards = [_random_rewards(seed, index, group_size) for index in range(num_groups)]
    first = seed * sum(map(len, rewards))
    groups = []
    for index, group_rewards in enumerate(rewards):
        group_seed = (seed if seed_of_ids is None else seed_of_ids) * 10_000 + index
        groups.append(make_group(rewards=group_rewards, seed=group_seed, first_request=first, **options))
        first += len(group_rewards)
    timestamp = _EPOCH + timedelta(seconds=seed)
    return RolloutBatch(groups=tuple(groups), metadata=RolloutMetadata(worker_id=worker_id, timestamp=timestamp))


def make_group(
    *,
    group_size: int = 4,
    rewards: Sequence[float | None] | None = None,
    prompt_length: int = 8,
    response_length: int = 16,
    num_turns: int = 1,
    policy_version: int = 0,
    env_name: str = "moar_cats",
    purpose: Purpose = "train",
    first_request: int = 0,
    seed: int = 0,
) -> RolloutGroup:
    """A valid group of one row an episode, the same for the same arguments.

    rewards: of each episode, instead of group_size; None is an episode that failed and was not scored.
    num_turns: above 1, an observation of one token (action_mask 0) stands before each later turn.
    """
    rng = np.random.default_rng(seed)
    if rewards is None:
        rewards = _random_rewards(seed, 0, group_size)
    shared = {
        "group_id": _random_id(rng),
        "group_size": len(rewards),
        "env_name": env_name,
        "env_example_id": f"example-{seed}",
        "purpose": purpose,
        "policy_version": policy_version,
        "policy_version_last": policy_version,
        "prompt_tokens": _random_tokens(rng, prompt_length),
    }
    rollouts = tuple(
        _make_rollout(
            rng, response_length, num_turns, reward, group_index=index, request_index=first_request + index, **shared
        )
        for index, reward in enumerate(rewards)
    )
    return RolloutGroup(key=f"{env_name}/example-{seed}", rollouts=rollouts)


def _make_rollout(
    rng: np.random.Generator, length: int, num_turns: int, reward: float | None, **shared: Any
) -> Rollout:
    turns = _turns(length, num_turns)
    mask = np.zeros(length, dtype=np.bool_)
    for start, end in turns:
        mask[start:end] = True
    token_rewards = np.zeros(length, dtype=np.float32)
    token_rewards[-1] = reward or 0.0
    logprobs = np.log(rng.uniform(0.05, 1.0, length)).astype(np.float32)
    answers = [f"cat number {number}" for number in rng.integers(0, 100, num_turns)]
    return Rollout.of(
        rollout_id=_random_id(rng),
        episode_id=_random_id(rng),
        model="tiny-qwen2",
        temperature=1.0,
        max_tokens=length,
        seed=int(rng.integers(0, 2**62)),
        response_tokens=_random_tokens(rng, length),
        response_logprobs=np.where(mask, logprobs, np.float32(0)),
        token_rewards=token_rewards,
        action_mask=None if mask.all() else mask,
        num_turns=num_turns,
        episode_reward=reward,
        reward_components={} if reward is None else {"num_cats": reward},
        terminated=reward is not None,
        truncated=False,
        finish_reason="stop",
        error="the environment failed" if reward is None else None,
        agent_steps=[
            AgentStep(turn=turn, action_target="env", start=start, end=end, finish_reason="stop", action=answers[turn])
            for turn, (start, end) in enumerate(turns)
        ],
        environment_steps=[
            EnvironmentStep(
                turn=turn,
                agent_steps=(turn,),
                observation="Say something about cats.",
                action=answer,
                next_observation=None if turn == num_turns - 1 else "Go on.",
                reward=reward if turn == num_turns - 1 else 0.0,
                terminated=turn == num_turns - 1 and reward is not None,
                truncated=False,
            )
            for turn, answer in enumerate(answers)
        ],
        messages=[
            Message(role="user", content="Say something about cats."),
            *(Message(role="assistant", content=answer) for answer in answers),
        ],
        **shared,
    )


def _turns(length: int, num_turns: int) -> list[tuple[int, int]]:
    """Start and end of each turn in the response, with one token between two turns."""
    bounds = np.linspace(0, length + 1, num_turns + 1).astype(int)
    return [(int(start), int(end) - 1) for start, end in pairwise(bounds)]


def _random_id(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _random_tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, _VOCABULARY_SIZE, length).astype(np.int32)


def _random_rewards(seed: int, index: int, group_size: int) -> list[float]:
    return np.random.default_rng([seed, index]).uniform(0, 1, group_size).round(3).tolist()


def changed(rollout: Rollout, **values: Any) -> Rollout:
    """The rollout with other values of its columns by name; arrays, too, of which None leaves one out."""
    own = {field.name for field in fields(Rollout)}
    arrays = {name: value for name, value in values.items() if name not in own}
    return with_columns(replace(rollout, **{name: values[name] for name in values if name in own}), **arrays)


def as_plain(value: Any) -> Any:
    """Records as tuples and dicts that `==` compares bit for bit; tuples and lists are alike, None is not empty."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if (names := _field_names(kind)) is not None:
        return kind.__name__, {name: as_plain(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | Ragged):
        return tuple(map(as_plain, value))
    return value.hex() if isinstance(value, float) else value


_PLAIN = frozenset({int, str, bool, type(None)})


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Names of a dataclass's fields; None for another type. Looking for them takes longer than all the rest."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def _arrays(elements: st.SearchStrategy, dtype: type, length: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(elements, min_size=length, max_size=length).map(lambda values: np.array(values, dtype=dtype))


_INT32 = st.integers(-(2**31), 2**31 - 1)
_INT64 = st.integers(-(2**63), 2**63 - 1)
_TOKENS = st.integers(0, 2**31 - 1)
_FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
_FLOAT64 = st.floats(allow_nan=False, allow_infinity=False)
_LOGPROBS = st.floats(width=32, min_value=-100, max_value=0)
_TEXT = st.text(max_size=5)
_MAYBE_TEXT = st.none() | _TEXT
_FINISH_REASONS = st.sampled_from([None, "stop", "length"])

_tool_calls = st.lists(
    st.builds(ToolCall, id=_TEXT, name=_TEXT, arguments=_TEXT, result=_MAYBE_TEXT, error=_MAYBE_TEXT), max_size=2
).map(tuple)
_messages = st.builds(
    Message,
    role=st.sampled_from(ROLES),
    content=_TEXT,
    name=_MAYBE_TEXT,
    tool_calls=_tool_calls,
    reasoning=_MAYBE_TEXT,
    tool_call_id=_MAYBE_TEXT,
)


@st.composite
def _agent_steps(draw: st.DrawFn, response_length: int) -> AgentStep:
    start, end = sorted(draw(st.tuples(*[st.integers(0, response_length)] * 2)))
    return AgentStep(
        turn=draw(_INT32),
        action_target=draw(st.sampled_from(["internal", "external", "env"])),
        start=start,
        end=end,
        finish_reason=draw(_FINISH_REASONS),
        parse_error=draw(st.booleans()),
        parse_feedback=draw(_MAYBE_TEXT),
        action=draw(_MAYBE_TEXT),
        tool_calls=draw(_tool_calls),
    )


def _environment_steps(num_agent_steps: int) -> st.SearchStrategy[EnvironmentStep]:
    indexes = st.lists(st.integers(0, num_agent_steps - 1), max_size=3) if num_agent_steps else st.just([])
    return st.builds(
        EnvironmentStep,
        turn=_INT32,
        agent_steps=indexes.map(tuple),
        observation=_MAYBE_TEXT,
        observation_hash=_MAYBE_TEXT,
        action=_MAYBE_TEXT,
        next_observation=_MAYBE_TEXT,
        reward=st.none() | _FLOAT64,
        terminated=st.booleans(),
        truncated=st.booleans(),
        info=st.dictionaries(_TEXT, _TEXT, max_size=2),
    )


@st.composite
def _weight_versions(draw: st.DrawFn, response_length: int) -> tuple[WeightSpan, ...]:
    borders = sorted(draw(st.sets(st.integers(0, response_length), max_size=4)))
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    versions = draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(spans), max_size=len(spans)))
    return tuple(WeightSpan(version=v, start=a, end=b) for v, (a, b) in zip(versions, spans, strict=True))


@st.composite
def _kept_tokens(draw: st.DrawFn, tokens: np.ndarray, mask: np.ndarray | None) -> Ragged:
    is_sampled = [True] * len(tokens) if mask is None else mask.tolist()
    others = draw(st.lists(st.sets(_TOKENS, max_size=3), min_size=len(tokens), max_size=len(tokens)))
    rows = zip(tokens.tolist(), others, is_sampled, strict=True)
    return Ragged.of((sorted({token, *ids}) if sampled else [] for token, ids, sampled in rows), np.int32)


@st.composite
def _experts(draw: st.DrawFn, num_read: int) -> np.ndarray:
    num_layers, chosen = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sets = st.sets(st.integers(0, 2**15 - 1), min_size=chosen, max_size=chosen).map(sorted)
    size = num_read * num_layers
    found = draw(st.lists(sets, min_size=size, max_size=size))
    return np.array(found, np.int16).reshape(num_read, num_layers, chosen)


@st.composite
def _rollouts(draw: st.DrawFn, **identity: Any) -> Rollout:
    """Any row that validation passes; identity: what its group decides."""
    error = draw(_MAYBE_TEXT)
    length = draw(st.integers(0 if error is not None else 1, 6))
    mask = draw(st.none() | _arrays(st.booleans(), np.bool_, length))
    capture = draw(st.sampled_from([None, "sampler", "trainer", "ids", "text"]))
    logprobs = draw(_arrays(_LOGPROBS, np.float32, length)) * np.float32(capture not in ("ids", "text"))
    prompt = draw(st.integers(1, 4).flatmap(lambda n: _arrays(_TOKENS, np.int32, n)))
    tokens = draw(_arrays(_TOKENS, np.int32, length))
    agent_steps = draw(st.lists(_agent_steps(length), max_size=2).map(tuple))
    truncation_reason = draw(st.sampled_from([None, "max_steps", "env", "max_seq_len", "context_length"]))
    versions = sorted(draw(st.tuples(*[st.integers(0, 10**18 - 1)] * 2)))
    return Rollout.of(
        request_index=draw(_INT64),
        agent_id=draw(st.text(min_size=1, max_size=5)),
        parent_rollout_id=draw(st.none() | st.text(min_size=1, max_size=5)),
        depth=draw(st.integers(0, 2**31 - 1)),
        trajectory_id=draw(st.none() | st.text(min_size=1, max_size=5)),
        policy_version=versions[0],
        policy_version_last=versions[1],
        weight_versions=draw(st.none() | _weight_versions(length)),
        model=draw(_TEXT),
        engine=draw(_MAYBE_TEXT),
        capture=capture,
        # Stored as float32, which keeps decimals of up to six digits.
        temperature=draw(st.integers(0, 200)) / 100,
        top_p=draw(st.integers(1, 1000)) / 1000,
        top_k=draw(st.none() | _INT32),
        max_tokens=draw(_INT32),
        seed=draw(_INT64),
        prompt_tokens=prompt,
        response_tokens=tokens,
        response_logprobs=logprobs if mask is None else np.where(mask, logprobs, np.float32(0)),
        token_rewards=draw(_arrays(_FLOAT32, np.float32, length)),
        action_mask=mask,
        kept_tokens=draw(st.none() | _kept_tokens(tokens, mask)),
        experts=draw(st.none() | _experts(len(prompt) + length - 1)) if length else None,
        num_turns=draw(st.integers(0, 2**31 - 1)),
        episode_reward=draw(_FLOAT64 if error is None else st.none() | _FLOAT64),
        reward_components=draw(st.dictionaries(_TEXT, _FLOAT64, max_size=2)),
        terminated=draw(st.booleans()),
        truncated=truncation_reason is not None,
        truncation_reason=truncation_reason,
        finish_reason=draw(_FINISH_REASONS),
        incomplete_completion=draw(st.booleans()),
        parse_error=draw(st.booleans()),
        error=error,
        agent_steps=agent_steps,
        environment_steps=draw(st.lists(_environment_steps(len(agent_steps)), max_size=2).map(tuple)),
        messages=draw(st.lists(_messages, max_size=2).map(tuple)),
        metadata=draw(st.dictionaries(_TEXT, _TEXT, max_size=2)),
        **identity,
    )


@st.composite
def rollout_groups(draw: st.DrawFn, group_id: str = "g0") -> RolloutGroup:
    """Any valid group: up to three episodes of one or two rows each."""
    group_size = draw(st.integers(1, 3))
    env_name, example, purpose = draw(
        st.tuples(st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5), st.sampled_from(["train", "eval"]))
    )
    rollouts = [
        draw(
            _rollouts(
                rollout_id=f"{group_id}-e{index}-r{segment}",
                group_id=group_id,
                episode_id=f"{group_id}-e{index}",
                group_index=index,
                group_size=group_size,
                segment_index=segment,
                parent_segment_index=draw(st.none() | st.integers(0, segment - 1)) if segment else None,
                env_name=env_name,
                env_example_id=example,
                purpose=purpose,
            )
        )
        for index in range(group_size)
        for segment in range(draw(st.integers(1, 2)))
    ]
    return RolloutGroup(key=draw(_TEXT), rollouts=tuple(rollouts))


@st.composite
def rollout_batches(draw: st.DrawFn, max_groups: int = 2) -> RolloutBatch:
    """Any valid batch of up to max_groups groups."""
    num_groups = draw(st.integers(1, max_groups))
    metadata = RolloutMetadata(
        worker_id=draw(st.text(min_size=1, max_size=5)),
        timestamp=draw(st.datetimes(timezones=st.just(UTC))),
    )
    groups = tuple(draw(rollout_groups(group_id=f"g{index}")) for index in range(num_groups))
    return RolloutBatch(groups=groups, metadata=metadata)
