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


def message_places(rollouts: Iterable[Rollout]) -> list[dict[str, int]]:
    """For each rollout, the index of the first message with a content."""
    places = []
    for rollout in rollouts:
        contents = [message.content for message in reversed(rollout.messages)]
        places.append(dict(zip(contents, range(len(contents) - 1, -1, -1), strict=True)))
    return places


def refer(
    rollouts: Iterable[Rollout], column: str, places: Iterable[Mapping[str, int]]
) -> dict[str, list[str | None] | list[int | None]]:
    """What is stored in a column's text and index fields, for the steps of all rollouts end to end.

    places: as from `message_places`, which are the same for both columns of steps.
    """
    lookups = [
        (place.get, step) for rollout, place in zip(rollouts, places, strict=True) for step in getattr(rollout, column)
    ]
    stored: dict[str, list[str | None] | list[int | None]] = {}
    for name in REFERENCES[column]:
        texts = list(map(attrgetter(name), (step for _, step in lookups)))
        indexes = [find(text) for (find, _), text in zip(lookups, texts, strict=True)]
        stored[name] = [text if index is None else None for text, index in zip(texts, indexes, strict=True)]
        stored[index_field(name)] = indexes
    return stored


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
