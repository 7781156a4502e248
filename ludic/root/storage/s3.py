"""Access S3 through fsspec's interface: s3fs with fewer requests, and obstore for frequent calls.

botocore finds credentials, region and endpoint: in the environment, in ~/.aws and in the machine's role.
obstore is used if it is installed and fsspec's configuration has no settings for s3, since those are meant for s3fs.
Raises the errors of s3fs, botocore and obstore, and FileExistsError if mode="create" finds a file.
"""

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import botocore.configprovider
import botocore.exceptions
import botocore.session
import fsspec
import s3fs

from ludic.base import is_path
from ludic.errors import StoreError
from ludic.root.storage.failures import is_refused_overwrite

try:
    import obstore
except ImportError:
    obstore = None

MAX_CONNECTIONS = 32
"""Maximum connections of one filesystem to one endpoint at a time."""
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S, _REQUEST_TIMEOUT_S = 5, 15, 60
_ATTEMPTS = 3
"""Attempts for each request, within a second or two, so that one failed part of a hundred does not fail an upload.
If a failure lasts longer, ludic.root.storage.failures retries the whole call."""
_PART_BYTES = 16 << 20

CLIENT_CONFIG = {
    "connect_timeout": _CONNECT_TIMEOUT_S,
    "read_timeout": _READ_TIMEOUT_S,
    "max_pool_connections": MAX_CONNECTIONS,
    "retries": {"mode": "standard", "total_max_attempts": _ATTEMPTS},
}
"""Settings of botocore, which fsspec's configuration may override."""

_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


# obstore's threads do not exist in a forked child, so every call there would hang.
os.register_at_fork(after_in_child=_note_fork)


def open_s3() -> s3fs.S3FileSystem:
    """Return the fastest filesystem for s3:// that respects the user's settings."""
    settings = fsspec.config.conf.get("s3", {})
    if obstore is None or settings or _is_forked:
        return S3(config_kwargs=CLIENT_CONFIG | settings.get("config_kwargs", {}), use_listings_cache=False)
    return ObstoreS3(config_kwargs=CLIENT_CONFIG, use_listings_cache=False)


class S3(s3fs.S3FileSystem):
    """s3fs without the requests that the store does not need."""

    retries = 1  # attempts of s3fs' own loop around botocore's retries

    def find(self, path: str, maxdepth: int | None = None, prefix: str = "", **options: Any) -> Any:
        """List files with one request per thousand, also if there are none, where s3fs would send two more requests."""
        parent, _, name = self._strip_protocol(path).rpartition("/")
        if maxdepth is not None or prefix or not parent:
            return super().find(path, maxdepth=maxdepth, prefix=prefix, **options)
        return super().find(parent, prefix=f"{name}/", **options)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete files with two requests per thousand.

        s3fs would send a request for each file, and ignore files that the server refuses to delete.
        """
        paths = [path] if isinstance(path, str) else list(path)
        found = [file for folder in paths for file in self.find(folder)] if recursive else []
        self._delete([*found, *paths])

    def _delete(self, paths: list[str]) -> None:
        keys = [self._split(path) for path in paths]
        for batch in (keys[start : start + 1000] for start in range(0, len(keys), 1000)):
            objects = [{"Key": key} for _, key in batch]
            answer = self.call_s3("delete_objects", Bucket=batch[0][0], Delete={"Objects": objects, "Quiet": True})
            if answer.get("Errors"):
                raise botocore.exceptions.ClientError({"Error": answer["Errors"][0]}, "DeleteObjects")

    def _split(self, path: str) -> tuple[str, str]:
        """Return bucket and key of a path."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        return bucket, key

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Read a file with one request; s3fs would request its size first."""
        return await super()._cat_file(path, start=start, end=end, **(options | {"max_concurrency": 1}))

    async def _put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        """Upload with 8 parts of 16 MB in memory; s3fs' ten parts of 50 MB would be half of what a worker may use."""
        part_bytes = max(_PART_BYTES, -(-Path(lpath).stat().st_size // s3fs.core.MAX_UPLOAD_PARTS))
        await super()._put_file(lpath, rpath, **({"chunksize": part_bytes, "max_concurrency": 8} | options))


class ObstoreS3(S3):
    """The same requests through obstore, with a fraction of the client's CPU time (benchmarks/object_store.py).

    Threads may share an instance. A forked process must open its own.
    """

    cachable = False  # making an instance takes 20 ms, and the environment may have changed

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._stores: dict[str, Any] = {}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Read a file or a range. As in fsspec, negative offsets count from the end, and a range ends with the file."""
        store, key = self._store(path)
        if end is None:
            byte_range = None if start is None else {"offset": start} if start >= 0 else {"suffix": -start}
            return obstore.get(store, key, options={"range": byte_range} if byte_range else None).bytes().to_bytes()
        start = start or 0
        if start < 0 or end < 0:
            size = self.size(path)
            start, end = (max(offset + size, 0) if offset < 0 else offset for offset in (start, end))
        return obstore.get_range(store, key, start=start, end=end).to_bytes() if start < end else b""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        store, key = self._store(path)
        try:
            obstore.put(store, key, value, mode=mode, use_multipart=False)
        except obstore.exceptions.AlreadyExistsError as error:
            if is_refused_overwrite(error):
                raise FileExistsError(path) from error
            raise  # another put of this name is in progress, and may still fail

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Download a file in parts, several at a time."""
        size = self.info(rpath)["size"]  # self.size would send a request through s3fs
        with Path(lpath).open("wb") as file, ThreadPoolExecutor(8) as pool:

            def fetch(start: int) -> None:
                os.pwrite(file.fileno(), self.cat_file(rpath, start, min(start + _PART_BYTES, size)), start)

            for _done in pool.map(fetch, range(0, size, _PART_BYTES)):
                pass

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        store, key = self._store(path)
        with suppress(FileNotFoundError):
            if key:
                head = obstore.head(store, key)
                return {"name": path, "size": head["size"], "type": "file", "LastModified": head["last_modified"]}
        with suppress(obstore.exceptions.InvalidPathError):  # a key that is not a path, so there is one
            if not any(obstore.list(store, key or None)):
                raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    def find(self, path: str, maxdepth: int | None = None, prefix: str = "", **options: Any) -> Any:
        if maxdepth is not None or prefix or options.get("withdirs"):
            return super().find(path, maxdepth=maxdepth, prefix=prefix, **options)
        store, key = self._store(path)
        bucket = self._split(path)[0]
        try:
            entries = [entry for page in obstore.list(store, key or None, chunk_size=1000) for entry in page]
        except obstore.exceptions.InvalidPathError:  # a key that is not a path, such as a//b, ends obstore's listing
            return super().find(path, **options)
        if not all(entry["size"] for entry in entries):  # ludic stores no empty files
            folders = {str(parent) for entry in entries for parent in PurePosixPath(entry["path"]).parents}
            entries = [
                entry for entry in entries if entry["size"] or not self._is_marker(store, entry["path"], folders)
            ]
        found = {f"{bucket}/{entry['path']}": {"size": entry["size"], "type": "file"} for entry in entries}
        return {name: {"name": name, **facts} for name, facts in found.items()} if options.get("detail") else [*found]

    def _is_marker(self, store: Any, key: str, folders: Collection[str]) -> bool:
        """Return whether an empty object marks a folder: its key ends in "/", which obstore's listing omits."""
        if key in folders:
            return True
        try:
            obstore.head(store, key)
        except FileNotFoundError:
            return True
        return False

    def _delete(self, paths: list[str]) -> None:
        if all(map(is_path, paths)):
            obstore.delete(self._store(paths[0])[0], [self._split(path)[1] for path in paths])
        else:  # obstore does not accept such a key
            super()._delete(paths)

    def _find_region(self, bucket: str) -> str:
        try:
            answer = self.call_s3("head_bucket", Bucket=bucket)
            return answer["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"]
        except (OSError, KeyError, botocore.exceptions.BotoCoreError):
            return "us-east-1"  # the next request will report the error

    def _store(self, path: str) -> tuple[Any, str]:
        """Return obstore's client for the bucket, and the key in it."""
        if _is_forked:
            raise StoreError(f"s3://{path}: opened before this process was forked; open the root again in the child")
        bucket, key = self._split(path)
        if bucket not in self._stores:
            self._stores[bucket] = _connect(bucket, self._find_region)
        return self._stores[bucket], key


def _connect(bucket: str, find_region: Callable[[str], str]) -> Any:
    """Make obstore's client. find_region: called if the environment and ~/.aws name no region."""
    session = botocore.session.Session()
    if session.get_credentials() is None:
        raise botocore.exceptions.NoCredentialsError
    endpoint = botocore.configprovider.ConfiguredEndpointProvider(
        full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
    ).provide()
    certificates = session.get_config_variable("ca_bundle")
    return obstore.store.S3Store(
        bucket,
        config={"region": session.get_config_variable("region") or find_region(bucket)}
        | ({"endpoint": endpoint} if endpoint else {}),
        credential_provider=lambda: _credentials(session),
        client_options={
            "allow_http": (endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=_REQUEST_TIMEOUT_S),
            "pool_max_idle_per_host": str(MAX_CONNECTIONS),
            **({"root_certificate": Path(certificates).read_bytes()} if certificates else {}),
        },
        retry_config={
            "max_retries": _ATTEMPTS - 1,
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
            "retry_timeout": timedelta(seconds=_READ_TIMEOUT_S),
        },
    )


def _credentials(session: botocore.session.Session) -> dict[str, Any]:
    """Return botocore's current credentials, valid here for 10 minutes: botocore renews expiring ones."""
    keys = session.get_credentials().get_frozen_credentials()
    return {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "token": keys.token,
        "expires_at": datetime.now(UTC) + timedelta(minutes=10),
    }
