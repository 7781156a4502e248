"""Print an episode of several rows as a tree: agents, their tools, the tasks that they handed on, and credit."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from ludic.results import number, plural, printable

_EXCERPT = 100
_ID_DIGITS = 12

Row = Mapping[str, Any]


def episode_tree(rows: Sequence[Row], shown_id: str, advantages: Mapping[str, float | None]) -> Tree:
    """Return the tree of an episode's rows.

    rows: all rows of the episode. shown_id: the row to point at. advantages: by rollout_id, of rows that a gradient
    step has considered.
    """
    tree = Tree(Text(f"episode {rows[0]['episode_id']}", style="dim"))
    ids = {row["rollout_id"] for row in rows}
    for row in rows:
        if row["parent_rollout_id"] not in ids:
            _add(tree, row, rows, shown_id, advantages)
    return tree


def _add(tree: Tree, row: Row, rows: Sequence[Row], shown_id: str, advantages: Mapping[str, float | None]) -> None:
    style = "bold" if row["rollout_id"] == shown_id else ""
    node = tree.add(Text(_headline(row, advantages.get(row["rollout_id"])), style=style))
    children = [each for each in rows if each["parent_rollout_id"] == row["rollout_id"]]
    for step in row["agent_steps"]:
        for call in step["tool_calls"]:
            branch = node.add(Text(_call(call), style="magenta"))
            for child in _children_of(call, children):
                children.remove(child)
                _add(branch, child, rows, shown_id, advantages)
    for child in children:
        _add(node, child, rows, shown_id, advantages)


def _children_of(call: Row, children: Sequence[Row]) -> list[Row]:
    """Return the rows of the agent that worked on a task: its first row by the task's text, and those rewritten."""
    task = _task(call)
    first = next((i for i, row in enumerate(children) if task is not None and task == _question(row)), None)
    if first is None:
        return []
    last = first + 1
    while last < len(children) and children[last]["segment_index"] > 0:
        last += 1
    return list(children[first:last])


def _task(call: Row) -> str | None:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return None
    return arguments.get("task") if call["name"] == "delegate" and isinstance(arguments, dict) else None


def _question(row: Row) -> str | None:
    users = (message["content"] for message in row["messages"] if message["role"] == "user")
    return next(users, None) if row["segment_index"] == 0 else None


def _headline(row: Row, advantage: float | None) -> str:
    segment = f" segment {row['segment_index']}" if row["segment_index"] else ""
    reward = "not scored" if row["episode_reward"] is None else f"reward {number(row['episode_reward'], 4)}"
    parts = [
        f"{row['agent_id']}{segment}  …{row['rollout_id'][-_ID_DIGITS:]}",
        reward,
        *([] if advantage is None else [f"advantage {advantage:+.4g}"]),
        f"{row['action_length']} of {row['prompt_length'] + row['response_length']} tokens sampled in "
        f"{plural(row['num_turns'], 'turn')}",
        _end(row),
    ]
    return printable(", ".join(part for part in parts if part))


def _end(row: Row) -> str:
    if row["error"]:
        return f"failed: {_excerpt(row['error'])}"
    flags = [name.replace("_", " ") for name in ("parse_error", "incomplete_completion") if row[name]]
    return ", ".join(["terminated" if row["terminated"] else row["truncation_reason"] or "not ended", *flags])


def _call(call: Row) -> str:
    answer = f"error: {call['error']}" if call["error"] else call["result"]
    shown = "no answer" if answer is None else _excerpt(str(answer))
    return printable(f"{call['name']}({_excerpt(call['arguments'])}) -> {shown}")


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else f"{line[: _EXCERPT - 1]}…"
