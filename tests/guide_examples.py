"""The code of docs/agents.md as files of a user, and the server of its judge."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import judge_replies

GUIDE = (Path(__file__).parents[1] / "docs/agents.md").read_text(encoding="utf-8")


def example(folder: Path, name: str) -> str:
    """path/to/file.py:name of the guide's code that defines this name."""
    codes = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (code,) = (code for code in codes if re.search(rf"(class|def) {name}\b", code))
    file = folder / "own.py"
    file.write_text(code)
    return f"{file}:{name}"


@contextmanager
def judge_of_safes() -> Iterator[str]:
    """The URL of a server that judges as the environment Safe asks: 1 for an answer that names what the safe holds."""
    with _Server(("127.0.0.1", 0), _JudgeOfSafes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a worker that ends hangs up on its judges."""


class _JudgeOfSafes(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        question, _, answer = asked.partition("\n\n")
        (inside,) = re.findall(r"The safe holds (\w+)\.", question)
        judge_replies.answer(self, str(int(inside in answer)))

    def log_message(self, *_: object) -> None:
        pass
