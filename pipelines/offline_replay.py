"""Train on stored rollouts: in epochs on chosen rollouts of other runs, or again on the batches of a run.

    python pipelines/collect.py --root runs/collected --model FOLDER_OR_ID --num-groups 64
    python pipelines/offline_replay.py --root runs/offline --sources runs/collected --epochs 2
    python pipelines/offline_replay.py --root runs/again --replay runs/offline

The second command creates a new run. Its ledger lists the rollouts that each step trained on, with their runs.
The third repeats that ledger with the same settings: on one rank the weights are bitwise equal.
After a stop or a kill, either continues from its last checkpoint.
"""

import ludic
from ludic.errors import ConfigError
from ludic.settings import run_script


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
        root: Folder or URL of the run to train; created if it does not exist.
        sources: Runs whose rollouts to train on.
        where: SQL predicate over a rollout, such as "episode_reward > 0"; None takes all.
        epochs: Passes over the rollouts.
        learning_rate: Learning rate of AdamW.
        replay: Run to repeat, instead of training offline.
    """
    if replay is not None:
        run = ludic.create(root, like=replay)
        done = run.train(replay_batches=replay)
    elif sources:
        run = ludic.create(root, like=sources[0])
        # Rollouts of any age: the importance ratio corrects for old weights, and is capped.
        done = run.train(
            offline=True, sources=sources, where=where, epochs=epochs, learning_rate=learning_rate, is_ratio_cap=2.0
        )
    else:
        raise ConfigError("give --sources, or --replay")
    print(f"trained to step {done.step}; {run.url} holds the last weights as a policy and as a checkpoint")


if __name__ == "__main__":
    run_script(main, description=__doc__)
