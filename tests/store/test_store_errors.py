"""What a user reads when a filesystem refuses: the URL, the cause, and no secret."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from s3fs import S3FileSystem

from ludic.errors import ConfigError, StoreError
from ludic.store import RolloutWriter, Root

SECRET = "sesame-open-up"

Answer = Callable[[str, str], tuple[int, str]]
"""From method and path, a status and an S3 error code; the code is empty for a success."""


@pytest.fixture
def s3_that_answers(monkeypatch) -> Iterator[Callable[[Answer], None]]:
    """Start a server that answers every S3 request as told, with the client's keys set to SECRET."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> None:
        servers.append(_serve(answer))
        use_endpoint(monkeypatch, f"http://127.0.0.1:{servers[0].server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
    S3FileSystem.clear_instance_cache()


def use_endpoint(monkeypatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()


def _serve(answer: Answer) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, code = answer(self.command, self.path)
            body = f"<Error><Code>{code}</Code><Message>As told.</Message></Error>".encode() if code else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = reply  # noqa: N815 (the names that http.server calls)

        def log_message(self, *_) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_path_below_a_file_is_refused(tmp_path, run_config):
    (tmp_path / "file").write_text("I am no folder")
    url = str(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match=rf"^{url}/run\.json: NotADirectoryError: "):
        Root.create(url, run_config)


def test_a_folder_that_became_a_file_stops_no_worker_silently(tmp_path, run_config, next_batch):
    root = Root.create(str(tmp_path / "run"), run_config)
    (tmp_path / "run" / "rollouts").write_text("I am no folder")
    writer = RolloutWriter(root, "w0")
    writer.append(next_batch())
    with pytest.raises(StoreError, match=r"run/rollouts/version=0/env=moar_cats/w0-0\.parquet: NotADirectoryError"):
        writer.flush()
    (tmp_path / "run" / "rollouts").unlink()
    writer.close()
    assert root.list("rollouts") == ["rollouts/version=0/env=moar_cats/w0-0.parquet"]


def test_an_unknown_protocol_is_named(run_config):
    with pytest.raises(StoreError, match="nosuch://bucket/run: Protocol not known: nosuch"):
        Root.create("nosuch://bucket/run", run_config)


def test_a_filesystem_that_cannot_be_reached_is_named(run_config):
    with pytest.raises(StoreError, match=r"ftp://127\.0\.0\.1:1/run: .*refused"):
        Root.create("ftp://127.0.0.1:1/run", run_config)


def test_a_password_in_the_url_is_refused_and_not_shown(run_config):
    with pytest.raises(ConfigError, match=r"ftp://host/run was given with a user or a password") as caught:
        Root.create(f"ftp://me:{SECRET}@host/run", run_config)
    assert SECRET not in str(caught.value)


def test_a_missing_bucket_is_named(s3_server, run_config):
    with pytest.raises(StoreError, match=r"^s3://no-such-bucket/run/run\.json: .*bucket does not exist"):
        Root.create("s3://no-such-bucket/run", run_config)


def test_a_bucket_deleted_under_a_worker_is_named(s3_server, run_config, next_batch):
    client = boto3.client("s3", endpoint_url=s3_server)
    client.create_bucket(Bucket="short-lived")
    root = Root.create("s3://short-lived/run", run_config)
    client.delete_object(Bucket="short-lived", Key="run/run.json")
    client.delete_bucket(Bucket="short-lived")
    writer = RolloutWriter(root, "w0")
    writer.append(next_batch())
    with pytest.raises(StoreError, match=r"w0-0\.parquet: .*bucket does not exist"):
        writer.flush()
    with pytest.raises(StoreError, match="bucket does not exist"):
        writer.close()


def test_an_endpoint_that_is_down_is_named(monkeypatch, run_config):
    use_endpoint(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"^s3://bucket/run/run\.json: .*127\.0\.0\.1:1") as caught:
        Root.create("s3://bucket/run", run_config)
    assert SECRET not in str(caught.value)
    S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_wrong_credentials_are_named_and_not_shown(s3_that_answers, run_config, code):
    s3_that_answers(lambda method, path: (403, code))
    for act in (lambda: Root.create("s3://bucket/run", run_config), lambda: Root.open("s3://bucket/run")):
        with pytest.raises(StoreError, match=r"^s3://bucket/run/run\.json: PermissionError: ") as caught:
            act()
        assert SECRET not in str(caught.value)


def test_a_server_that_refuses_without_naming_the_condition_keeps_its_promise(s3_that_answers, run_config):
    """S3 names If-None-Match in its 412; servers that only imitate it may not."""
    puts = []

    def answer(method: str, path: str) -> tuple[int, str]:
        if method == "PUT":
            puts.append(path)
            return (200, "") if len(puts) == 1 else (412, "PreconditionFailed")
        return 404, "NoSuchKey"

    s3_that_answers(answer)
    Root.create("s3://bucket/run", run_config)
    assert puts == ["/bucket/run/run.json"] * 2


def test_a_server_that_overwrites_is_refused(s3_that_answers, run_config):
    s3_that_answers(lambda method, path: (200, ""))
    with pytest.raises(StoreError, match="S3FileSystem overwrites files although it was asked to create only"):
        Root.create("s3://bucket/run", run_config)
