"""Show a rollout or a group to people: conversation, tokens in colours, outcome, and uses in training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ludic.results import cell, number, pairs, plain_table, plural, printable
from ludic.schema import extra_names
from ludic.show.episode_tree import episode_tree
from ludic.show.tokens import (
    Color,
    TokenReader,
    colour_legend,
    coloured,
    load_token_reader,
    token_rows,
    token_table,
)

if TYPE_CHECKING:
    from ludic.show.found import Found

_SHOWN_DIGITS = 12
_EXCERPT = 300
_SHOWN_TOKENS = 2_000
_SHOWN_CHARACTERS = 4_000
"""Tokens of a response and characters of each text that are shown, half of them from each end, unless `full` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a rollout is printed."""

    color: Color = "logprob"
    """Colour the response's tokens by their probability, the advantage used in training, the ratio or the mask."""
    tokens: bool = False
    """List the tokens, one per line."""
    full: bool = False
    """Print long texts and responses whole."""
    to_see_all: str = "--full shows them"
    """What shows a text that is left out."""


def print_found(console: Console, found: "Found", look: Look) -> None:
    """Print a rollout, or a table of a group's rollouts."""
    is_coloured = bool(console.color_system) and not console.no_color
    if found.kind == "rollout":
        for part in rollout_parts(found, look, load_token_reader(found.root), legend=is_coloured):
            console.print(part)
    else:
        _print_group(console, found.rows, found.uses, look)


def rollout_parts(found: "Found", look: Look, reader: TokenReader, *, legend: bool = True) -> Iterator[RenderableType]:
    """Yield all that is known of a rollout, from top to bottom. legend: explain the colours of its tokens."""
    row, uses = found.rows[0], found.uses
    yield pairs(_identity(row))
    if len(found.episode) > 1:
        yield _rule("episode")
        yield episode_tree(found.episode, row["rollout_id"], found.advantages)
    yield _rule("conversation")
    yield from _conversation(row["messages"], look)
    yield from _response(row, reader, uses[0]["advantage"] if uses else None, look, legend=legend)
    yield _rule("outcome")
    yield pairs({name: _shorten(value, look) for name, value in _outcome(row).items()})
    if row["num_turns"] > 1 or any(step["tool_calls"] for step in row["agent_steps"]):
        yield _agent_steps(row["agent_steps"], look)
        yield _environment_steps(row["environment_steps"], look)
    yield _rule("training")
    if not uses:
        yield Text("no gradient step has considered it yet")
    for use in uses:
        yield Text(_use_text(use), style="dim" if use["superseded"] else "")
    if found.code:
        yield _rule("code")
        yield pairs(_code_lines(found.code))


def _rule(title: str) -> Rule:
    return Rule(title, align="left", style="dim")


def _response(
    row: dict[str, Any], reader: TokenReader, advantage: float | None, look: Look, *, legend: bool
) -> Iterator[RenderableType]:
    """Yield the tokens in colours, then one line per token with --tokens; leave out the middle of a long response."""
    length = row["response_length"]
    yield _rule(f"response, {length} tokens")
    kept = length if look.full else min(length, _SHOWN_TOKENS)
    first = length if kept == length else kept - kept // 2  # a second part would lose the space before its first word
    head = token_rows(row, reader, 0, first)
    tail = token_rows(row, reader, length - (kept - first), length)
    text = coloured(head, look.color, advantage)
    if kept < length:
        text.append(f"\n… {length - kept:,} tokens left out; {look.to_see_all} …\n", style="dim")
    yield text.append(coloured(tail, look.color, advantage))
    if legend and head:
        yield colour_legend(look.color, advantage)
    if look.tokens:
        yield token_table([*head, *tail])


def _identity(row: dict[str, Any]) -> dict[str, str]:
    top = "".join(f", {name} {number(row[name])}" for name in ("top_p", "top_k") if row[name] not in (None, 1))
    last = row["policy_version_last"]
    versions = f"{row['policy_version']}" + (f" to {last}" if last != row["policy_version"] else "")
    lines = {
        "rollout": row["rollout_id"],
        "group": f"{row['group_id']}, {row['group_index'] + 1} of {row['group_size']}",
        "agent": row["agent_id"] if row["agent_id"] != "agent" else None,
        "delegated by": f"{row['parent_rollout_id']}, depth {row['depth']}" if row["parent_rollout_id"] else None,
        "segment": _segment(row),
        "example": f"{row['env_name']} {row['env_example_id']} ({row['purpose']})",
        "policy": f"version {versions} of {row['model']}",
        "sampling": f"temperature {number(row['temperature'])}{top}, max_tokens {row['max_tokens']}, "
        f"seed {row['seed']}",
        "written": f"{row['created_at']:%Y-%m-%d %H:%M:%S} UTC, request {row['request_index']}",
        "file": f"{row['file']}, row group {row['row_group']}, row {row['row']}",
    }
    return {name: value for name, value in lines.items() if value is not None}


def _segment(row: dict[str, Any]) -> str | None:
    """Describe which of an episode's rewritten contexts a row is; None for the first."""
    if not row["segment_index"]:
        return None
    parent = row["parent_segment_index"]
    return f"{row['segment_index']}" + ("" if parent is None else f", rewritten from {parent}")


def _shorten(text: str, look: Look) -> str:
    """Replace the middle of a long text by the number of characters that are left out."""
    left_out = 0 if look.full else len(text) - _SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters left out; {look.to_see_all} …\n{text[-half:]}"


def _conversation(messages: list[dict[str, Any]], look: Look) -> Iterator[Text]:
    for message in messages:
        name = f" {printable(message['name'])}" if message["name"] else ""
        text = Text(f"{printable(message['role'])}{name}  ", style="bold cyan")
        yield text.append(printable(_shorten(message["content"], look)), style="not bold default")
        for call in message["tool_calls"]:
            yield Text(f"  {_call_text(call, look)}", style="magenta")


def _call_text(call: dict[str, Any], look: Look) -> str:
    answer = f"error: {call['error']}" if call["error"] else call["result"]
    arguments, answer = (_shorten(str(text), look) for text in (call["arguments"], answer))
    return printable(f"{call['name']}({arguments}) -> {answer}")


def _outcome(row: dict[str, Any]) -> dict[str, str]:
    components = ", ".join(f"{name} {number(value)}" for name, value in row["reward_components"].items())
    reward = "not scored" if row["episode_reward"] is None else number(row["episode_reward"])
    flags = [name for name in ("terminated", "truncated", "incomplete_completion", "parse_error") if row[name]]
    reasons = [f"{name} {row[name]}" for name in ("truncation_reason", "finish_reason") if row[name]]
    metadata = ", ".join(f"{name} {value}" for name, value in row["metadata"].items())
    lines = {
        "reward": f"{reward}  ({components})" if components else reward,
        "end": ", ".join([*flags, *reasons]),
        "length": f"{plural(row['num_turns'], 'turn')}, {row['prompt_length']} prompt tokens, "
        f"{row['response_length']} response tokens, {row['action_length']} of them sampled",
        "error": row["error"],
        "metadata": metadata,
        **{name: cell(row[name]).plain for name in extra_names(list(row)) if row[name] is not None},
    }
    return {name: value for name, value in lines.items() if value}


def _agent_steps(steps: list[dict[str, Any]], look: Look) -> Table:
    table = plain_table("turn", "target", "tokens", "finish", "action")
    for step in steps:
        action = f"parse error: {step['parse_feedback'] or ''}" if step["parse_error"] else step["action"] or ""
        calls = "".join(f"\n{_call_text(call, look)}" for call in step["tool_calls"])
        table.add_row(
            str(step["turn"]),
            step["action_target"],
            f"{step['start']}-{step['end']}",
            cell(step["finish_reason"]),
            Text(printable(f"{_shorten(action, look)}{calls}".strip())),
        )
    return table


def _environment_steps(steps: list[dict[str, Any]], look: Look) -> Table:
    table = plain_table("step", "agent turns", ">reward", "next observation", "end")
    for step in steps:
        ends = [name for name in ("terminated", "truncated") if step[name]]
        reason = dict(step["info"]).get("truncation_reason")
        table.add_row(
            str(step["turn"]),
            " ".join(map(str, step["agent_steps"])),
            "-" if step["reward"] is None else number(step["reward"]),
            Text(printable(_shorten(step["next_observation"] or "", look))),
            ", ".join([*ends, *([reason] if reason else [])]),
        )
    return table


def _code_lines(code: list[dict[str, Any]]) -> dict[str, str]:
    """Return the code that scored and the code that gave advantages, by title."""
    lines = {}
    for record in code:
        text = (
            f"{record['name']}, sha256 {str(record['sha256'])[:_SHOWN_DIGITS]} of {record['path'] or record['package']}"
        )
        if record["attempt_id"] is None:
            lines["scored by"] = f"{text} (life {record['life']} of slot {record['slot']})"
        else:
            lines[f"advantage of attempt {record['attempt_id']}"] = text
    return {name: printable(text) for name, text in lines.items()}


def _use_text(use: dict[str, Any]) -> str:
    verdict = "used" if use["used"] else f"dropped by {use['reason']}"
    advantage = (
        "" if use["advantage"] is None else f", advantage {use['advantage']:+.6g}, weight {number(use['weight'])}"
    )
    superseded = " (superseded by a later attempt)" if use["superseded"] else ""
    where = f"at step {use['step']} of attempt {use['attempt_id']}"
    return f"{verdict} {where}{advantage}, off-policy steps {use['off_policy_steps']}{superseded}"


def _print_group(console: Console, rows: list[dict[str, Any]], uses: list[dict[str, Any]], look: Look) -> None:
    first = rows[0]
    console.print(
        pairs(
            {
                "group": first["group_id"],
                "example": f"{first['env_name']} {first['env_example_id']} ({first['purpose']})",
                "policy": f"version {first['policy_version']} of {first['model']}",
            }
        )
    )
    for part in _conversation(first["messages"][:1], look):
        console.print(part)
    use_of = {use["rollout_id"]: use for use in reversed(uses)}
    titles = ("", "agent", "rollout (its end)", ">reward", ">advantage", ">tokens", "finish", "training")
    is_told = {"agent": len({row["agent_id"] for row in rows}) > 1, ">advantage": bool(uses)}
    kept = [title for title in titles if is_told.get(title, True)]
    table = plain_table(*kept)
    table.columns[kept.index("rollout (its end)")].no_wrap = True  # ids are copied
    for row in rows:
        line = dict(zip(titles, _group_line(row, use_of.get(row["rollout_id"])), strict=True))
        table.add_row(*(line[title] for title in kept))
    console.print(table)
    scored = sorted((row for row in rows if row["episode_reward"] is not None), key=lambda row: row["episode_reward"])
    for title, row in (("best", scored[-1]), ("worst", scored[0])) if len(scored) > 1 else ():
        console.rule(f"{title}, {number(row['episode_reward'])}", align="left", style="dim")
        text = row["messages"][-1]["content"] if row["messages"] else ""
        console.print(Text(printable(text[:_EXCERPT]) + ("…" if len(text) > _EXCERPT else "")))


def _group_line(row: dict[str, Any], use: dict[str, Any] | None) -> list[Text]:
    ends = row["error"] or row["truncation_reason"] or row["finish_reason"]
    training = "not considered" if use is None else f"step {use['step']}" if use["used"] else use["reason"]
    advantage = use["advantage"] if use else None
    values = [
        str(row["group_index"]),
        "  " * row["depth"] + row["agent_id"],
        row["rollout_id"][-12:],
        number(row["episode_reward"], 4),
        "-" if advantage is None else f"{advantage:+.4g}",
        str(row["response_length"]),
        ends or "-",
        training,
    ]
    return [cell(value, most=30) for value in values]
