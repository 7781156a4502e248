"""Rows whose sampler's logprobs were not kept train as if they had been, once they are computed by their version."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from strategies import changed, make_batch
from tiny_runs import copied, create_root, make_model, query, train_here
from transformers import AutoModelForCausalLM

from ludic.app.launch.branch import branch_config
from ludic.errors import ConfigError
from ludic.eval.what_if.rerun import rerun
from ludic.records.rollout import Rollout, RolloutBatch
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.stream import BatchStream
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import replay_settings

pytestmark = pytest.mark.slow

OFFLINE = {"offline": True, "epochs": 1, "where": "worker_id = 'late'", "keep_token_stats": True}


def logprobs_of(model: torch.nn.Module, row: Rollout) -> np.ndarray:
    """(response_length,) float32: as transformers has them, one row alone; 0 where nothing was sampled."""
    tokens = torch.from_numpy(np.concatenate([row.prompt_tokens, row.response_tokens])).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].double() / row.temperature
    places = torch.arange(row.prompt_length - 1, len(tokens) - 1)
    found = logits[places].log_softmax(-1)[torch.arange(len(places)), tokens[places + 1]].numpy().astype(np.float32)
    return found if row.action_mask is None else np.where(row.action_mask, found, np.float32(0))


def sampled(batch: RolloutBatch, folder: str | Path, *, temperature: float) -> RolloutBatch:
    """The batch as the model of a folder would have sampled it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = []
    for group in batch.groups:
        rows = [replace(row, temperature=temperature) for row in group.rollouts]
        rows = [changed(row, response_logprobs=logprobs_of(model, row)) for row in rows]
        groups.append(replace(group, rollouts=tuple(rows)))
    return replace(batch, groups=tuple(groups))


def kept_as(batch: RolloutBatch, capture: str) -> RolloutBatch:
    """The same rows, without their logprobs."""
    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(changed(row, response_logprobs=np.zeros_like(row.response_logprobs)), capture=capture)
                for row in group.rollouts
            ),
        )
        for group in batch.groups
    ]
    return replace(batch, groups=tuple(groups))


def append(root: Root, *batches: RolloutBatch, worker_id: str = "late") -> None:
    with RolloutWriter(root, worker_id, file_per_batch=True) as writer:
        for batch in batches:
            writer.append(batch)


def late(policy_version: int, seed: int, **options: int) -> RolloutBatch:
    return make_batch(worker_id="late", num_groups=1, seed=seed, policy_version=policy_version, **options)


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> tuple[Root, Root, Mapping[str, np.ndarray]]:
    """A run with the logprobs of a group of version 0 and of one of version 1, and its twin without them; and these
    logprobs by rollout_id."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_model(folder / "model")
    root = create_root(str(folder / "run"), model)
    append(root, sampled(make_batch(worker_id="early", seed=1), model, temperature=1.0), worker_id="early")
    train_here(root, num_steps=1, learning_rate=0.02)
    twin = copied(root, folder / "twin")
    other = "policies/version=1"
    rows = [
        sampled(late(0, 2, num_turns=2), model, temperature=0.7),
        sampled(late(1, 3, num_turns=2), f"{root.path}/{other}", temperature=1.0),
    ]
    append(root, *rows)
    # Version 7 is not there; and no text is ever trained on.
    append(twin, *(kept_as(batch, "ids") for batch in rows), kept_as(late(7, 4), "ids"), kept_as(late(0, 5), "text"))
    known = {row.rollout_id: row.response_logprobs for each in rows for group in each.groups for row in group.rollouts}
    return root, twin, known


def stats_of_step(root: Root) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The factor of each token's gradient, and the trainer's logprobs, by rollout_id, of step 2."""
    rows = query(root, "select rollout_id, weight, trainer_logprobs from token_stats where step = 2")
    return {rollout_id: (np.array(weight), np.array(logprobs)) for rollout_id, weight, logprobs in rows}


@pytest.mark.parametrize("unit", ["episode", "turn"])
def test_computed_logprobs_are_the_samplers_and_so_is_the_gradient(tmp_path, batches, unit):
    root, twin, known = batches
    settings = dict(OFFLINE) | {"training_unit": unit, "keep_token_stats": unit == "episode"}
    told, computed = [], []
    root, twin = copied(root, tmp_path / "root"), copied(twin, tmp_path / "twin")
    report = lambda rows: lambda step, row: rows.append(row)  # noqa: E731
    assert train_here(root, report=report(told), **settings) == 2
    assert train_here(twin, report=report(computed), **settings, compute_logprobs=True) == 2
    # what was computed, at sampled tokens, against transformers' own logits of one row alone
    stored = dict(query(twin, "select rollout_id, reference_logprobs from reference"))
    masks = dict(query(root, "select rollout_id, action_mask from rollouts where worker_id = 'late'"))
    assert stored.keys() == known.keys()
    for rollout_id, logprobs in stored.items():
        assert np.where(masks[rollout_id], logprobs, 0) == pytest.approx(known[rollout_id], abs=1e-4)
    for name in ("loss", "grad_norm", "sampler_kl", "ratio_max", "ratio_mean"):
        assert computed[0][name] == pytest.approx(told[0][name], rel=1e-3, abs=1e-6), name
    assert computed[0]["ratio_max"] > 1.01  # rows of version 0 under weights of version 1
    if unit == "episode":
        one, other = stats_of_step(root), stats_of_step(twin)
        assert one.keys() == other.keys() == known.keys()
        for rollout_id, (weight, logprobs) in one.items():
            assert other[rollout_id][0] == pytest.approx(weight, abs=1e-3 * abs(weight).max())
            assert other[rollout_id][1] == pytest.approx(logprobs, abs=1e-5)
    assert query(twin, "select reason, count(*) from batches where step = 2 group by reason order by reason") == [
        ("no_logprobs", 4),
        ("text_capture", 4),
        (None, 8),
    ]


def test_two_ranks_compute_the_same_and_take_the_same_step(tmp_path, batches):
    one, two = (copied(batches[1], tmp_path / name) for name in ("one", "two"))
    train_here(one, **OFFLINE, compute_logprobs=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("computed_on_ranks.py")), two.url]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stored = [dict(query(root, "select rollout_id, reference_logprobs from reference")) for root in (one, two)]
    assert stored[0].keys() == stored[1].keys() == batches[2].keys()
    for rollout_id, logprobs in stored[0].items():
        assert stored[1][rollout_id] == pytest.approx(logprobs, abs=1e-5)
    metrics = "select loss, grad_norm, sampler_kl, ratio_mean, ratio_max from metrics where step = 2"
    assert query(two, metrics)[0] == pytest.approx(query(one, metrics)[0], rel=1e-4)


def test_a_second_start_computes_nothing_again(tmp_path, batches, caplog):
    twin = copied(batches[1], tmp_path / "twin")
    caplog.set_level("INFO")
    for _ in range(2):
        train_here(twin, **OFFLINE, compute_logprobs=True)
    assert [record.message.partition(": ")[2] for record in caplog.records if "computing" in record.message] == [
        f"computing the logprobs of 4 rollouts under version {version}" for version in (0, 1)
    ]


def test_rows_that_a_sampler_cut_from_its_distribution_are_not_computed(tmp_path, batches):
    root = copied(batches[0], tmp_path / "root")
    kinds = [{"top_p": 0.9}, {"top_k": 5}, {"policy_version_last": 1}, {"policy_version": 7, "policy_version_last": 7}]
    (group,) = kept_as(make_batch(worker_id="cut", num_groups=1, seed=8), "ids").groups
    rows = tuple(replace(row, **kind) for row, kind in zip(group.rollouts, kinds, strict=True))
    append(root, replace(make_batch(worker_id="cut", seed=8), groups=(replace(group, rollouts=rows),)), worker_id="cut")
    with pytest.raises(
        ConfigError, match=r"no_logprobs most \(4\); no_logprobs: their sampling logprobs were not stored"
    ):
        train_here(root, offline=True, epochs=1, where="worker_id = 'cut'", compute_logprobs=True)


def test_without_it_nothing_is_left_and_the_error_says_what_to_do(tmp_path, batches):
    twin = copied(batches[1], tmp_path / "twin")
    with pytest.raises(ConfigError, match=r"nothing to train on where .* compute them offline with compute_logprobs"):
        train_here(twin, **OFFLINE)
    # sft reads no sampler's logprobs: all rows are trained on, and nothing is said of a ratio
    assert train_here(twin, **OFFLINE, objective="sft") == 3
    metrics = """
        select distinct sampler_kl, sampler_kl_k1, ratio_mean, ratio_max, ratio_p01, clip_fraction, loss > 0
        from metrics where step > 1
    """
    assert query(twin, metrics) == [(*[None] * 5, 0.0, True)]
    assert query(twin, "select count(*) from mismatch") == [(0,)]


def test_settings_that_can_not_go_together_are_refused_by_name():
    with pytest.raises(ConfigError, match="compute_logprobs is set, and only offline training computes logprobs"):
        TrainConfig.of(compute_logprobs=True)
    with pytest.raises(ConfigError, match="compute_logprobs is set, and sft reads no sampler's logprobs"):
        TrainConfig.of(compute_logprobs=True, offline=True, objective="sft")


def test_a_batch_stream_gives_such_rows_to_losses_that_need_no_logprobs(batches):
    _, twin, _ = batches
    config = BatchConfig(where="worker_id = 'late'")
    with pytest.raises(ConfigError, match="compute_logprobs is set, and BatchStream runs no model"):
        BatchStream(twin, config=BatchConfig(offline=True, compute_logprobs=True))
    with pytest.raises(ConfigError, match="nothing to train on"):
        BatchStream(twin, config=config)
    shares = list(BatchStream(twin, config=config, needs_logprobs=False))
    logprobs = torch.cat([batch.sampler_logprobs for share in shares for batch in share.micro_batches])
    masks = torch.cat([batch.action_mask for share in shares for batch in share.micro_batches])
    assert logprobs[masks].isnan().all()
    assert (logprobs[~masks] == 0).all()


def test_a_second_look_without_a_filter_uses_no_row_that_could_not_be_computed(tmp_path, batches):
    twin = copied(batches[1], tmp_path / "twin")
    batch = make_batch(worker_id="cut", num_groups=1, seed=9)
    (group,) = kept_as(batch, "ids").groups
    rows = tuple(replace(row, top_p=0.9, truncated=True, truncation_reason="env") for row in group.rollouts)
    append(twin, replace(batch, groups=(replace(group, rollouts=rows),)), worker_id="cut")
    where = "worker_id in ('late', 'cut')"
    train_here(twin, **OFFLINE | {"where": where}, compute_logprobs=True, filters=("drop_truncated",))
    reasons = rerun(twin, {"filters": ()}, steps="2").rows.filter(pl.col("reason") == "drop_truncated")
    assert reasons["new_reason"].to_list() == ["no_logprobs"] * 4


def test_a_second_look_at_such_steps_knows_what_was_computed(tmp_path, batches):
    twin = copied(batches[1], tmp_path / "twin")
    train_here(twin, **OFFLINE, compute_logprobs=True)
    assert rerun(twin, {}, steps="2").is_ledger
    assert rerun(twin, {"objective": "sft"}, steps="2").steps["num_new_used"].to_list() == [16]
    with pytest.raises(ConfigError, match="trained on logprobs that it computed, and a branch computes none"):
        branch_config(twin, 2, {}, from_step=1, num_steps=1)
    assert not branch_config(twin, 2, {"objective": "sft"}, from_step=1, num_steps=1).batch.compute_logprobs
    again = create_root(str(tmp_path / "again"), twin.record.model)
    with pytest.raises(ConfigError, match="the sampler's logprobs of 8 of 8 rows were not stored, and a replay"):
        train_here(again, **replay_settings(twin.url), replay_batches=twin.url)
