"""Measure the time to plan a batch of 8 groups by SQL, by the number of pending groups, and against plain Python.

    python -m benchmarks.planner

Plain Python does the same over dicts of scalars: apply one filter to all rows, queue the groups, compute the
leave-one-out baseline of the batch. It has no ledger, and its filter and advantage can't be replaced by a file.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

import pyarrow as pa

from benchmarks.measure import median_ratio, print_table, take_turns
from benchmarks.rollouts import make_batch
from ludic.records import to_table
from ludic.root.sql import BatchRules, Planner
from ludic.settings import run_script

GROUPS_PER_BATCH = 8
RULES = BatchRules(
    filters=("max_off_policy_steps",), params={"max_off_policy_steps": 8}, groups_per_batch=GROUPS_PER_BATCH
)


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use few groups and one round, to check that the benchmark works.
    """
    sizes, rounds = ((16, 32), 1) if quick else ((64, 256, 1024, 4096), 9)
    seconds = {size: _measure(size, rounds) for size in sizes}
    first = median(seconds[sizes[0]]["sql"])
    rows = []
    for size in sizes:
        sql, python = (seconds[size][name] for name in ("sql", "python"))
        row = [f"{size:,}", f"{median(sql) * 1e3:.1f} ms", f"{median(sql) / first:.1f}x"]
        rows.append([*row, f"{median(python) * 1e3:.1f} ms", f"{median_ratio(sql, python):.1f}x"])
    columns = ["groups of 8 that wait", "SQL", "of the first line", "plain Python", "SQL of plain Python"]
    print_table("Planning a batch of 8 groups", columns, rows)


def _measure(num_groups: int, rounds: int) -> dict[str, list[float]]:
    planner = Planner(RULES)
    # Each plan removes its groups, so num_groups are pending in the middle round.
    rows = pending_rows(num_groups + (rounds // 2 + 1) * GROUPS_PER_BATCH)
    planner.add(rows)
    by_python = rows.to_pylist()
    return take_turns(
        {
            "sql": lambda: planner.plan(step=1, attempt_id=1, trainer_version=8),
            "python": lambda: plan_in_python(by_python, trainer_version=8),
        },
        rounds,
    )


def pending_rows(num_groups: int) -> pa.Table:
    """Return scalars of rollouts, with the addresses that a reader adds."""
    table = to_table(make_batch(num_groups, mean_length=2), run_id="benchmark", sequence=0)
    table = table.select(Planner(RULES).columns)
    indexes = pa.array(range(table.num_rows))
    address = {
        "file": pa.repeat(pa.scalar("rollouts/version=7/env=moar_cats/w0-0.parquet"), table.num_rows),
        "row_group": pa.repeat(pa.scalar(0, pa.int32()), table.num_rows),
        "row": indexes.cast(pa.int32()),
        "arrival": indexes,
        "refusal": pa.nulls(table.num_rows, pa.string()),
    }
    for name, column in address.items():
        table = table.append_column(name, column)
    return table


def plan_in_python(rows: list[dict[str, Any]], trainer_version: int) -> list[Mapping[str, Any]]:
    """Return the rows of the next batch with their advantages; removes no rows."""
    groups = defaultdict(list)
    for row in rows:
        if trainer_version - row["policy_version"] <= 8 and row["error"] is None:
            groups[row["group_id"]].append(row)
    queue = sorted(groups.values(), key=lambda group: (group[0]["policy_version"], group[0]["arrival"]))
    return [row | {"advantage": advantage} for group in queue[:GROUPS_PER_BATCH] for row, advantage in _rloo(group)]


def _rloo(group: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    total = sum(row["episode_reward"] for row in group)
    return [(row, row["episode_reward"] - (total - row["episode_reward"]) / (len(group) - 1)) for row in group]


if __name__ == "__main__":
    run_script(main, description=__doc__)
