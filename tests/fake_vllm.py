"""An HTTP server with vLLM's endpoints, for what a real vLLM can't be made to do: faults, other flags, other versions.

It samples token 5 again and again, with logprob -1, or 0 where only one token may be sampled. A comparison after a load
gets the logprobs of the files.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from ludic.base.defaults import Longrope
from ludic.models.families import logprobs_alone
from ludic.models.weight_files import load_pretrained

Fault = Callable[[dict[str, Any]], tuple[int, bytes]]
"""Returns status and body of an answer to a request for a completion; given the usual answer."""


class FakeVllm:
    """State of one server; tests read and change it."""

    def __init__(self) -> None:
        self.label = "default"
        self.model = "tiny"
        self.is_paused = False
        self.has_generate = True
        self.has_weights_endpoints = True
        self.fails_loads = False
        self.raw_logprobs = False
        self.device_and_dtype: tuple[str | None, str] | None = ("cuda", "float32")
        """What it tells that it runs on and in; None is a server without /server_info."""
        self.cuts_prompts = False
        """Whether it tells that it computes prompts in parts."""
        self.has_extension = False
        """Whether it was started with ludic's worker extension."""
        self.logprobs_of: Callable[[list[int]], list[float]] | None = None
        """Gives the logprobs of all tokens but the first of a sequence; None is the constant logprob."""
        self.max_model_len = 512
        self.latency_s = 0.0
        self.hangs = threading.Event()
        """While set, completions wait."""
        self.loads: list[str] = []
        """Folders that were loaded."""
        self.num_completions = 0
        self.num_given_up = 0
        """Completions whose client closed the connection."""
        self.labels: list[str] = []
        """All labels, in order."""
        self.faults: list[Fault] = []
        """Each is applied to one completion, after the engine's own check at the start."""
        self.lock = threading.Lock()
        self.url = ""

    def restart(self) -> None:
        """Become what a server is after a restart."""
        self.label, self.is_paused = "default", False

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        routes: dict[str, Callable[[dict[str, Any]], Any]] = {
            "GET /health": lambda body: {},
            "GET /version": lambda body: {"version": "0.32.0"},
            "GET /v1/models": lambda body: {"data": [{"id": self.model, "max_model_len": self.max_model_len}]},
            "POST /v1/completions": self._complete,
        }
        if self.has_generate:
            routes["POST /inference/v1/generate"] = self._generate
        if self.has_weights_endpoints:
            routes |= {
                "GET /weight_info": lambda body: {"weight_version": self.label},
                "GET /is_paused": lambda body: {"is_paused": self.is_paused},
                "POST /update_weight_version": self._set_label,
                "POST /pause": lambda body: self._pause(True),
                "POST /resume": lambda body: self._pause(False),
                "POST /collective_rpc": self._load,
                "POST /reset_prefix_cache": lambda body: {"success": True},
            }
        if self.device_and_dtype is not None:
            routes["GET /server_info"] = lambda body: self._server_info(*self.device_and_dtype)
        route = routes.get(f"{method} {path}")
        if route is None:
            return 404, b'{"detail":"Not Found"}'
        salt = body.get("cache_salt", "")
        if len(salt) > 128 or set(salt) & set("@/\\\0"):  # as vLLM 0.32
            return 400, b'{"error":{"message":"Parameter \'cache_salt\' must be at most 128 characters"}}'
        found = route(body)
        if isinstance(found, tuple):
            return found
        if "choices" in found and not self._is_check(body) and self.faults:
            with self.lock:
                fault = self.faults.pop(0)
            return fault(found)
        return 200, json.dumps(found).encode()

    def _set_label(self, body: dict[str, Any]) -> dict[str, Any]:
        self.label = body["new_version"]
        self.labels.append(self.label)
        return {"success": True}

    def _pause(self, is_paused: bool) -> dict[str, Any]:
        self.is_paused = is_paused
        return {}

    def _server_info(self, device: str | None, dtype: str) -> dict[str, Any]:
        config = {
            "device_config": {"device": device},  # as vLLM 0.32 answers
            "model_config": {"dtype": f"torch.{dtype}"},
            "scheduler_config": {"enable_chunked_prefill": self.cuts_prompts},
        }
        return {"vllm_config": config}

    def _load(self, body: dict[str, Any]) -> Any:
        if body["method"] != "reload_weights" and not self.has_extension:
            return 500, b'{"error":{"message":"Method \'x\' is not implemented."}}'
        if self.fails_loads:
            return 500, b'{"error":{"message":"no such folder"}}'
        self.loads.append(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        tokens, logprobs = self._sample(body, params, body["token_ids"])
        content = [{"token_id": 5, "logprob": logprob, "top_logprobs": []} for logprob in logprobs]
        span = {"version": self.label, "start": 0, "end": len(tokens)}
        choice = {"token_ids": tokens, "finish_reason": "length", "weight_versions": [span]}
        return {"choices": [choice | {"logprobs": {"content": content}}]}

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, logprobs = self._sample(body, body, body["prompt"])
        choice = {"text": "never read", "token_ids": tokens, "finish_reason": "length"}
        return {"choices": [choice | {"logprobs": {"token_logprobs": logprobs}}]}

    def _sample(self, body: dict[str, Any], params: dict[str, Any], prompt: list[int]) -> tuple[list[int], list[float]]:
        while self.is_paused:
            time.sleep(0.01)
        if not self._is_check(body):
            time.sleep(self.latency_s)
            with self.lock:
                self.num_completions += 1
        is_certain = params["top_k"] == 1 and not self.raw_logprobs
        tokens = [5] * params["max_tokens"]
        logprobs_of = self.logprobs_of
        if logprobs_of is None and self._is_comparison(body):
            logprobs_of = logprobs_of_folder(self.loads[-1])
        if logprobs_of is not None and not is_certain:
            return tokens, logprobs_of([*prompt, *tokens])[-len(tokens) :]
        return tokens, [0.0 if is_certain else -1.0] * len(tokens)

    def _is_check(self, body: dict[str, Any]) -> bool:
        return body.get("cache_salt", "").startswith("check")

    def _is_comparison(self, body: dict[str, Any]) -> bool:
        return body.get("cache_salt", "").startswith("check ")


@cache
def logprobs_of_folder(
    folder: str, off_by: float = 0.0, longrope: Longrope | None = None
) -> Callable[[list[int]], list[float]]:
    """Return what a server with a folder's weights computes, off by some nats."""
    model = load_pretrained(folder, dtype=torch.float32, longrope=longrope)

    def logprobs_of(tokens: list[int]) -> list[float]:
        with torch.inference_mode():
            return (logprobs_alone(model, np.array(tokens)) - off_by).tolist()

    return logprobs_of


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits 40 ms for the headers' receipt
    fake: FakeVllm
    is_down = False

    def do_GET(self) -> None:
        self._answer("GET", {})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        self._answer("POST", json.loads(self.rfile.read(length) or b"{}"))

    def _answer(self, method: str, body: dict[str, Any]) -> None:
        path = self.path.partition("?")[0]
        while self.fake.hangs.is_set() and "token_ids" in body and not self.fake._is_check(body):
            time.sleep(0.01)
            self.connection.setblocking(False)
            try:
                if self.connection.recv(1) == b"":
                    self.fake.num_given_up += 1
                    self.close_connection = True
                    return
            except BlockingIOError:
                pass
            finally:
                self.connection.setblocking(True)
        status, content = self.fake.answer(method, path, body)
        if self.is_down:  # the connection of a dead process ends without an answer
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def listening(fake: FakeVllm, port: int = 0) -> Iterator[FakeVllm]:
    """Serve while the block lasts; sets its url."""
    handler = type("Handler", (_Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            handler.is_down = True  # type: ignore[attr-defined]
            server.shutdown()
            thread.join()
