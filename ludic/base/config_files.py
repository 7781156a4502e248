"""Read files of settings in TOML, or in JSON by their suffix.

A file is UTF-8, whatever the locale; a byte-order mark, which editors on Windows write, is ignored. Raises ConfigError,
which names the file.
"""

import json
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError

MAX_BYTES = 10_000_000
"""Maximum bytes of a file; a larger one holds no settings, and parsing it would take long."""


def read_config(path: Path, known: Collection[str] | None = None) -> dict[str, Any]:
    """Return the settings of a TOML or a JSON file by name. Raises ConfigError; FileNotFoundError if there is none.

    known: names that the file may hold, one of which errors show; None: any.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes, wanted a TOML or JSON file of settings")
    return parse_config(data, str(path), known)


def parse_config(data: bytes, name: str, known: Collection[str] | None = None) -> dict[str, Any]:
    """Return the settings in a file's content. name: of the file, for errors; the suffix .json means JSON.

    known: as in `read_config`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "another encoding"
        raise ConfigError(
            f"{name}: byte {error.start} is {data[error.start]:#04x}, which is not UTF-8; the file is in {encoding}: "
            "save it as UTF-8"
        ) from error
    try:
        values = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}{_other_format(Path(name), text, known) or f': {error}'}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: wanted a JSON object of settings")
    return values


_YAML_LINE = re.compile(r"(?P<name>[\w.\"'-]+):(?:[ \t]+(?P<value>[^#\n]*\S))?[ \t]*(?:#.*)?")


def _other_format(path: Path, text: str, known: Collection[str] | None) -> str:
    """Describe an unreadable text that is YAML or JSON; "" if it is neither."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---"))]
    if lines and lines[0].lstrip().startswith("{") and path.suffix != ".json":
        return " is JSON, and its name does not end with .json; rename it, or write TOML"
    found = [match for line in lines if (match := _YAML_LINE.fullmatch(line.strip()))]
    if not found or (path.suffix not in (".yaml", ".yml") and not _YAML_LINE.fullmatch(lines[0])):
        return ""
    # The first line with a known name and a plain value shows the change; a deeper one loses the tables around it.
    plain = [(each["name"].strip("\"'"), each["value"]) for each in found if each["value"]]
    name, value = next((each for each in plain if known is None or each[0] in known), ("learning_rate", "1e-6"))
    return f" is YAML, wanted TOML; write `{name}: {value}` as `{name} = {value}`, and all settings at the top"
