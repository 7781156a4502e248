"""batches/: the ledger, the authoritative record of the rollouts that each gradient step trained on and dropped.

A step's file is written before its gradient step, and never changed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import FencedError
from ludic.schema import arrow_schema
from ludic.store.attempts import (
    chain,
    check_not_fenced,
    newest_attempt_id,
    read_attempt,
    read_parent,
)
from ludic.store.catalogue import BATCHES, StepName
from ludic.store.records import Attempt, CheckpointId
from ludic.store.root import Root
from ludic.store.tables import put_table, read_table

_EVERY_STEP = 2**62

_CONCURRENT_READS = 8


def ledger_name(attempt_id: int, step: int) -> str:
    return BATCHES.name(StepName(attempt_id, step))


def write_ledger(root: Root, attempt: Attempt, step: int, rows: pa.Table) -> None:
    """Commit a step's rows (schema of the batches table). Raises FencedError if a newer attempt owns the root."""
    assert rows.schema.equals(arrow_schema("batches"))
    check_not_fenced(root, attempt)
    name = StepName(attempt.attempt_id, step)
    if not put_table(root, BATCHES, name, rows):
        raise FencedError(
            f"{root.url}/{BATCHES.name(name)} exists with other content: another process trains as this attempt"
        )


def read_ledger(root: Root, attempt_id: int, step: int) -> pa.Table:
    """Read a step's rows as planned; columns that a file of an older schema lacks are null.

    Raises FileNotFoundError if the step was not planned, SchemaError if the file is broken.
    """
    return read_table(root, BATCHES, StepName(attempt_id, step))


def count_uses(root: Root, checkpoint: CheckpointId | None) -> dict[str, int]:
    """Count the steps that trained on each group up to a checkpoint, in attempts that may use a group again.

    The reader's cursor holds only groups that are used up; this counts the uses of groups that it delivers again.
    """
    if checkpoint is None:
        return {}
    checkpoint_ids = effective_steps(root, checkpoint, of=lambda attempt_id: _max_uses(root, attempt_id) > 1)
    return recall_groups(root, checkpoint_ids)[0]


def effective_steps(
    root: Root, checkpoint: CheckpointId, *, of: Callable[[int], bool] = lambda _: True
) -> list[CheckpointId]:
    """Return attempt_id and step of steps planned up to a checkpoint, unordered. of: whether to include an attempt."""
    checkpoint_ids: list[CheckpointId] = []
    for link in chain(checkpoint[0], partial(read_parent, root)):
        if of(link.attempt_id):
            last_step = checkpoint[1] if link.last_step is None else min(link.last_step, checkpoint[1])
            checkpoint_ids += [
                (link.attempt_id, step) for step in ledger_steps(root, link.attempt_id) if step <= last_step
            ]
    return checkpoint_ids


def attempt_of_steps(root: Root) -> dict[int, int]:
    """Return the attempt_id of each step of the effective ledger, in order of steps; {} before the first."""
    newest = newest_attempt_id(root)
    found = effective_steps(root, (newest, _EVERY_STEP)) if newest else []
    return {step: attempt_id for attempt_id, step in sorted(found, key=lambda planned: planned[1])}


def recall_groups(root: Root, checkpoint_ids: Iterable[CheckpointId]) -> tuple[dict[str, int], set[str]]:
    """Return how many of these steps trained on each group, and the groups that they considered but did not use."""
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        steps = list(pool.map(lambda checkpoint_id: _groups_of_step(root, *checkpoint_id), checkpoint_ids))
    uses = Counter(group_id for used, _ in steps for group_id in used)
    return dict(uses), {group_id for _, seen in steps for group_id in seen} - uses.keys()


def _groups_of_step(root: Root, attempt_id: int, step: int) -> tuple[list[str], list[str]]:
    """Return the groups that a step used, and all groups that it considered."""
    rows = read_ledger(root, attempt_id, step)
    used = rows.filter(rows["used"])
    return used["group_id"].unique().to_pylist(), rows["group_id"].unique().to_pylist()


def newest_rows(root: Root, checkpoint: CheckpointId, num_rows: int, *, of_groups: bool) -> Iterator[pa.Table]:
    """Yield scored ledger rows of steps up to a checkpoint, newest step first, until there are num_rows of them.

    A rollout is in the table of the newest step that used it. of_groups: whole groups that were used, not only their
    used rows.
    """
    seen: set[str] = set()
    for attempt_id, step in sorted(effective_steps(root, checkpoint), key=lambda planned: planned[1], reverse=True):
        if len(seen) >= num_rows:
            return
        rows = read_ledger(root, attempt_id, step)
        used = rows["used"]
        if of_groups:
            used = pc.is_in(rows["group_id"], rows["group_id"].filter(used).unique())
        is_known = pc.is_in(rows["rollout_id"], pa.array(seen, pa.string()))
        rows = rows.filter(pc.and_(used, pc.and_(pc.is_valid(rows["episode_reward"]), pc.invert(is_known))))
        seen.update(rows["rollout_id"].to_pylist())
        yield rows


def consumed_groups(root: Root, checkpoint: CheckpointId) -> set[str]:
    """Return the groups that steps up to a checkpoint used for the last time, or dropped, in online attempts."""
    checkpoint_ids = effective_steps(root, checkpoint, of=lambda attempt_id: _is_online(_config(root, attempt_id)))
    max_uses = {attempt_id: _config(root, attempt_id).get("max_uses", 1) for attempt_id in dict(checkpoint_ids)}
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        steps = pool.map(
            lambda checkpoint_id: _consumed_by(read_ledger(root, *checkpoint_id), max_uses[checkpoint_id[0]]),
            checkpoint_ids,
        )
        return {group_id for groups in steps for group_id in groups}


def _consumed_by(rows: pa.Table, max_uses: int) -> set[str]:
    stays = pc.fill_null(pc.and_(rows["used"], pc.less(rows["num_uses"], max_uses)), False)
    groups = rows["group_id"]
    return set(groups.unique().to_pylist()) - set(groups.filter(stays).unique().to_pylist())


def _max_uses(root: Root, attempt_id: int) -> int:
    """Return the max_uses of an online attempt, and 1 for others: offline and replay attempts' uses do not count.

    They trained on groups that workers do not deliver here, or that are to be used again.
    """
    config = _config(root, attempt_id)
    return config.get("max_uses", 1) if _is_online(config) else 1


def _is_online(config: Mapping[str, Any]) -> bool:
    return not (config.get("offline") or config.get("replay_batches"))


def _config(root: Root, attempt_id: int) -> Mapping[str, Any]:
    try:
        return read_attempt(root, attempt_id).config
    except FileNotFoundError:
        return {}


def ledger_steps(root: Root, attempt_id: int) -> list[int]:
    """Return the steps that an attempt planned, in order."""
    return [found.step for found in BATCHES.listed(root, attempt_id=attempt_id)]
