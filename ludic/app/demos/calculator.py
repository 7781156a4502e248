r"""The agents' demo's run: a model of random weights learns to call a calculator, from demonstrations and then by RL.

It does in one root, on this machine and without downloads, what a user does with a large model: create a run, import
demonstrations, train on them offline, and train online. Tokenizer, model and demonstrations are generated. Held-out
problems are answered before RL, while it goes on, and after it. Each function continues what an interrupted call began.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import ludic
from ludic.agents import Toolbox, calculate, make_parser, make_tools
from ludic.app.demos.words import draw_curve, keep_new_model, print_next, save
from ludic.app.show.evaluations import Comparison, interval_text
from ludic.base import open_console, sparkline
from ludic.base.results import printable
from ludic.environments import Example, WordProblems
from ludic.models import make_tiny_chat_model
from ludic.records import to_message
from ludic.root import MODEL, Root
from ludic.root.sql import connect
from ludic.run import RunConfig, create_root
from ludic.training import TrainConfig

ENVIRONMENT = "word_problems"
DEMONSTRATIONS = "demonstrations.jsonl"
"""File of the root that is imported."""
NUM_PROBLEMS, PER_PROBLEM, NUM_EPOCHS = 1500, 2, 4
"""Problems with demonstrations, demonstrations of each, and passes over all of them."""
NUM_HELDOUT = 256
"""Held-out problems that each evaluated version answers."""
EVAL_EVERY = 10
"""Versions of RL from one evaluation to the next."""


def open_demo(url: str) -> Root:
    """Start the run with a new tiny model that is stored in its root, or open the existing run."""
    url = url.rstrip("/")
    run = RunConfig(
        model=f"{url}/{MODEL.folder}",
        env=(ENVIRONMENT,),
        tools=TOOLS,
        parser=PARSER,
        group_size=8,
        groups_per_batch=16,
        # One worker keeps up with the trainer, so that two cores have one process each.
        num_workers=1,
        max_tokens=48,
    )
    root = create_root(url, run)
    keep_new_model(root, _make_model)
    return root


def _make_model(folder: str) -> None:
    records = list(make_demonstrations(num_problems=500, per_problem=PER_PROBLEM))
    conversations = (list(map(to_message, record["messages"])) for record in records)
    make_tiny_chat_model(folder, conversations, tools=records[0]["tools"])


def warm_start(root: Root, *, num_problems: int = NUM_PROBLEMS, num_heldout: int = NUM_HELDOUT) -> None:
    """Import demonstrations, train on them, good ones and bad ones, and evaluate; does nothing once this is done.

    num_problems: of which there are demonstrations; fewer make a shorter warm start. Raises KeyboardInterrupt after
    Ctrl-C.
    """
    if (version := version_before_rl(root)) is not None:
        evaluate(root, str(version), num_heldout)
        return
    lines = (json.dumps(record) + "\n" for record in make_demonstrations(num_problems, PER_PROBLEM))
    root.put_if_absent(DEMONSTRATIONS, "".join(lines).encode())
    run = ludic.Run(root)
    run.import_(f"{root.url}/{DEMONSTRATIONS}", "jsonl", env=ENVIRONMENT)
    run.train(warm_start_config())
    evaluate(root, "latest", num_heldout)


def warm_start_config() -> TrainConfig:
    """Return settings of supervised fine-tuning on the root's own rollouts, as `--offline --algorithm sft` has them."""
    return TrainConfig.of(
        offline=True,
        epochs=NUM_EPOCHS,
        advantage="reinforce",
        objective="sft",
        learning_rate=1.5e-3,
        schedule="cosine",
        warmup_steps=10,
        max_tokens_per_micro_batch=4096,
        device="cpu",
        # Threads of a step wait for each other: where others use the cores too, a second one makes it slower.
        num_threads=1,
        checkpoint_every=None,
    )


def improve(root: Root, num_steps: int) -> None:
    """Train online for `num_steps` steps after those of the warm start, and evaluate versions beside it."""
    config = rl_config(last_warm_step(root) + num_steps)
    ludic.Run(root).run(config, eval_every=EVAL_EVERY, eval_options={"num_examples": NUM_HELDOUT})


def last_warm_step(root: Root) -> int:
    """Return the last step that trained on demonstrations; 0 before the first."""
    query = """
        select max(step) from batches join rollouts using (rollout_id)
        where used and rollouts.worker_id like 'import-%'
    """
    (step,) = connect(root).execute(query).fetchall()[0]
    return int(step or 0)


def rl_config(num_steps: int) -> TrainConfig:
    """Return settings of RLOO. num_steps: of the whole run, with those of the warm start."""
    return TrainConfig.of(
        num_steps=num_steps,
        learning_rate=3e-4,
        is_ratio_cap=2.0,
        max_tokens_per_micro_batch=4096,
        device="cpu",
        num_threads=1,
        checkpoint_every=20,
    )


def evaluate(root: Root, versions: str, num_heldout: int = NUM_HELDOUT) -> None:
    """Sample an answer to each held-out problem, as `ludic eval` does; what is stored is not sampled again."""
    ludic.Run(root).eval(versions, num_examples=num_heldout, device="cpu")


def version_before_rl(root: Root) -> int | None:
    """Return the version with stored evals that the warm start ended with; None before it has ended."""
    query = """
        select min(policy_version)
        from evals
        join policies on policies.version = policy_version
        where step = $step and step > 0
    """
    (version,) = connect(root).execute(query, {"step": last_warm_step(root)}).fetchall()[0]
    return version


# --- Demonstrations ------------------------------------------------------------------------------------------------
# Demonstrations for a warm start: conversations that solve word problems with a calculator, from a script and a seed.
#
# They are as mixed as those that people collect: some choose the wrong operation, answer with a number of the story
# instead of calling the tool, or forget to put the answer in \boxed{}. Each has the reward that the environment gives.


TOOLS = ("calculator",)
PARSER = "boxed"
KINDS: Mapping[str, float] = {"good": 0.4, "wrong_operation": 0.25, "no_call": 0.2, "no_box": 0.15}
"""Share of each kind of demonstration."""
THOUGHTS: Mapping[str, str] = {
    "+": "The numbers belong together, so I add.",
    "-": "A part goes away, so I subtract.",
    "*": "The same number comes again and again, so I multiply.",
}

DemoRecord = dict[str, Any]
"""A demonstration as `ludic import --from jsonl` reads it: a conversation with its tools, and columns of rollouts."""


def make_demonstrations(num_problems: int, per_problem: int, seed: int = 0) -> Iterator[DemoRecord]:
    """Yield demonstrations of the first train problems of the environment `word_problems`, the same for the same seed.

    per_problem: demonstrations of each problem, of kinds that are drawn independently.
    """
    environment, parser, tools = WordProblems(seed=seed), make_parser(PARSER), Toolbox(make_tools(TOOLS)).schemas
    for index in range(num_problems):
        example = environment.example(index, "train")
        for number in range(per_problem):
            random = Random(f"{seed}/{index}/{number}")
            (kind,) = random.choices(list(KINDS), list(KINDS.values()))
            messages = _converse(example, kind, random)
            action = parser.parse(messages[-1]["content"]).action
            reward = 0.0 if action is None else environment.score(example, action).reward
            yield {
                "messages": messages,
                "tools": tools,
                "env_example_id": example.example_id,
                "episode_reward": reward,
                "finish_reason": "stop",
                "metadata": {"kind": kind},
            }


def _converse(example: Example, kind: str, random: Random) -> Sequence[DemoRecord]:
    expression = example.data["expression"]
    left, operator, right = expression.split()
    if kind == "wrong_operation":
        operator = random.choice([other for other in THOUGHTS if other != operator])
        expression = f"{left} {operator} {right}"
    question = {"role": "user", "content": example.messages[-1].content}
    thought = f"<think>{THOUGHTS[operator]}</think>"
    if kind == "no_call":
        guess = random.choice([left, right])
        return [question, {"role": "assistant", "content": f"{thought}\n{_answer(guess)}"}]
    result = calculate(expression)
    function = {"name": TOOLS[0], "arguments": {"expression": expression}}
    call = {"id": "call_0", "type": "function", "function": function}
    answer = f"The answer is {result}." if kind == "no_box" else _answer(result)
    return [
        question,
        {"role": "assistant", "content": thought, "tool_calls": [call]},
        {"role": "tool", "name": TOOLS[0], "content": result},
        {"role": "assistant", "content": answer},
    ]


def _answer(number: str) -> str:
    return rf"The answer is \boxed{{{number}}}."


# --- What the demo prints ------------------------------------------------------------------------------------------


_SHOWN_PROBLEMS = 3
_CLEAR = 0.05
"""Largest p-value that counts as a clear difference."""

DemoRow = Mapping[str, Any]
"""Mean reward of a version on held-out problems, with its interval."""

CURVE = """
    select policy_version, avg(episode_reward)
    from rollouts where worker_id not like 'import-%' group by all order by all
"""
"""Reward by version of what the workers sampled."""


def teach_a_tool(url: str, num_steps: int) -> None:
    """Run the demo in the root at `url`, with so many gradient steps of RL."""
    console = open_console()
    root = open_demo(url)
    console.print(f"[bold]Warm start in {root.url}: import of demonstrations, supervised fine-tuning[/]")
    warm_start(root)
    console.print(f"[bold]RL in {root.url}: a worker, a trainer, and an evaluation each {EVAL_EVERY} versions[/]")
    improve(root, num_steps)
    before = version_before_rl(root)
    assert before is not None, "the warm start is evaluated"
    run = ludic.Run(root)
    measured = [
        row for row in run.eval(stored=True, measures=["mean_reward"]).to_dict()["measures"] if _version(row) >= before
    ]
    after = max(map(_version, measured))
    _print_answers(console, root, measured)
    _print_curve(console, root, measured)
    _print_comparison(console, run.compare(before, after))
    _print_next(console, root, before, after)


def _version(row: DemoRow) -> int:
    return int(row["policy_version"])


def _print_answers(console: Console, root: Root, measured: Sequence[DemoRow]) -> None:
    table = Table("problem (held out)", "before RL", "after RL", title="Answers at temperature 1", show_lines=True)
    ends = measured[0], measured[-1]
    old, new = (_answers(root, _version(row)) for row in ends)
    for problem in list(old)[:_SHOWN_PROBLEMS]:
        table.add_row(*(Text(printable(text)) for text in (problem, old[problem], new[problem])))
    means = (f"[bold]{row['estimate']:.3f} ({interval_text(row, 3)})[/]" for row in ends)
    table.add_row(f"mean reward of {measured[-1]['num_examples']}, 95% interval", *means)
    console.print(table)


def _print_comparison(console: Console, comparison: Comparison) -> None:
    """Print whether RL improved the answers, and the comparison that says so."""
    (row,) = comparison.to_dict()["differences"]
    is_clear = row["p_value"] < _CLEAR and row["difference"] != 0
    verdict = ("RL improved it" if row["difference"] > 0 else "RL made it worse") if is_clear else "not clear"
    test = {"mcnemar": "McNemar's exact test", "permutation": "permutation test"}[row["test"]]
    console.print(
        f"\nDid RL help? [bold]{verdict}[/]: mean reward {row['difference']:+.3f} "
        f"(95% interval {interval_text(row, 3)}), p = {row['p_value']:.2g} ({test}, same problems)",
        highlight=False,
    )
    comparison.print_to(console)


def _answers(root: Root, version: int) -> dict[str, str]:
    """Return the answers of a version, with their tool calls and results, by problem."""
    query = "select env_example_id, messages from evals where policy_version = ? order by request_index"
    rows = connect(root).execute(query, [version]).fetchall()
    return {problem: "\n".join(map(_as_line, messages[1:])) for problem, messages in rows}


def _as_line(message: dict[str, str]) -> str:
    return f"-> {message['content']}" if message["role"] == "tool" else message["content"]


def _print_curve(console: Console, root: Root, measured: Sequence[DemoRow]) -> None:
    versions, rewards = zip(*connect(root).execute(CURVE).fetchall(), strict=True)
    console.print(f"\nReward by policy version in training, {rewards[0]:.3f} to {rewards[-1]:.3f}:")
    console.print(f"  [green]{sparkline(rewards, 72)}[/]")
    figure = draw_curve(versions, rewards, "Word problems with a calculator, RL after a warm start")
    (axes,) = figure.axes
    means = [row["estimate"] for row in measured]
    axes.errorbar(
        list(map(_version, measured)),
        means,
        yerr=[
            [math.nan if row[name] is None else abs(row[name] - row["estimate"]) for row in measured]
            for name in ("low", "high")
        ],
        fmt="o",
        capsize=4,
        color="tab:blue",
        label=f"{measured[-1]['num_examples']} held-out problems, 95% interval",
    )
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    console.print(f"  {save(figure, root)}")


def _print_next(console: Console, root: Root, before: int, after: int) -> None:
    query = "select rollout_id from evals where policy_version = ? order by episode_reward desc limit 1"
    ((rollout_id,),) = connect(root).execute(query, [after]).fetchall()
    kinds = "select metadata['kind'] as kind, count(*), avg(episode_reward) from rollouts group by all order by all"
    print_next(
        console,
        f"view {root.url} {rollout_id} --text",
        f'sql {root.url} "{kinds}"',
        f"compare {root.url}@{before} @{after}",
    )
