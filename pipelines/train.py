"""Train on the stored rollouts of a root; no worker runs.

    python pipelines/collect.py --root runs/collected --model FOLDER_OR_ID --num-groups 64
    python pipelines/train.py --root runs/collected --num-steps 8
    torchrun --nproc-per-node 2 pipelines/train.py --root runs/collected

A step uses groups_per_batch groups (see run.json) that no earlier step used. So num_steps needs groups_per_batch
x num_steps groups; with fewer, the trainer stops after 30 seconds and reports the missing groups. After a stop or a
kill, the same command continues from the last checkpoint.
"""

import os

import ludic
from ludic.settings import run_script


def main(root: str = "runs/collected", num_steps: int | None = None, learning_rate: float = 1e-6) -> None:
    """Train, and publish each step's weights to the same root.

    Args:
        root: Folder or URL of the run.
        num_steps: Total number of gradient steps, including those before a resume; None: as many as the
            groups allow.
        learning_rate: Learning rate of AdamW.
    """
    run = ludic.open(root)
    done = run.train(
        num_steps=steps_in(run) if num_steps is None else num_steps,
        learning_rate=learning_rate,
        # All stored rollouts count, however old their weights; their importance ratio is capped instead.
        max_off_policy_steps=None,
        is_ratio_cap=2.0,
        rollout_timeout_s=30.0,
    )
    if os.environ.get("RANK", "0") == "0":
        print(f"trained to step {done.step}; {run.url} holds the weights of every step")


def steps_in(run: ludic.Run) -> int:
    """Return the number of gradient steps that the groups of a run allow."""
    (num_groups,) = ludic.connect(run.url).execute("select count(distinct group_id) from rollouts").fetchall()[0]
    return num_groups // run.config.groups_per_batch


if __name__ == "__main__":
    run_script(main, description=__doc__)
