"""An S3 server in a process of the environment of all other tests, since the package alone has none."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="session")
def server_address() -> Iterator[str]:
    """The address of a server with a bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = Path(__file__).parents[2] / ".venv" / "bin" / "python"
    server = subprocess.Popen([str(python), "-m", "moto.server", "--port", str(port)], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(urllib.request.Request(f"{address}/ludic-light", method="PUT")):
                    break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def s3_bucket(server_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The bucket's s3:// URL. The server's address and keys are in the environment of this test alone."""
    for name, value in {**_ENVIRONMENT, "AWS_ENDPOINT_URL": server_address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return "s3://ludic-light"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes from, or goes to, the folders of the user; colours and widths are those of a file."""
    for name in ("CACHE", "CONFIG"):
        monkeypatch.setenv(f"LUDIC_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("COLUMNS", "120")
    assert os.environ["LUDIC_CACHE_DIR"]
