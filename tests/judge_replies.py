"""Answers of a judge's server in tests, whole and broken."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


def answer(handler: BaseHTTPRequestHandler, text: str, *, status: int = 200, **choice: Any) -> None:
    """Send a chat completion of 100 tokens read and 10 written."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    send(handler, json.dumps({"choices": [{"message": {"content": text}, **choice}], "usage": usage}), status)


def send(handler: BaseHTTPRequestHandler, text: str, status: int = 200, *, promised: int | None = None) -> None:
    """Send any text. promised: length that the header states."""
    data = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data) if promised is None else promised))
    handler.end_headers()
    handler.wfile.write(data)
