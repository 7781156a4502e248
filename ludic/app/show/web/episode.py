"""The page of an episode: its agents, whom each was called by, and one agent's turns with their rewards."""

from collections.abc import Iterator, Sequence
from typing import Any

from ludic.app.show.transcript import Lookup, cause_of, children_of, end_of_step, fate_of
from ludic.app.show.web.conversation import paged, uses_by_rollout
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, page, short_id
from ludic.records import MAX_TOKENS, Row, add_rewards, ended_by

_INDENT = "\N{NO-BREAK SPACE}" * 3
_MOST_INDENT = 20


@page("episode", "Episode")
def episode(request: PageRequest) -> PageAnswer:
    """The tree of an episode, found by one of its rollouts, and this rollout's turns."""
    found = request.data.find(request.required("id"), trained=False)
    row = found.rows[0]
    agents, turns = agents_table(request, found), turns_table(request, row)
    values = {
        "row": row,
        "agents": paged(request, agents, "agent"),
        "turns": paged(request, turns, "turn"),
        "rollout_href": request.link("rollout", id=row["rollout_id"]),
    }
    return PageAnswer("episode.html.j2", values, title=f"Episode {short_id(row['episode_id'])}", tables=[agents, turns])


def agents_table(request: PageRequest, found: Lookup) -> PageTable:
    """Return the rows of an episode, each below the agent that called it."""
    uses = uses_by_rollout(found)
    rows = [
        {
            "agent": f"{_branch(level)}{row['agent_id']}{' ◀' if row['rollout_id'] == shown_id else ''}",
            "segment_index": row["segment_index"],
            "rollout_id": row["rollout_id"],
            "parent_rollout_id": row["parent_rollout_id"],
            "call": None if call is None else f"{call['name']}({call['arguments']})",
            "episode_reward": row["episode_reward"],
            "advantage": use["advantage"] if (use := uses.get(row["rollout_id"])) else None,
            "action_length": row["action_length"],
            "num_turns": row["num_turns"],
            "ended_by": row["error"] or cause_of(row),
            "training": fate_of(uses.get(row["rollout_id"])),
        }
        for shown_id in [found.rows[0]["rollout_id"]]
        for level, row, call in walk(found.episode)
    ]
    columns = [
        name
        for name in rows[0]
        if name != "parent_rollout_id" and (name not in ("segment_index", "call") or any(row[name] for row in rows))
    ]
    titles = {"action_length": "sampled tokens", "call": "called by", "segment_index": "segment"}
    links = {"rollout_id": lambda row: request.link("episode", id=row["rollout_id"])}
    if request.page.name != "episode":
        links = {"rollout_id": lambda row: request.link("rollout", id=row["rollout_id"])}
    return PageTable(name="agents", rows=rows, columns=columns, titles=titles, links=links)


def _branch(level: int) -> str:
    return f"{_INDENT * (min(level, _MOST_INDENT) - 1)}└ " if level else ""


def walk(rows: Sequence[Row]) -> Iterator[tuple[int, Row, Row | None]]:
    """Yield the rows of an episode, parents before children: level, row, and the call by which a parent delegated.

    Rows whose parents are in a circle, which no writer makes, come last, as roots.
    """
    ids = {row["rollout_id"] for row in rows}
    left = {row["rollout_id"]: row for row in rows}
    starts: list[tuple[int, Row, Row | None]] = []
    starts += [(0, row, None) for row in reversed(rows) if row["parent_rollout_id"] not in ids]
    while left:
        level, row, call = starts.pop() if starts else (0, next(iter(left.values())), None)
        if left.pop(row["rollout_id"], None) is None:
            continue
        yield level, row, call
        children = [each for each in rows if each["parent_rollout_id"] == row["rollout_id"]]
        starts += [(level + 1, child, by) for child, by in reversed(list(_with_calls(row, children)))]


def _with_calls(row: Row, children: list[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Yield the rows that a row called, each with its call, in the order of the calls; then the others."""
    for step in row["agent_steps"] if children else ():
        for call in step["tool_calls"]:
            for child in children_of(call, children):
                children.remove(child)
                yield child, call
    yield from ((child, None) for child in children)


# --- Turns -----------------------------------------------------------------------------------------------------------


def turns_table(request: PageRequest, row: Row) -> PageTable:
    """Return the turns of a rollout: actions, calls with their results, and answers of the environment.

    reward: of a step of the environment. token_reward: sum of the rewards at the tokens of an agent's turn.
    """
    rows = list(_turns(row))
    links = {
        "tokens": lambda turn: (
            turn["tokens"]
            and request.link("rollout", id=row["rollout_id"], position=turn["tokens"].partition("-")[0]) + "#response"
        ),
        "text": lambda turn: turn["name"] and request.link("text", id=row["rollout_id"], name=turn["name"]),
    }
    columns = [
        name
        for name in ("turn", "who", "text", "reward", "token_reward", "tokens", "end")
        if name == "turn" or any(turn[name] is not None for turn in rows)
    ]
    return PageTable(name="turns", rows=rows, columns=columns, titles={"token_reward": "reward at tokens"}, links=links)


def _turns(row: Row) -> Iterator[dict[str, Any]]:
    answered: dict[int, list[tuple[int, Row]]] = {}
    for index, step in enumerate(row["environment_steps"]):
        answered.setdefault(max(step["agent_steps"], default=-1), []).append((index, step))
    for index, step in [(-1, None), *enumerate(row["agent_steps"])]:
        if step is not None:
            yield from _turn_of_agent(row, index, step)
        for number, answer in answered.pop(index, ()):
            yield _turn_of_environment(row, number, answer)
    for number, answer in (each for some in answered.values() for each in some):  # of agent steps that are not there
        yield _turn_of_environment(row, number, answer)


def _turn_of_agent(row: Row, index: int, step: Row) -> Iterator[dict[str, Any]]:
    text, name = step["action"], f"action-{index}"
    if step["parse_error"]:
        problem = f"cut at {MAX_TOKENS}" if step["finish_reason"] == "length" else "parse error"
        text, name = f"{problem}: {step['parse_feedback'] or ''}", f"feedback-{index}"
    yield {
        "turn": str(step["turn"]),
        "who": row["agent_id"] if step["action_target"] == "env" else f"{row['agent_id']}, {step['action_target']}",
        "text": text,
        "reward": None,
        "token_reward": add_rewards(row["token_rewards"][step["start"] : step["end"]]),
        "tokens": f"{step['start']}-{step['end']}",
        "end": ended_by(None, step["finish_reason"], step["parse_error"]),
        "name": name if text else None,
    }
    for number, call in enumerate(step["tool_calls"]):
        answer = f"error: {call['error']}" if call["error"] else call["result"]
        yield {
            "turn": str(step["turn"]),
            "who": "tool",
            "text": f"{call['name']}({call['arguments']}) → {answer or ''}",
            "reward": None,
            "token_reward": None,
            "tokens": None,
            "end": "failed" if call["error"] else None,
            "name": f"{'error' if call['error'] else 'result'}-step-{index}-{number}" if answer else None,
        }


def _turn_of_environment(row: Row, index: int, step: Row) -> dict[str, Any]:
    return {
        "turn": str(step["turn"]),
        "who": "environment",
        "text": step["next_observation"],
        "reward": step["reward"],
        "token_reward": None,
        "tokens": None,
        "end": end_of_step(step, row["agent_steps"]) or None,
        "name": f"observation-{index}" if step["next_observation"] else None,
    }
