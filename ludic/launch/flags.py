"""Convert settings to command-line flags for child processes."""

import json
from collections.abc import Mapping
from typing import Any


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return the flags that set these fields: ["--learning-rate", "0.003", "--no-resume", ...]."""
    return [part for name, value in values.items() for part in _to_flag(name.replace("_", "-"), value)]


def _to_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
