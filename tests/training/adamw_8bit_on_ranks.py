"""Run by torchrun: train with moments in 8 bits and in float32, and resume, for test_adamw_8bit.py.

    python -m torch.distributed.run --standalone --nproc-per-node 2 adamw_8bit_on_ranks.py OUT

OUT/run gets attempt 1 and its continuation from step 3 as attempt 2. OUT/rank=R.json.
"""

import json
import sys
from pathlib import Path

from conftest import random_model, random_sequences, train

from ludic.base.distributed import init_distributed, num_ranks, rank, run_on_main, shut_down
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.training.batches.packing import pack
from ludic.training.config import TrainConfig
from ludic.training.model import shard
from ludic.training.step import build_optimizer, train_step

NUM_STEPS = 40
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
"""Two shapes of matrices and one of vectors: torchao compiles its step for each shape, and each weight decay."""


def losses(optimizer: str) -> list[float]:
    """Nats a token, while a model learns ten random sequences by heart."""
    model, sequences = random_model(**SIZES), random_sequences(10, seed=0)
    shard(model, init_distributed("cpu"))
    options = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": None}
    config = TrainConfig.of(objective="sft", optimizer=optimizer, **options)
    adam, mine = build_optimizer(model, config), pack(sequences[rank() :: num_ranks()])
    settings = {"config": config, "num_ranks": num_ranks(), "learning_rate": 3e-3}
    settings["num_action_tokens"] = sum(sequence.num_action_tokens for sequence in sequences)
    return [train_step(model, adam, [mine], **settings)["loss"] for _ in range(NUM_STEPS)]


def make_root(out: str) -> str:
    random_model(**SIZES).save_pretrained(f"{out}/model")
    return put_run(f"{out}/run", RunConfig(model=f"{out}/model", env=("moar_cats",))).url


def main(out: str) -> None:
    init_distributed("cpu")
    root = run_on_main(lambda: make_root(out))
    of_8bit = {"optimizer": "adamw_8bit"}
    seen = {
        "adamw": losses("adamw"),
        "adamw_8bit": losses("adamw_8bit"),
        "unbroken": train(root, attempt_id=1, steps=range(1, 6), **of_8bit),
        "resumed": train(root, attempt_id=2, steps=range(4, 6), resume_from=(1, 3), **of_8bit),
    }
    (Path(out) / f"rank={rank()}.json").write_text(json.dumps(seen))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
