r"""An agent with a tool in plain OpenAI calls: the model may calculate, and then answers in \boxed{}.

ludic run runs/sums --model MODEL --env word_problems --agent pipelines/agents/calculator.py:run
"""

import ast
import json
import operator
import re
from typing import Any

from openai import AsyncOpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute an arithmetic expression of whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "Such as (2 + 3) * 4."}},
                "required": ["expression"],
            },
        },
    }
]
MOST_CALLS = 4
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def run(example: dict[str, Any], client: AsyncOpenAI, model: str) -> str:
    """Let the model use the calculator until it answers; return what it boxed."""
    messages = list(example["messages"])
    for _ in range(MOST_CALLS):
        said = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        answer = said.choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            assert call.type == "function"
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", answer.content or "")
    return boxed[-1] if boxed else ""


def calculate(arguments: str) -> str:
    """Return the result of a call, or what is wrong with it. arguments: as the model wrote them, JSON."""
    try:
        return calculator(**json.loads(arguments))
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def calculator(expression: str):  # type: ignore[no-untyped-def]
    """Compute an arithmetic expression of whole numbers.

    Args:
        expression: Such as (2 + 3) * 4.
    """
    return str(value(ast.parse(expression, mode="eval").body))


def value(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError("wanted whole numbers with +, - and *")
