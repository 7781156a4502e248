"""Teach a tiny model to delegate tasks to sub-agents: a warm start on demonstrations, then RL, in one root.

    python pipelines/delegation.py --root runs/delegation

In the environment `errands` an agent can do one of three sums itself, and must delegate the others. A quarter of the
demonstrations delegate, and the others only answer. RL learns that delegation earns more. It takes a few minutes on two
cores. After a stop or a kill, the same command continues.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import ludic
from ludic.agents import delegate_schema, helper
from ludic.environments import Errands
from ludic.models import make_tiny_chat_model
from ludic.records import to_message
from ludic.settings import run_script

HIGHEST = 4
"""Largest summand; a tiny model can memorise these sums."""
HANDED_ON = 0.25
"""Share of the demonstrations that delegate."""

TOOLS = [dict(delegate_schema((helper(),)))]

Record = dict[str, Any]


def main(root: str = "runs/delegation", num_steps: int = 60, num_demonstrations: int = 1500) -> None:
    """Train, and print the number of delegated tasks by policy version.

    Args:
        root: Folder of the run.
        num_steps: Gradient steps of RL.
        num_demonstrations: Demonstrations of the warm start; each adds two more, of a single sum.
    """
    records = list(demonstrations(num_demonstrations))
    run = ludic.create(
        root,
        model=model_beside(Path(root), records),
        env="errands",
        env_options={"errands": {"highest": HIGHEST}},
        sub_agents=("helper",),
        group_size=16,
        max_tokens=72,
    )
    warm_start(run, records)
    (warm_steps,) = run.sql(LAST_WARM_STEP).row(0)
    run.run(
        num_steps=warm_steps + num_steps,
        algorithm="rloo",
        # Parents are compared with parents, and children with children.
        advantage="grpo_by_agent",
        learning_rate=3e-4,
        schedule="constant",
        warmup_steps=0,
        is_ratio_cap=2.0,
        checkpoint_every=20,
        device="cpu",
        num_threads=1,
    )
    print(run.sql(CURVE))


LAST_WARM_STEP = """
select max(step) from batches join rollouts using (rollout_id) where used and rollouts.worker_id like 'import-%'
"""
CURVE = """
select
    policy_version // 8 * 8 as from_version,
    count(*) filter (depth = 0) as episodes,
    count(*) filter (depth = 1) / count(*) filter (depth = 0) as tasks_per_episode,
    avg(reward_components['by_others']) filter (depth = 0) as done_by_others,
    avg(episode_reward) filter (depth = 0) as reward
from rollouts where worker_id not like 'import-%' group by all order by all
"""


def model_beside(root: Path, records: list[Record]) -> Path:
    """Return the folder of the initial model; create it if it does not exist."""
    folder = root.parent / f"{root.name}-model"
    if not folder.exists():
        conversations = (list(map(to_message, record["messages"])) for record in records[:600])
        make_tiny_chat_model(str(folder), conversations, tools=TOOLS)
    return folder


def warm_start(run: ludic.Run, records: list[Record]) -> None:
    """Import the demonstrations and train on them; do nothing if this was done before."""
    file = Path(run.url).with_suffix(".jsonl")
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run.import_(file, "jsonl", env="errands")
    if run.sql("select 1 from policies where step > 0").height:
        return
    run.train(
        algorithm="sft",
        offline=True,
        epochs=8,
        learning_rate=1.5e-3,
        schedule="cosine",
        warmup_steps=10,
        max_tokens_per_micro_batch=4096,
        device="cpu",
        checkpoint_every=None,
    )


def demonstrations(num_demonstrations: int) -> Iterator[Record]:
    """Yield conversations with the errands of train examples, and of helpers with a single sum."""
    errands = Errands(highest=HIGHEST)
    for index in range(num_demonstrations):
        random, example = Random(index), errands.example(index, "train")
        yield _answered(example.messages[0].content, example.data["sums"], random)
        for _ in range(2):
            a, b = random.randint(0, HIGHEST), random.randint(0, HIGHEST)
            yield _record([_user(f"{a} + {b}"), _assistant(str(a + b))], example_id=f"{a} + {b}")


def _answered(question: str, sums: list[tuple[int, int]], random: Random) -> Record:
    own = random.choice(sums)
    handed_on = [each for each in sums if each is not own][: random.choice([1, 2])]
    if random.random() >= HANDED_ON:
        handed_on = []
    messages = [_user(question)]
    if handed_on:
        messages.append(_assistant("") | {"tool_calls": [_call(i, f"{a} + {b}") for i, (a, b) in enumerate(handed_on)]})
        messages += [{"role": "tool", "name": "delegate", "content": str(a + b)} for a, b in handed_on]
    return _record([*messages, _assistant(str(sum(own)))], example_id=question, tools=TOOLS)


def _record(messages: list[Record], *, example_id: str, **columns: Any) -> Record:
    columns |= {"env_example_id": example_id, "episode_reward": 1.0, "finish_reason": "stop"}
    return {"messages": messages, **columns}


def _user(content: str) -> Record:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Record:
    return {"role": "assistant", "content": content}


def _call(index: int, task: str) -> Record:
    function = {"name": "delegate", "arguments": {"task": task}}
    return {"id": f"call_{index}", "type": "function", "function": function}


if __name__ == "__main__":
    run_script(main, description=__doc__)
