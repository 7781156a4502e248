"""Runs for tests: a tiny model, roots filled with the rollouts of `make_batch`, and what a trainer did with them."""

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from safetensors.numpy import load, save_file
from strategies import make_batch
from torch.optim import Optimizer
from transformers import PreTrainedModel

import ludic
from ludic.base.distributed import run_on_main
from ludic.models.tiny import make_tiny_model
from ludic.records.rollout import RolloutGroup
from ludic.root.attempts import complete_checkpoints, folder_of
from ludic.root.claims import claim_slot
from ludic.root.json_records import CheckpointInfo
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.root.rows.tables import MetricsLog
from ludic.root.rows.tombstones import expire, quarantine, stored_files
from ludic.root.rows.writer import RolloutWriter
from ludic.run import run_json
from ludic.run.config import RunConfig
from ludic.run.run_json import run_of
from ludic.training.checkpoint import take_snapshot, write_checkpoint
from ludic.training.config import TrainConfig
from ludic.training.trainer import train

GROUP_SIZE, GROUPS_PER_BATCH = 4, 2


def make_model(folder: Path) -> str:
    """A tiny model whose vocabulary holds every token that `make_batch` draws."""
    make_tiny_model(str(folder), (first + second for first in ascii_lowercase for second in "abcdefghi"))
    return str(folder)


def other_model(folder: Path) -> str:
    """The model of `make_model` with one weight changed."""
    make_model(folder)
    tensors = load((folder / "model.safetensors").read_bytes())
    changed = {name: tensor + (name == "model.norm.weight") for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def create_root(url: str, model: str, **settings: Any) -> Root:
    defaults = {"env": ("moar_cats",), "group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH}
    return run_json.create_root(url, RunConfig(model=model, **(defaults | settings)))


def fill(
    root: Root, *, num_files: int, groups_per_file: int = 4, worker_id: str = "w0-test", seed: int = 0, **options: Any
) -> dict[str, RolloutGroup]:
    """Append groups, a file a call, and return them by group_id; the same for the same arguments."""
    groups: dict[str, RolloutGroup] = {}
    with RolloutWriter(root, worker_id) as writer:
        for number in range(num_files):
            sizes = {"num_groups": groups_per_file, "group_size": run_of(root).group_size}
            batch = make_batch(worker_id=worker_id, seed=seed + number, **(sizes | options))
            writer.append(batch)
            writer.flush()
            groups |= {group.rollouts[0].group_id: group for group in batch.groups}
    return groups


def copied(root: Root, folder: Path) -> Root:
    """A copy of a root on this machine, which may be changed."""
    return Root.open(shutil.copytree(root.path, folder).as_posix(), writable=True)


def train_config(**settings: Any) -> TrainConfig:
    """Settings under which the plans follow from the store alone: no rollout gets too old."""
    defaults = {"learning_rate": 1e-3, "max_off_policy_steps": None, "checkpoint_every": 3, "rollout_timeout_s": 0.5}
    return TrainConfig.of(**(defaults | {"device": "cpu"} | settings))


def train_here(root: Root, *, report: Callable[[int, Mapping[str, Any]], None] | None = None, **settings: Any) -> int:
    """Train in this process; the last step."""
    return train(root, train_config(**settings), threading.Event(), report)


def make_whole_root(folder: Path) -> Root:
    """A short run with a file of every kind: compacted and expired ones, a reference, evals, token statistics, a broken
    file, weights in full and as differences."""
    root = create_root(str(folder / "run"), make_model(folder / "model"))
    fill(root, num_files=3)
    fill(root, num_files=2, worker_id="w1-test", seed=5, policy_version=1)
    with RolloutWriter(root, "e0-test", folder="evals") as writer:
        writer.append(make_batch(worker_id="e0-test", num_groups=1, seed=9, purpose="eval"))
    claim_slot(root, 0, "w0-test")
    reference = {"reference": root.record.model, "reference_cache": True, "kl_weight": 0.1}
    train_here(root, num_steps=2, checkpoint_every=1, full_version_every=2, keep_token_stats=True, **reference)
    with closing(MetricsLog(root, "worker", "w0-test")) as log:
        log.write(worker_id="w0-test", env_name="moar_cats", num_rollouts=8, policy_version=0)
    compact(root, before_version=1)
    (*_, last) = stored_files(root)
    expire(root, [last], rule="the newest")
    root.put("rollouts/version=1/env=moar_cats/w2-test-0.parquet", b"torn")
    quarantine(root, "rollouts/version=1/env=moar_cats/w2-test-0.parquet", "not a Parquet file")
    return root


class KilledError(Exception):
    """Ends a trainer in the middle of everything."""


def train_until_killed(root: Root, *, at_step: int, **settings: Any) -> None:
    """Train, and die after the gradient step `at_step`, without any farewell."""

    def die(step: int, row: Mapping[str, Any]) -> None:
        if step == at_step:
            raise KilledError

    try:
        train_here(root, report=die, **settings)
    except KilledError:
        return
    raise AssertionError(f"trained to the end without passing step {at_step}")


def save_checkpoint(root: Root, model: PreTrainedModel, optimizer: Optimizer, **facts: Any) -> CheckpointInfo:
    """Take a snapshot and write it at once, on rank 0; every rank must call it."""
    snapshot = take_snapshot(model, optimizer, **facts)
    run_on_main(partial(write_checkpoint, root, snapshot))
    return snapshot.info


def query(root: Root, sql: str) -> list[tuple]:
    return ludic.connect(root).execute(sql).fetchall()


def ledger(root: Root) -> list[tuple]:
    """What each step trained on and dropped, apart from versions and attempts, which a restart changes."""
    return query(
        root,
        """
        select step, batch_index, rollout_id, group_id, file, row_group, row, advantage, weight, used, reason
        from batches
        order by step, batch_index
        """,
    )


def final_weights(root: Root) -> dict[str, np.ndarray]:
    """Those of the newest checkpoint."""
    return load(root.read(f"{folder_of(complete_checkpoints(root)[-1])}/model.safetensors"))


def cursor_of_ledger(root: Root, first_version: int | None = None) -> dict[str, Any]:
    """The reader's position that the effective ledger amounts to.

    first_version: the oldest version that a trainer with a window of versions remembers; None has no window.
    """
    stored = query(root, "select distinct worker_id, sequence, group_id, version from rollouts")
    in_ledger = {group_id for (group_id,) in query(root, "select distinct group_id from batches")}
    cursor = Cursor()
    numbers = (
        "select distinct request_index // group_size, batches.group_id from batches join rollouts using (rollout_id)"
    )
    for number, _ in query(root, f"{numbers} where coalesce(reason, '') <> 'duplicate_request'"):
        cursor.finish_request(number)
    for worker_id, sequence, version in sorted({(worker, number, version) for worker, number, _, version in stored}):
        groups = {group_id for worker, number, group_id, _ in stored if (worker, number) == (worker_id, sequence)}
        of_version = None if first_version is None else version
        if groups & in_ledger:
            cursor.consume(worker_id, sequence, groups & in_ledger, whole=groups <= in_ledger, version=of_version)
    cursor.forget_before(first_version or 0)
    return cursor.to_dict()


def groups_left(root: Root, cursor: Mapping[str, Any], versions: range | None) -> set[str]:
    """What a reader delivers that goes on from a position."""
    rows = RolloutReader(root, [], Cursor.from_dict(dict(cursor))).poll(versions)
    return set() if rows is None else set(rows.column("group_id").to_pylist())
