"""Run all benchmarks: `python -m benchmarks`, or with --quick only to see that they work."""

import tyro

from benchmarks import loop, planner, store_size, wait


def main(quick: bool = False) -> None:
    """Print every table.

    Args:
        quick: Tiny sizes; the figures mean nothing.
    """
    for benchmark in (store_size, planner, wait, loop):
        benchmark.main(quick)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
