"""Scan the rollouts of one or several runs with Polars.

Reads the workers' and compacted files that exist when the scan is created, each row once; ignores foreign files below
rollouts/, such as a table log. Raises MissingRootError if there is no run. A broken file fails the collect that reads
it, with Polars' error.
"""

from collections.abc import Iterable, Sequence

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds

from ludic.records import rollouts_schema
from ludic.root.root import Root
from ludic.root.rows.files import current_files
from ludic.root.sql.connection import RootLike, open_roots
from ludic.root.sql.root_views import ROOT_COLUMN

_PARTITION = pa.schema([("version", pa.int64()), ("env", pa.string())])
_CAPTURE = pl.coalesce("capture", pl.when(pl.col("metadata").map.get("logprobs") == "absent").then(pl.lit("text")))
"""Value of `capture` by the macro capture_of, for rows that were imported before rollouts 1.8."""


def scan(*roots: RootLike | Iterable[RootLike]) -> pl.LazyFrame:
    """Return the current rollouts as a lazy frame, with the columns version and env of the partition, and root.

    roots: folders, URLs or opened roots, as separate arguments or as a list. Column `root` is the root of a row, as it
    was given. A filter on version, env or root skips files unread. Raises MissingRootError if there is no run,
    QueryError if the roots can't be read together.
    """
    frames = [_scan(root).with_columns(pl.lit(root.url).alias(ROOT_COLUMN)) for root in open_roots(roots)]
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal_relaxed")


def _scan(root: Root) -> pl.LazyFrame:
    schema = rollouts_schema(root.extra_columns)
    paths = [
        f"{root.path}/{file.name}" for file in current_files(root)
    ]  # listed, so no file is behind a link that leads out
    if not paths:
        return _empty_frame(pa.schema([*schema, *_PARTITION])).lazy()
    # For a list of files, Polars reads every folder=value of a path as a key, also folders above the root.
    is_plain = root.is_local and "=" not in root.path
    return (_scan_local(paths, schema) if is_plain else _scan_dataset(root, paths, schema)).with_columns(_CAPTURE)


def _scan_local(paths: Sequence[str], schema: pa.Schema) -> pl.LazyFrame:
    """Scan with Polars' own reader, ten times as fast as through pyarrow over 2,000 files."""
    return pl.scan_parquet(
        list(paths),
        glob=False,
        schema=_empty_frame(schema).schema,
        hive_partitioning=True,
        hive_schema=_empty_frame(_PARTITION).schema,
        missing_columns="insert",
        extra_columns="ignore",
        cast_options=pl.ScanCastOptions(missing_struct_fields="insert", extra_struct_fields="ignore"),
    )


def _scan_dataset(root: Root, paths: Sequence[str], schema: pa.Schema) -> pl.LazyFrame:
    """Scan through pyarrow, which reads from any fsspec filesystem; Polars does not."""
    dataset = ds.dataset(
        list(paths),
        schema=pa.schema([*schema, *_PARTITION]),
        format="parquet",
        filesystem=root.fs,
        partitioning=ds.partitioning(_PARTITION, flavor="hive"),
        partition_base_dir=root.at("rollouts"),
    )
    return pl.scan_pyarrow_dataset(dataset)


def _empty_frame(schema: pa.Schema) -> pl.DataFrame:
    frame = pl.from_arrow(schema.empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame
