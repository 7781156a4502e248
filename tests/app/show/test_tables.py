"""Tables of a query's result."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from ludic.app.show.tables import print_table


def test_a_table_keeps_the_rows_that_it_shows_in_memory_and_no_others() -> None:
    before, peak = pa.total_allocated_bytes(), 0

    def batches():
        nonlocal peak
        for _ in range(50):
            yield pa.record_batch({"a": pc.add(pa.array(np.zeros(100_000)), 1.0)})  # 800 kB, which Arrow counts
            peak = max(peak, pa.total_allocated_bytes() - before)

    reader = pa.RecordBatchReader.from_batches(pa.schema([("a", pa.float64())]), batches())
    console = Console(file=io.StringIO(), width=80)
    print_table(reader, console, max_rows=3)
    assert "3 of 5,000,000 rows" in console.file.getvalue()
    assert peak < 10_000_000
