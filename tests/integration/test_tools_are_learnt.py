"""The environment of docs/agents.md with state, two tools and a judge: a tiny model learns to use them, by `ludic run`.

A warm start on demonstrations shows how tools are called, and also what is of no use: a number that was not read, an
answer that was guessed. RL finds out what pays.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import forks
import pytest
from guide_examples import example, judge_of_safes

from ludic.adapters.imports.importing import import_files
from ludic.agents.tools.registry import environment_tools
from ludic.app.launch.process import interruptible
from ludic.app.launch.train import train_in_process
from ludic.environments.environment import Example
from ludic.environments.limits import LimitedEnvironments
from ludic.environments.registry import make_environment
from ludic.models.tiny import make_tiny_chat_model
from ludic.records.messages import to_message
from ludic.root.root import Root
from ludic.root.sql.connection import connect
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, run_of
from ludic.training.config import TrainConfig

KINDS = {"reads": 0.4, "guesses_the_number": 0.3, "guesses_the_answer": 0.3}
"""Shares of demonstrations; all of the first kind are right, a tenth of the second and a third of the last one."""
NUM_DEMONSTRATIONS, NUM_EPOCHS, NUM_STEPS = 640, 4, 20
A_GROUP = 2
"""Demonstrations of a group, so that a step of the warm start is as large as one of RL is small."""
SETTINGS = {"device": "cpu", "num_threads": 1, "max_tokens_per_micro_batch": 4096, "checkpoint_every": None}
RL = "--learning-rate 5e-4 --is-ratio-cap 2 --device cpu --num-threads 1"
RL += " --max-tokens-per-micro-batch 4096 --checkpoint-every None"
RL += " --objective reinforce --advantage rloo --schedule constant --warmup-steps 0"

Conversation = list[dict[str, Any]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_model_learns_to_open_the_safe(tmp_path: Path) -> None:
    with judge_of_safes() as judge:
        root, schemas, demonstrations = make_run(tmp_path, judge)
        warm_start(root, schemas, demonstrations)
        num_warm_steps = NUM_DEMONSTRATIONS // A_GROUP * NUM_EPOCHS // run_of(root).groups_per_batch
        run = forks.ludic("run", root.url, "--num-steps", str(num_warm_steps + NUM_STEPS), *RL.split(), folder=tmp_path)
        assert run.returncode == 0, run.stderr
    before, read_before = of_steps(root, num_warm_steps + 1, num_warm_steps + 3)
    after, read_after = of_steps(root, num_warm_steps + NUM_STEPS - 2, num_warm_steps + NUM_STEPS)
    assert before < 0.65
    assert after > before + 0.2
    assert read_after > read_before + 0.2


def of_steps(root: Root, first: int, last: int) -> tuple[float, float]:
    """Return the mean reward of the answers that these steps trained on, and the share of those with a read note."""
    query = """
        select avg(rollouts.episode_reward), avg((messages::varchar like '%The number is%')::int)
        from batches
        join rollouts using (rollout_id)
        where used and step between $first and $last
    """
    return connect(root).execute(query, {"first": first, "last": last}).fetchall()[0]


def make_run(folder: Path, judge: str) -> tuple[Root, Sequence[Any], Sequence[tuple[Conversation, float]]]:
    """Return a run of a new model, the schemas of its tools, and demonstrations with their rewards."""
    name, options = example(folder, "Safe"), {"judge_url": judge}
    make = make_environment(name, options)
    tools, _ = environment_tools(LimitedEnvironments(name, make)())
    schemas = [tool.schema for tool in tools]
    demonstrations = [demonstration(make().example(index, "train")) for index in range(NUM_DEMONSTRATIONS)]
    conversations = [list(map(to_message, messages)) for messages, _ in demonstrations]
    make_tiny_chat_model(str(folder / "model"), conversations, tools=schemas, max_length=256)
    run = RunConfig(
        model=str(folder / "model"),
        env=(name,),
        env_options={name: options},
        group_size=8,
        groups_per_batch=8,
        # What is learnt in a step is sampled with in the next ones.
        batches_ahead=1,
        max_tokens=32,
    )
    return create_root(str(folder / "run"), run), schemas, demonstrations


def warm_start(root: Root, schemas: Sequence[Any], demonstrations: Sequence[tuple[Conversation, float]]) -> None:
    file = Path(root.url) / "demonstrations.jsonl"
    with file.open("w") as lines:
        for index, (messages, reward) in enumerate(demonstrations):
            record = {
                "messages": messages,
                "tools": schemas,
                "group_id": str(index // A_GROUP),
                "episode_reward": reward,
            }
            lines.write(json.dumps({**record, "finish_reason": "stop"}) + "\n")
    import_files(root, [str(file)], "jsonl", env=root.record.env[0])
    settings = {"learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 10, **SETTINGS}
    with interruptible() as stop:
        train_in_process(
            root,
            TrainConfig.of(offline=True, epochs=NUM_EPOCHS, advantage="reinforce", objective="sft", **settings),
            stop,
        )


def demonstration(start: Example) -> tuple[Conversation, float]:
    """Return a conversation, and whether its answer is right."""
    random = Random(start.example_id)
    (kind,) = random.choices(list(KINDS), list(KINDS.values()))
    number, inside = start.data["number"], start.data["inside"]
    said: Conversation = [{"role": "user", "content": start.messages[-1].content}]
    if kind == "reads":
        said += call("read", {}, f"The number is {number}.")
    if kind == "guesses_the_answer":
        answer = random.choice(["cats", "gold", "tea"])
    else:
        to = number if kind == "reads" else random.randrange(10)
        said += call("turn", {"to": to}, f"It holds {inside}." if to == number else "It stays shut.")
        answer = inside if to == number else "nothing"
    return [*said, {"role": "assistant", "content": f"It holds {answer}."}], float(answer == inside)


def call(name: str, arguments: dict[str, Any], result: str) -> Conversation:
    function = {"name": name, "arguments": arguments}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    return [asked, {"role": "tool", "name": name, "content": result}]
