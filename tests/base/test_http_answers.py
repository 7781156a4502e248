"""Answers of servers that send too much, too slowly or something else; whoever asks, the limits are the same."""

import asyncio
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest

from ludic.adapters.judge import Judge
from ludic.adapters.reward_models import ServerScorer
from ludic.base import http_answers
from ludic.base.http_answers import AnswerTooLongError, ask
from ludic.engines import server_http
from ludic.engines.server_http import BadAnswerError, Server, UnreachableError
from ludic.errors import JudgeError, ScorerError
from ludic.records.rollout import Message

Send = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(send: Send) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # the client has gone
                send(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Sent:
    """How a server answers, and how much of it was taken."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_over = threading.Event()

    def too_much(self, handler: BaseHTTPRequestHandler) -> None:
        """Send 1 GB in pieces, until the client goes."""
        handler.send_response(200)
        handler.end_headers()
        for _ in range(16_384):
            handler.wfile.write(b" " * 65_536)
            self.num_bytes += 65_536

    def too_slowly(self, handler: BaseHTTPRequestHandler) -> None:
        """Send a byte every 10 ms, so that the connection is never silent."""
        handler.send_response(200)
        handler.end_headers()
        while not self.is_over.wait(0.01):
            handler.wfile.write(b" ")
            self.num_bytes += 1


async def of_server(url: str, timeout_s: float) -> object:
    async with httpx2.AsyncClient(trust_env=False) as client:
        server = Server(url, client, timeout_s)
        return await server._call("GET", "/health", timeout_s=timeout_s)


async def of_judge(url: str, timeout_s: float) -> object:
    return await Judge(url, "m", tries=1, timeout_s=timeout_s).ask("?")


async def of_pooling_server(url: str, timeout_s: float) -> object:
    scorer = ServerScorer(url, {"timeout_s": timeout_s, "tries": 1})
    return await scorer.value([Message(role="user", content="?")])


ASKING = {
    "vLLM server": (of_server, BadAnswerError, UnreachableError),
    "judge": (of_judge, JudgeError, JudgeError),
    "pooling server": (of_pooling_server, ScorerError, ScorerError),
}


@pytest.mark.parametrize(("asking", "too_long", "_"), ASKING.values(), ids=ASKING)
def test_an_answer_is_read_up_to_a_limit(asking: Any, too_long: type[Exception], _: Any) -> None:
    sent = Sent()
    with serving(sent.too_much) as url, pytest.raises(too_long, match="answered more than 8,388,608 bytes"):
        asyncio.run(asking(url, 60.0))
    assert sent.num_bytes < 64 << 20  # what the buffers of the connection hold beside


@pytest.mark.parametrize(("asking", "_", "late"), ASKING.values(), ids=ASKING)
def test_the_limit_of_time_is_that_of_the_whole_answer(asking: Any, _: Any, late: type[Exception]) -> None:
    sent = Sent()
    with serving(sent.too_slowly) as url:
        with pytest.raises(late, match=r"(no whole answer|no answer) within 0.3 s"):
            asyncio.run(asyncio.wait_for(asking(url, 0.3), 30))
        sent.is_over.set()


def test_a_compressed_answer_counts_as_it_is_sent() -> None:
    bomb = zlib.compress(b" " * (64 << 20))  # 65 kB

    def send(handler: BaseHTTPRequestHandler) -> None:
        assert handler.headers["accept-encoding"] == "identity"
        handler.send_response(200)
        handler.send_header("content-encoding", "deflate")
        handler.send_header("content-length", str(len(bomb)))
        handler.end_headers()
        handler.wfile.write(bomb)

    async def get(url: str) -> http_answers.HttpAnswer:
        async with httpx2.AsyncClient(trust_env=False) as client:
            return await ask(client, "GET", url, timeout_s=60.0)

    with serving(send) as url:
        assert asyncio.run(get(url)).data == bomb


def test_an_answer_of_the_largest_size_is_whole() -> None:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(404)
        handler.end_headers()
        handler.wfile.write(b"a" * 100)

    async def get(url: str, most_bytes: int) -> http_answers.HttpAnswer:
        async with httpx2.AsyncClient(trust_env=False) as client:
            return await ask(client, "GET", url, timeout_s=60.0, most_bytes=most_bytes)

    with serving(send) as url:
        found = asyncio.run(get(url, 100))
        assert (found.status, found.is_success, found.text) == (404, False, "a" * 100)
        with pytest.raises(AnswerTooLongError):
            asyncio.run(get(url, 99))


def test_the_limit_of_a_completion_grows_with_the_tokens_asked_for() -> None:
    # 8 MB, 16 sampled tokens with 3 logprobs each of up to 1 kB; 4 + 16 tokens read with up to 16 kB of experts
    from engine_requests import a_request

    request = a_request(max_tokens=16, return_experts=True)
    num_read = len(request.prompt_tokens) + 16
    assert server_http._most_bytes(request, {"logprobs": 2}) == (8 << 20) + 16 * 3 * 1024 + num_read * 16_384
