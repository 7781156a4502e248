"""Compute advantages from formats that store whole rows, JSON lines and MessagePack, in Python.

Each reader decodes as little as its library can: `json`, `orjson` and `msgpack` always decode token lists, msgspec
skips all fields but those of `Row`.
"""

import importlib
import importlib.util
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pyarrow.parquet as pq

from ludic.root import Root
from ludic.root.rows import list_files

Advantages = dict[str, float]
"""Advantage by rollout_id."""


class Row(msgspec.Struct, gc=False):
    """Fields that advantages and filters need."""

    rollout_id: str
    group_id: str
    episode_id: str
    agent_id: str
    episode_reward: float | None
    policy_version: int
    truncated: bool
    incomplete_completion: bool
    parse_error: bool
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFiles:
    """The same rows in each format."""

    lines: Path
    """File of JSON lines."""
    messages: list[bytes]
    """MessagePack of each row, in memory."""


def write_rows(root: Root, lines: Path) -> RowFiles:
    """Convert all rows of a run."""
    messages = []
    with lines.open("w") as file:
        for name in (stored.name for stored in list_files(root)):
            for row in pq.ParquetFile(root.at(name)).read().to_pylist(maps_as_pydicts="lossy"):
                file.write(json.dumps(row, default=str) + "\n")
                messages.append(msgpack.packb(row, default=str))
    return RowFiles(lines=lines, messages=messages)


def readers(files: RowFiles, oldest_version: int) -> dict[str, Callable[[], Advantages]]:
    """Return contestants by name; orjson only if it is installed."""
    of_line, of_message = msgspec.json.Decoder(Row).decode, msgspec.msgpack.Decoder(Row).decode
    lines: dict[str, Callable[[bytes], Row]] = {
        "msgspec, needed fields": of_line,
        "json": lambda line: needed(json.loads(line)),
    }
    if importlib.util.find_spec("orjson"):
        loads = importlib.import_module("orjson").loads
        lines["orjson"] = lambda line: needed(loads(line))
    messages: dict[str, Callable[[bytes], Row]] = {
        "msgspec, needed fields": of_message,
        "msgpack": lambda message: needed(msgpack.unpackb(message)),
    }
    calls: dict[str, Callable[[], Advantages]] = {}
    for name, decode in lines.items():
        calls[f"JSON lines, {name}"] = partial(_from_file, files.lines, decode, oldest_version)
    for name, decode in messages.items():
        calls[f"MessagePack, {name}"] = partial(_from_memory, files.messages, decode, oldest_version)
    return calls


def needed(row: Mapping[str, Any]) -> Row:
    return Row(**{name: row[name] for name in Row.__struct_fields__})


def by_python(rows: Iterable[Row], oldest_version: int) -> Advantages:
    """Compute RLOO; applies the filters that can drop rows of these data."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group_id].append(row)
    return dict(pair for group in groups.values() for pair in _rloo(group, oldest_version))


def _from_file(lines: Path, decode: Callable[[bytes], Row], oldest_version: int) -> Advantages:
    with lines.open("rb") as file:
        return by_python(map(decode, file), oldest_version)


def _from_memory(messages: list[bytes], decode: Callable[[bytes], Row], oldest_version: int) -> Advantages:
    return by_python(map(decode, messages), oldest_version)


def _rloo(group: list[Row], oldest_version: int) -> Iterator[tuple[str, float]]:
    rewards = {(row.episode_id, row.agent_id): row.episode_reward for row in group if row.episode_reward is not None}
    if len(set(rewards.values())) < 2:
        return
    total = sum(rewards.values())
    for row in group:
        dropped = row.truncated or row.incomplete_completion or row.parse_error or row.error is not None
        if not dropped and row.policy_version >= oldest_version and row.episode_reward is not None:
            yield row.rollout_id, row.episode_reward - (total - row.episode_reward) / (len(rewards) - 1)
