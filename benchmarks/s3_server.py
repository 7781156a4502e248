"""An S3 server on this machine (moto): real HTTP, in a separate process, with latency added to each response."""

import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from botocore.exceptions import BotoCoreError
from werkzeug.serving import WSGIRequestHandler, run_simple

BUCKET = "ludic-benchmark"


@contextmanager
def s3_server(latency_s: float) -> Iterator[None]:
    """Run an S3 server with an empty bucket, and point this process's environment to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(port, latency_s), daemon=True)
    process.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        _create_bucket()
        yield
    finally:
        process.terminate()
        process.join()


def _serve(port: int, latency_s: float) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    inner = DomainDispatcherApplication(create_backend_app)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        time.sleep(latency_s)
        return inner(environ, start_response)

    class KeepAlive(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    run_simple("127.0.0.1", port, answer, threaded=True, request_handler=KeepAlive)


def _create_bucket() -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
            return
        except (OSError, BotoCoreError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
