"""Roots on three filesystems: a folder, memory://, and s3:// from a real S3 server on this machine.

The server's address and keys are in the environment for the whole session, so that a plain
s3:// URL works here and in every process that a test starts.
"""

import faulthandler
import signal
import uuid
from collections.abc import Iterator

import boto3
import fsspec
import hypothesis
import pytest
from moto.server import ThreadedMotoServer

from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

# A busy machine is no failure.
hypothesis.settings.register_profile("ludic", deadline=None)
hypothesis.settings.load_profile("ludic")

# A shell starts what runs in the background with SIGINT ignored, and so would everything be that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """End the process if a thread that a test left behind keeps it from ending; `--timeout` watches only tests."""
    faulthandler.dump_traceback_later(60, exit=True)


THROUGH_S3FS = ("test_reader.py", "test_retries.py", "test_root.py", "test_store_errors.py", "test_writer.py")
"""Files of tests/root whose roots are also reached through plain s3fs; others would ask for the same again."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that ask the S3 server as slow: each of its answers takes milliseconds of Python."""
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = {} if callspec is None else callspec.params
        if any(str(value).startswith("s3") for value in params.values()):
            item.add_marker(pytest.mark.slow)
        is_left_out = params.get("root_url") == "s3fs" and item.path.name not in THROUGH_S3FS
        (left_out if is_left_out else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ludic.connect remembers of files stays out of the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUDIC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """So does the user's consent to run code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUDIC_CONFIG_DIR", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server on a free port; AWS_ENDPOINT_URL names it until the session ends."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": address}.items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        yield address
    server.stop()


@pytest.fixture(scope="session")
def s3_bucket(s3_server: str) -> str:
    """A bucket that is there; its s3:// URL."""
    boto3.client("s3", endpoint_url=s3_server).create_bucket(Bucket="ludic-tests")
    return "s3://ludic-tests"


@pytest.fixture(params=["local", "memory", "s3"])
def root_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a root that nobody has used."""
    if request.param == "local":
        yield str(request.getfixturevalue("tmp_path") / "run")
        return
    parent = "memory://" if request.param == "memory" else f"{request.getfixturevalue('s3_bucket')}/"
    url = f"{parent}{uuid.uuid4()}"
    yield url
    fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    if fs.exists(path):
        fs.rm(path, recursive=True)


@pytest.fixture
def run_config() -> RunConfig:
    return RunConfig(model="tiny-qwen2", env=("moar_cats",), group_size=4, groups_per_batch=2)


@pytest.fixture
def root(root_url: str, run_config: RunConfig) -> Root:
    """A run that was just started."""
    return put_run(root_url, run_config)
