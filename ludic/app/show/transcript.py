"""Print a rollout or a group for people: reward and wanted answer, conversation, coloured tokens, training.

Tokens are shown as text by tokenizer.json of the newest published policy that has one, or else of the run's first
model; without a tokenizer, as ids.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from tokenizers import Tokenizer

from ludic.app.show.stats import describe_sampling
from ludic.base import Result, cell, left_out, number, pairs, plain_table, plural, read_json
from ludic.base.results import printable
from ludic.records import MAX_TOKENS, WITHOUT_LOGPROBS, Rollout, Row, ended_by, extra_names
from ludic.root import WEIGHT_FILES, Root
from ludic.root.weights import read_identity, read_snapshot
from ludic.run import is_recorded_run

if TYPE_CHECKING:
    import polars as pl

LookupKind = Literal["rollout", "group"]
Color = Literal["logprob", "advantage", "ratio", "mask", "none"]
TokenReader = Callable[[Sequence[int]], list[str]]
"""Returns the text that each token adds."""

_TOKENIZER = "tokenizer.json"
_EMPTY = "(empty)"
"""Placeholder for a text without visible characters."""
_ID_DIGITS = 12
_EXCERPT = 300
_TREE_EXCERPT = 100
_SHOWN_TOKENS = 2_000
_SHOWN_CHARACTERS = 4_000
"""Tokens of a response and characters of each text that are shown, half of them from each end, unless `full` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintOptions:
    """How a rollout is printed."""

    color: Color = "logprob"
    """Colour the response's tokens by their probability, the advantage used in training, the ratio or the mask."""
    tokens: bool = False
    """List the tokens, one per line."""
    full: bool = False
    """Print long texts and responses whole."""
    to_see_all: str = "--full shows them"
    """Advice on how to show omitted text."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lookup(Result):
    """A rollout or a group found by its id. Prints as a readable conversation, or as a table of the group."""

    root: Root
    kind: LookupKind
    rows: list[dict[str, Any]]
    """Rows of the rollouts table, with their address: the rollout, or the rollouts of the group."""
    records: tuple[Rollout, ...]
    """The same rows as records."""
    group: list[dict[str, Any]]
    """Rows of the whole group."""
    group_uses: list[dict[str, Any]]
    """Rows of the ledger about the group, superseded rows last."""
    code: list[dict[str, Any]]
    """Rows of the view `code`: the environment and users' scorers that scored it, then the advantages of the attempts
    that considered it."""
    options: PrintOptions = field(default_factory=PrintOptions)
    """How it is printed."""
    labels: list[dict[str, Any]] = field(default_factory=list)
    """Labels of the rollout, oldest first; empty for a group, and where it is not looked up to be printed."""

    @property
    def record(self) -> Rollout:
        """The rollout; of a group, its first."""
        return self.records[0]

    @cached_property
    def episode(self) -> list[dict[str, Any]]:
        """Rows of the rollout's episode, of all its agents; empty for a group."""
        return [row for row in self.group if row["episode_id"] == self.rows[0]["episode_id"] and self.kind == "rollout"]

    @cached_property
    def uses(self) -> list[dict[str, Any]]:
        """Rows of the ledger about `rows`, superseded rows last."""
        shown = {row["rollout_id"] for row in self.rows}
        return [use for use in self.group_uses if use["rollout_id"] in shown]

    @cached_property
    def advantages(self) -> dict[str, float | None]:
        """Advantages of the group's rows by rollout_id, each in its first use that is not superseded."""
        return {use["rollout_id"]: use["advantage"] for use in reversed(self.group_uses)}

    @property
    def advantage(self) -> float | None:
        """Advantage of the rollout in its first use."""
        return self.advantages.get(self.rows[0]["rollout_id"])

    def tokens(self) -> "pl.DataFrame":
        """Return a row per response token: rollout_id, index, token_id, text, logprob (nats), reward and sampled.

        sampled is false for tokens that the environment or a tool inserted; logprob is null if it was not stored. Text
        needs the tokenizer of a published policy or of the first model; without one it is the id.
        """
        import polars as pl

        reader = load_token_reader(self.root)
        return pl.DataFrame(
            [
                (row["rollout_id"], index, token.token_id, token.text, token.logprob, token.reward, token.sampled)
                for row in self.rows
                for index, token in enumerate(token_rows(row, reader, 0, row["response_length"]))
            ],
            schema=_TOKEN_COLUMNS,
            schema_overrides={"logprob": pl.Float64},
            orient="row",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, as `ludic view --json` prints it."""
        return {"kind": self.kind, "rows": self.rows, "uses": self.uses, "code": self.code, "labels": self.labels}

    def print_to(self, console: Console) -> None:
        """Print for people."""
        print_found(console, self, self.options)


_TOKEN_COLUMNS = ["rollout_id", "index", "token_id", "text", "logprob", "reward", "sampled"]


# --- A rollout, from top to bottom -----------------------------------------------------------------------------------


def print_found(console: Console, found: Lookup, options: PrintOptions) -> None:
    """Print a rollout, or a table of a group's rollouts."""
    is_coloured = bool(console.color_system) and not console.no_color
    if found.kind == "rollout":
        for part in rollout_parts(found, options, load_token_reader(found.root), legend=is_coloured):
            console.print(part)
        for part in label_lines(found.labels):
            console.print(part)
    else:
        reader = None if all(row["messages"] for row in found.rows) else load_token_reader(found.root)
        _print_group(console, [with_messages(row, reader) for row in found.rows], found.uses, options)


def label_lines(labels: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """Yield a line for each label, below a title; nothing without labels."""
    if labels:
        yield _rule("labels")
    for label in labels:
        mark = label["text"] or (number(label["value"]) if label["value"] is not None else "")
        line = (
            f"{label['name']} {mark}  by {label['author']}, {label['created_at']:%Y-%m-%d %H:%M}  {label['note'] or ''}"
        )
        yield Text(printable(line))


def rollout_parts(
    found: Lookup, options: PrintOptions, reader: TokenReader, *, legend: bool = True
) -> Iterator[RenderableType]:
    """Yield all that is known of a rollout, from top to bottom. legend: explain the colours of its tokens."""
    row, uses = with_messages(found.rows[0], reader), found.uses
    yield pairs({name: _shorten(value, options) for name, value in _summary(row, uses).items()})
    if len(found.episode) > 1:
        yield _rule("episode")
        yield episode_tree(found.episode, row["rollout_id"], found.advantages)
    yield _rule("conversation")
    yield from _conversation(row["messages"], options)
    yield from _response(row, reader, uses[0]["advantage"] if uses else None, options, legend=legend)
    if row["traceback"]:
        yield _rule("traceback" if row["error"] else "traceback of a tool")
        yield Text(printable(row["traceback"]), style="red")
    if row["num_turns"] > 1 or any(step["tool_calls"] for step in row["agent_steps"]):
        yield _agent_steps(row["agent_steps"], options)
        yield _environment_steps(row, options)
    yield _rule("training")
    if not uses:
        yield Text("no gradient step has considered it yet")
    for use in uses:
        yield Text(use_text(use), style="dim" if use["superseded"] else "")
    if found.code:
        yield _rule("code")
        yield pairs(_code_lines(found.code))
    yield _rule("origin")
    yield pairs(
        {
            name: _shorten(value, options)
            for name, value in origin_of(row, is_recorded=is_recorded_run(found.root)).items()
        }
    )


def with_messages(row: dict[str, Any], reader: TokenReader | None) -> dict[str, Any]:
    """Return a row; one that another program recorded without messages gets the texts of its tokens as such."""
    if row["messages"] or reader is None:
        return row
    empty: dict[str, Any] = {"name": None, "tool_calls": [], "reasoning": None, "tool_call_id": None}
    texts = {"prompt": row["prompt_tokens"], "assistant": row["response_tokens"]}
    made = [{**empty, "role": role, "content": "".join(reader(tokens))} for role, tokens in texts.items()]
    return {**row, "messages": made}


def _rule(title: str) -> Rule:
    return Rule(title, align="left", style="dim")


def _response(
    row: dict[str, Any], reader: TokenReader, advantage: float | None, options: PrintOptions, *, legend: bool
) -> Iterator[RenderableType]:
    """Yield the tokens in colours, then one line per token with --tokens; leave out the middle of a long response."""
    length = row["response_length"]
    yield _rule(f"response, {length} tokens")
    kept = length if options.full else min(length, _SHOWN_TOKENS)
    first = length if kept == length else kept - kept // 2  # a second part would lose the space before its first word
    head = token_rows(row, reader, 0, first)
    tail = token_rows(row, reader, length - (kept - first), length)
    text = coloured(head, options.color, advantage)
    if kept < length:
        text.append(f"\n… {length - kept:,} tokens left out; {options.to_see_all} …\n", style="dim")
    yield text.append(coloured(tail, options.color, advantage))
    if legend and head:
        yield colour_legend(options.color, advantage)
    if options.tokens:
        yield token_table([*head, *tail])


def _summary(row: dict[str, Any], uses: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the summary above the text: reward, advantage, the wanted answer, and the episode's end."""
    components = ", ".join(f"{name} {number(value)}" for name, value in row["reward_components"].items())
    reward = "not scored" if row["episode_reward"] is None else number(row["episode_reward"])
    advantage = uses[0]["advantage"] if uses else None
    lines = {
        "rollout": row["rollout_id"],
        "example": f"{row['env_name']} {row['env_example_id']} ({row['purpose']})",
        "reward": f"{reward}  ({components})" if components else reward,
        "advantage": None if advantage is None else f"{advantage:+.6g}",
        "wanted": row["wanted"],
        "correct": None if row["correct"] is None else cell(row["correct"]).plain,
        **{name: cell(row[name]).plain for name in extra_names(list(row)) if row[name] is not None},
        "end": end_in_full(row),
        "error": row["error"],
        "length": f"{plural(row['num_turns'], 'turn')}, {row['prompt_length']} prompt tokens, "
        f"{row['response_length']} response tokens, {row['action_length']} of them sampled",
    }
    return {name: value for name, value in lines.items() if value}


def cause_of(row: Row) -> str | None:
    """Return why a row's last answer ended; see ludic.records.ended_by."""
    return ended_by(row["truncation_reason"], row["finish_reason"], row["parse_error"])


def _other_causes(row: Row) -> list[str]:
    """Return problems of answers besides the end: parse failures, and cut answers before the last."""
    if row["incomplete_completion"]:
        return [] if cause_of(row) == MAX_TOKENS else ["an answer was cut at max_tokens"]
    return ["parse error"] if row["parse_error"] else []


def end_in_full(row: Row) -> str:
    """Return how the episode and its last answer ended; a cause is named once."""
    flags = [name for name in ("terminated", "truncated") if row[name]]
    reasons = [f"{name} {row[name]}" for name in ("truncation_reason", "finish_reason") if row[name]]
    if (cause := cause_of(row)) == MAX_TOKENS:
        flags, reasons = [name for name in flags if name == "terminated"], [f"cut at {cause}"]
    return ", ".join([*flags, *reasons, *_other_causes(row)])


_CAPTURES = {
    "trainer": "of a trainer's forward pass with the weights that sampled",
    "ids": "the sampler's were not stored; the token ids are its own",
    "text": "the sampler's were not stored; the token ids were encoded from the recorded text",
}
"""Note on the logprobs of a row by its `capture`; none for the sampler's own logprobs."""


def origin_of(row: dict[str, Any], *, is_recorded: bool) -> dict[str, str]:
    """Return where a row comes from: group, weights, sampling settings, time and file."""
    last = row["policy_version_last"]
    versions = f"{row['policy_version']}" + (f" to {last}" if last != row["policy_version"] else "")
    lines = {
        "group": f"{row['group_id']}, {row['group_index'] + 1} of {row['group_size']}",
        "agent": row["agent_id"] if row["agent_id"] != "agent" else None,
        "delegated by": f"{row['parent_rollout_id']}, depth {row['depth']}" if row["parent_rollout_id"] else None,
        "segment": _segment(row),
        "policy": f"version {versions} of {row['model']}",
        "sampling": describe_sampling(row, is_recorded=is_recorded),
        "logprobs": _CAPTURES.get(row["capture"]),
        "engine": row["engine"],
        "written": f"{row['created_at']:%Y-%m-%d %H:%M:%S} UTC"
        + (f", request {row['request_index']}" if row["request_index"] >= 0 else ""),
        "file": f"{row['file']}, row group {row['row_group']}, row {row['row']}",
        "metadata": ", ".join(f"{name} {value}" for name, value in row["metadata"].items()),
    }
    return {name: value for name, value in lines.items() if value}


def _segment(row: dict[str, Any]) -> str | None:
    """Describe which of an episode's rewritten contexts a row is; None for the first."""
    if not row["segment_index"]:
        return None
    parent = row["parent_segment_index"]
    return f"{row['segment_index']}" + ("" if parent is None else f", rewritten from {parent}")


def _shorten(text: str, options: PrintOptions) -> str:
    """Replace the middle of a long text by the number of characters that are left out."""
    left_out = 0 if options.full else len(text) - _SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters left out; {options.to_see_all} …\n{text[-half:]}"


def _conversation(messages: Sequence[Row], options: PrintOptions) -> Iterator[Text]:
    for message in messages:
        name = f" {printable(message['name'])}" if message["name"] else ""
        text = Text(f"{printable(message['role'])}{name}  ", style="bold cyan")
        if reasoning := message.get("reasoning"):
            text.append(f"{printable(_shorten(reasoning, options))}\n", style="not bold dim italic")
        is_empty = not (message["content"].strip() or message["tool_calls"] or reasoning)
        content = _EMPTY if is_empty else printable(_shorten(message["content"], options))
        yield text.append(content, style="not bold dim" if is_empty else "not bold default")
        for call in message["tool_calls"]:
            yield Text(f"  {_call_text(call, options)}", style="magenta")


def _call_text(call: Row, options: PrintOptions) -> str:
    return _with_answer(call, lambda text: _shorten(text, options))


def _with_answer(call: Row, shorten: Callable[[str], str]) -> str:
    """Return a call with its answer; a call from a file has none, but messages of role tool after it."""
    answer = f"error: {call['error']}" if call["error"] else call["result"]
    shown = "" if answer is None else f" -> {shorten(str(answer))}"
    return printable(f"{call['name']}({shorten(call['arguments'])}){shown}")


def _agent_steps(steps: list[dict[str, Any]], options: PrintOptions) -> Table:
    table = plain_table("turn", "target", "tokens", "finish", "action")
    for step in steps:
        problem = f"cut at {MAX_TOKENS}" if step["finish_reason"] == "length" else "parse error"
        action = f"{problem}: {step['parse_feedback'] or ''}" if step["parse_error"] else step["action"] or ""
        calls = "".join(f"\n{_call_text(call, options)}" for call in step["tool_calls"])
        table.add_row(
            str(step["turn"]),
            step["action_target"],
            f"{step['start']}-{step['end']}",
            cell(ended_by(None, step["finish_reason"], step["parse_error"])),
            Text(printable(f"{_shorten(action, options)}{calls}".strip())),
        )
    return table


def _environment_steps(row: Row, options: PrintOptions) -> Table:
    table = plain_table("step", "agent turns", ">reward", "next observation", "end")
    for step in row["environment_steps"]:
        table.add_row(
            str(step["turn"]),
            " ".join(map(str, step["agent_steps"])),
            "-" if step["reward"] is None else number(step["reward"]),
            Text(printable(_shorten(step["next_observation"] or "", options))),
            end_of_step(step, row["agent_steps"]),
        )
    return table


def end_of_step(step: Row, agent_steps: Sequence[Row]) -> str:
    """Return whether and why a step of the environment ended the episode; empty if it did not."""
    ends = [name for name in ("terminated", "truncated") if step[name]]
    reason = dict(step["info"]).get("truncation_reason")
    if reason and step["agent_steps"]:
        last = agent_steps[step["agent_steps"][-1]]
        if ended_by(reason, last["finish_reason"], last["parse_error"]) == MAX_TOKENS:
            return MAX_TOKENS
    return ", ".join([*ends, *([reason] if reason else [])])


def _code_lines(code: list[dict[str, Any]]) -> dict[str, str]:
    """Return the code that scored and the code that gave advantages, by title."""
    lines: dict[str, str] = {}
    for record in code:
        text = f"{record['name']}, sha256 {str(record['sha256'])[:_ID_DIGITS]} of {record['path'] or record['package']}"
        if record["attempt_id"] is None:
            text = f"{text} (life {record['life']} of slot {record['slot']})"
            lines["scored by"] = "; ".join(filter(None, (lines.get("scored by"), text)))
        else:
            lines[f"advantage of attempt {record['attempt_id']}"] = text
    return {name: printable(text) for name, text in lines.items()}


def use_text(use: dict[str, Any]) -> str:
    """Return a line about a row of the ledger: what a gradient step did with a rollout, or why not."""
    verdict = "used" if use["used"] else f"dropped by {use['reason']}"
    advantage = (
        "" if use["advantage"] is None else f", advantage {use['advantage']:+.6g}, weight {number(use['weight'])}"
    )
    superseded = " (superseded by a later attempt)" if use["superseded"] else ""
    where = f"at step {use['step']} of attempt {use['attempt_id']}"
    return f"{verdict} {where}{advantage}, off-policy steps {use['off_policy_steps']}{superseded}"


# --- A group ---------------------------------------------------------------------------------------------------------


def _print_group(
    console: Console, rows: list[dict[str, Any]], uses: list[dict[str, Any]], options: PrintOptions
) -> None:
    first = rows[0]
    console.print(
        pairs(
            {
                "group": first["group_id"],
                "example": f"{first['env_name']} {first['env_example_id']} ({first['purpose']})",
                "policy": f"version {first['policy_version']} of {first['model']}",
                **({"wanted": _shorten(first["wanted"], options)} if first["wanted"] else {}),
            }
        )
    )
    for part in _conversation(prompt_of(first["messages"]), options):
        console.print(part)
    use_of = {use["rollout_id"]: use for use in reversed(uses)}
    titles = ("", "agent", "rollout (its end)", ">reward", "correct", ">advantage", ">tokens", "finish", "training")
    is_shown = {
        "agent": len({row["agent_id"] for row in rows}) > 1,
        "correct": any(row["correct"] is not None for row in rows),
        ">advantage": bool(uses),
    }
    kept = [title for title in titles if is_shown.get(title, True)]
    table = plain_table(*kept)
    table.collapse_padding = True  # otherwise all columns need more than 80 characters
    table.columns[kept.index("rollout (its end)")].no_wrap = True  # ids are copied
    for row in rows:
        line = dict(zip(titles, _group_line(row, use_of.get(row["rollout_id"])), strict=True))
        table.add_row(*(line[title] for title in kept))
    console.print(table)
    for title, row in _shown_answers(rows, options):
        reward = "not scored" if row["episode_reward"] is None else number(row["episode_reward"])
        console.rule(f"{title}, {reward}", align="left", style="dim")
        text = row["messages"][-1]["content"] if row["messages"] else ""
        most = len(text) if options.full else _EXCERPT
        shown = printable(text[:most]) + ("…" if len(text) > most else "")
        console.print(Text(shown) if text.strip() else Text(_EMPTY, style="dim"))


def _shown_answers(rows: list[dict[str, Any]], options: PrintOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the best and the worst scored row of a group with a title; with `full` all rows, by group_index."""
    if options.full:
        yield from ((f"answer {row['group_index']}", row) for row in rows)
        return
    scored = sorted((row for row in rows if row["episode_reward"] is not None), key=lambda row: row["episode_reward"])
    if len(scored) > 1:
        yield from (("best", scored[-1]), ("worst", scored[0]))


def prompt_of(messages: Sequence[Row]) -> list[Row]:
    """Return the messages before the first answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def _group_line(row: dict[str, Any], use: dict[str, Any] | None) -> list[Text]:
    ends = row["error"] or cause_of(row)
    advantage = use["advantage"] if use else None
    values = [
        str(row["group_index"]),
        "  " * row["depth"] + row["agent_id"],
        row["rollout_id"][-12:],
        number(row["episode_reward"], 4),
        "-" if row["correct"] is None else cell(row["correct"]).plain,
        "-" if advantage is None else f"{advantage:+.4g}",
        str(row["response_length"]),
        ends or "-",
        fate_of(use),
    ]
    return [cell(value, most=30) for value in values]


def fate_of(use: dict[str, Any] | None) -> str:
    """Return what training did with a row in its first use: the step, or the reason of its drop."""
    if use is None:
        return "not considered"
    fate = f"step {use['step']}" if use["used"] else str(use["reason"])
    return f"superseded, {fate}" if use["superseded"] else fate  # by each of its uses, since superseded ones are last


# --- An episode of several rows as a tree: agents, their tools, delegated tasks, and credit ------------


def episode_tree(rows: Sequence[Row], shown_id: str, advantages: Mapping[str, float | None]) -> Tree:
    """Return the tree of an episode's rows.

    rows: all rows of the episode. shown_id: the row to point at. advantages: by rollout_id, of rows that a gradient
    step has considered.
    """
    tree = Tree(Text(f"episode {rows[0]['episode_id']}", style="dim"))
    ids = {row["rollout_id"] for row in rows}
    for row in rows:
        if row["parent_rollout_id"] not in ids:
            _add_row(tree, row, rows, shown_id, advantages)
    return tree


def _add_row(tree: Tree, row: Row, rows: Sequence[Row], shown_id: str, advantages: Mapping[str, float | None]) -> None:
    style = "bold" if row["rollout_id"] == shown_id else ""
    node = tree.add(Text(_headline(row, advantages.get(row["rollout_id"])), style=style))
    children = [each for each in rows if each["parent_rollout_id"] == row["rollout_id"]]
    for step in row["agent_steps"]:
        for call in step["tool_calls"]:
            branch = node.add(Text(_short_call(call), style="magenta"))
            for child in children_of(call, children):
                children.remove(child)
                _add_row(branch, child, rows, shown_id, advantages)
    for child in children:
        _add_row(node, child, rows, shown_id, advantages)


def children_of(call: Row, children: Sequence[Row]) -> list[Row]:
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
        arguments = read_json(call["arguments"])
    except (ValueError, RecursionError):
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
        _end_of(row),
    ]
    return printable(", ".join(part for part in parts if part))


def _end_of(row: Row) -> str:
    if row["error"]:
        return f"failed: {left_out(row['error'], _TREE_EXCERPT)}"
    is_limited = row["truncated"] or cause_of(row) == MAX_TOKENS
    end = "terminated" if row["terminated"] else (cause_of(row) if is_limited else None) or "not ended"
    return ", ".join([end, *_other_causes(row)])


def _short_call(call: Row) -> str:
    return _with_answer(call, _excerpt)


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TREE_EXCERPT else f"{line[: _TREE_EXCERPT - 1]}…"


# --- Tokens ----------------------------------------------------------------------------------------------------------


# Minimum probability and style, from likely to unlikely.
_SHADES = ((0.9, "green"), (0.5, "bright_green"), (0.1, "yellow"), (0.01, "bright_red"), (0.0, "bold red"))
# Minimum ratio of the probabilities under the trainer's and the sampler's weights, and style.
_RATIOS = ((1.2, "bold green"), (1.02, "green"), (0.98, "dim"), (0.8, "red"), (0.0, "bold red"))
_MASKED = "dim italic"
_SAMPLED = "bold"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of a response."""

    token_id: int
    text: str
    logprob: float | None
    """Logprob in nats; None if the sampler's was not stored."""
    reward: float
    sampled: bool
    """False for tokens that the environment or a tool inserted."""
    ratio: float | None = None
    """Probability under the trainer's weights, as a multiple of the sampler's; None without token statistics."""
    advantage: float | None = None
    """Advantage of this token in training; None if the rollout has one for all."""


def load_token_reader(root: Root) -> TokenReader:
    """Return a reader with the run's newest tokenizer; without a tokenizer, it shows token ids."""
    data = _newest_tokenizer(root)
    if data is None:
        return lambda token_ids: [f" {token_id}" for token_id in token_ids]
    tokenizer = Tokenizer.from_str(data.decode())
    return lambda token_ids: token_texts(lambda ids: tokenizer.decode(ids, skip_special_tokens=False), token_ids)


def _newest_tokenizer(root: Root) -> bytes | None:
    """Return tokenizer.json of the newest policy, or else of the first model; None if neither has one."""
    published = [name for name in WEIGHT_FILES.listed(root) if name.file == _TOKENIZER]
    if published:
        return root.read(WEIGHT_FILES.name(max(published)))
    identity = read_identity(root)  # a run whose weights are elsewhere: imported, or recorded from another trainer
    kept = {} if identity is None else identity.tokenizer
    return read_snapshot(root, {_TOKENIZER: kept[_TOKENIZER]})[_TOKENIZER] if _TOKENIZER in kept else None


def token_texts(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; joined, they are the text of all tokens.

    Decoding tokens one by one would lose spaces between words, and characters that span several tokens. Such a
    character belongs to its last token.
    """
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(token_ids) + 1):
        before, now = decode(list(token_ids[start:read])), decode(list(token_ids[start:end]))
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and end < len(token_ids)):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, read = read, end
    return texts


def token_rows(row: dict[str, Any], reader: TokenReader, start: int, end: int) -> list[TokenRow]:
    """Return tokens start to end of a row's response. The row may have lists of `ratios` and `token_advantages`."""
    token_ids = row["response_tokens"][start:end]
    is_known = row["capture"] not in WITHOUT_LOGPROBS
    logprobs = row["response_logprobs"] if is_known else [None] * len(row["response_logprobs"])
    columns = (
        token_ids,
        reader(token_ids),
        logprobs[start:end],
        row["token_rewards"][start:end],
        row["action_mask"][start:end] if row["action_mask"] else [True] * len(token_ids),
        *(_padded(row.get(name), start, end) for name in ("ratios", "token_advantages")),
    )
    return [TokenRow(*values) for values in zip(*columns, strict=True)]


def _padded(values: Sequence[float] | None, start: int, end: int) -> list[float | None]:
    """Return items start to end; None for those that are missing, since max_seq_len may cut a response in training."""
    found = list((values or ())[start:end])
    return [*found, *[None] * (end - start - len(found))]


def coloured(tokens: Sequence[TokenRow], color: Color, advantage: float | None) -> Text:
    """Return the response as text with one style per token."""
    text = Text()
    for token in tokens:
        text.append(printable(token.text), style=_style(token, color, advantage))
    return text


def colour_legend(color: Color, advantage: float | None) -> Text:
    """Return a legend of the colours."""
    text = Text("")
    match color:
        case "logprob":
            text.append("probability ")
            for least, style in _SHADES:
                text.append(f" ≥ {least:g} " if least else " less ", style=style)
        case "advantage" if advantage is not None:
            text.append(f"advantage {advantage:+.6g}", style=_advantage_style(advantage))
        case "advantage":
            text.append("without an advantage")
        case "ratio":
            text.append("trainer / sampler ")
            for least, style in _RATIOS:
                text.append(f" ≥ {least:g} " if least else " less ", style=style)
            text.append("  not in token_stats", style="")
        case "mask":
            text.append("sampled", style=_SAMPLED)
    return text.append("  not sampled", style=_MASKED) if color != "none" else text


def token_table(tokens: Sequence[TokenRow]) -> Table:
    """Return a table with one line per token."""
    table = plain_table(">index", ">id", "text", ">logprob", ">probability", ">reward", "sampled")
    for index, token in enumerate(tokens):
        logprob = token.logprob if token.sampled else None
        table.add_row(
            str(index),
            str(token.token_id),
            cell(repr(token.text)),
            "-" if logprob is None else number(logprob, 4),
            "-" if logprob is None else number(math.exp(logprob), 3),
            number(token.reward, 4),
            "yes" if token.sampled else "no",
        )
    return table


def _style(token: TokenRow, color: Color, advantage: float | None) -> str:
    if color == "none":
        return ""
    if not token.sampled:
        return _MASKED
    if color == "mask":
        return _SAMPLED
    if color == "ratio":
        return "" if token.ratio is None else next(style for least, style in _RATIOS if token.ratio >= least)
    if color == "advantage":
        own = advantage if token.advantage is None else token.advantage
        return "" if own is None else _advantage_style(own)
    if token.logprob is None:
        return ""
    probability = math.exp(token.logprob)
    return next(style for least, style in _SHADES if probability >= least)


def _advantage_style(advantage: float) -> str:
    return "green" if advantage > 0 else "red" if advantage < 0 else "dim"
