"""Run by `run_ranks`: a step of a small mixture of experts with router losses, for test_router_losses.py.

    router_losses_on_ranks.py OUT

OUT/rank=R.json: the step's metrics, and whole gradients by the weight's name.
"""

import json
import sys
from pathlib import Path

from mixtures import micro_batches, step_of

from ludic.base.distributed import init_distributed, num_ranks, rank, shut_down


def main(out: str) -> None:
    init_distributed("cpu")
    mine = micro_batches()[rank() :: num_ranks()]
    metrics, gradients = step_of(mine, activation_checkpointing=True)
    seen = {"metrics": metrics, "gradients": {name: gradient.tolist() for name, gradient in gradients.items()}}
    (Path(out) / f"rank={rank()}.json").write_text(json.dumps(seen))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
