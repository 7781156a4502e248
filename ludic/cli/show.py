"""`ludic show ROOT ID`: print one rollout or one group for people to read.

Reads the rollout's file (ludic.store.lookup), the ledger, and tokenizer.json of a published policy; for part of an id
also all ids of the run. Raises UnknownIdError if the id matches nothing or several ids.
"""

import logging
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

import duckdb
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ludic.cli.flags.show import Settings
from ludic.cli.query import ask
from ludic.cli.tokens import TokenReader, TokenRow, colour_legend, coloured, load_token_reader, token_table
from ludic.errors import LudicError, QueryError
from ludic.maintenance.verify import TABLES, read_footers
from ludic.schema import extra_names, resolve_row
from ludic.sql import connect
from ludic.store import Root
from ludic.store.lookup import Address, find_rows, read_addresses
from ludic.viewer.output import cell, number, pairs, plain_table, plural, print_json, printable, stdout_console

logger = logging.getLogger(__name__)

_MOST_CANDIDATES = 4
_SHOWN_DIGITS = 12
_EXCERPT = 300
_SHOWN_TOKENS = 2_000
_SHOWN_CHARACTERS = 4_000
"""Tokens of a response and characters of each text that are shown, half of them from each end, unless --full is set."""
_WHOLE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_FIND = """
with seen as (
    select rollout_id, group_id, version from rollouts
    union all
    select rollout_id, group_id, version from evals
),

ids as (
    select rollout_id as id, 'rollout' as kind, version from seen
    union
    select group_id as id, 'group' as kind, version from seen
)

select id, kind, id = $id as exact, version
from ids
where starts_with(id, $id) or ends_with(id, $id)
order by exact desc, id
"""
_USES = """
select attempt_id, step, used, reason, advantage, weight, off_policy_steps, superseded, rollout_id
from all_batches
where rollout_id = $id or group_id = $id
order by superseded, attempt_id, step
"""
_CODE = """
select attempt_id, slot, life, role, name, sha256, path, package
from code
where (worker_id = $worker_id and name = $env_name) or (role = 'advantage' and list_contains($attempts, attempt_id))
order by attempt_id nulls first
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Data of the rollout or group with an id; --json prints it."""

    kind: Literal["rollout", "group"]
    rows: list[dict[str, Any]]
    """Rows of the rollouts table: the rollout, or the rollouts of the group."""
    uses: list[dict[str, Any]]
    """Rows of the ledger, superseded rows last."""
    code: list[dict[str, Any]]
    """Rows of the view `code`: the environment that scored, then the advantages of the attempts that considered it."""


class UnknownIdError(LudicError, LookupError):
    """An id matches no rollout or group, or several."""


def main(settings: Settings) -> None:
    root = Root.open(settings.root)
    found = look_up(root, settings.id)
    if settings.json:
        print_json(asdict(found))
    elif found.kind == "rollout":
        _print_rollout(stdout_console(), root, found, settings)
    else:
        _print_group(stdout_console(), found.rows, found.uses, settings)


def look_up(root: Root, part: str) -> Found:
    """Find the rollout or group that `part` of an id matches. Leaves out broken files, with a warning."""
    addresses = find_rows(root, part) if _WHOLE_ID.fullmatch(part) else []
    try:
        return _look_up(connect(root), root, part, addresses)
    except QueryError:
        broken = [footer.name for folder in TABLES for footer in read_footers(root, folder) if footer.problem]
        if not broken:
            raise
        logger.warning("left out what can't be read: %s", ", ".join(broken))
        return _look_up(connect(root, without=broken), root, part, addresses)


def _look_up(con: duckdb.DuckDBPyConnection, root: Root, part: str, addresses: list[Address]) -> Found:
    id_ = part
    if not addresses:
        match = _find(con, root, part)
        id_, addresses = match["id"], find_rows(root, match["id"], match["version"])
    if not addresses:  # deleted since the view of rollouts was made
        raise _unknown(root, part)
    rows = _read(root, addresses)
    uses = ask(con, root, _USES, {"id": id_})
    kind: Literal["rollout", "group"] = "rollout" if rows[0]["rollout_id"] == id_ else "group"
    return Found(kind=kind, rows=rows, uses=uses, code=_code_of(con, root, rows[0], uses))


def _code_of(
    con: duckdb.DuckDBPyConnection, root: Root, row: dict[str, Any], uses: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    attempts = sorted({use["attempt_id"] for use in uses})
    try:
        return ask(con, root, _CODE, {"worker_id": row["worker_id"], "env_name": row["env_name"], "attempts": attempts})
    except QueryError as error:
        logger.warning("the code that scored is left out: %s", error)
        return []


def _read(root: Root, addresses: list[Address]) -> list[dict[str, Any]]:
    """Read rows with the columns of the view `rollouts`, and their file, row group and row."""
    rows = [
        {
            **resolve_row(row),
            "version": address.file.version,
            "env": address.file.env_name,
            "file": address.file.name,
            "row_group": address.row_group,
            "row": address.row,
        }
        for address, row in zip(
            addresses, read_addresses(root, addresses).to_pylist(maps_as_pydicts="lossy"), strict=True
        )
    ]
    return sorted(rows, key=lambda row: (row["group_index"], row["segment_index"]))


def _find(con: duckdb.DuckDBPyConnection, root: Root, part: str) -> dict[str, Any]:
    """Find the one id that equals, begins with or ends with `part`; returns its id, kind and version."""
    found = ask(con, root, _FIND, {"id": part}) if part else []
    if not found:
        raise _unknown(root, part)
    if len(found) > 1 and not found[0]["exact"]:
        some = ", ".join(f"{row['kind']} {row['id']}" for row in found[:_MOST_CANDIDATES])
        more = f" and {len(found) - _MOST_CANDIDATES:,} more" if len(found) > _MOST_CANDIDATES else ""
        raise UnknownIdError(f"{part!r} stands for {some}{more}; give more of it (ids differ most at their end)")
    return found[0]


def _unknown(root: Root, part: str) -> UnknownIdError:
    query = "select rollout_id, group_id from rollouts"
    return UnknownIdError(f'{root.url} has no rollout or group {part!r}; `ludic sql {root.url} "{query}"` lists them')


def _print_rollout(console: Console, root: Root, found: Found, settings: Settings) -> None:
    row, uses = found.rows[0], found.uses
    console.print(pairs(_identity(row)))
    console.rule("conversation", align="left", style="dim")
    _print_conversation(console, row["messages"], settings)
    use = uses[0] if uses else None
    _print_response(console, row, load_token_reader(root), use["advantage"] if use else None, settings)
    console.rule("outcome", align="left", style="dim")
    console.print(pairs({name: _shorten(value, settings) for name, value in _outcome(row).items()}))
    if row["num_turns"] > 1 or any(step["tool_calls"] for step in row["agent_steps"]):
        console.print(_agent_steps(row["agent_steps"], settings))
    console.rule("training", align="left", style="dim")
    _print_uses(console, uses)
    if found.code:
        console.rule("code", align="left", style="dim")
        console.print(pairs(_code_lines(found.code)))


def _print_response(
    console: Console, row: dict[str, Any], reader: TokenReader, advantage: float | None, settings: Settings
) -> None:
    """Print the tokens in colours, then one line per token with --tokens; leave out the middle of a long response."""
    length = row["response_length"]
    console.rule(f"response, {length} tokens", align="left", style="dim")
    kept = length if settings.full else min(length, _SHOWN_TOKENS)
    head = _token_rows(row, reader, 0, kept - kept // 2)
    tail = _token_rows(row, reader, length - kept // 2, length)
    text = coloured(head, settings.color, advantage)
    if kept < length:
        text.append(f"\n… {length - kept:,} tokens left out; --full shows them …\n", style="dim")
    console.print(text.append(coloured(tail, settings.color, advantage)))
    if console.color_system and not console.no_color and head:
        console.print(colour_legend(settings.color, advantage))
    if settings.tokens:
        console.print(token_table([*head, *tail]))


def _identity(row: dict[str, Any]) -> dict[str, str]:
    top = "".join(f", {name} {number(row[name])}" for name in ("top_p", "top_k") if row[name] not in (None, 1))
    last = row["policy_version_last"]
    versions = f"{row['policy_version']}" + (f" to {last}" if last != row["policy_version"] else "")
    lines = {
        "rollout": row["rollout_id"],
        "group": f"{row['group_id']}, {row['group_index'] + 1} of {row['group_size']}",
        "delegated by": f"{row['parent_rollout_id']}, depth {row['depth']}" if row["parent_rollout_id"] else None,
        "segment": str(row["segment_index"]) if row["segment_index"] else None,
        "example": f"{row['env_name']} {row['env_example_id']} ({row['purpose']})",
        "policy": f"version {versions} of {row['model']}",
        "sampling": f"temperature {number(row['temperature'])}{top}, max_tokens {row['max_tokens']}, "
        f"seed {row['seed']}",
        "written": f"{row['created_at']:%Y-%m-%d %H:%M:%S} UTC, request {row['request_index']}",
        "file": f"{row['file']}, row group {row['row_group']}, row {row['row']}",
    }
    return {name: value for name, value in lines.items() if value is not None}


def _shorten(text: str, settings: Settings) -> str:
    """Replace the middle of a long text by the number of characters that are left out."""
    left_out = 0 if settings.full else len(text) - _SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters left out; --full shows them …\n{text[-half:]}"


def _print_conversation(console: Console, messages: list[dict[str, Any]], settings: Settings) -> None:
    for message in messages:
        name = f" {printable(message['name'])}" if message["name"] else ""
        text = Text(f"{printable(message['role'])}{name}  ", style="bold cyan")
        console.print(text.append(printable(_shorten(message["content"], settings)), style="not bold default"))
        for call in message["tool_calls"]:
            console.print(Text(f"  {_call_text(call, settings)}", style="magenta"))


def _call_text(call: dict[str, Any], settings: Settings) -> str:
    answer = f"error: {call['error']}" if call["error"] else call["result"]
    arguments, answer = (_shorten(str(text), settings) for text in (call["arguments"], answer))
    return printable(f"{call['name']}({arguments}) -> {answer}")


def _token_rows(row: dict[str, Any], reader: TokenReader, start: int, end: int) -> list[TokenRow]:
    token_ids = row["response_tokens"][start:end]
    columns = (
        token_ids,
        reader(token_ids),
        row["response_logprobs"][start:end],
        row["token_rewards"][start:end],
        row["action_mask"][start:end] if row["action_mask"] else [True] * len(token_ids),
    )
    return [TokenRow(*values) for values in zip(*columns, strict=True)]


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


def _agent_steps(steps: list[dict[str, Any]], settings: Settings) -> Table:
    table = plain_table("turn", "target", "tokens", "finish", "action")
    for step in steps:
        action = "parse error" if step["parse_error"] else _shorten(str(step["action"]), settings)
        calls = "".join(f"\n{_call_text(call, settings)}" for call in step["tool_calls"])
        table.add_row(
            str(step["turn"]),
            step["action_target"],
            f"{step['start']}-{step['end']}",
            cell(step["finish_reason"]),
            Text(printable(f"{action}{calls}")),
        )
    return table


def _print_uses(console: Console, uses: list[dict[str, Any]]) -> None:
    if not uses:
        console.print("no gradient step has considered it yet")
    for use in uses:
        console.print(Text(_use_text(use), style="dim" if use["superseded"] else ""))


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


def _print_group(console: Console, rows: list[dict[str, Any]], uses: list[dict[str, Any]], settings: Settings) -> None:
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
    _print_conversation(console, first["messages"][:1], settings)
    use_of = {use["rollout_id"]: use for use in reversed(uses)}
    table = plain_table("", "rollout (its end)", ">reward", ">advantage", ">tokens", "finish", "training")
    for row in rows:
        table.add_row(*_group_line(row, use_of.get(row["rollout_id"])))
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
        row["rollout_id"][-12:],
        number(row["episode_reward"], 4),
        "-" if advantage is None else f"{advantage:+.4g}",
        str(row["response_length"]),
        ends or "-",
        training,
    ]
    return [cell(value, most=30) for value in values]
