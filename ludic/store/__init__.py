"""Read and write the root of a run and all files below it, on any fsspec filesystem; no other layer touches files.

Chapters, each on those before it: filesystem (over local and s3, with failures), records, catalogue, root; parquet,
files, writer, tables; claims, weights, attempts, policies; reader, tombstones, ledger; evaluations.
"""

from ludic.store.attempts import check_not_fenced, newest_attempt_id, read_attempt, start_attempt
from ludic.store.files import RolloutFile, list_files
from ludic.store.ledger import count_uses, ledger_steps, read_ledger, write_ledger
from ludic.store.parquet import read_columns, read_rows
from ludic.store.policies import fetch_policy, latest_policy, point_latest, prune_policies, publish_policy
from ludic.store.reader import Cursor, RolloutReader
from ludic.store.records import Attempt, LatestPolicy
from ludic.store.root import Root
from ludic.store.tables import MetricsLog, MetricsTail
from ludic.store.writer import RolloutWriter

__all__ = [
    "Attempt",
    "Cursor",
    "LatestPolicy",
    "MetricsLog",
    "MetricsTail",
    "RolloutFile",
    "RolloutReader",
    "RolloutWriter",
    "Root",
    "check_not_fenced",
    "count_uses",
    "fetch_policy",
    "latest_policy",
    "ledger_steps",
    "list_files",
    "newest_attempt_id",
    "point_latest",
    "prune_policies",
    "publish_policy",
    "read_attempt",
    "read_columns",
    "read_ledger",
    "read_rows",
    "start_attempt",
    "write_ledger",
]
