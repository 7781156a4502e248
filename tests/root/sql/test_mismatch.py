"""The views trained_tokens and mismatch, over logprobs written by hand."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from strategies import changed, make_batch
from tiny_runs import create_root, query

import ludic
from ludic.records.rollout import Rollout, WeightSpan
from ludic.records.tables import arrow_schema
from ludic.root.catalogue import ATTEMPTS, TOKEN_STATS, RankName
from ludic.root.json_records import Attempt
from ludic.root.root import Root
from ludic.root.rows.ledger import ledger_name
from ludic.root.rows.parquet import encode_plain
from ludic.root.rows.tables import encode_token_stats, to_token_stats
from ludic.root.rows.writer import RolloutWriter

LOG_RATIOS = np.log([2.0, 1.0, 1.0, 0.5])
"""Of the four tokens of the first rollout; the second token is not sampled."""


def put_step(root: Root, step: int, trainer_version: int, trained: dict[str, tuple[Rollout, np.ndarray]]) -> None:
    """Write what a trainer writes of a step. trained: each rollout and its log ratios, by rollout_id."""
    rows = [
        {
            **dict.fromkeys(arrow_schema("batches").names),
            "attempt_id": 1,
            "step": step,
            "batch_index": 0,
            "used": True,
            "weight": 1.0,
            "row_group": 0,
            "row": 0,
            **{name: getattr(rollout, name) for name in ("rollout_id", "group_id", "env_name", "policy_version")},
            "trainer_version": trainer_version,
            "lag": trainer_version - rollout.policy_version,
            "file": "file",
            "prompt_length": rollout.prompt_length,
            "response_length": rollout.response_length,
        }
        for rollout, _ in trained.values()
    ]
    table = pa.Table.from_pylist(rows, schema=arrow_schema("batches"))
    root.put_if_absent(ledger_name(1, step), encode_plain(table))
    lengths = np.array([len(log_ratios) for _, log_ratios in trained.values()])
    logprobs = [rollout.response_logprobs[: len(log_ratios)] + log_ratios for rollout, log_ratios in trained.values()]
    zeros = np.zeros(lengths.sum(), np.float32)
    stats = to_token_stats(
        attempt_id=1,
        step=step,
        rollout_ids=list(trained),
        lengths=lengths,
        trainer_logprobs=np.concatenate(logprobs).astype(np.float32),
        entropy=zeros,
        weight=zeros,
        clipped=zeros.astype(bool),
    )
    root.put_if_absent(TOKEN_STATS.name(RankName(1, step, 0)), encode_token_stats(stats))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Two rollouts: one of 4 tokens at top_p 0.5, by two versions; one of an older ludic, cut to 1 of its 4 tokens."""
    root = create_root(str(tmp_path / "run"), "model")
    attempt = Attempt(
        attempt_id=1, parent_attempt=None, parent_step=None, owner="h", created_at="2026-11-23", config={}
    )
    root.put_if_absent(ATTEMPTS.name_of(attempt), json.dumps(asdict(attempt)).encode())
    batch = make_batch(num_groups=1, group_size=2, response_length=4)
    mask = np.array([True, False, True, True])
    first, second = (
        changed(row, response_logprobs=np.where(mask, np.float32(-1), np.float32(0)), action_mask=mask, temperature=0.5)
        for row in batch.groups[0].rollouts
    )
    spans = (WeightSpan(version=0, start=0, end=3), WeightSpan(version=1, start=3, end=4))
    first = replace(first, engine="vllm 0.32.0", top_p=0.5, weight_versions=spans, policy_version_last=1)
    with RolloutWriter(root, "worker-0") as writer:
        writer.append(replace(batch, groups=(replace(batch.groups[0], rollouts=(first, second)),)))
    put_step(root, 1, 1, {first.rollout_id: (first, LOG_RATIOS)})
    put_step(root, 2, 2, {second.rollout_id: (second, np.log([4.0]))})
    return root


def mismatch(root: Root, grouping: str) -> dict[Any, dict[str, Any]]:
    """The rows of a grouping, by its value."""
    rows = ludic.connect(root).sql(f"from mismatch where grouping = '{grouping}'").to_arrow_table().to_pylist()
    return {row[grouping]: row for row in rows}


@pytest.mark.slow
def test_each_sampled_token_has_its_log_ratio_and_the_age_of_its_own_weights(root: Root):
    old, cut = "temperature 0.5, top_p 0.5", "temperature 0.5"
    tokens = """
        select step, position, off_policy_steps, engine, sampling, round(exp(log_ratio), 5)
        from trained_tokens
        order by step, position
    """
    assert query(root, tokens) == [
        (1, 0, 1, "vllm 0.32.0", old, 2.0),
        (1, 2, 1, "vllm 0.32.0", old, 1.0),
        (1, 3, 0, "vllm 0.32.0", old, 0.5),
        (2, 0, 2, None, cut, 4.0),
    ]


def test_k1_k3_and_quantiles_are_of_the_sampled_tokens(root: Root):
    row = mismatch(root, "step")[1]
    # k1: -(log 2 + 0 - log 2) / 3; k3: ((2 - 1 - log 2) + 0 + (0.5 - 1 + log 2)) / 3 = 0.5 / 3
    assert (row["k1"], row["k3"]) == pytest.approx((0, 0.5 / 3), abs=1e-6)
    # between the ratios 0.5, 1 and 2: 0.5 + 2 * 0.01 * 0.5, and 1 + (2 * 0.99 - 1) * 1
    assert [row[f"ratio_p{q}"] for q in ("01", "50", "99")] == pytest.approx([0.51, 1, 1.98], abs=1e-5)
    assert (row["ratio_max"], row["num_tokens"]) == (pytest.approx(2), 3)


@pytest.mark.slow
def test_each_grouping_has_a_row_per_value(root: Root):
    counts = {
        name: {value: row["num_tokens"] for value, row in mismatch(root, name).items()}
        for name in ("step", "position", "off_policy_steps", "engine", "sampling")
    }
    assert counts == {
        "step": {1: 3, 2: 1},
        "position": {0: 2, 2: 2},  # 2 and 3 share a range
        "off_policy_steps": {0: 1, 1: 2, 2: 1},
        "engine": {"vllm 0.32.0": 3, None: 1},
        "sampling": {"temperature 0.5, top_p 0.5": 3, "temperature 0.5": 1},
    }
    assert mismatch(root, "off_policy_steps")[2]["k1"] == pytest.approx(-math.log(4))


@pytest.mark.slow
def test_a_run_without_token_stats_has_no_mismatch(tmp_path: Path):
    root = create_root(str(tmp_path / "other"), "model")
    assert query(root, "from mismatch") == query(root, "from trained_tokens") == []
