"""Store a step's text as the index of the message with the same content, so that it is stored once.

Each text field of REFERENCES has a field FIELD_message, an index into the row's messages; if it is set, FIELD is null.
So an answer of 4 kB takes 4 kB instead of three times that. Records hold the texts, never the indexes. Raises
SchemaError if an index is beyond the messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ludic.errors import SchemaError
from ludic.records import Rollout

REFERENCES: dict[str, tuple[str, ...]] = {
    "agent_steps": ("action",),
    "environment_steps": ("observation", "action", "next_observation"),
}
"""Text fields of steps that may be stored as references, by column."""


def index_field(name: str) -> str:
    """Return the name of the field with the message index of a text field."""
    return f"{name}_message"


INDEX_FIELDS = frozenset(index_field(name) for names in REFERENCES.values() for name in names)
"""Fields that rows have and records do not."""


def message_indexes(rollouts: Iterable[Rollout]) -> list[dict[str, int]]:
    """Return, for each rollout, the index of the first message with each content."""
    indexes = []
    for rollout in rollouts:
        contents = [message.content for message in reversed(rollout.messages)]
        indexes.append(dict(zip(contents, range(len(contents) - 1, -1, -1), strict=True)))
    return indexes


def refer(rows: Iterable[Sequence[dict[str, Any]]], column: str, indexes: Iterable[Mapping[str, int]]) -> None:
    """Replace texts by references, where a message fits. rows: the steps of each rollout, as dictionaries.

    indexes: result of `message_indexes`, the same for both columns of steps.
    """
    for steps, index_of in zip(rows, indexes, strict=True):
        for step in steps:
            for name in REFERENCES[column]:
                index = index_of.get(step[name])
                if index is not None:
                    step[name], step[index_field(name)] = None, index


def resolve_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row from SQL or to_pylist with texts in its steps in place of references."""
    return {**row, **{column: resolve(row[column], column, row["messages"]) for column in REFERENCES}}


def resolve(
    steps: Iterable[Mapping[str, Any]], column: str, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the steps of a row, as dictionaries, with texts in place of references."""
    found = []
    for step in steps:
        values = {name: value for name, value in step.items() if name not in INDEX_FIELDS}
        for name in REFERENCES[column]:
            index = step.get(index_field(name))
            if index is not None:
                values[name] = _content(messages, index, f"{column}[].{name}")
        found.append(values)
    return found


def _content(messages: Sequence[Mapping[str, Any]], index: int, path: str) -> str:
    if not 0 <= index < len(messages):
        raise SchemaError(f"table: {index_field(path)} is {index}, its row has {len(messages)} messages")
    return messages[index]["content"]
