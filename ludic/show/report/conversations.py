"""Read the conversations of a few rollouts, cut to a length that a page can show."""

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from ludic.sql.query import ask
from ludic.store import Root
from ludic.store.files import Folder

_MOST_CHARACTERS = 4_000
"""Characters of each text that are shown, half of them from each end."""
_MOST_MESSAGES = 40
# `in (select unnest(...))` would be a join, for which DuckDB reads the messages of all rows.
_MESSAGES = """
select rollout_id, messages
from {table}
where list_contains($versions::bigint[], version) and list_contains($ids::varchar[], rollout_id)
"""

Message = Mapping[str, Any]


def read_conversations(
    con: duckdb.DuckDBPyConnection, root: Root, folder: Folder, versions: Mapping[str, int]
) -> dict[str, list[Message]]:
    """Return the messages of rollouts by rollout_id. versions: version of each rollout, which spares other files."""
    if not versions:
        return {}
    params = {"ids": list(versions), "versions": sorted(set(versions.values()))}
    rows = ask(con, root, _MESSAGES.format(table=folder), params)
    return {row["rollout_id"]: _shown(row["messages"] or []) for row in rows}


def split_answer(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the messages before the first answer, and the others."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _shown(messages: Sequence[Message]) -> list[Message]:
    half = _MOST_MESSAGES // 2
    shown = [_short(message) for message in messages]
    if len(shown) <= _MOST_MESSAGES:
        return shown
    left_out = f"{len(shown) - 2 * half:,} messages left out; `ludic show` prints them"
    return [*shown[:half], {"role": "", "name": None, "content": left_out, "calls": []}, *shown[-half:]]


def _short(message: Message) -> Message:
    calls = [
        {"name": call["name"], "arguments": shorten(call["arguments"]), "result": shorten(call["result"])}
        | {"error": call["error"]}
        for call in message["tool_calls"] or []
    ]
    return {"role": message["role"], "name": message["name"], "content": shorten(message["content"]), "calls": calls}


def shorten(text: str | None) -> str:
    """Replace the middle of a long text by the number of characters that are left out."""
    text = text or ""
    half = _MOST_CHARACTERS // 2
    if len(text) <= 2 * half:
        return text
    left_out = f"… {len(text) - 2 * half:,} characters left out; `ludic show ID --full` prints them …"
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"
