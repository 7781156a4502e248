"""token_stats/: statistics of each token that gradient steps trained on, for SQL; training never reads them.

A thread writes token_stats/attempt=A/step=S-rank=R.parquet, one file per step and rank, so that no rank waits for
another. A file is complete and immutable once listed; a killed trainer loses the files of its last steps.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from ludic.schema import arrow_schema
from ludic.store.catalogue import TOKEN_STATS, RankName
from ludic.store.parquet import encode_plain
from ludic.store.root import Root
from ludic.store.writer import BackgroundAppender, NamedFile

_LISTS = ("trainer_logprobs", "entropy", "weight")
_ROUNDED = ("entropy", "weight")
_DROPPED_BITS = 13
# The rows of a step are read together, and each row group adds its own dictionaries and statistics.
_ROW_GROUP_ROWS = 4096


class TokenStatsLog:
    """Appends files of the token_stats table (schemas/token_stats.v1.json)."""

    def __init__(self, root: Root, rank: int) -> None:
        self._rank = rank
        self._appender = BackgroundAppender[Callable[[], pa.Table]](
            root, self._make_files, is_full=lambda tables: True, flush_age_s=0.0
        )

    def append(self, make_table: Callable[[], pa.Table]) -> None:
        """Hand over a function that makes the rows of a step, called in the thread; a table without rows makes no file.

        Raises the error of an earlier failed write. Waits while 64 steps wait to be written.
        """
        self._appender.append(make_table)

    def close(self) -> None:
        """Write the remaining files and stop the thread."""
        self._appender.close()

    def _make_files(self, tables: Sequence[Callable[[], pa.Table]]) -> list[NamedFile]:
        files: list[NamedFile] = []
        for table in (make() for make in tables):
            if table.num_rows:
                name = RankName(table["attempt_id"][0].as_py(), table["step"][0].as_py(), self._rank)
                files.append((TOKEN_STATS.name(name), encode_token_stats(table)))
        return files


def encode_token_stats(table: pa.Table) -> bytes:
    """Return the Parquet bytes of a step's rows; floats are split into byte streams, as in rollouts, and compressed."""
    schema = arrow_schema("token_stats")
    assert table.schema.equals(schema)
    lists = [f"{name}.list.element" for name in _LISTS]
    return encode_plain(
        table,
        row_group_size=_ROW_GROUP_ROWS,
        use_dictionary=["attempt_id", "step", "response_length"],
        column_encoding=dict.fromkeys(lists, "BYTE_STREAM_SPLIT"),
        write_statistics=["attempt_id", "step", "rollout_id"],
    )


def to_token_stats(
    *, attempt_id: int, step: int, rollout_ids: Sequence[str], lengths: np.ndarray, **lists: np.ndarray
) -> pa.Table:
    """Return rows of the token_stats table.

    lengths: (num_rows,) response tokens of each rollout. lists: values of each list column, concatenated over rows.
    """
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    values = lists | {name: round_to_11_bits(lists[name]) for name in _ROUNDED}
    columns = {
        "attempt_id": pa.repeat(pa.scalar(attempt_id, pa.int32()), len(rollout_ids)),
        "step": pa.repeat(pa.scalar(step, pa.int64()), len(rollout_ids)),
        "rollout_id": pa.array(rollout_ids, pa.string()),
        "response_length": pa.array(lengths, pa.int32()),
    }
    schema = arrow_schema("token_stats")
    for name in lists:
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values[name]), type=schema.field(name).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def round_to_11_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 values to a significand of 11 bits, as in float16, and keep the range of float32.

    The low bits are then 0 and compress to nothing; float16 columns are a type that not every reader supports.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    return ((bits + half) & np.uint32(2**32 - (1 << _DROPPED_BITS))).view(np.float32)
