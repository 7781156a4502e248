"""Read a run that W&B has recorded offline: its .wandb file, by W&B's own description of a record.

The file is a log of LevelDB (github.com/google/leveldb, doc/log_format.md) behind W&B's header of 7 bytes: blocks of
32 KiB, in which a record is one fragment (type 1), or a first, middle and last one (2, 3, 4), each behind a header of
CRC (4 bytes), length (2) and type (1).
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK, _HEADER, _START = 32768, 7, b":W&B"


@dataclass
class Recorded:
    """What W&B would upload."""

    facts: dict[str, Any] = field(default_factory=dict)
    """project, entity, id, name and tags."""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Each call of log, without W&B's own keys; keys of a dict are joined by slashes."""
    axes: dict[str, str] = field(default_factory=dict)
    """The x-axis of metrics, by glob."""
    exit_code: int | None = None

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Step and value of a metric, in the order in which they were logged."""
        return [(row["step"], row[name]) for row in self.rows if name in row]


def read_offline_run(folder: Path) -> Recorded:
    """Read the one .wandb file of a run's folder."""
    (file,) = folder.glob("*.wandb")
    found = Recorded()
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                found.facts = {name: getattr(run, name) for name in ("project", "entity", "run_id", "display_name")}
                found.facts["tags"] = list(run.tags)
                found.config |= {item.key: json.loads(item.value_json) for item in run.config.update}
            case "history":
                items = [(item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item]
                found.rows.append({key: json.loads(value) for key, value in items if not key.startswith("_")})
            case "metric":
                metric = record.metric
                found.axes[metric.glob_name or metric.name] = metric.step_metric
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def read_table(folder: Path, row: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the rows of a table that a call of log had."""
    table = json.loads((folder / "files" / row[f"{name}/path"]).read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def _records(data: bytes) -> Iterator[bytes]:
    assert data.startswith(_START)
    at, parts = len(_START) + 3, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block is zeros
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):
            yield parts
            parts = b""
