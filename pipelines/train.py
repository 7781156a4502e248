"""Train on what a root holds, and nothing more: no worker runs.

    python pipelines/collect.py --root runs/collected --model FOLDER_OR_ID --num-groups 64
    python pipelines/train.py --root runs/collected --num-steps 8
    torchrun --nproc-per-node 2 pipelines/train.py --root runs/collected

A step takes groups_per_batch groups (see run.json) that no step took before. So num_steps needs groups_per_batch
x num_steps groups; with fewer, the trainer gives up after 30 seconds and says what is missing. Stopped or killed,
the same command goes on from the last checkpoint.
"""

import tyro

from ludic.cli.process import stop_on_signals
from ludic.cli.train import describe
from ludic.sql import connect
from ludic.store import Root
from ludic.training.config import TrainConfig
from ludic.training.trainer import train


def main(root: str = "runs/collected", num_steps: int | None = None, learning_rate: float = 1e-6) -> None:
    """Train, and publish each step's weights to the same root.

    Args:
        root: Folder or URL of the run.
        num_steps: Gradient steps in all, those before a resume included; None takes as many as there are groups for.
        learning_rate: Of AdamW.
    """
    opened = Root.open(root, writable=True)
    config = TrainConfig.of(
        num_steps=steps_in(opened) if num_steps is None else num_steps,
        learning_rate=learning_rate,
        # Every stored rollout counts, however old its weights; its importance ratio is capped instead.
        max_off_policy_steps=None,
        is_ratio_cap=2.0,
        rollout_timeout_s=30.0,
    )
    last_step = train(opened, config, stop_on_signals(), lambda step, row: print(f"step {step}  {describe(row)}"))
    print(f"trained to step {last_step}; {opened.url} holds the weights of every step")


def steps_in(root: Root) -> int:
    """Gradient steps that the groups of a root are enough for."""
    (num_groups,) = connect(root).execute("select count(distinct group_id) from rollouts").fetchall()[0]
    return num_groups // root.run.groups_per_batch


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
