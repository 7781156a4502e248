"""Pages of one rollout: all that is known of it, its texts, calls and tokens one page at a time, and its labels."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, get_args

from ludic.app.show.lookup import UnknownIdError
from ludic.app.show.transcript import (
    Color,
    Lookup,
    TokenRow,
    end_in_full,
    origin_of,
    use_text,
    with_messages,
)
from ludic.app.show.web.conversation import (
    MESSAGES_A_PAGE,
    Fact,
    best_sibling,
    members,
    page_index,
    page_links,
    paged,
    shown_messages,
    shown_text,
)
from ludic.app.show.web.episode import agents_table, turns_table
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, Redirect, page, short_id
from ludic.app.show.web.texts import CHARACTERS_A_PAGE, page_of, texts_of
from ludic.app.show.web.tokens import TOKENS_A_PAGE, advantage_scale, coloured, legend, own_advantage, read_tokens
from ludic.base import cell, number, plural
from ludic.errors import ConfigError, LudicError, one_line
from ludic.records import extra_names
from ludic.root.rows import LABEL
from ludic.run import is_recorded_run

COLOURS: Sequence[Color] = get_args(Color)
_SHA_DIGITS = 12
_MOST_COLUMNS, _LONGEST_VALUE = 40, 200
"""Columns of the data set that are shown, and characters of one."""
_MOST_MARK_CHARACTERS = 200
_MOST_NOTE_CHARACTERS = 10_000


@page("rollout", "Rollout")
def rollout(request: PageRequest) -> PageAnswer:
    """Everything about one rollout."""
    color = colour_of(request, "logprob")
    found = request.data.find(request.required("id"), trained=color in ("advantage", "ratio"))
    row = with_messages(found.rows[0], request.data.token_reader)
    num_messages = len(row["messages"])
    first = page_index(request, "message", num_messages, MESSAGES_A_PAGE) * MESSAGES_A_PAGE
    tables = [members(request, found, but=row["rollout_id"], name="group")]
    agents = agents_table(request, found) if len(found.episode) > 1 else None
    turns = turns_table(request, row) if _has_turns(row) else None
    values = {
        "row": row,
        "head": head_of(request, found),
        "best": best_sibling(found, row),
        "columns": columns_of(request, row),
        "wanted": shown_text(request, row, "wanted", row["wanted"]),
        "error": shown_text(request, row, "error", row["error"]),
        "traceback": shown_text(request, row, "traceback", row["traceback"]),
        "messages": shown_messages(request, row, first),
        "pages_of_messages": page_links(request, "message", num_messages, MESSAGES_A_PAGE, "messages"),
        "tokens": tokens_of(request, found, color),
        "uses": [(use_text(use), use["superseded"]) for use in found.uses],
        "group": paged(request, tables[0], "member"),
        "agents": agents and paged(request, agents, "agent"),
        "turns": turns and paged(request, turns, "turn"),
        "labels": request.data.labels(row["rollout_id"]),
        "new_label": {"mark": "", "note": "", "name": LABEL, "author": ""},
        "code": [_code_fact(request, record) for record in found.code],
        "origin": _origin(request, found),
        "example_href": _example(request, row),
    }
    tables += [table for table in (agents, turns) if table is not None]
    return PageAnswer("rollout.html.j2", values, title=f"Rollout {short_id(row['rollout_id'])}", tables=tables)


def colour_of(request: PageRequest, default: Color) -> Color:
    """Return the colouring that the address asks for. Raises ConfigError."""
    wanted = request.query.get("color") or default
    found = next((color for color in COLOURS if color == wanted), None)
    if found is None:
        raise ConfigError(f"color is {wanted!r}, wanted one of {', '.join(COLOURS)}")
    return found


def _has_turns(row: dict[str, Any]) -> bool:
    return row["num_turns"] > 1 or any(step["tool_calls"] for step in row["agent_steps"])


def head_of(request: PageRequest, found: Lookup) -> list[Fact]:
    """Return what a reader wants to know before the text: reward, advantage, components, end, use and lengths."""
    row, use = found.rows[0], next(iter(found.uses), None)
    reward = "not scored" if row["episode_reward"] is None else number(row["episode_reward"])
    advantage = None if use is None or use["advantage"] is None else f"{use['advantage']:+.6g}"
    facts = [
        Fact("reward", reward),
        Fact("advantage", advantage or ("none yet" if use is None else "none")),
        *(Fact(name, number(value)) for name, value in row["reward_components"].items()),
        Fact("correct", "" if row["correct"] is None else cell(row["correct"]).plain),
        *(Fact(name, cell(row[name], 200).plain) for name in extra_names(list(row)) if row[name] is not None),
        Fact("end", end_in_full(row)),
        Fact("training", "not considered yet" if use is None else _fate(use)),
        Fact("tokens", _lengths(row)),
        Fact("turns", str(row["num_turns"])),
        Fact("version", str(row["version"])),
        Fact("example", f"{row['env_name']} {row['env_example_id']}", _example(request, row)),
    ]
    return [fact for fact in facts if fact.text]


def columns_of(request: PageRequest, row: dict[str, Any]) -> list[Fact]:
    """Return the columns that the data set has for the example, cut; the last fact leads to their whole text."""
    text = row["example_columns"]
    if not text:
        return []
    try:
        found = json.loads(text)
    except ValueError:  # another program has written it
        found = None
    values = {str(name): _plain(value) for name, value in found.items()} if isinstance(found, dict) else {}
    facts = [Fact(name, cell(value, _LONGEST_VALUE).plain) for name, value in islice(values.items(), _MOST_COLUMNS)]
    if 0 < len(values) <= _MOST_COLUMNS and all(len(value) <= _LONGEST_VALUE for value in values.values()):
        return facts
    return [
        *facts,
        Fact("all of it", f"{len(text):,} characters", request.link("text", id=row["rollout_id"], name="columns")),
    ]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _example(request: PageRequest, row: dict[str, Any]) -> str:
    return request.link("example", env=row["env_name"], id=row["env_example_id"])


def _lengths(row: dict[str, Any]) -> str:
    length, sampled = row["response_length"], row["action_length"]
    return f"{length:,}" if length == sampled else f"{length:,}, {sampled:,} of them sampled"


def _fate(use: dict[str, Any]) -> str:
    verdict = "used" if use["used"] else f"dropped by {use['reason']}"
    return f"{verdict} at step {use['step']}" + (", superseded" if use["superseded"] else "")


def _origin(request: PageRequest, found: Lookup) -> list[Fact]:
    row = found.rows[0]
    links = {
        "group": request.link("group", id=row["group_id"]),
        "delegated by": request.link("rollout", id=row["parent_rollout_id"]) if row["parent_rollout_id"] else None,
    }
    lines = origin_of(row, is_recorded=is_recorded_run(found.root))
    return [
        Fact("rollout", row["rollout_id"], request.link("rollout", id=row["rollout_id"])),
        *(Fact(title, text, links.get(title)) for title, text in lines.items()),
    ]


def _code_fact(request: PageRequest, record: dict[str, Any]) -> Fact:
    """Return a line about code that scored a rollout or gave its advantage, with a link to a user's file."""
    by = "scored by" if record["attempt_id"] is None else f"advantage of attempt {record['attempt_id']}"
    name = f"{record['name']}, {record['path'] or record['package']}, sha256 {str(record['sha256'])[:_SHA_DIGITS]}"
    href = request.link("code", sha256=record["sha256"], path=record["path"]) if record["path"] else None
    return Fact(by, name, href)


# --- Tokens ----------------------------------------------------------------------------------------------------------


def tokens_of(request: PageRequest, found: Lookup, color: Color, scale: float | None = None) -> dict[str, Any]:
    """Return the values of the macro `tokens`: the page of the response with a token, coloured, and the legend."""
    row = found.rows[0]
    length = row["response_length"]
    first, some = read_page_of_tokens(request, row)
    advantage = found.advantage
    scale = advantage_scale([(some, advantage)]) if scale is None else scale
    return {
        "length": length,
        "spans": coloured(some, color, advantage, scale, first=first),
        "legend": legend(color, some, advantage, scale),
        "colours": [(name, None if name == color else request.here(color=name) + "#response") for name in COLOURS],
        "pages": page_links(request, "position", length, TOKENS_A_PAGE, "response"),
        "table_href": request.link("response", id=row["rollout_id"], position=first or None),
    }


def read_page_of_tokens(request: PageRequest, row: dict[str, Any]) -> tuple[int, list[TokenRow]]:
    """Return the index of the first token of the page that the address asks for, and its tokens."""
    length = row["response_length"]
    first = page_index(request, "position", length, TOKENS_A_PAGE) * TOKENS_A_PAGE
    return first, read_tokens(row, request.data.token_reader, first, min(length, first + TOKENS_A_PAGE))


@page("response", "Response")
def response(request: PageRequest) -> PageAnswer:
    """The tokens of a response as a table."""
    found = request.data.find(request.required("id"))
    row = found.rows[0]
    length = row["response_length"]
    first, some = read_page_of_tokens(request, row)
    advantage = found.advantage
    rows = [_token_row(index, token, advantage) for index, token in enumerate(some, start=first)]
    table = PageTable(name="response", rows=rows, columns=list(rows[0]) if rows else ["index"])
    values = {
        "rows": table,
        "length": length,
        "pages": page_links(request, "position", length, TOKENS_A_PAGE),
        "back": request.link("rollout", id=row["rollout_id"]),
    }
    title = f"Tokens of rollout {short_id(row['rollout_id'])}"
    return PageAnswer("response.html.j2", values, title=title, tables=[table])


def _token_row(index: int, token: TokenRow, advantage: float | None) -> dict[str, Any]:
    logprob = token.logprob if token.sampled else None
    return {
        "index": str(index),
        "token_id": str(token.token_id),
        "text": repr(token.text),
        "logprob": logprob,
        "probability": None if logprob is None else math.exp(min(0.0, logprob)),
        "reward": token.reward,
        "advantage": own_advantage(token, advantage),
        "ratio": token.ratio if token.sampled else None,
        "sampled": token.sampled,
    }


# --- Long texts ------------------------------------------------------------------------------------------------------


@page("text", "Text")
def text(request: PageRequest) -> PageAnswer:
    """One text of a rollout, some characters a page."""
    name = request.required("name")
    found = request.data.find(request.required("id"), trained=False)
    row = with_messages(found.rows[0], request.data.token_reader)
    texts = texts_of(row)
    if name not in texts:
        raise UnknownIdError(f"rollout {row['rollout_id']} has no text {name!r}")
    part = page_of(texts[name], request.whole_number("start", 0))
    whole = PageTable(name="text", rows=[{"text": texts[name]}], columns=("text",))
    values = {
        "part": part,
        "pages": page_links(request, "start", part.length, CHARACTERS_A_PAGE),
        "back": request.link("rollout", id=row["rollout_id"]),
    }
    title = f"{name.replace('-', ' ')} of rollout {short_id(row['rollout_id'])}"
    return PageAnswer("text.html.j2", values, title=title, tables=[whole])


@page("calls", "Tool calls")
def calls(request: PageRequest) -> PageAnswer:
    """All tool calls of a message."""
    found = request.data.find(request.required("id"), trained=False)
    row = found.rows[0]
    index = request.whole_number("message", 0)
    if index >= len(row["messages"]):
        raise UnknownIdError(f"rollout {row['rollout_id']} has {plural(len(row['messages']), 'message')}, not {index}")
    rows = [
        {"call": str(number), **{name: call[name] for name in ("name", "arguments", "result", "error")}}
        for number, call in enumerate(row["messages"][index]["tool_calls"] or ())
    ]
    links = {
        name: lambda call, name=name: (
            call[name] and request.link("text", id=row["rollout_id"], name=f"{name}-{index}-{call['call']}")
        )
        for name in ("arguments", "result", "error")
    }
    table = PageTable(name="calls", rows=rows, columns=("call", "name", "arguments", "result", "error"), links=links)
    values = {"table": table, "back": request.link("rollout", id=row["rollout_id"])}
    title = f"Tool calls of message {index} of rollout {short_id(row['rollout_id'])}"
    return PageAnswer("table.html.j2", values, title=title, tables=[table])


# --- Labels ----------------------------------------------------------------------------------------------------------


@page("label", "Label", posts=True)
def label(request: PageRequest) -> Redirect | PageAnswer:
    """Store a label of a rollout; show the rollout, or the form again with why it was refused."""
    rollout_id = request.form.get("id", "")
    found = request.data.find(rollout_id, trained=False).record.rollout_id if rollout_id else ""
    if not found or found != rollout_id:
        raise UnknownIdError(f"the form names no rollout, but {rollout_id!r}")
    fields = {name: request.form.get(name, "") for name in ("mark", "note", "name", "author")}
    try:
        _check_lengths(fields)
        author, name = fields["author"].strip() or None, fields["name"].strip() or LABEL
        request.data.label(rollout_id, fields["mark"], fields["note"], name=name, author=author)
    except LudicError as error:  # what was typed is not lost
        values = {"problem": one_line(error), "rollout_id": rollout_id, "given": fields}
        return PageAnswer("label.html.j2", values, title="Not labelled", status=400)
    return Redirect(request.link("rollout", id=rollout_id) + "#labels")


def _check_lengths(fields: Mapping[str, str]) -> None:
    """Raise ConfigError for a field of a label that is too long."""
    for name, value in fields.items():
        most = _MOST_NOTE_CHARACTERS if name == "note" else _MOST_MARK_CHARACTERS
        if len(value) > most:
            raise ConfigError(f"the {name} has {len(value):,} characters, at most {most:,} are stored; shorten it")
