"""Random sequences are cut and packed as before the catalogue of columns (tests/oracles/packing_before.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import packing_before as before
from oracles import present
from strategies import as_plain

from ludic.batches.config import MICRO_BATCH_TOKENS, BatchConfig
from ludic.batches.packing import assign_pairs, cap, cut_out, pack_each
from ludic.batches.reading import read_rank_batch
from ludic.batches.source import BatchPlan
from ludic.records import RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.run_config import RunConfig
from ludic.run_json import put_run
from ludic.schema.validation import Routing
from ludic.sql.planner import BatchRules, Planner
from ludic.store import RolloutReader, RolloutWriter, Root


def kept_tokens(rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray | None) -> list[np.ndarray]:
    is_sampled = np.ones(len(tokens), bool) if mask is None else mask
    rows = zip(tokens.tolist(), is_sampled.tolist(), strict=True)
    return [
        np.unique([token, *rng.integers(0, 99, rng.integers(0, 4))]).astype(np.int32) if sampled else np.zeros(0, "i4")
        for token, sampled in rows
    ]


def flat(kept: Sequence[np.ndarray]) -> before.KeptTokens:
    return before.KeptTokens(
        np.concatenate([np.zeros(0, np.int32), *kept]), np.append(0, np.cumsum([len(ids) for ids in kept])).astype(int)
    )


def arrays(rng: np.random.Generator, response_length: int) -> dict[str, Any]:
    """Arrays of a row as a record has them; each that may lack lacks in some rows."""
    prompt, response = (rng.integers(0, 99, n).astype(np.int32) for n in (rng.integers(1, 8), response_length))
    mask = rng.random(response_length) < 0.6 if rng.random() < 0.5 else None
    logprobs = -rng.gamma(0.25, 2.0, response_length).astype(np.float32)
    num_read = len(prompt) + response_length - 1
    experts = np.sort(rng.permuted(np.tile(np.arange(8, dtype=np.int16), (num_read, 2, 1)), axis=2)[..., :3], axis=2)
    return {
        "prompt_tokens": prompt,
        "response_tokens": response,
        "response_logprobs": logprobs if mask is None else np.where(mask, logprobs, np.float32(0)),
        "action_mask": mask,
        "kept_tokens": kept_tokens(rng, response, mask) if rng.random() < 0.6 else None,
        "experts": experts if rng.random() < 0.6 else None,
    }


def sequence_of(row: dict[str, Any], **others: Any) -> before.TrainingSequence:
    row = dict(row)
    kept = row.pop("kept_tokens")
    return before.TrainingSequence(
        sampler_logprobs=row.pop("response_logprobs"),
        kept_tokens=None if kept is None else flat(kept),
        **row,
        **others,
    )


def sequences(rng: np.random.Generator, num: int, least: int = 0) -> list[before.TrainingSequence]:
    """Sequences of which some are of one token, some have no response, and some are pairs."""
    rows = []
    for number in range(num):
        length = int(rng.choice([least, 1, rng.integers(2, 12)], p=[0.1, 0.2, 0.7]))
        rows.append(
            sequence_of(
                arrays(rng, length),
                rollout_id=f"r{number}",
                advantage=float(rng.normal()) if rng.random() < 0.5 else rng.normal(size=length).astype(np.float32),
                weight=float(rng.choice([1.0, 0.5])),
                temperature=float(rng.choice([1.0, 0.7])),
                pair_id=None if rng.random() < 0.6 else f"pair {number // 2}",
            )
        )
    return rows


def plain(value: Any) -> Any:
    """Values that `==` compares bit for bit, tensors by dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return "tensor", as_plain(value.numpy())
    if isinstance(value, before.MicroBatch | before.PackedKeptTokens):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return as_plain(value)


def assert_cuts_are_equal(seeds: range) -> int:
    """Compare 33 cuts of each seed's sequences: 11 at a length, 22 parts; return the number of cuts."""
    num_cuts = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        old = before.Sequences.of(sequences(rng, 6, least=1))
        new = present.sequences_of(before_rows(old))
        for most in rng.integers(1, 20, 11).tolist():
            (wanted, num_wanted), (found, num_found) = before.cap(old, most), cap(new, most)
            assert num_found == num_wanted, seed
            assert plain(present.plain_sequences(found)) == plain(wanted), (seed, most)
        rows = rng.integers(0, 6, 22)
        starts = np.array([rng.integers(0, len(old.response_tokens[row])) for row in rows])
        ends = np.array(
            [rng.integers(a, len(old.response_tokens[row])) + 1 for row, a in zip(rows, starts, strict=True)]
        )
        wanted, found = before.cut_out(old, rows, starts, ends), cut_out(new, rows, starts, ends)
        assert plain(present.plain_sequences(found)) == plain(wanted), seed
        most = int(rng.integers(1, 12))  # a part that is cut again
        wanted, found = before.cap(wanted, most)[0], cap(found, most)[0]
        assert plain(present.plain_sequences(found)) == plain(wanted), seed
        num_cuts += 33
    return num_cuts


def before_rows(columns: before.Sequences) -> Iterator[before.TrainingSequence]:
    names = [field.name for field in fields(columns)]
    values = zip(*(getattr(columns, name) for name in names), strict=True)
    return (before.TrainingSequence(**dict(zip(names, row, strict=True))) for row in values)


def test_random_cuts_are_as_before():
    assert assert_cuts_are_equal(range(20)) == 660


@pytest.mark.slow
def test_13200_random_cuts_are_as_before():
    assert assert_cuts_are_equal(range(400)) == 13_200


def assert_packs_are_equal(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        rows = sequences(rng, int(rng.integers(1, 20)))
        if seed % 3 == 0:  # no row has kept tokens, or none experts
            rows = [replace(row, **{["kept_tokens", "experts"][seed % 2]: None}) for row in rows]
        old, new = before.Sequences.of(rows), present.sequences_of(rows)
        assert (new.num_tokens, new.num_action_tokens) == (old.num_tokens, old.num_action_tokens)
        lengths = np.array([row.num_tokens for row in rows])
        for num_ranks in (1, 2, 3):
            for plans in assign_pairs(lengths, [row.pair_id for row in rows], num_ranks, int(rng.integers(8, 64))):
                wanted = before.pack_each(old, plans)
                found = [present.plain_micro_batch(one) for one in pack_each(new, plans)]
                assert [plain(one) for one in found] == [plain(one) for one in wanted], (seed, num_ranks)


def test_random_packs_over_ranks_are_as_before():
    assert_packs_are_equal(range(20))


@pytest.mark.slow
def test_many_random_packs_over_ranks_are_as_before():
    assert_packs_are_equal(range(20, 400))


# --- From the files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["rloo", "token_returns"])
def stored(request, tmp_path_factory) -> tuple[Root, BatchPlan, dict[str, dict[str, Any]]]:
    """A root with 12 groups of 4 in two files, a plan of them all, and their arrays by rollout_id."""
    folder: Path = tmp_path_factory.mktemp("packing")
    run = RunConfig(model="tiny", env=("moar_cats",), group_size=4, keep_experts=True)
    root = put_run(str(folder / "run"), run)
    rng, of_rows = np.random.default_rng(37), dict[str, dict[str, Any]]()
    for worker in range(2):
        groups = []
        for number in range(6):
            ids = [f"w{worker}-g{number}-r{index}" for index in range(4)]
            of_rows |= {rollout_id: arrays(rng, int(rng.integers(1, 12))) for rollout_id in ids}
            rollouts = tuple(rollout(rng, rollout_id, of_rows[rollout_id]) for rollout_id in ids)
            groups.append(RolloutGroup(key="k", rollouts=rollouts))
        metadata = RolloutMetadata(worker_id=f"w{worker}", timestamp=datetime(2026, 11, 5, tzinfo=UTC))
        with RolloutWriter(root, metadata.worker_id) as writer:
            writer.append(RolloutBatch(groups=tuple(groups), metadata=metadata))
    planner = Planner(BatchRules(advantage=request.param, groups_per_batch=12))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    rows = planner.plan(step=1, attempt_id=1, trainer_version=0)
    return root, BatchPlan(step=1, rows=rows, cursor={}, num_pending_groups=0, num_unreadable_files=0), of_rows


def rollout(rng: np.random.Generator, rollout_id: str, of_row: dict[str, Any]) -> Any:
    group_id, _, index = rollout_id.rpartition("-r")
    return present.rollout_of(
        **of_row,
        rollout_id=rollout_id,
        group_id=group_id,
        episode_id=f"{rollout_id}-e",
        group_index=int(index),
        group_size=4,
        request_index=int(rng.integers(2**40)),
        env_name="moar_cats",
        env_example_id="1",
        policy_version=0,
        policy_version_last=0,
        model="tiny",
        temperature=temperature_of(rollout_id),
        max_tokens=16,
        seed=0,
        token_rewards=rng.normal(size=len(of_row["response_tokens"])).astype(np.float32),
        episode_reward=float(rng.normal()),
        terminated=True,
        truncated=False,
        finish_reason="stop",
    )


def temperature_of(rollout_id: str) -> float:
    return 0.5 if rollout_id.endswith("1") else 1.0


def parts_of(mask: np.ndarray | None, length: int, unit: str) -> list[tuple[int, int]]:
    """Start and end of each sequence that is made of a row."""
    if unit == "episode" or mask is None:
        return [(0, length)]
    runs = np.split(np.arange(length), np.flatnonzero(np.diff(mask)) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs if mask[run[0]]]


def ranks_before(
    plan: BatchPlan, of_rows: dict[str, dict[str, Any]], config: BatchConfig, num_ranks: int, *, experts: bool
) -> list[list[before.MicroBatch]]:
    """The micro-batches of each rank, from the records: nothing of them is read from a file."""
    used, rows = plan.rows.filter(plan.rows["used"]).to_pylist(), []
    for row in used:
        of_row = of_rows[row["rollout_id"]] | ({} if experts else {"experts": None})
        others = {name: row[name] for name in ("rollout_id", "advantage", "weight")}
        if row["token_advantages"] is not None:
            others["advantage"] = np.array(row["token_advantages"], np.float32)
        rows.append(sequence_of(of_row, temperature=temperature_of(row["rollout_id"]), **others))
    pieces = before.Sequences.of(rows)
    bounds = np.array(
        [
            (number, start, end)
            for number, row in enumerate(rows)
            for start, end in parts_of(row.action_mask, len(row.response_tokens), config.training_unit)
        ]
    )
    lengths = np.array([len(rows[number].prompt_tokens) + end for number, _, end in bounds])
    if config.training_unit == "turn":
        pieces = before.cut_out(pieces, *bounds.T)
    if config.max_seq_len is not None:
        pieces, lengths = before.cap(pieces, config.max_seq_len)[0], np.minimum(lengths, config.max_seq_len)
    files = list(dict.fromkeys(row["file"] for row in used))
    row_groups = np.array([files.index(used[number]["file"]) for number, _, _ in bounds])
    most_tokens = config.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS
    shares = assign_pairs(lengths, [None] * len(lengths), num_ranks, most_tokens, row_groups)
    return [before.pack_each(pieces, share) for share in shares]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("unit", ["episode", "turn"])
@pytest.mark.parametrize("max_seq_len", [None, 9])
@pytest.mark.parametrize("experts", [True, False])
def test_what_ranks_read_and_pack_is_as_before(stored, num_ranks, unit, max_seq_len, experts):
    root, plan, of_rows = stored
    config = BatchConfig(training_unit=unit, max_seq_len=max_seq_len, max_tokens_per_micro_batch=64)
    routing = Routing(layers=(0, 1), chosen=3, num_experts=8) if experts else None
    wanted = ranks_before(plan, of_rows, config, num_ranks, experts=experts)
    for rank in range(num_ranks):
        batch = read_rank_batch(root, config, plan, rank, num_ranks, routing=routing)
        found = [present.plain_micro_batch(one) for one in batch.micro_batches]
        assert [plain(one) for one in found] == [plain(one) for one in wanted[rank]]
        num_tokens = sum(int(one.action_mask.sum()) for one in wanted[rank])
        assert batch.num_action_tokens == num_tokens
