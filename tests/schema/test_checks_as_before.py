"""Random rows, sound and broken, are refused as before the catalogue of columns: for the same columns and tokens.

The oracle is tests/oracles/checks_before.py. Texts and order are free. A row that is refused for several reasons may be
refused for fewer of them: only one must be left.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracles import checks_before as before
from oracles import present

from ludic.records import RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.schema import arrow_schema, find_problems
from ludic.schema.validation import Routing, find_untrainable, reason_against_experts

Row = before.Rollout
VOCABULARY = 100


def sound_row(rng: np.random.Generator, rollout_id: str) -> Row:
    num_prompt, num_response = rng.integers(1, 6), rng.integers(1, 7)
    tokens = rng.integers(0, VOCABULARY, num_response).astype(np.int32)
    mask = rng.random(num_response) < 0.6 if rng.random() < 0.6 else None
    is_sampled = np.ones(num_response, bool) if mask is None else mask
    kept = [
        np.unique([token, *rng.integers(0, VOCABULARY, 2)]).astype(np.int32) if sampled else np.zeros(0, np.int32)
        for token, sampled in zip(tokens.tolist(), is_sampled.tolist(), strict=True)
    ]
    experts = np.tile(np.arange(8, dtype=np.int16), (num_prompt + num_response - 1, 2, 1))
    return Row(
        rollout_id=rollout_id,
        prompt_tokens=rng.integers(0, VOCABULARY, num_prompt).astype(np.int32),
        response_tokens=tokens,
        response_logprobs=np.where(is_sampled, -rng.gamma(0.25, 2.0, num_response), 0).astype(np.float32),
        token_rewards=rng.normal(size=num_response).astype(np.float32),
        action_mask=mask,
        kept_tokens=tuple(kept) if rng.random() < 0.6 else None,
        experts=np.sort(rng.permuted(experts, axis=2)[..., :3], axis=2) if rng.random() < 0.6 else None,
    )


ARRAYS = [field.name for field in fields(Row) if field.name not in ("rollout_id", "error")]
FLAT = ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards", "action_mask")
NUMBERS = {
    "prompt_tokens": [-1, 2**31 - 1, VOCABULARY],
    "response_tokens": [-1, 2**31 - 1, VOCABULARY],
    "response_logprobs": [np.nan, np.inf, -np.inf, 1e-5, 1.1e-5, -100.0, -100.1, -9999.0, -0.5],
    "token_rewards": [np.nan, np.inf, -np.inf, np.finfo(np.float32).max],
    "experts": [-1, 2**15 - 1, 0],
}


def other_number(rng: np.random.Generator, row: Row) -> Row:
    name = str(rng.choice(list(NUMBERS)))
    array = getattr(row, name)
    if not isinstance(array, np.ndarray) or not array.size or array.dtype not in (np.int32, np.float32, np.int16):
        return row
    array = array.copy()
    array.reshape(-1)[rng.integers(0, array.size, rng.integers(1, 3))] = rng.choice(NUMBERS[name])
    return replace(row, **{name: array})


def other_length(rng: np.random.Generator, row: Row) -> Row:
    name = str(rng.choice(ARRAYS))
    array = getattr(row, name)
    if not isinstance(array, np.ndarray | tuple) or rng.random() < 0.5:
        return row if not isinstance(array, np.ndarray | tuple) else replace(row, **{name: array[:-1]})
    longer = (*array, *array[-1:]) if isinstance(array, tuple) else np.concatenate([array, array[-1:]])
    return replace(row, **{name: longer})


def other_type(rng: np.random.Generator, row: Row) -> Row:
    name = str(rng.choice(ARRAYS))
    array = getattr(row, name)
    if not isinstance(array, np.ndarray):
        return row
    changes: list[Callable[[np.ndarray], Any]] = [
        lambda a: a.astype(np.int64),
        lambda a: a.astype(np.float64),
        lambda a: a[None],
        lambda a: a.reshape(-1)[0] if a.size else a,
        np.ndarray.tolist,
        lambda a: "text",
        lambda a: None,
    ]
    return replace(row, **{name: changes[rng.integers(len(changes))](array)})


def other_kept_tokens(rng: np.random.Generator, row: Row) -> Row:
    if not isinstance(row.kept_tokens, tuple) or not row.kept_tokens:
        return row
    if rng.random() < 0.1:
        return replace(row, kept_tokens="text")
    kept = list(row.kept_tokens)
    at = rng.integers(len(kept))
    ids = kept[at]
    if not isinstance(ids, np.ndarray) or ids.ndim != 1:
        return row
    changes: list[Callable[[], Any]] = [
        lambda: np.sort(ids)[::-1],
        lambda: np.repeat(ids, 2),
        lambda: ids[1:],
        lambda: np.zeros(0, np.int32),
        lambda: np.array([-1, *ids], np.int32),
        lambda: np.array([*ids, VOCABULARY], np.int32),
        lambda: ids.astype(np.int64),
        lambda: ids[None],
        lambda: ids.tolist(),
        lambda: None,
    ]
    kept[at] = changes[rng.integers(len(changes))]()
    return replace(row, kept_tokens=kept if rng.random() < 0.2 else tuple(kept))


def other_experts(rng: np.random.Generator, row: Row) -> Row:
    if not isinstance(row.experts, np.ndarray) or row.experts.ndim != 3 or not row.experts.size:
        return row
    changes = [row.experts[..., ::-1], row.experts[:, :0], row.experts[..., :0], np.repeat(row.experts, 2, axis=2)]
    return replace(row, experts=changes[rng.integers(len(changes))])


def another_mask(rng: np.random.Generator, row: Row) -> Row:
    """A mask that does not go with logprobs and kept tokens."""
    if not isinstance(row.response_tokens, np.ndarray) or row.response_tokens.ndim != 1:
        return row
    return replace(row, action_mask=rng.random(len(row.response_tokens)) < 0.5)


def no_response(rng: np.random.Generator, row: Row) -> Row:
    """Nothing was sampled; without an error that is refused."""
    nothing = np.zeros(0, np.float32)
    row = replace(row, response_tokens=nothing.astype(np.int32), response_logprobs=nothing, token_rewards=nothing)
    return replace(row, action_mask=None, kept_tokens=None, error="x" if rng.random() < 0.5 else None)


BREAKS = (other_number, other_length, other_type, other_kept_tokens, other_experts, another_mask, no_response)


def rows_of(seed: int) -> list[Row]:
    """Rows of a batch, of which some are broken in one or several ways."""
    rng = np.random.default_rng(seed)
    rows = [sound_row(rng, f"r{number}") for number in range(rng.integers(1, 5))]
    for number in range(len(rows)):
        for _ in range(rng.choice([0, 1, 2, 3], p=[0.4, 0.4, 0.1, 0.1])):
            rows[number] = BREAKS[rng.integers(len(BREAKS))](rng, rows[number])
    return rows


def batch_of(rows: list[Row]) -> RolloutBatch:
    """Each row is an episode of one group, all else of which is sound."""
    rollouts = tuple(
        present.rollout_of(
            **{name: getattr(row, name) for name in (*ARRAYS, "rollout_id", "error")},
            group_id="g",
            episode_id=f"e{index}",
            group_index=index,
            group_size=len(rows),
            request_index=index,
            env_name="moar_cats",
            env_example_id="1",
            policy_version=0,
            policy_version_last=0,
            model="tiny",
            temperature=1.0,
            max_tokens=16,
            seed=0,
            episode_reward=0.0,
            terminated=True,
            truncated=False,
            finish_reason="stop",
        )
        for index, row in enumerate(rows)
    )
    metadata = RolloutMetadata(worker_id="w", timestamp=datetime(2026, 11, 5, tzinfo=UTC))
    return RolloutBatch(groups=(RolloutGroup(key="k", rollouts=rollouts),), metadata=metadata)


Reason = tuple[str, int | None]
"""Column, and the token; None if the reason is of all tokens."""


def reason_of(text: str) -> Reason:
    """text: column and reason."""
    column, token = text.partition(" ")[0], re.search(r"at token (\d+)", text)
    return column, None if token is None or column == "experts" else int(token[1])


def by_row(texts: Iterable[str]) -> dict[str, set[Reason]]:
    """texts: reasons with their row, as `Problem` writes them."""
    found = defaultdict[str, set[Reason]](set)
    for text in texts:
        where, _, reason = text.partition(": ")
        found[where].add(reason_of(reason))
    return dict(found)


def assert_reasons_are_equal(seeds: range) -> int:
    """Return how many batches are sound."""
    num_sound = 0
    for seed in seeds:
        rows, vocab_size = rows_of(seed), VOCABULARY if seed % 2 else None
        unfit = {f"rollout {rows[row].rollout_id}" for row, *_ in before.find_misfits(rows)}
        wanted = by_row(before.find_problems(rows, vocab_size))
        found = by_row(map(str, find_problems(batch_of(rows), vocab_size=vocab_size)))
        assert found.keys() == wanted.keys(), seed
        for where, reasons in wanted.items():
            if len(reasons) == 1:
                assert reasons <= found[where], (seed, where)
            if where not in unfit:
                assert found[where] <= reasons, (seed, where)
        num_sound += not wanted
    return num_sound


def test_random_batches_are_refused_as_before():
    assert 20 < assert_reasons_are_equal(range(100)) < 60


@pytest.mark.slow
def test_many_random_batches_are_refused_as_before():
    assert 400 < assert_reasons_are_equal(range(2_000)) < 1_200


@pytest.mark.slow
def test_the_random_batches_have_every_reason():
    """Each rule for arrays refuses some row, so none is compared in vain."""
    found = "\n".join(reason for seed in range(2_000) for reason in before.find_problems(rows_of(seed), VOCABULARY))
    missing = [reason for reason in REASONS if reason not in found]
    assert not missing


REASONS = (
    *(f"{name} is NoneType, wanted a NumPy array" for name in FLAT[:4]),
    *(f"{name} is list, wanted a NumPy array" for name in (*FLAT, "experts")),
    *(f"{name} is int64 of shape" for name in (*FLAT, "experts")),
    *(f"{name} has length" for name in ("response_logprobs", "token_rewards", "action_mask", "kept_tokens")),
    "kept_tokens is str, wanted a tuple of NumPy arrays of int32",
    "kept_tokens holds other values than NumPy arrays of int32 of one dimension",
    "prompt_length is 0, wanted at least one prompt token",
    "response_length is 0, wanted at least one response token",
    *(f"{name} is {n} at token" for name in ("prompt_tokens", "response_tokens") for n in (-1, VOCABULARY, 2**31 - 1)),
    *(f"{name} is {n} at token" for name in ("response_logprobs", "token_rewards") for n in ("nan", "inf", "-inf")),
    "wanted at most 0, the logarithm of a probability",
    "wanted at least -100: a token less likely is never sampled",
    "response_logprobs is -",
    "wanted 0, since action_mask is 0",
    "lacks the sampled token, wanted it among the kept ones",
    "is not empty, wanted no ids, since action_mask is 0",
    "does not ascend, wanted sorted ids, each once",
    "holds a number that is no token id",
    "wanted experts for each of the",
    "experts holds numbers from -1",
    "does not ascend, wanted a layer's experts sorted, each once",
    ", and 1 more",
)


# --- Stored rows ---------------------------------------------------------------------------------------


def stored(seed: int) -> pa.Table:
    """Rows as training reads them, in two chunks, of which some can't be trained on."""
    rng = np.random.default_rng(seed)
    rows = [stored_row(rng, sound_row(rng, "r")) for _ in range(rng.integers(1, 6))]
    names = [*before.TRAINED_COLUMNS, "prompt_length", "response_length"]
    schema = pa.schema([arrow_schema("rollouts").field(name) for name in names])
    table, cut = pa.Table.from_pylist(rows, schema), int(rng.integers(0, len(rows) + 1))
    return pa.concat_tables([table.slice(0, cut), table.slice(cut)])


def stored_row(rng: np.random.Generator, row: Row) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in before.TRAINED_COLUMNS[1:]}
    found = {
        name: value if value is None else [np.asarray(each).tolist() for each in value]
        for name, value in values.items()
    }
    lengths = {"prompt_length": len(row.prompt_tokens), "response_length": len(row.response_tokens)}
    for _ in range(rng.choice([0, 1, 2], p=[0.4, 0.4, 0.2])):
        name = str(rng.choice(list(found)))
        if not found[name]:
            continue
        at, values = int(rng.integers(len(found[name]))), list(found[name])
        match rng.integers(3), name:
            case 0, _:
                found[name] = values[:-1]
                continue
            case _, "kept_tokens":
                ids = values[at]
                values[at] = [ids[::-1], ids * 2, ids[1:], [], [-1, *ids], [*ids, VOCABULARY]][rng.integers(6)]
            case _, "action_mask":
                values[at] = not values[at]
            case _:
                values[at] = NUMBERS[name][rng.integers(len(NUMBERS[name]))]
        found[name] = values
    if rng.random() < 0.05:
        found["prompt_tokens"], lengths["prompt_length"] = [], 0
    temperature = rng.choice([1.0, 0.0, -1.0, np.nan, np.inf], p=[0.8, 0.05, 0.05, 0.05, 0.05])
    return {"temperature": float(temperature), **found, **lengths}


def assert_untrainable_rows_are_equal(seeds: range) -> None:
    for seed in seeds:
        table, vocab_size, any_logprob = stored(seed), VOCABULARY if seed % 2 else None, seed % 3 == 0
        wanted = before.find_untrainable(table, vocab_size, any_logprob=any_logprob)
        found = find_untrainable(table, vocab_size, any_logprob=any_logprob)
        assert found.keys() == wanted.keys(), seed
        for row, reason in wanted.items():
            (column, token), (found_column, found_token) = reason_of(reason), reason_of(found[row])
            assert found_column == column, (seed, row)
            # Kept tokens that are wrong in two ways may be named for the other one.
            assert found_token == token or column == "kept_tokens", (seed, row)


def test_stored_rows_are_left_out_as_before():
    assert_untrainable_rows_are_equal(range(100))


@pytest.mark.slow
def test_many_stored_rows_are_left_out_as_before():
    assert_untrainable_rows_are_equal(range(2_000))


def test_the_stored_rows_have_every_reason():
    found = [before.find_untrainable(stored(seed), VOCABULARY) for seed in range(300)]
    reasons = "\n".join(reason for rows in found for reason in rows.values())
    wanted = (
        *("greedy samples can't be trained on", "is nan", "a token id from 0 to 99", "wanted a finite number"),
        *("wanted at most 0", "wanted at least -100", "prompt_tokens is empty", "the row says"),
        *("lacks the sampled token", "does not ascend", "holds a number that is no token id"),
    )
    missing = [reason for reason in wanted if reason not in reasons]
    assert not missing
    assert sum(not rows for rows in found) > 30


@pytest.mark.parametrize("seed", range(3))
def test_experts_fit_a_model_as_before(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        num_read, layers, chosen = (int(number) for number in rng.integers(0, 4, 3))
        experts = np.sort(rng.integers(-1, 5, (num_read, layers, chosen)), axis=2).astype(np.int16)
        num_read = max(0, num_read + int(rng.integers(-1, 2)) * int(rng.random() < 0.3))
        choice = {"layers": tuple(range(rng.integers(1, 4))), "chosen": int(rng.integers(1, 4)), "num_experts": 4}
        for known in (True, False):
            wanted = before.reason_against_experts(experts, num_read, before.Routing(**choice) if known else None)
            found = reason_against_experts(experts, num_read, Routing(**choice) if known else None)
            assert (found is None) == (wanted is None)
            if wanted is not None and wanted.startswith("has"):
                assert found == wanted
