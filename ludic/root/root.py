"""Open or create the root of a run: a folder on any fsspec filesystem whose run.json holds the run's settings.

This module reads only the settings in ludic.root.json_records.RunRecord and keeps the rest unchanged, so a root with
settings that this ludic does not know still opens. ludic.run.run_json reads all settings and starts runs. Raises
MissingRootError if there is no run, ConfigError for a run.json or URL that ludic can't use, ReplacedRootError if the
root was deleted or created again.
"""

import inspect
import runpy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from threading import Event
from typing import Any
from uuid import UUID

import fsspec
from fsspec.registry import known_implementations, register_implementation

from ludic.base import EXAMPLE_IDS, ExampleIds, is_url, public_url
from ludic.errors import ConfigError, MissingRootError, ReplacedRootError, StoreError, similar_names
from ludic.records import SCHEMA_VERSION
from ludic.root.catalogue import FILE_KINDS, RUN
from ludic.root.json_records import RunRecord, convert, decode_json, encode_json
from ludic.root.storage import local
from ludic.root.storage.filesystem import Storage

_MOST_RUNS_BELOW = 10


def _where_runs_are(storage: Storage) -> str:
    """Describe the runs directly below a folder that is none itself; without any, the commands that start one."""
    runs: list[str] = []
    with suppress(StoreError, OSError):  # only a hint; the folder may be a file, or not readable
        if not storage.is_local or Path(storage.path).is_dir():
            below = storage.folders("")[:_MOST_RUNS_BELOW]
            runs = [f"{storage.url}/{name}" for name in below if storage.exists(f"{name}/{RUN.template}")]
        elif alike := similar_names(Path(storage.path).name, _runs_beside(Path(storage.path))):
            return f"did you mean {' or '.join(str(PurePath(storage.url).with_name(name)) for name in alike)}?"
    if runs:
        return f"{', '.join(runs)} {'is a run' if len(runs) == 1 else 'are runs'}"
    return "`ludic run` or `ludic.record` starts one"


def _runs_beside(path: Path) -> list[str]:
    """Return the names of the runs in the folder of a path, of this machine."""
    return [each.name for each in path.parent.iterdir() if (each / RUN.template).is_file()]


@dataclass(frozen=True, slots=True)
class Root(Storage):
    """An open root; cheap to pass around, holds no open files.

    Raises ConfigError if run_json is none of this major version, or one of the record's values is wrong.
    """

    run_json: bytes = field(kw_only=True, repr=False)
    """Content of run.json, which never changes."""
    record: RunRecord = field(init=False)
    """The fields of run.json that the root itself reads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "record", record_of(self.run_json, f"{self.url}/{RUN.template}"))

    @classmethod
    def open(
        cls,
        url: str,
        *,
        writable: bool = False,
        fs: fsspec.AbstractFileSystem | None = None,
        stop: Event | None = None,
    ) -> "Root":
        """Open an existing run.

        writable: also check that the filesystem refuses to overwrite, by creating run.json a second time.
        fs: filesystem to use instead of the URL's own. stop: once set, failed operations are not retried. Raises
        MissingRootError if there is no run.json, StoreError if the filesystem fails, and for a writable root
        SchemaError if a folder is a link that leads out of it, or not a folder, and ConfigError as `check_scheme`.
        """
        if writable and fs is None:
            check_scheme(url)
        storage = replace(Storage.connect(url, fs), stop=stop)
        try:
            data = storage.read(RUN.template)
        except FileNotFoundError:
            raise MissingRootError(
                f"{storage.url} holds no run: {RUN.template} is missing; {_where_runs_are(storage)}"
            ) from None
        root = cls(storage.url, storage.fs, storage.path, stop, run_json=data)
        if writable:
            # Listings skip such folders: a trainer would miss its checkpoints, and begin with the first weights.
            root.refuse_lost_folders({row.folder for row in FILE_KINDS if row.folder})
            root.prove_put_if_absent(RUN.template, data)
        return root

    def writable(self) -> "Root":
        """Open the run again to write to it; checks as `open` does."""
        return Root.open(self.url, writable=True)

    @classmethod
    def create(
        cls,
        url: str,
        run_json: bytes,
        *,
        fs: fsspec.AbstractFileSystem | None = None,
        stop: Event | None = None,
    ) -> "Root":
        """Write run.json, or open an existing run whatever its settings; ludic.run.run_json.put_run compares them.

        fs, stop: as for `open`. Raises ConfigError as `check_scheme`.
        """
        if fs is None:
            check_scheme(url)
        storage = replace(Storage.connect(url, fs), stop=stop)
        if not storage.put_if_absent(RUN.template, run_json):
            return cls.open(url, writable=True, fs=fs, stop=stop)
        storage.prove_put_if_absent(RUN.template, run_json)
        return cls(storage.url, storage.fs, storage.path, stop, run_json=run_json)

    @property
    def run_id(self) -> str:
        """A uuid7, drawn when the run was started."""
        return self.record.run_id

    @property
    def created_at(self) -> datetime | None:
        """Time in the run's uuid7, by the clock of the machine that started it; None for another id."""
        with suppress(ValueError, OverflowError):  # no UUID, or of no year before 10,000
            run_id = UUID(self.run_id)
            return datetime.fromtimestamp((run_id.int >> 80) / 1000, UTC) if run_id.version == 7 else None
        return None

    @property
    def example_ids(self) -> ExampleIds:
        """Identification of examples of questions, fixed when the root was created."""
        return self.record.example_ids

    @property
    def extra_columns(self) -> Mapping[str, str]:
        """Extra columns of the run's rollouts, type by name."""
        return self.record.extra_columns

    def check_same_run(self) -> None:
        """Check, by one read of run.json, that the root is the run that this process opened; call it before a write.

        A write can't be made conditional on this check, so a root that is replaced between the two still gets the
        write. Raises ReplacedRootError if the root was deleted or created again, not if run.json is damaged.
        """
        try:
            found = run_id_of(self.read(RUN.template))
        except FileNotFoundError:
            raise ReplacedRootError(
                f"{self.url}: run {self.run_id} was deleted while this process worked on it; it stops"
            ) from None
        if found is not None and found != self.run_id:
            raise ReplacedRootError(
                f"{self.url} was deleted and created again: it holds run {found} now, and this process works on run "
                f"{self.run_id}; it stops, and leaves the new run as it is"
            )

    def upload(self, folder: str | Path, name: str, *, last: str | None = None) -> None:
        """Move all files of a local folder, subfolders included, below `name`; each appears whole, one after the other.

        last: the file that is moved last and tells readers that all files are there; if None, a marker must follow.
        Raises SchemaError, before anything is moved, if the folder holds a link or anything else that is not a file.
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
"""Schemes of fsspec's static table; its table in memory also has schemes that programs register."""


def check_scheme(url: str) -> None:
    """Raise ConfigError for a URL at which no run can be, before anything is connected.

    A filesystem that the user's program has registered with fsspec is tried.
    """
    scheme = url.partition("://")[0]
    is_users = scheme not in _OF_FSSPEC and (scheme in fsspec.registry or scheme in known_implementations)
    if not is_url(url) or scheme in SCHEMES or is_users:
        return
    raise ConfigError(
        f"{public_url(url)}: a run can't be stored at {scheme}://, which has no put-if-absent; wanted a "
        "folder, s3://, gs:// or az:// (docs/storage.md)"
    )


# --- run.json -------------------------------------------------------------------------------------------------
# run.json: the settings of a run, as JSON, with what only the root has. Written once, never changed.


def content_of(settings: Mapping[str, Any], run_id: str, example_ids: ExampleIds = EXAMPLE_IDS[0]) -> bytes:
    """Return the content of run.json with these settings. Raises ConfigError if an option does not fit JSON."""
    values = {"run_id": run_id, "schema_version": SCHEMA_VERSION, "example_ids": example_ids, **settings}
    try:
        return encode_json(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_options can't be written to run.json: {error}; wanted JSON values") from error


def run_id_of(data: bytes) -> str | None:
    """Return the run_id in a run.json of any version; None if the file is damaged."""
    try:
        run_id = decode_json(data).get("run_id")
    except ValueError:
        return None
    return run_id if isinstance(run_id, str) else None


@lru_cache(maxsize=64)
def record_of(data: bytes, where: str) -> RunRecord:
    """Return the fields of run.json that the root reads.

    Raises ConfigError, naming `where`, if the data is not a run.json of this major version, or identifies examples in a
    way that this ludic does not know.
    """
    with reading(where):
        values = decode_json(data)
        version, example_ids = values["schema_version"], values.get("example_ids", EXAMPLE_IDS[0])
        if parse_version(version)[0] != parse_version(SCHEMA_VERSION)[0]:
            raise ConfigError(f"{where} has schema {version}, this ludic reads {SCHEMA_VERSION}; upgrade ludic")
        if example_ids not in EXAMPLE_IDS:
            wanted = " or ".join(EXAMPLE_IDS)
            raise ConfigError(f"{where}: example_ids is {example_ids!r}, wanted {wanted}; upgrade ludic")
        return convert(values, RunRecord)


def parse_version(version: str) -> tuple[int, int]:
    """Return the major and the minor version of a schema. Raises ValueError or AttributeError if it is none."""
    major, minor = map(int, version.split("."))
    return major, minor


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Raise ConfigError, naming `where`, for errors of values of run.json that ludic can't read."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where} is not a run.json that ludic can read: {error}; put a sound copy of the file in its place"
        ) from error
