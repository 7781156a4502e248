"""Texts of steps that are a message's content are stored once: as the message's index, in place of the text.

FIELD_message, an index into the row's messages, belongs to each text field of REFERENCES; where it is set,
FIELD is null. So an answer of 4 kB costs 4 kB and not three times that. Records hold the texts, never the
indexes. Raises SchemaError for an index beyond the messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ludic.errors import SchemaError
from ludic.records import Rollout

REFERENCES: dict[str, tuple[str, ...]] = {
    "agent_steps": ("action",),
    "environment_steps": ("observation", "action", "next_observation"),
}
"""The text fields of steps that may be stored as references, by column."""


def index_field(name: str) -> str:
    """The field that holds the index of a text field."""
    return f"{name}_message"


INDEX_FIELDS = frozenset(index_field(name) for names in REFERENCES.values() for name in names)
"""What rows have and records have not."""


def refer(rollouts: Iterable[Rollout], column: str) -> dict[str, list[str | None] | list[int | None]]:
    """What is stored in a column's text and index fields, for the steps of all rollouts end to end."""
    texts: dict[str, list[str | None]] = {name: [] for name in REFERENCES[column]}
    indexes: dict[str, list[int | None]] = {name: [] for name in REFERENCES[column]}
    for rollout in rollouts:
        steps = getattr(rollout, column)
        contents = [message.content for message in rollout.messages]
        first_with = dict(zip(reversed(contents), reversed(range(len(contents))), strict=True))
        for name in REFERENCES[column]:
            for text in map(attrgetter(name), steps):
                index = first_with.get(text)
                texts[name].append(text if index is None else None)
                indexes[name].append(index)
    return {**texts, **{index_field(name): values for name, values in indexes.items()}}


def resolve(
    texts: Sequence[str | None], indexes: Sequence[int | None], contents: Iterable[Sequence[str]], path: str
) -> list[str | None]:
    """The texts of a field of steps end to end; the inverse of `refer`.

    contents: of the messages in each step's row. path: the field, for the message.
    """
    rows = zip(texts, indexes, contents, strict=True)
    return [text if index is None else _content(row, index, path) for text, index, row in rows]


def resolve_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as SQL or to_pylist gives it, its steps with their texts and without references."""
    contents = [message["content"] for message in row["messages"]]
    steps = {column: [_resolve_step(step, column, contents) for step in row[column]] for column in REFERENCES}
    return {**row, **steps}


def _resolve_step(step: Mapping[str, Any], column: str, contents: Sequence[str]) -> dict[str, Any]:
    fields = {name: value for name, value in step.items() if name not in INDEX_FIELDS}
    for name in REFERENCES[column]:
        indexes = [step.get(index_field(name))]
        (fields[name],) = resolve([step[name]], indexes, [contents], f"{column}[].{name}")
    return fields


def _content(contents: Sequence[str], index: int, path: str) -> str:
    if not 0 <= index < len(contents):
        raise SchemaError(f"table: {index_field(path)} is {index}, its row has {len(contents)} messages")
    return contents[index]
