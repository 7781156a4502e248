r"""Demonstrations for a warm start: conversations that solve word problems with a calculator, from a script and a seed.

They are as mixed as those that people collect: some choose the wrong operation, answer with a number of the story
instead of calling the tool, or forget to put the answer in \boxed{}. Each has the reward that the environment gives.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from ludic.agents.parsers import make_parser
from ludic.agents.tools.calculator import calculate
from ludic.agents.tools.registry import make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.environments.environment import Example
from ludic.environments.toys import WordProblems

TOOLS = ("calculator",)
PARSER = "boxed"
KINDS: Mapping[str, float] = {"good": 0.4, "wrong_operation": 0.25, "no_call": 0.2, "no_box": 0.15}
"""Share of each kind of demonstration."""
THOUGHTS: Mapping[str, str] = {
    "+": "The numbers belong together, so I add.",
    "-": "A part goes away, so I subtract.",
    "*": "The same number comes again and again, so I multiply.",
}

Record = dict[str, Any]
"""A demonstration as `ludic import --from jsonl` reads it: a conversation with its tools, and columns of rollouts."""


def make_demonstrations(num_problems: int, per_problem: int, seed: int = 0) -> Iterator[Record]:
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


def _converse(example: Example, kind: str, random: Random) -> Sequence[Record]:
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
