"""Compute the logprobs of stored rollouts that have only token ids, for importance ratios. Collective.

Each row is run under the weights of its own policy_version. The logprobs are stored under reference/ of the trained
root (ludic.training.reference), where batches read them. Raises ModelError or StoreError on every rank if a version
can't be loaded.
"""

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.distributed.device_mesh import DeviceMesh

from ludic.base import bytes_from_main, is_main, num_ranks, path_on_main, rank, run_on_all, temporary_folder
from ludic.errors import StoreError
from ludic.records import table_from_bytes, table_to_bytes
from ludic.root import Root
from ludic.root.rows import ReferenceIndex
from ludic.root.weights import FIRST_VERSION, fetch_policy, first_model, has_weights
from ludic.run import run_of
from ludic.training.batches.reading import read_rank_batch
from ludic.training.batches.source import BatchPlan
from ludic.training.config import TrainConfig
from ludic.training.model import compute_dtype, load_sharded
from ludic.training.reference import CachedReference, Reference, model_reference

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 256
"""Rows that are read and packed together."""


def compute_logprobs(
    root: Root, model: str | None, config: TrainConfig, mesh: DeviceMesh, find_rows: Callable[[], pa.Table]
) -> ReferenceIndex:
    """Compute missing logprobs, and return the index of the logprobs of all rows.

    model: another location of the run's first model. find_rows: called on rank 0; returns the rows as
    OfflineSource.rows_to_compute.
    """
    rows = table_from_bytes(bytes_from_main(lambda: table_to_bytes(find_rows())))
    index = ReferenceIndex()
    keys = rows.group_by(["root", "policy_version"], use_threads=False).aggregate([]).to_pylist()
    for url, version in ((key["root"], key["policy_version"]) for key in keys):
        of_root = pc.is_null(rows["root"]) if url is None else pc.equal(rows["root"], url)
        of_version = rows.filter(pc.and_(of_root, pc.equal(rows["policy_version"], version)))
        source = root if url is None else Root.open(url)
        find = partial(_weights_of, source, version, model if url is None else None)
        index.include(_compute_under(root, source, version, config, mesh, of_version, find))
        gc.collect()  # the model of the version
        if mesh.device_type == "cuda":
            torch.cuda.empty_cache()
    return index


def _compute_under(
    root: Root,
    source: Root,
    version: int,
    config: TrainConfig,
    mesh: DeviceMesh,
    rows: pa.Table,
    find_weights: Callable[[], AbstractContextManager[Path]],
) -> ReferenceIndex:
    """Compute rows of one version that are not stored yet; return the index of all its rows."""
    device, name = torch.device(mesh.device_type), _name_of(source, version, config)
    cached = CachedReference(_never, root, name, device, [source])
    missing = _missing(rows, cached.index, config.batch.max_seq_len)
    if missing.num_rows:
        if is_main():
            what = "%s: computing the logprobs of %d rollouts under version %d"
            logger.info(what, source.url, missing.num_rows, version)
        cached = CachedReference(_model_of(source, config, mesh, find_weights), root, name, device, [source])
        for start in range(0, missing.num_rows, _ROWS_AT_ONCE):
            plan = _plan_of(missing.slice(start, _ROWS_AT_ONCE))
            # Turns are parts of rows, whose logprobs are kept whole.
            batch = replace(config.batch, training_unit="episode", balance_by="tokens")
            cached(run_on_all(partial(read_rank_batch, root, batch, plan, rank(), num_ranks())).micro_batches)
    return cached.index


def _missing(rows: pa.Table, index: ReferenceIndex, most: int | None) -> pa.Table:
    """Return the rows without stored logprobs for their responses, cut to max_seq_len (`most`)."""
    columns = (rows[name].to_pylist() for name in ("rollout_id", "temperature", "prompt_length", "response_length"))
    is_missing = []
    for rollout_id, temperature, prompt, response in zip(*columns, strict=True):
        length = response if most is None else min(response, most - prompt)
        is_missing.append(length > 0 and not index.has(rollout_id, temperature, length))
    return rows.filter(pa.array(is_missing, pa.bool_()))


def _never(_: object) -> list[torch.Tensor]:
    raise AssertionError("a model is loaded before it is run")


def _name_of(source: Root, version: int, config: TrainConfig) -> str:
    """Return the name of a version's logprobs in reference/; a version never changes, so no file is read."""
    run = run_of(source)
    facts = {
        "run": source.run_id,
        "version": version,
        "dtype": str(compute_dtype(config) or torch.float32),
        "float32_head": run.float32_head,
        "longrope": run.longrope,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _model_of(
    source: Root, config: TrainConfig, mesh: DeviceMesh, find_weights: Callable[[], AbstractContextManager[Path]]
) -> Reference:
    """Load a version's weights, and return their Reference."""
    dtype, run = compute_dtype(config), run_of(source)
    with path_on_main(find_weights) as folder:
        model = load_sharded(
            folder,
            mesh,
            dtype=dtype or torch.float32,
            compute_dtype=dtype,
            float32_head=run.float32_head,
            longrope=run.longrope,
        )
    chunk_tokens = config.model.logprob_chunk_tokens
    return model_reference(model, torch.device(mesh.device_type), chunk_tokens=chunk_tokens)


@contextmanager
def _weights_of(source: Root, version: int, model: str | None) -> Iterator[Path]:
    """Yield a local folder with the weights of a version. model: another location of the run's first model."""
    if version == FIRST_VERSION and not has_weights(source, version):
        with first_model(source, model) as folder:
            yield folder
        return
    with temporary_folder("version") as cache:
        try:
            folder = Path(fetch_policy(source, version, cache))
        except FileNotFoundError as error:
            raise StoreError(f"{error}; its weights were deleted since this trainer found them; start again") from error
        yield folder


def _plan_of(rows: pa.Table) -> BatchPlan:
    """Return rows as a plan that uses them all."""
    for name, value in {
        "pair_id": pa.scalar(None, pa.string()),
        "advantage": pa.scalar(0.0),
        "token_advantages": pa.scalar(None, pa.list_(pa.float32())),
        "weight": pa.scalar(1.0),
        "used": pa.scalar(True),
    }.items():
        rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    return BatchPlan(step=0, rows=rows, cursor={}, num_pending_groups=0, num_unreadable_files=0)
