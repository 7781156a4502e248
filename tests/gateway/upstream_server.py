"""A server of OpenAI's chat completions that answers what a test says, and a program that calls a gateway before it.

Needs no package.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROGRAM = """
import json, os, urllib.request
address = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
body = {"model": "theirs", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
request = urllib.request.Request(address, json.dumps(body).encode(), headers)
assert json.load(urllib.request.urlopen(request))["content"][0]["text"] == "good day"
raise SystemExit(3)
"""


def answer(**values: Any) -> dict[str, Any]:
    """What a vLLM server answers that is asked for token ids and logprobs."""
    choice = {
        "message": {"role": "assistant", "content": "good day"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        **values,
    }
    return {
        "choices": [choice],
        "prompt_token_ids": [1, 2, 3],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }


@dataclass
class Upstream:
    """A server that gives its answers in turn, the last one again and again."""

    url: str = ""
    answers: list[tuple[int, Mapping[str, str], Any]] = field(default_factory=list)
    models: tuple[int, Any] = (200, {"data": [{"id": "theirs"}]})
    """Its answer that lists its models: status and body."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def upstream_server() -> Iterator[Upstream]:
    here = Upstream()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(here.models[0], {}, here.models[1])

        def do_POST(self) -> None:
            here.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            here.keys.append(self.headers["Authorization"])
            self._send(*(here.answers.pop(0) if len(here.answers) > 1 else here.answers[0]))

        def _send(self, status: int, headers: Mapping[str, str], body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
