"""run.json: the settings of a run (ludic.run_config), as JSON. Written once, never changed."""

import re
from dataclasses import asdict, fields

from ludic.errors import ConfigError
from ludic.run_config import RunConfig
from ludic.schema import SCHEMA_VERSION
from ludic.store.json_files import convert, decode_json, encode_json

# The run_id becomes part of paths on this machine: the cache of scalars, logs, TensorBoard's folder.
_RUN_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


_FIRST_WITH_STEPS = 2
"""Minor version of the schema from which on episodes may have several steps; those of earlier runs have one."""


def to_json(config: RunConfig, run_id: str) -> bytes:
    """Return the content of run.json. Raises ConfigError if JSON can't hold an option."""
    values = {"run_id": run_id, "schema_version": SCHEMA_VERSION, **asdict(config)}
    for name in ("extra_columns", "float32_head", "keep_sampling_mask"):
        if values[name] is None or (name != "keep_sampling_mask" and not values[name]):
            del values[name]  # so that a ludic that does not know the setting can open the run
    try:
        return encode_json(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_options can't be written to run.json: {error}; wanted what JSON can hold") from error


def run_id_of(data: bytes) -> str | None:
    """Return the run_id, of a run.json of any version; None if the file is damaged."""
    try:
        run_id = decode_json(data).get("run_id")
    except ValueError:
        return None
    return run_id if isinstance(run_id, str) else None


def from_json(data: bytes, where: str) -> tuple[RunConfig, str]:
    """Return settings and run_id; settings that a newer minor version added are left out.

    Raises ConfigError, naming `where`, if the data is not a run.json of this major version.
    """
    try:
        values = decode_json(data)
        run_id, version = values.pop("run_id"), values.pop("schema_version")
        if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
            raise ConfigError(f"{where}: run_id is {run_id!r}, wanted at most 64 letters, digits and hyphens")
        (major, minor), (own_major, own_minor) = (map(int, text.split(".")) for text in (version, SCHEMA_VERSION))
        if major != own_major:
            raise ConfigError(f"{where} has schema {version}, this ludic reads {SCHEMA_VERSION}; upgrade ludic")
        if minor < _FIRST_WITH_STEPS:
            values.setdefault("max_steps", 1)
        if minor > own_minor:
            values = {field.name: values[field.name] for field in fields(RunConfig) if field.name in values}
        unknown = sorted(values.keys() - {field.name for field in fields(RunConfig)})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no setting of a run")
        return convert(values, RunConfig), run_id
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{where} is not a run.json that ludic can read: {error}; put a sound copy of the file in its place"
        ) from error
