"""Runs with stored rollouts, and a small HTTP server that answers as a judge does, or does not."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from eval.scoring.conftest import run
from judge_replies import answer

__all__ = ["judge", "judge_server", "run"]

Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@dataclass(slots=True)
class JudgeServer:
    """A server on this machine; `reply` answers each request."""

    url: str
    reply: Reply = field(default=lambda handler, body: answer(handler, "0.5"))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture
def judge_server() -> Iterator[JudgeServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            judge.bodies.append(body)
            judge.keys.append(self.headers["Authorization"])
            judge.reply(self, body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # the client went away
                self.close_connection = True

        def finish(self) -> None:
            try:
                super().finish()
            except ConnectionError:
                self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        judge = JudgeServer(f"http://127.0.0.1:{server.server_port}/v1")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield judge
        server.shutdown()


@pytest.fixture
def judge(judge_server: JudgeServer, tmp_path: Path) -> dict[str, Any]:
    """Options of a judge that asks the server."""
    (tmp_path / "prompt.txt").write_text('Question: {prompt}\nAnswer: {response}\nReply as JSON, not {"score": 1}.')
    return {"judge_url": judge_server.url, "judge_model": "big", "judge_prompt": str(tmp_path / "prompt.txt")}
