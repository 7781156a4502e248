"""Measure peak resident memory of a writer, a reader and a compaction, by the size of a store of long rollouts.

    python -m benchmarks.memory                   # 1, 4 and 16 GB in the temporary folder, which takes a while
    python -m benchmarks.memory --sizes-gb 1 4

Each is a separate process. Its peak is Linux's VmHWM, which includes Python and its libraries. The writer appends
groups of rollouts of about 150,000 tokens. The reader polls, and reads tokens and logprobs group by group, as a
trainer's rank does. The compaction rewrites all files, which are in one partition. Then a reader reads the result.
"""

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import in_a_process, print_table
from benchmarks.rollouts import make_batch, make_like
from ludic.records import new_id
from ludic.root import Root
from ludic.root.maintenance import compact
from ludic.root.rows import RolloutReader, RolloutWriter, read_rollouts
from ludic.run import RunConfig, put_run
from ludic.settings import run_script

Role = Callable[..., None]
COLUMNS = ["prompt_tokens", "response_tokens", "response_logprobs", "token_rewards"]


def main(quick: bool = False, sizes_gb: tuple[float, ...] = (1, 4, 16)) -> None:
    """Print a table.

    Args:
        quick: Use small stores of short rollouts, to check that the benchmark works.
        sizes_gb: Sizes of the stores, in 10^9 bytes.
    """
    mean_length = 200 if quick else 150_000
    sizes = (0.0005,) if quick else sizes_gb
    rows = []
    for group_size in (8, 64):
        peaks = [_measure(group_size, mean_length, size) for size in sizes]
        for role in ROLES:
            mine = [of_size[role] for of_size in peaks]
            row = [f"groups of {group_size}: {role}", *(f"{peak / 1e6:,.0f} MB" for peak in mine)]
            rows.append([*row, f"{mine[-1] / mine[0]:.2f}x"])
    columns = ["", *(f"{size:g} GB" for size in sizes), "of the first"]
    print_table(f"Peak resident memory, rollouts of {mean_length:,} tokens", columns, rows)


def _measure(group_size: int, mean_length: int, size_gb: float) -> dict[str, int]:
    """Return the peak bytes of each role; the roles run one after the other on one store."""
    with tempfile.TemporaryDirectory() as folder:
        root = put_run(f"{folder}/run", RunConfig(model="none", env=("moar_cats",), group_size=group_size))
        args = (root.url, group_size, mean_length, int(size_gb * 1e9))
        return {role: in_a_process(_peak_bytes, function, *args) for role, function in ROLES.items()}


def _peak_bytes(function: Role, *args: Any) -> int:
    """Play a role, and return the most memory that its process ever held."""
    function(*args)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def write(url: str, group_size: int, mean_length: int, size_bytes: int) -> None:
    """Append groups until the store has at least size_bytes."""
    root = Root.open(url, writable=True)
    group = make_batch(1, mean_length=mean_length, group_size=group_size)
    with RolloutWriter(root, "w0-long") as writer:
        for number in count():
            writer.append(make_like(group, "w0-long", new_id()))
            if number % 8 == 0 and sum(root.sizes("rollouts").values()) >= size_bytes:
                return


def read(url: str, group_size: int, mean_length: int, size_bytes: int) -> None:
    """Poll, and read the tokens of a group at a time, or of enough rollouts for about a million tokens."""
    root = Root.open(url)
    reader = RolloutReader(root, ["rollout_id"])
    rows = reader.poll(None)
    assert rows is not None
    rows_at_once = max(group_size, 1_000_000 // mean_length)
    for start in range(0, rows.num_rows, rows_at_once):
        read_rollouts(root, rows.slice(start, rows_at_once), COLUMNS)
    reader.consume(rows)


def compact_all(url: str, *_: int) -> None:
    compact(Root.open(url, writable=True))


ROLES: dict[str, Role] = {
    "writer": write,
    "reader": read,
    "compaction": compact_all,
    "reader of what was compacted": read,
}


if __name__ == "__main__":
    run_script(main, description=__doc__)
