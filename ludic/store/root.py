"""The root of a run: a folder on any fsspec filesystem whose run.json holds the run's settings."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import fsspec

from ludic.errors import ConfigError, MissingRootError, ReplacedRootError
from ludic.records import new_id
from ludic.settings import check_urls
from ludic.store.catalogue import RUN
from ludic.store.code_files import consented_files, copy_code, keep_files
from ludic.store.filesystem import Storage
from ludic.store.run_json import RunConfig, from_json, run_id_of, to_json
from ludic.user_files import NO_FILES


@dataclass(frozen=True, slots=True)
class Root(Storage):
    """An opened root. Cheap to pass around; holds no open files."""

    run_id: str = field(kw_only=True)
    """A uuid7, drawn when the run was started."""
    run: RunConfig = field(kw_only=True)

    @classmethod
    def open(cls, url: str, *, writable: bool = False, fs: fsspec.AbstractFileSystem | None = None) -> "Root":
        """Open an existing run.

        writable: also check that the filesystem refuses to overwrite, by creating run.json a second time.
        fs: filesystem to use instead of the URL's own.
        Raises MissingRootError if there is no run.json, StoreError if the filesystem fails, SchemaError if a folder of
        a writable root is a link that leads out of it.
        """
        storage = Storage.connect(url, fs)
        try:
            data = storage.read(RUN.template)
        except FileNotFoundError:
            raise MissingRootError(
                f"{storage.url} holds no run: {RUN.template} is missing; `ludic run` starts one"
            ) from None
        run, run_id = from_json(data, f"{storage.url}/{RUN.template}")
        if writable:
            # A listing passes over such links: a trainer would miss its checkpoints, and begin with the first weights.
            storage.refuse_linked_folders()
            storage.prove_put_if_absent(RUN.template, data)
        return cls(storage.url, storage.fs, storage.path, run_id=run_id, run=run)

    @classmethod
    def create(
        cls, url: str, run: RunConfig, *, like: "Root | None" = None, fs: fsspec.AbstractFileSystem | None = None
    ) -> "Root":
        """Start a run, or open an existing run that has the same settings.

        A new root gets copies of the users' files that `run` names; creating it is consent to run them.
        like: the run that the settings come from. The files are copied from it, and consent is still needed.
        Raises ConfigError naming each setting that differs from the existing run, a URL with a secret or a missing
        file.
        """
        storage = Storage.connect(url, fs)
        run_id = new_id()
        data = to_json(run, run_id)
        root = cls(storage.url, storage.fs, storage.path, run_id=run_id, run=run)
        # Consent is stored before run.json: if the process is killed in between, the same command can resume.
        is_new = like is None and not storage.exists(RUN.template)
        if is_new:
            check_urls(run)
        files = consented_files(root) if is_new else NO_FILES
        if storage.put_if_absent(RUN.template, data):
            storage.prove_put_if_absent(RUN.template, data)
            keep_files(root, files) if like is None else copy_code(like, root)
            return root
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
        """
        files = {file.relative_to(folder).as_posix(): file for file in Path(folder).rglob("*") if not file.is_dir()}
        for relative in sorted(files, key=lambda relative: (relative == last, relative)):
            self.move_in(files[relative], f"{name}/{relative}")

    def download(self, name: str, folder: str | Path, *, leave_out: Collection[str] = ()) -> None:
        """Copy the files below `name`, subfolders included, into a local folder. leave_out: file names to skip.

        Raises StoreError for a name, SchemaError for a symbolic link, that leads out, before anything is copied.
        """
        if self.is_local:
            self.folder_for_others(name)
        names = {file: PurePosixPath(file).relative_to(name) for file in self.list(name)}
        self.copy_all({file: path for file, path in names.items() if path.name not in leave_out}, Path(folder))
