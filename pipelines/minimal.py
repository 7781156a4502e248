"""The whole loop in one process, which samples and trains in turn. Read this first.

A tiny model with random weights learns MoarCats on a CPU in half a minute: cats earn reward, loved cats more.

    python pipelines/minimal.py --root runs/minimal
    ludic sql runs/minimal "select step, avg(episode_reward) from batches group by all order by all"

A second call on the same root starts over from the initial weights, as the root's next attempt.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path

import pyarrow.compute as pc
from transformers import PreTrainedModel

from ludic.agents import Agent
from ludic.base import init_distributed, shut_down
from ludic.engines import TransformersEngine
from ludic.environments import WORDS
from ludic.models import load_tokenizer, make_tiny_model
from ludic.rollouts import GroupSampler, new_worker_id
from ludic.root import Root, start_attempt
from ludic.root.rows import RolloutReader, RolloutWriter, write_ledger
from ludic.root.sql import BatchRules, Planner
from ludic.root.weights import fetch_policy
from ludic.run import RunConfig, put_run, run_of
from ludic.settings import run_script
from ludic.training import (
    Publisher,
    TrainConfig,
    build_optimizer,
    copy_tokenizer,
    full_state_dict,
    learning_rate,
    load_model,
    save_weights,
    train_step,
)
from ludic.training.batches import pack, read_sequences


def main(root: str = "runs/minimal", model: str = "runs/minimal-model", num_steps: int = 50) -> None:
    """Create the model and the root if they do not exist, then learn.

    Args:
        root: Folder or URL of the run, such as memory://minimal.
        model: Folder of the initial weights; if it does not exist, a tiny model is created there.
        num_steps: Gradient steps.
    """
    if not Path(model).exists():
        make_tiny_model(model, WORDS)
    run = RunConfig(model=model, env=("moar_cats",), max_tokens=32, accept_incomplete=True)
    config = TrainConfig.of(num_steps=num_steps, learning_rate=4e-3, schedule="linear")
    with tempfile.TemporaryDirectory() as cache:
        for step, metrics in enumerate(learn(put_run(root, run), config, Path(cache)), start=1):
            print(f"step {step:3}  reward {metrics['reward']:7.3f}  entropy {metrics['entropy']:.2f} nats", flush=True)


def learn(root: Root, config: TrainConfig, cache: Path) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step. cache: folder for copies of weights, if the root is not a local folder."""
    init_distributed("cpu")  # a group of this process alone, for train_step's sums over ranks
    model, attempt, worker_id = load_model(root.record.model), start_attempt(root), new_worker_id(slot=0)
    optimizer = build_optimizer(model, config)
    publisher, save = Publisher(root, attempt, keep=config.checkpoint.keep_policies), partial(save_policy, root, model)
    version = publisher.publish(save, step=0)
    engine = TransformersEngine(fetch_policy(root, version, cache), device="cpu", version=version)
    agent = Agent(engine=engine, tokenizer=load_tokenizer(root.record.model), model=root.record.model)
    sampler, group_numbers = GroupSampler.of_run(run_of(root), agent), count()
    planner = Planner(BatchRules(advantage="rloo", groups_per_batch=run_of(root).groups_per_batch))
    reader = RolloutReader(root, planner.columns)
    with RolloutWriter(root, worker_id) as writer:
        for step in range(1, config.num_steps + 1):
            while (plan := planner.plan(step=step, attempt_id=attempt.attempt_id, trainer_version=version)) is None:
                writer.append(sampler.sample(list(islice(group_numbers, run_of(root).groups_per_batch)), worker_id))
                writer.flush()
                planner.add(reader.poll(range(version, version + 1)))
            write_ledger(root, attempt, step, plan)
            sequences = read_sequences(root, plan.filter(plan["used"]))
            metrics = train_step(
                model,
                optimizer,
                [pack(sequences)],
                config=config,
                num_action_tokens=sequences.num_action_tokens,
                num_ranks=1,
                learning_rate=learning_rate(step, config),
            )
            version = publisher.publish(save, step=step)
            engine.load_weights(fetch_policy(root, version, cache), version)
            yield metrics | {"reward": pc.mean(plan["episode_reward"]).as_py()}
    shut_down()


def save_policy(root: Root, model: PreTrainedModel, folder: Path) -> None:
    save_weights(model, full_state_dict(model), folder)
    copy_tokenizer(root.record.model, folder)


if __name__ == "__main__":
    run_script(main, description=__doc__)
