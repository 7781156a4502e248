"""Mappings from a peer's field names to ludic's: one TOML file for each format.

Reads ludic/interop/formats/NAME.toml or a user's own file; writes nothing. Raises ConfigError, which names the file
and the entry. docs/exchange.md explains each entry.
"""

import difflib
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, get_args

from ludic.errors import ConfigError
from ludic.paths import local_path

Container = Literal["jsonl", "parquet"]
Layout = Literal["rollouts", "episodes"]

FIELDS = (
    "prompt",
    "completion",
    "messages",
    "prompt_tokens",
    "response_tokens",
    "response_logprobs",
    "action_mask",
    "token_rewards",
    "group",
    "env_name",
    "env_example_id",
    "purpose",
    "agent_id",
    "policy_version",
    "policy_version_last",
    "model",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "episode_reward",
    "reward_components",
    "finish_reason",
    "truncation_reason",
    "error",
    "metadata",
)
"""Fields that a mapping may fill: columns of the rollouts table, and four fields that columns are made from: prompt
(text, or messages), completion (text), messages (the whole conversation), and group (a key shared by its rollouts)."""

ANY_NUMBER = "*"
"""Value of reward_components in a mapping that means every number of the record that the mapping does not name."""

_ENTRIES = ("container", "layout", "path", "json", "ignore", "fields", "reward_weights", "defaults")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatMapping:
    """Mapping that tells how to read one peer's files."""

    name: str
    sha256: str
    """Digest of the mapping file: an import with another mapping is another import."""
    container: Container
    layout: Layout
    """rollouts: a record is a rollout. episodes: a record is an episode of verifiers, with its message graph."""
    path: re.Pattern[str] | None
    """Pattern searched in a file's path; its named groups become fields of each record that lacks them."""
    json: frozenset[str]
    """Fields whose text is parsed as JSON."""
    ignore: frozenset[str]
    """Redundant fields, which are not kept and not reported."""
    fields: Mapping[str, tuple[str, ...]]
    """Names in a record for each of FIELDS and of the run's own columns x_*; the first that is present is used. A dot
    separates the names of nested objects."""
    reward_weights: Mapping[str, float]
    """Weights of reward_components in the reward of a record without episode_reward; if empty, each weight is 1."""
    defaults: Mapping[str, Any]
    """Values of FIELDS for records that lack them."""

    @property
    def known(self) -> frozenset[str]:
        """Top-level names of a record that the mapping uses or ignores."""
        places = [place for places in self.fields.values() for place in places]
        return frozenset(place.partition(".")[0] for place in places) | frozenset(places) | self.ignore


def format_names() -> list[str]:
    """Return the names of the formats that come with ludic."""
    files = resources.files("ludic.interop").joinpath("formats").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_format(name_or_path: str) -> FormatMapping:
    """Load the mapping of a format that comes with ludic, by name, or of a user's .toml file."""
    if name_or_path.endswith(".toml"):
        try:
            path = local_path(name_or_path, "--from")
            return _parse(path.stem, name_or_path, path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{name_or_path}: {error.strerror or error}") from error
    names = format_names()
    if name_or_path not in names:
        close = difflib.get_close_matches(name_or_path, names) or names
        raise ConfigError(
            f"there is no format {name_or_path!r}; did you mean {' or '.join(close)}? "
            "A mapping of your own must end in .toml"
        )
    data = resources.files("ludic.interop").joinpath("formats", f"{name_or_path}.toml").read_bytes()
    return _parse(name_or_path, f"ludic/interop/formats/{name_or_path}.toml", data)


def _parse(name: str, source: str, data: bytes) -> FormatMapping:
    try:
        spec = tomllib.loads(data.decode())
        _check_names(source, "entry", spec, _ENTRIES)
        mapping = FormatMapping(
            name=name,
            sha256=hashlib.sha256(data).hexdigest(),
            container=_one_of(source, "container", spec.get("container"), get_args(Container)),
            layout=_one_of(source, "layout", spec.get("layout", "rollouts"), get_args(Layout)),
            path=re.compile(spec["path"]) if "path" in spec else None,
            json=frozenset(spec.get("json", ())),
            ignore=frozenset(spec.get("ignore", ())),
            fields={field: _places(places) for field, places in spec.get("fields", {}).items()},
            reward_weights={part: float(weight) for part, weight in spec.get("reward_weights", {}).items()},
            defaults=spec.get("defaults", {}),
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, re.error, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source}: {error}") from error
    for field in (*mapping.fields, *mapping.defaults):
        if not field.startswith("x_"):
            _check_names(source, "field", [field], FIELDS)
    return mapping


def _places(places: str | list[str]) -> tuple[str, ...]:
    return (places,) if isinstance(places, str) else tuple(places)


def _one_of(source: str, entry: str, found: Any, wanted: tuple[str, ...]) -> Any:
    if found not in wanted:
        raise ConfigError(f"{source}: {entry} is {found!r}, wanted {' or '.join(wanted)}")
    return found


def _check_names(source: str, what: str, names: Any, known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"{source}: no {what} is called {name!r}; {hint}")
