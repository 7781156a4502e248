"""Read and write the settings of a run in its root (run.json as a RunConfig), and start a run."""

from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import lru_cache

import fsspec

from ludic.base import EXAMPLE_IDS, RECORDED_ENV, ExampleIds
from ludic.errors import ConfigError, SchemaError
from ludic.records import SCHEMA_VERSION, new_id
from ludic.root import (
    RUN,
    Root,
    RunRecord,
    check_scheme,
    content_of,
    convert,
    copy_code,
    copy_data,
    decode_json,
    keep_files,
    located_options,
    other_trainer_of,
    parse_version,
    reading,
)
from ludic.root.storage import Storage
from ludic.run.code_snapshots import consented_files
from ludic.run.code_uses import sampling_uses
from ludic.run.config import RunConfig
from ludic.settings import NO_FILES, check_urls, settings_of

_FIRST_WITH_STEPS = 2
"""Minor version of the schema from which on episodes may have several steps; those of earlier runs have one."""


def run_of(root: Root) -> RunConfig:
    """Return the settings of a run. Cheap to call again: they are read once.

    Settings that a newer minor version added are left out. Raises ConfigError, naming the file, for a setting that is
    out of range, has another type, or is unknown.
    """
    return from_json(root.run_json, f"{root.url}/{RUN.template}")


def is_recorded_run(root: Root) -> bool:
    """Return whether another program's run is recorded here; its unknown settings have the defaults of RunConfig."""
    if RECORDED_ENV in run_of(root).env:
        return True
    with suppress(SchemaError):  # a run with a broken attempt can still be shown
        return other_trainer_of(root) is not None
    return False


@lru_cache(maxsize=64)
def from_json(data: bytes, where: str) -> RunConfig:
    """Return the settings in run.json, which Root.open has read; as `run_of`."""
    with reading(where):
        values = decode_json(data)
        minor, own_minor = (parse_version(text)[1] for text in (values["schema_version"], SCHEMA_VERSION))
        if minor < _FIRST_WITH_STEPS:
            values.setdefault("max_steps", 1)
        known, of_root = ({field.name for field in fields(each)} for each in (RunConfig, RunRecord))
        unknown = sorted(values.keys() - known - of_root)
        if unknown and minor <= own_minor:
            raise ValueError(f"{unknown[0]!r} is not a setting of a run")
        return convert({name: value for name, value in values.items() if name in known}, RunConfig)


def to_json(run: RunConfig, run_id: str, example_ids: ExampleIds = EXAMPLE_IDS[0]) -> bytes:
    """Return the content of run.json. Raises ConfigError if an option does not fit JSON."""
    values = asdict(run)
    for each in settings_of(RunConfig):
        if each.role.stored_if_set and values[each.name] == each.default:
            del values[each.name]
    return content_of(values, run_id, example_ids)


def located(run: RunConfig, root: Storage) -> RunConfig:
    """Return settings whose environments find data of the root on this machine; as `located_options`."""
    return replace(run, env_options=located_options(run.env, run.env_options, root))


def put_run(
    url: str,
    run: RunConfig,
    *,
    run_id: str | None = None,
    is_copy: bool = False,
    example_ids: ExampleIds = EXAMPLE_IDS[0],
    fs: fsspec.AbstractFileSystem | None = None,
) -> Root:
    """Put run.json, or open an existing run that has the same settings.

    `create_root` stores users' files as well. run_id: of the run if it is new; None draws one. is_copy: the settings
    come from another root. example_ids: of a new run. Raises ConfigError that names each setting that differs from the
    existing run, or, of a new one, for a URL with a secret or an option that does not fit JSON; and as `check_scheme`.
    """
    if fs is None:
        check_scheme(url)
    data = to_json(run, run_id or new_id(), example_ids)
    if not is_copy and not Storage.connect(url, fs).exists(RUN.template):
        check_urls(run)
    root = Root.create(url, data, fs=fs)
    differing = run.differences(run_of(root))
    if differing:
        raise ConfigError(f"{root.url} was started with other settings ({differing}); keep them or choose another root")
    return root


def create_root(
    url: str, run: RunConfig, *, like: Root | None = None, fs: fsspec.AbstractFileSystem | None = None
) -> Root:
    """Start a run, or open an existing run that has the same settings.

    A new root gets copies of the users' files that `run` names; creating it is consent to run them.
    like: the run that the settings come from. The files are copied from it, and consent is still needed.
    Raises ConfigError for a missing file or a URL with a secret, and as `put_run` does.
    """
    run_id = new_id()
    storage = Storage.connect(url, fs)
    # Consent is stored before run.json: if the process is killed in between, the same command can resume.
    is_there = storage.exists(RUN.template)
    is_new = like is None and not is_there
    if is_new:
        check_urls(run)
        to_json(run, run_id)  # refuses options that do not fit JSON
    files = consented_files(sampling_uses(run), storage.url, run_id) if is_new else NO_FILES
    example_ids = EXAMPLE_IDS[0] if like is None else like.example_ids
    if like is not None and not is_there:
        if fs is None:
            check_scheme(url)
        # Before run.json: if the process is killed in between, the same command can resume.
        copy_data(like, storage)
    root = put_run(url, run, run_id=run_id, is_copy=like is not None, example_ids=example_ids, fs=fs)
    if root.run_id != run_id:  # another process has started it
        return root
    if like is None:
        keep_files(root, files)
    else:
        copy_code(like, root)
    return root
