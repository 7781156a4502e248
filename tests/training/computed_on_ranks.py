"""Run by torchrun: train a root offline on logprobs that are computed first, for test_computed_logprobs.py.

python -m torch.distributed.run --standalone --nproc-per-node 2 computed_on_ranks.py ROOT
"""

import sys

from test_computed_logprobs import OFFLINE
from tiny_runs import train_here

from ludic.root.root import Root

if __name__ == "__main__":
    train_here(Root.open(sys.argv[1]), **OFFLINE, compute_logprobs=True, device="cpu")
