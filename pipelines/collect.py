"""Sample groups with one set of weights into a root; no trainer runs.

    python pipelines/collect.py --root runs/collected --model FOLDER_OR_ID --env moar_cats addition --num-groups 64
    ludic sql runs/collected "select env_name, avg(episode_reward) from rollouts group by all"

A second call continues the run's schedule: it samples the next groups, with the newest policy of the root. This is the
model itself, unless a trainer has published since (see train.py).
"""

import ludic
from ludic.settings import run_script


def main(
    model: str,
    root: str = "runs/collected",
    env: tuple[str, ...] = ("moar_cats",),
    num_groups: int = 64,
    group_size: int = 8,
    groups_per_batch: int = 8,
    max_tokens: int = 256,
    accept_incomplete: bool = False,
) -> None:
    """Create the run, then sample.

    Args:
        model: Folder or Hugging Face id of the weights to sample with.
        root: Folder or URL of the run.
        env: Environments, sampled in turn.
        num_groups: Groups to sample now.
        group_size: Episodes sampled from one example.
        groups_per_batch: Groups in the batch of a gradient step, for a later trainer.
        max_tokens: Maximum tokens in one completion.
        accept_incomplete: Also score completions that were cut at max_tokens, instead of refusing them.
    """
    run = ludic.create(
        root,
        model=model,
        env=env,
        group_size=group_size,
        groups_per_batch=groups_per_batch,
        max_tokens=max_tokens,
        accept_incomplete=accept_incomplete,
    )
    print(f"{run.worker(num_groups).num_groups} groups of {group_size} episodes committed to {run.url}")


if __name__ == "__main__":
    run_script(main, description=__doc__)
