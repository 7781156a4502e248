"""Run most of the benchmarks: `python -m benchmarks`; with --quick, only check that they work."""

from benchmarks import (
    call_log,
    compaction,
    compare,
    contention,
    continuous_batching,
    credit,
    episodes,
    families,
    in_flight,
    intervals,
    logprobs_memory,
    loop,
    many_files,
    memory,
    object_store,
    one_rank,
    package,
    packing,
    pages,
    peers,
    plan,
    planner,
    point_read,
    report,
    runs,
    scale,
    sql,
    store_size,
    stream,
    tail,
    train_step,
    train_wait,
    viewer,
    wait,
    weights,
)
from ludic.settings import run_script

BENCHMARKS = (
    store_size,
    contention,
    tail,
    sql,
    credit,
    many_files,
    point_read,
    call_log,
    compaction,
    memory,
    object_store,
    planner,
    scale,
    stream,
    package,
    packing,
    one_rank,
    train_step,
    families,
    logprobs_memory,
    plan,
    wait,
    train_wait,
    loop,
    continuous_batching,
    episodes,
    in_flight,
    weights,
    viewer,
    pages,
    peers,
    report,
    compare,
    runs,
    intervals,
)


def main(quick: bool = False) -> None:
    """Print every table.

    Args:
        quick: Use tiny sizes, to check that the benchmarks work; the figures mean nothing.
    """
    for benchmark in BENCHMARKS:
        benchmark.main(quick)


if __name__ == "__main__":
    run_script(main, description=__doc__)
