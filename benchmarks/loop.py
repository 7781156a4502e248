"""Measure steps per second of pipelines/minimal.py, which works through the store, and of the same loop in memory.

    python -m benchmarks.loop

In memory, rollouts are passed as Python objects and weights are copied from model to model, as in trainers that sample
in their own process. Both loops start with the same weights and seeds, so they sample and learn the same.
"""

import tempfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from statistics import fmean, median

from benchmarks.measure import median_ratio, print_table, take_turns
from ludic.agents import Agent
from ludic.engines import TransformersEngine
from ludic.environments import WORDS
from ludic.models import load_tokenizer, make_tiny_model
from ludic.records import RolloutGroup
from ludic.rollouts import GroupSampler
from ludic.run import RunConfig, put_run
from ludic.settings import run_script
from ludic.training import TrainConfig, build_optimizer, learning_rate, load_model, train_step
from ludic.training.batches import TrainingSequence, pack
from pipelines import minimal


def main(quick: bool = False) -> None:
    """Print a table with a row for each size of model.

    Args:
        quick: Use one small model and two steps, to check that the benchmark works.
    """
    rows = [_measure(hidden_size, num_steps=2 if quick else 20) for hidden_size in ((64,) if quick else (64, 256))]
    columns = ["width", "steps/s in memory", "steps/s through the store", "of those in memory", "the store takes"]
    print_table("The whole ring: sample 8 groups of 8, plan, train, hand over the weights", columns, rows)


def _measure(hidden_size: int, num_steps: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        make_tiny_model(model, WORDS, hidden_size=hidden_size)
        run = RunConfig(model=model, env=("moar_cats",), max_tokens=32, accept_incomplete=True)
        # One step more than is timed: the first warms up.
        config = TrainConfig.of(num_steps=num_steps + 1, learning_rate=1e-3)
        stored = minimal.learn(put_run(f"{folder}/run", run), config, Path(folder))
        passed = learn_in_memory(run, config)
        rewards: dict[str, list[float]] = {"stored": [], "passed": []}
        seconds = take_turns(
            {
                "stored": lambda: rewards["stored"].append(next(stored)["reward"]),
                "passed": lambda: rewards["passed"].append(next(passed)["reward"]),
            },
            num_steps,
        )
        assert max(abs(a - b) for a, b in zip(*rewards.values(), strict=True)) < 0.05, "the rings did different work"
        assert [*stored, *passed] == [], "a ring has steps left"
    extra_s = median(slow - fast for slow, fast in zip(seconds["stored"], seconds["passed"], strict=True))
    rates = [1 / median(seconds[name]) for name in ("passed", "stored")]
    ratio = median_ratio(seconds["passed"], seconds["stored"])
    return [str(hidden_size), *(f"{rate:.2f}" for rate in rates), f"{ratio:.2f}x", f"{extra_s * 1e3:.0f} ms a step"]


def learn_in_memory(run: RunConfig, config: TrainConfig) -> Iterator[dict[str, float]]:
    """Learn as minimal.learn does, without a store; needs the process group that minimal.learn opens."""
    model = load_model(run.model)
    optimizer = build_optimizer(model, config)
    engine = TransformersEngine(run.model, device="cpu")
    agent = Agent(engine=engine, tokenizer=load_tokenizer(run.model), model=run.model)
    sampler, group_numbers = GroupSampler.of_run(run, agent), count()
    for step in range(1, config.num_steps + 1):
        groups = sampler.sample(list(islice(group_numbers, run.groups_per_batch)), "w0-memory").groups
        sequences = [sequence for group in groups for sequence in to_sequences(group)]
        metrics = train_step(
            model,
            optimizer,
            [pack(sequences)],
            config=config,
            num_action_tokens=sum(sequence.num_action_tokens for sequence in sequences),
            num_ranks=1,
            learning_rate=learning_rate(step, config),
        )
        engine._model.load_state_dict(model.state_dict())  # engines take folders only
        yield metrics | {"reward": fmean(rollout.episode_reward or 0.0 for g in groups for rollout in g.rollouts)}


def to_sequences(group: RolloutGroup) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            rollout_id=rollout.rollout_id,
            prompt_tokens=rollout.prompt_tokens,
            response_tokens=rollout.response_tokens,
            columns={"response_logprobs": rollout.response_logprobs},
            advantage=advantage,
        )
        for rollout, advantage in zip(group.rollouts, group.rloo_advantages().tolist(), strict=True)
    ]


if __name__ == "__main__":
    run_script(main, description=__doc__)
