"""Measure the advantages of agents over a million rows: episodes with several rows and children, two turns a row.

    python -m benchmarks.credit

A group has 4 episodes, each of a root of two rows and two children. The table is in DuckDB's memory, so nothing is read
from files. Advantages by token have 20 tokens a row. Times are from the call to an Arrow table, on as many threads as
there are cores; CPU seconds are of all threads together, for a machine that is busy with other work.
"""

import os
import time
from statistics import median
from typing import Any

import duckdb

from benchmarks.measure import print_table
from ludic.root.sql import advantages, open_duckdb
from ludic.settings import run_script

CONTESTANTS: dict[str, dict[str, Any]] = {
    "rloo": {},
    "grpo": {},
    "grpo_by_agent": {},
    "child_credit": {},
    "turn_returns": {},
    "mt_grpo": {},
    "gigpo": {},
    "rae": {},
    "tree_grpo": {},
    "fold_grpo": {"context_limit": 4000},
}
"""Parameters of each advantage."""

_ROLLOUTS = """
create table rollouts as
with numbers as (
    select i, i // 16 as g, i % 16 // 4 as e, i % 4 as place from range($num_rows) t(i)
)

select
    printf('%036d', i) as rollout_id,
    printf('%036d', g) as group_id,
    printf('%036d', i // 4) as episode_id,
    'env-' || (g % 4) as env_name,
    (i // 4)::bigint as request_index,
    case when place < 2 then 'main' else 'solver' end as agent_id,
    case when place >= 2 then printf('%036d', i - place) end as parent_rollout_id,
    printf('%036d', case when place < 2 then i - place else i end) as trajectory_id,
    (place >= 2)::integer as depth,
    case when place < 2 then place else 0 end::integer as segment_index,
    case when place < 2 then hash(i // 4) % 2 else hash(i) % 3 / 2 end::double as episode_reward,
    case when place < 2 then hash(i // 4) % 2 = 1 end as correct,
    1000 as prompt_length,
    20 as response_length,
    16 as action_length,
    [hash(i // 8, place) % 2, 5, 6, 7, 8, 9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6]::integer[] as response_tokens,
    [0, 0, 0, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, hash(i) % 3, 0, 0]::float[] as token_rewards,
    map {'scope': case when hash(i) % 5 = 0 then -0.2 else 0 end::double} as reward_components,
    [
        {'start': 0, 'end': 8, 'parse_error': false, 'tool_calls': [{'name': 'delegate', 'error': null::varchar}]},
        {'start': 10, 'end': 18, 'parse_error': hash(i) % 10 = 0, 'tool_calls': []}
    ] as agent_steps,
    [
        {'agent_steps': [0], 'observation_hash': 'state-' || (hash(i) % 4)},
        {'agent_steps': [1], 'observation_hash': 'state-' || (hash(i + 1) % 4)}
    ] as environment_steps
from numbers
"""


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use few rows and one round, to check that the benchmark works.
    """
    num_rows, rounds = (1600, 1) if quick else (1_000_000, 5)
    con = rollouts(num_rows)
    rows = []
    for name in CONTESTANTS:
        measured = [_measure(con, name) for _ in range(rounds + 1)][1:]  # the first call warms up
        rows.append([name, *(f"{median(column):.2f} s" for column in zip(*measured, strict=True))])
    print_table(f"Advantages of {num_rows:,} rollouts", ["advantage", "time", "CPU"], rows)


def rollouts(num_rows: int) -> duckdb.DuckDBPyConnection:
    """Return a connection with a table `rollouts` of so many rows, with the columns that the advantages read."""
    con = open_duckdb()
    con.execute(f"set threads = {os.cpu_count() or 1}")
    con.execute(_ROLLOUTS, {"num_rows": num_rows})
    return con


def _measure(con: duckdb.DuckDBPyConnection, name: str) -> tuple[float, float]:
    """Return the seconds of one call, and its CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    advantages(con, name, **CONTESTANTS[name])
    return time.perf_counter() - start, time.process_time() - cpu


if __name__ == "__main__":
    run_script(main, description=__doc__)
