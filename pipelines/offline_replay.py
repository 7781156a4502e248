"""Train on what is stored: on chosen rollouts of other runs, in epochs; or on the very batches of a run, once more.

    python pipelines/collect.py --root runs/collected --model FOLDER_OR_ID --num-groups 64
    python pipelines/offline_replay.py --root runs/offline --sources runs/collected --epochs 2
    python pipelines/offline_replay.py --root runs/again --replay runs/offline

The second command makes a run of its own, which says for each step what it was trained on, and in which run that lies.
The third repeats it from its ledger, with the same settings: on one rank the weights come out the same bit for bit.
Stopped or killed, either goes on from its last checkpoint.
"""

import tyro

from ludic.cli.process import stop_on_signals
from ludic.cli.train import describe
from ludic.errors import ConfigError
from ludic.store import Root
from ludic.training.config import TrainConfig
from ludic.training.replay import replay_settings
from ludic.training.trainer import train


def main(
    root: str,
    sources: tuple[str, ...] = (),
    where: str | None = None,
    epochs: int = 1,
    learning_rate: float = 1e-6,
    replay: str | None = None,
) -> None:
    """Train offline, or replay.

    Args:
        root: Folder or URL of the run to train; made where it is not there.
        sources: Runs whose rollouts to train on.
        where: SQL predicate over a rollout, such as "episode_reward > 0"; None takes all.
        epochs: Passes over them.
        learning_rate: Of AdamW.
        replay: Run to repeat, in the place of all the others.
    """
    if replay is None and not sources:
        raise ConfigError("give --sources, or --replay")
    if replay is not None:
        config = TrainConfig.of(**replay_settings(replay), replay_batches=replay)
    else:
        # However old the weights that sampled: the importance ratio handles that, and is capped.
        config = TrainConfig.of(
            offline=True,
            sources=sources,
            where=where,
            epochs=epochs,
            learning_rate=learning_rate,
            is_ratio_cap=2.0,
        )
    like = Root.open(replay if replay is not None else sources[0])
    opened = Root.create(root, like.run, like=like)
    last_step = train(opened, config, stop_on_signals(), lambda step, row: print(f"step {step}  {describe(row)}"))
    print(f"trained to step {last_step}; {opened.url} holds the last weights as a policy and as a checkpoint")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
