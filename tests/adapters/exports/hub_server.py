"""A Hub of one user for tests: it creates repositories and takes commits, as huggingface_hub sends them."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What was sent to it."""

    url: str = ""
    repos: dict[str, bool] = field(default_factory=dict)
    """Whether each is private, by TYPE/OWNER/NAME."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    refused: bool = False


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def answer(self, value: Any, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            kind, _, rest = self.path.removeprefix("/api/").partition("?")[0].partition("s/")
            owner, name, *more = rest.split("/")
            repo = f"{kind}/{owner}/{name}"
            if more[:1] == ["tree"]:
                self.answer([])
            elif repo not in hub.repos:
                self.answer({"error": "Repository not found"}, 404)
            else:
                self.answer({"id": f"{owner}/{name}", "private": hub.repos[repo], "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hub.tokens.add(self.headers["Authorization"])
            path = self.path.removeprefix("/api/").partition("?")[0]
            if hub.refused:
                self.answer({"error": f"{self.headers['Authorization']} may not write"}, 403)
            elif path == "validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif path == "repos/create":
                asked = json.loads(body)
                repo = f"{asked.get('type', 'model')}/{asked['organization']}/{asked['name']}"
                folder = "datasets/" if repo.startswith("dataset") else ""
                url = f"{hub.url}/{folder}{asked['organization']}/{asked['name']}"
                is_new = repo not in hub.repos
                hub.repos.setdefault(repo, asked.get("private", asked.get("visibility") == "private"))
                self.answer({"url": url}, 200 if is_new else 409)
            elif "/preupload/" in path:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self.answer({"files": files})
            else:
                kind, _, rest = path.partition("s/")
                repo = f"{kind}/{rest.partition('/commit/')[0]}"
                lines = [json.loads(line) for line in body.splitlines()]
                hub.files.setdefault(repo, {}).update(
                    {
                        line["value"]["path"]: base64.b64decode(line["value"]["content"])
                        for line in lines
                        if line["key"] == "file"
                    }
                )
                self.answer(
                    {"commitUrl": f"{hub.url}/{rest}/commit/abc".replace("/commit/main", ""), "commitOid": "abc"}
                )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
