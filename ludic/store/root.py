"""The root of a run: a folder on any fsspec filesystem whose run.json holds the run's settings."""

import inspect
import re
import runpy
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import cast

import fsspec
from fsspec.registry import known_implementations, register_implementation

from ludic.defaults import EXAMPLE_IDS, ExampleIds
from ludic.errors import ConfigError, MissingRootError, ReplacedRootError
from ludic.masking import public_url
from ludic.paths import is_url
from ludic.records import new_id
from ludic.run_config import RunConfig
from ludic.schema import SCHEMA_VERSION
from ludic.settings import check_urls
from ludic.store import local
from ludic.store.catalogue import ROWS, RUN
from ludic.store.filesystem import Storage
from ludic.store.records import convert, decode_json, encode_json


@dataclass(frozen=True, slots=True)
class Root(Storage):
    """An opened root. Cheap to pass around; holds no open files."""

    run_id: str = field(kw_only=True)
    """A uuid7, drawn when the run was started."""
    run: RunConfig = field(kw_only=True)
    example_ids: ExampleIds = field(default=EXAMPLE_IDS[0], kw_only=True)
    """What identifies an example of questions; a root keeps what it began with."""

    @classmethod
    def open(cls, url: str, *, writable: bool = False, fs: fsspec.AbstractFileSystem | None = None) -> "Root":
        """Open an existing run.

        writable: also check that the filesystem refuses to overwrite, by creating run.json a second time.
        fs: filesystem to use instead of the URL's own.
        Raises MissingRootError if there is no run.json, StoreError if the filesystem fails, and for a writable root
        SchemaError if a folder is a link that leads out of it, or no folder, and ConfigError as `check_scheme`.
        """
        if writable and fs is None:
            check_scheme(url)
        storage = Storage.connect(url, fs)
        try:
            data = storage.read(RUN.template)
        except FileNotFoundError:
            raise MissingRootError(
                f"{storage.url} holds no run: {RUN.template} is missing; `ludic run` starts one"
            ) from None
        run, run_id = from_json(data, f"{storage.url}/{RUN.template}")
        example_ids = example_ids_of(data, f"{storage.url}/{RUN.template}")
        if writable:
            # A listing passes over them: a trainer would miss its checkpoints, and begin with the first weights.
            storage.refuse_lost_folders({row.folder for row in ROWS if row.folder})
            storage.prove_put_if_absent(RUN.template, data)
        return cls(storage.url, storage.fs, storage.path, run_id=run_id, run=run, example_ids=example_ids)

    def writable(self) -> "Root":
        """Open the run again to write to it; checks as `open` does."""
        return Root.open(self.url, writable=True)

    @classmethod
    def create(
        cls,
        url: str,
        run: RunConfig,
        *,
        run_id: str | None = None,
        is_copy: bool = False,
        example_ids: ExampleIds = EXAMPLE_IDS[0],
        fs: fsspec.AbstractFileSystem | None = None,
    ) -> "Root":
        """Put run.json, or open an existing run that has the same settings.

        ludic.code.kept.create_root stores users' files as well. run_id: of the run if it is new; None draws one.
        is_copy: the settings come from another root. example_ids: of a new run. Raises ConfigError that names each
        setting that differs from the existing run, or, of a new one, for a URL with a secret or an option that JSON
        can't hold; and as `check_scheme`.
        """
        if fs is None:
            check_scheme(url)
        storage = Storage.connect(url, fs)
        run_id = run_id or new_id()
        data = to_json(run, run_id, example_ids)
        if not is_copy and not storage.exists(RUN.template):
            check_urls(run)
        if storage.put_if_absent(RUN.template, data):
            storage.prove_put_if_absent(RUN.template, data)
            return cls(storage.url, storage.fs, storage.path, run_id=run_id, run=run, example_ids=example_ids)
        root = cls.open(url, writable=True, fs=fs)
        differing = run.differences(root.run)
        if differing:
            raise ConfigError(
                f"{root.url} was started with other settings ({differing}); keep them or choose another root"
            )
        return root

    def check_same_run(self) -> None:
        """Check, by one read of run.json, that the root is the run that this process opened; call it before a write.

        Nothing can make a write depend on the answer, so a root that is replaced between the two gets that write.
        Raises ReplacedRootError if the root was deleted, or made again. A damaged run.json says neither.
        """
        try:
            found = run_id_of(self.read(RUN.template))
        except FileNotFoundError:
            raise ReplacedRootError(
                f"{self.url}: run {self.run_id} was deleted while this process worked on it; it stops"
            ) from None
        if found is not None and found != self.run_id:
            raise ReplacedRootError(
                f"{self.url} was deleted and made again: it holds run {found} now, and this process works on run "
                f"{self.run_id}; it stops, and leaves the new run as it is"
            )

    def upload(self, folder: str | Path, name: str, *, last: str | None = None) -> None:
        """Move all files of a local folder, subfolders included, below `name`; each appears whole, one after the other.

        last: the file that is moved last and tells readers that all files are there; if None, a marker must follow.
        Raises SchemaError, before anything is moved, if the folder holds a link or what else is no file.
        """
        with local.opened(folder) as opened:
            for file in sorted(opened.files(), key=lambda file: (file == last, file)):
                self._move_in(opened, file, f"{name}/{file}")

    def download(self, name: str, folder: str | Path, *, leave_out: Collection[str] = ()) -> None:
        """Copy the files below `name`, subfolders included, into a local folder. leave_out: file names to skip.

        Raises StoreError for a name, SchemaError for a symbolic link, that leads out, before anything is copied.
        """
        if self.is_local:
            self.folder_for_others(name)
        names = {file: PurePosixPath(file).relative_to(name) for file in self.list(name)}
        self.copy_all({file: path for file, path in names.items() if path.name not in leave_out}, Path(folder))


SCHEMES = ("file", "local", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Beginnings of URLs at which a run can be; docs/storage.md says what each guarantees."""


_OF_FSSPEC = frozenset(runpy.run_path(inspect.getfile(register_implementation))["known_implementations"])
"""Schemes of fsspec's own table; the one in memory also has those that programs have registered."""


def check_scheme(url: str) -> None:
    """Raise ConfigError for a URL at which no run can be, before anything is connected.

    A filesystem that the user's program has registered with fsspec is tried.
    """
    scheme = url.partition("://")[0]
    is_users = scheme not in _OF_FSSPEC and (scheme in fsspec.registry or scheme in known_implementations)
    if not is_url(url) or scheme in SCHEMES or is_users:
        return
    raise ConfigError(
        f"{public_url(url)}: no run can be at {scheme}://, where files can't be created only if absent; wanted a "
        "folder, s3://, gs:// or az:// (docs/storage.md)"
    )


# --- run.json -------------------------------------------------------------------------------------------------
# run.json: the settings of a run (ludic.run_config), as JSON. Written once, never changed.


# The run_id becomes part of paths on this machine: the cache of scalars, logs, TensorBoard's folder.
_RUN_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


_FIRST_WITH_STEPS = 2
"""Minor version of the schema from which on episodes may have several steps; those of earlier runs have one."""


_OLD_EXAMPLE_IDS: ExampleIds = "question"
"""What identifies an example in roots whose run.json does not say."""


def to_json(config: RunConfig, run_id: str, example_ids: ExampleIds = EXAMPLE_IDS[0]) -> bytes:
    """Return the content of run.json. Raises ConfigError if JSON can't hold an option."""
    values = {"run_id": run_id, "schema_version": SCHEMA_VERSION, "example_ids": example_ids, **asdict(config)}
    for name in ("extra_columns", "float32_head", "keep_sampling_mask", "keep_experts", "longrope"):
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


def example_ids_of(data: bytes, where: str) -> ExampleIds:
    """Return what identifies an example in the root of this run.json, which from_json has read.

    Raises ConfigError, naming `where`, for a way that this ludic does not know.
    """
    found = decode_json(data).get("example_ids", _OLD_EXAMPLE_IDS)
    if found not in EXAMPLE_IDS:
        raise ConfigError(f"{where}: example_ids is {found!r}, wanted {' or '.join(EXAMPLE_IDS)}; upgrade ludic")
    return cast(ExampleIds, found)


def from_json(data: bytes, where: str) -> tuple[RunConfig, str]:
    """Return settings and run_id; settings that a newer minor version added are left out.

    Raises ConfigError, naming `where`, if the data is not a run.json of this major version.
    """
    try:
        values = decode_json(data)
        run_id, version = values.pop("run_id"), values.pop("schema_version")
        values.pop("example_ids", None)  # example_ids_of reads it
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
