"""S3 behind fsspec's interface: s3fs with one request a call, and obstore for the calls that the store makes often.

Credentials, region and endpoint come from where botocore looks: the environment, ~/.aws and the machine's role.
obstore is used where it is installed, unless fsspec's configuration has settings for s3, which are s3fs' own.
Raises what s3fs, botocore and obstore raise; FileExistsError where mode="create" finds a file.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.configprovider
import botocore.exceptions
import botocore.session
import fsspec
import s3fs

from ludic.errors import StoreError
from ludic.store.failures import is_refused_overwrite

try:
    import obstore
except ImportError:
    obstore = None

MAX_CONNECTIONS = 32
"""To one endpoint at a time, of one filesystem."""
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S, _REQUEST_TIMEOUT_S = 5, 15, 60
_ATTEMPTS = 3
"""Of each request, within a second or two, so that one part of a hundred does not fail an upload.
What lasts longer is for ludic.store.failures, which tries the whole call again."""
_PART_BYTES = 16 << 20

CLIENT_CONFIG = {
    "connect_timeout": _CONNECT_TIMEOUT_S,
    "read_timeout": _READ_TIMEOUT_S,
    "max_pool_connections": MAX_CONNECTIONS,
    "retries": {"mode": "standard", "total_max_attempts": _ATTEMPTS},
}
"""Of botocore, unless fsspec's configuration says otherwise."""

_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


# obstore's threads do not live on in a forked child, where every call would wait for ever.
os.register_at_fork(after_in_child=_note_fork)


def open_s3() -> s3fs.S3FileSystem:
    """The quickest filesystem for s3:// that honours the user's settings."""
    settings = fsspec.config.conf.get("s3", {})
    if obstore is None or settings or _is_forked:
        return S3(config_kwargs=CLIENT_CONFIG | settings.get("config_kwargs", {}), use_listings_cache=False)
    return ObstoreS3(config_kwargs=CLIENT_CONFIG, use_listings_cache=False)


class S3(s3fs.S3FileSystem):
    """s3fs without the requests that the store has no use for."""

    retries = 1  # of s3fs' own loop around botocore's

    def find(self, path: str, maxdepth: int | None = None, prefix: str = "", **options: Any) -> Any:
        """One request a thousand files, also where there is none: s3fs would ask twice more whether it is a file."""
        parent, _, name = self._strip_protocol(path).rpartition("/")
        if maxdepth is not None or prefix or not parent:
            return super().find(path, maxdepth=maxdepth, prefix=prefix, **options)
        return super().find(parent, prefix=f"{name}/", **options)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Two requests a thousand files; s3fs would ask about each, and pass over what the server refuses to delete."""
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
        """Bucket and key."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        return bucket, key

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """One request; s3fs would ask for the size first."""
        return await super()._cat_file(path, start=start, end=end, **(options | {"max_concurrency": 1}))

    async def _put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        """Holds 8 parts of 16 MB in memory; s3fs' ten of 50 MB would be half of what a worker may use."""
        part_bytes = max(_PART_BYTES, -(-Path(lpath).stat().st_size // s3fs.core.MAX_UPLOAD_PARTS))
        await super()._put_file(lpath, rpath, **({"chunksize": part_bytes, "max_concurrency": 8} | options))


class ObstoreS3(S3):
    """The same requests through obstore, for a fraction of the client's CPU time (benchmarks/object_store.py).

    Threads may share it. A process forked from one that used it must open its own.
    """

    cachable = False  # one is made in 20 ms, and the environment may have changed

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._stores: dict[str, Any] = {}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """As fsspec has it: negative places count from the end, and what lies behind the end is left out."""
        store, key = self._store(path)
        if end is None:
            place = None if start is None else {"offset": start} if start >= 0 else {"suffix": -start}
            return obstore.get(store, key, options={"range": place} if place else None).bytes().to_bytes()
        start = start or 0
        if start < 0 or end < 0:
            size = self.size(path)
            start, end = (max(place + size, 0) if place < 0 else place for place in (start, end))
        return obstore.get_range(store, key, start=start, end=end).to_bytes() if start < end else b""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        store, key = self._store(path)
        try:
            obstore.put(store, key, value, mode=mode, use_multipart=False)
        except obstore.exceptions.AlreadyExistsError as error:
            if is_refused_overwrite(error):
                raise FileExistsError(path) from error
            raise  # another put of this name is under way, and may yet fail

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """In parts, several at a time."""
        size = self.size(rpath)
        with Path(lpath).open("wb") as file, ThreadPoolExecutor(8) as pool:

            def fetch(start: int) -> None:
                os.pwrite(file.fileno(), self.cat_file(rpath, start, min(start + _PART_BYTES, size)), start)

            for _done in pool.map(fetch, range(0, size, _PART_BYTES)):
                pass

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        store, key = self._store(path)
        with suppress(FileNotFoundError):
            if key:
                return {"name": path, "size": obstore.head(store, key)["size"], "type": "file"}
        if any(obstore.list(store, key or None)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def find(self, path: str, maxdepth: int | None = None, prefix: str = "", **options: Any) -> Any:
        if maxdepth is not None or prefix or options.get("withdirs"):
            return super().find(path, maxdepth=maxdepth, prefix=prefix, **options)
        store, key = self._store(path)
        bucket = self._split(path)[0]
        entries = [entry for page in obstore.list(store, key or None, chunk_size=1000) for entry in page]
        found = {f"{bucket}/{entry['path']}": {"size": entry["size"], "type": "file"} for entry in entries}
        return {name: {"name": name, **facts} for name, facts in found.items()} if options.get("detail") else [*found]

    def _delete(self, paths: list[str]) -> None:
        obstore.delete(self._store(paths[0])[0], [self._split(path)[1] for path in paths])

    def _find_region(self, bucket: str) -> str:
        try:
            answer = self.call_s3("head_bucket", Bucket=bucket)
            return answer["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"]
        except (OSError, KeyError, botocore.exceptions.BotoCoreError):
            return "us-east-1"  # the request that follows will say what is wrong

    def _store(self, path: str) -> tuple[Any, str]:
        """obstore's client for the bucket, and the key in it."""
        if _is_forked:
            raise StoreError(f"s3://{path}: opened before this process was forked; open the root again in the child")
        bucket, key = self._split(path)
        if bucket not in self._stores:
            self._stores[bucket] = _connect(bucket, self._find_region)
        return self._stores[bucket], key


def _connect(bucket: str, find_region: Callable[[str], str]) -> Any:
    """obstore's client; `find_region` is asked where neither the environment nor ~/.aws says."""
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
    """As botocore has them now; it renews those that expire, so ask again every few minutes."""
    keys = session.get_credentials().get_frozen_credentials()
    return {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "token": keys.token,
        "expires_at": datetime.now(UTC) + timedelta(minutes=10),
    }
