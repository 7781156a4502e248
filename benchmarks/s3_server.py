"""An S3 server on this machine (moto): real HTTP, in a separate process, with latency added to each response.

The server listens on a port for each client, so that clients can have latencies of their own, and counts requests.
"""

import json
import logging
import os
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import fsspec
from botocore.exceptions import BotoCoreError
from werkzeug.serving import WSGIRequestHandler, run_simple

from benchmarks.measure import processes
from benchmarks.ports import free_port

BUCKET = "ludic-benchmark"
_COUNTS = "/-counts"
"""Path of the server's own page; no bucket's name begins with a hyphen."""
_FOLDER = re.compile(r"[^/]+/(policies/LATEST|[^/]*)")


class Request(NamedTuple):
    """Requests that are counted together."""

    client: str
    """Name of the client's port."""
    kind: str
    """LIST, DELETE (also of many files), or a method: PUT, GET, HEAD, POST."""
    folder: str
    """First folder below the run, or policies/LATEST."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server."""

    ports: Mapping[str, int]
    """Port by client."""

    def serve(self, client: str) -> None:
        """Point this process's environment to a client's port: filesystems that are made now use it."""
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ports[client]}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def counts(self) -> Counter[Request]:
        """Return the number of requests since the start."""
        port = next(iter(self.ports.values()))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{_COUNTS}") as answer:
            return Counter({Request(*request): count for *request, count in json.load(answer)})


@contextmanager
def s3_server(latency_s: float | Mapping[str, float]) -> Iterator[S3Server]:
    """Run an S3 server with an empty bucket, and point this process's environment to its first client's port.

    latency_s: seconds added to each response, for all or by client.
    """
    latencies = latency_s if isinstance(latency_s, Mapping) else {"all": latency_s}
    server = S3Server({client: free_port() for client in latencies})
    ports = {port: (client, latencies[client]) for client, port in server.ports.items()}
    process = processes().Process(target=_serve, args=(ports,), daemon=True)
    process.start()
    server.serve(next(iter(latencies)))
    try:
        _create_bucket()
        yield server
    finally:
        process.terminate()
        process.join()


def _serve(ports: Mapping[int, tuple[str, float]]) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    inner = DomainDispatcherApplication(create_backend_app)
    counts: Counter[Request] = Counter()
    lock = threading.Lock()

    def answer(client: str, latency_s: float, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == _COUNTS:
            start_response("200 OK", [("Content-Type", "application/json")])
            with lock:
                return [json.dumps([(*request, count) for request, count in counts.items()]).encode()]
        with lock:
            counts[_described(client, environ)] += 1
        time.sleep(latency_s)
        return inner(environ, start_response)

    class KeepAlive(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

    def listen(port: int) -> None:
        run_simple("127.0.0.1", port, partial(answer, *ports[port]), threaded=True, request_handler=KeepAlive)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with ThreadPoolExecutor(len(ports)) as pool:
        list(pool.map(listen, ports))


def _described(client: str, environ: Mapping[str, Any]) -> Request:
    """Return how a request is counted."""
    method, query = environ["REQUEST_METHOD"], parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    kind = "LIST" if method == "GET" and "prefix" in query else "DELETE" if "delete" in query else method
    path = query["prefix"][0] if kind == "LIST" else environ["PATH_INFO"].lstrip("/").partition("/")[2]
    match = _FOLDER.match(path)
    return Request(client, kind, match[1] if match else "")


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
