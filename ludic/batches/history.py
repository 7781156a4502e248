"""Recall rows of earlier batches for an advantage that continues over batches, such as rae.

Reads batches/ and rollouts/. After a restart, a planner sees the rows that it would have seen without one.
"""

import logging
from typing import Literal

import pyarrow as pa

from ludic.errors import SchemaError, StoreError
from ludic.sql.planner import Planner
from ludic.store import Root
from ludic.store.ledger import newest_rows, read_rollouts
from ludic.store.records import CheckpointId

logger = logging.getLogger(__name__)


def recall_history(
    root: Root, planner: Planner, checkpoint: CheckpointId, *, baseline_over: Literal["group", "kept"]
) -> None:
    """Give the planner the newest rows of batches up to a checkpoint, as many as its advantage wants.

    If their files are gone or broken, it has none, and an average begins again; a warning says so.
    """
    if not planner.history:
        return
    tables = newest_rows(root, checkpoint, planner.history, of_groups=baseline_over == "group")
    rows = pa.concat_tables([rows for rows in tables if rows.num_rows] or [pa.table({})])
    if not rows.num_rows:
        return
    try:
        found = read_rollouts(root, rows, planner.columns)
    except (SchemaError, StoreError) as error:
        logger.warning("%s: the advantage starts without earlier batches, since %s", root.url, error)
        return
    # The reward that the plan used, which a scorer may have given.
    found = found.set_column(found.schema.get_field_index("episode_reward"), "episode_reward", rows["episode_reward"])
    planner.recall_history(found.select(planner.columns).append_column("trained_step", rows["step"]))
