"""Measure bytes per sampled token of the column kept_tokens in several encodings.

    python -m benchmarks.kept_tokens

Each token's kept ids are drawn from a distribution over a vocabulary of 150,000 that falls as a power of the rank, cut
by top_k and top_p. The tokens at each rank are those of a context: half are the same everywhere, as common words are,
and the others differ from token to token. Parquet's encodings leave the column's type as it is, list<list<int32>>, and
any reader decodes them. The others would need a type of their own: a bitmap of the vocabulary, and, as text, the ids
that were cut (the complement). ludic uses the encoding of ludic.root.rows.parquet.
"""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import print_table
from ludic.root.rows import writer_options
from ludic.settings import run_script

VOCABULARY = 150_000
_COLUMN = "kept_tokens.list.element.list.element"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Size of the measurement."""

    rollouts: int = 64
    """Rollouts in the file, which is one row group."""
    length: int = 200
    """Sampled tokens of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Settings of the sampler, and how peaked the model is."""

    name: str
    top_k: int
    top_p: float
    power: float
    """The probability of rank r falls as r ** -power."""


CUTS = (
    Cut(name="top_k 20", top_k=20, top_p=1.0, power=1.5),
    Cut(name="top_k 50, top_p 0.9", top_k=50, top_p=0.9, power=1.5),
    Cut(name="top_p 0.9, peaked", top_k=VOCABULARY, top_p=0.9, power=2.5),
    Cut(name="top_p 0.9, wide", top_k=VOCABULARY, top_p=0.9, power=1.5),
)


def kept_ids(cut: Cut, num_tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Return the ascending ids, (kept,) int32, that a sampler keeps at each of num_tokens tokens."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, VOCABULARY + 1) ** -cut.power
    mass = np.cumsum(weights / weights.sum())
    common = rng.permutation(VOCABULARY).astype(np.int32)
    found = []
    for _ in range(num_tokens):
        # A token's distribution is more or less peaked: the number of kept tokens varies by half a power of ten.
        num_kept = int(np.searchsorted(mass, cut.top_p) + 1) if cut.top_p < 1 else VOCABULARY
        num_kept = max(1, min(int(num_kept * 10 ** rng.uniform(-0.5, 0.5)), cut.top_k))
        shared = common[: 2 * num_kept][rng.permutation(min(2 * num_kept, VOCABULARY))[: num_kept // 2]]
        own = rng.integers(0, VOCABULARY, num_kept, dtype=np.int32)
        found.append(np.unique(np.concatenate([shared, own]))[:num_kept])
    return found


def parquet_sizes(table: pa.Table, column: str) -> dict[str, int]:
    """Return the bytes of a table's only column in one row group, by encoding; lengths of lists are in each of them.

    column: path of its numbers. The last encoding is the one by which ludic writes rollouts.
    """
    sizes = {}
    for encoding in ("PLAIN", "DICTIONARY", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"):
        is_dictionary = encoding == "DICTIONARY"
        for compression in ("none", "zstd"):
            sizes[f"{encoding}, {compression}"] = _size(
                table,
                compression=compression,
                compression_level=None if compression == "none" else 1,
                use_dictionary=[column] if is_dictionary else False,
                column_encoding=None if is_dictionary else {column: encoding},
                store_schema=False,
            )
    return sizes | {"as ludic writes it": _size(table, **writer_options(table.schema, dictionaries=True))}


def _size(table: pa.Table, **options: Any) -> int:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return int(pq.ParquetFile(sink).metadata.row_group(0).column(0).total_compressed_size)


def other_bytes(ids: list[np.ndarray]) -> tuple[int, int]:
    """Return the bytes of bitmaps, and of the ids that were cut, both compressed by zstd at level 1."""
    codec = pa.Codec("zstd", compression_level=1)
    bitmap = complement = 0
    for some in ids:
        is_kept = np.zeros(VOCABULARY, bool)
        is_kept[some] = True
        bitmap += len(codec.compress(np.packbits(is_kept).tobytes()))
        complement += len(codec.compress(np.diff(np.flatnonzero(~is_kept), prepend=0).astype(np.uint8).tobytes()))
    return bitmap, complement


def main(config: Config) -> None:
    """Print one table: bytes per sampled token, by encoding and by the sampler's settings."""
    rows: dict[str, list[str]] = {}
    header = ["encoding"]
    for cut in CUTS:
        num_tokens = config.rollouts * config.length
        ids = kept_ids(cut, num_tokens)
        lists = [[each.tolist() for each in ids[i : i + config.length]] for i in range(0, num_tokens, config.length)]
        table = pa.table({"kept_tokens": pa.array(lists, pa.list_(pa.list_(pa.int32())))})
        header.append(f"{cut.name} (mean {np.mean([len(each) for each in ids]):.1f})")
        sizes = parquet_sizes(table, _COLUMN)
        few = ids[:: max(1, num_tokens // 200)]
        for name, size in zip(("bitmap, zstd", "complement, zstd"), other_bytes(few), strict=True):
            sizes[name] = size * num_tokens // len(few)
        for name, size in sizes.items():
            rows.setdefault(name, [name]).append(f"{size / num_tokens:.1f}")
    print_table("bytes a sampled token", header, list(rows.values()))


if __name__ == "__main__":
    run_script(main, description=__doc__)
