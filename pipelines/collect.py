"""Sample groups with one set of weights into a root; no trainer runs.

    python pipelines/collect.py --root runs/collected --model FOLDER_OR_ID --env moar_cats addition --num-groups 64
    ludic sql runs/collected "select env_name, avg(episode_reward) from rollouts group by all"

Run again, it goes on in the run's schedule: the next groups, with the newest policy of the root, which is the
model itself unless somebody trained on what was collected (see train.py).
"""

from pathlib import Path

import tyro

from ludic.engines.transformers_engine import TransformersEngine
from ludic.launch.process import stop_on_signals
from ludic.rollouts.worker import WorkerConfig, run_worker
from ludic.store import Root, RunConfig, latest_policy, publish_policy
from ludic.training.model import copy_tokenizer, full_state_dict, load_model, save_weights


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
    """Publish the model as version 0, then sample.

    Args:
        model: Folder or Hugging Face id of the weights to sample with.
        root: Folder or URL of the run.
        env: Environments, sampled in turn.
        num_groups: Groups to sample now.
        group_size: Episodes sampled from one example.
        groups_per_batch: Groups that a gradient step will take, should somebody train on this.
        max_tokens: Most tokens in one completion.
        accept_incomplete: Score a completion that hit max_tokens too, instead of refusing it.
    """
    run = RunConfig(
        model=model,
        env=env,
        group_size=group_size,
        groups_per_batch=groups_per_batch,
        max_tokens=max_tokens,
        accept_incomplete=accept_incomplete,
    )
    opened = Root.create(root, run)
    if latest_policy(opened) is None:
        publish_first(opened)
    config = WorkerConfig(slot=0, num_groups=num_groups, follow_quota=False)
    num_made = run_worker(opened, config, make_engine, stop_on_signals())
    print(f"{num_made} groups of {group_size} episodes committed to {opened.url}")


def publish_first(root: Root) -> None:
    """Make the run's model version 0, so that a worker finds weights."""

    def save(folder: Path) -> None:
        model = load_model(root.run.model)
        save_weights(model, full_state_dict(model), folder)
        copy_tokenizer(root.run.model, folder)

    publish_policy(root, save, step=0, attempt_id=0, parent_version=None, groups_per_worker=lambda version: 0)


def make_engine(folder: str, version: int) -> TransformersEngine:
    return TransformersEngine(folder, version=version)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
