"""A worker for test_kill.py: `python append_until_killed.py URL WORKER_ID FIRST_SEED` appends until it is killed.

Prints the group_ids of its batches, a line each time that a flush has returned.
"""

import itertools
import sys

from strategies import make_batch

from ludic.store import RolloutWriter, Root


def main(url: str, worker_id: str, first_seed: str) -> None:
    writer = RolloutWriter(Root.open(url, writable=True), worker_id, flush_groups=2, flush_age_s=0.001)
    appended: list[str] = []
    for seed in itertools.count(int(first_seed)):
        batch = make_batch(
            worker_id=worker_id, num_groups=1 + seed % 3, group_size=3, response_length=10_000, seed=seed
        )
        writer.append(batch)
        appended += [group.rollouts[0].group_id for group in batch.groups]
        if seed % 2 == 0:
            writer.flush()
            print(*appended, flush=True)
            appended.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
