"""The gateway over HTTP: routes, keys, limits, errors in the dialect of the path, and streams that are held back."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway.scripted import Asked, Turn, says, scripted_agent
from gateway.served import OWN_KEY, Episode, ServedGateway, served

from ludic.base.defaults import RECORDED_ENV
from ludic.engines.engine import SamplingParams
from ludic.gateway.calls import CallRequest
from ludic.gateway.config import GatewaySettings, HttpSettings
from ludic.gateway.dialects import chat
from ludic.gateway.server import allow_many_files
from ludic.root.gateways import episode_claims
from ludic.root.rows.calls import read_all_calls, read_calls
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

SLOW_S = 0.5
LONG = 450_000
"""Bytes of an answer that the buffers of two sockets do not hold."""
HTTP = HttpSettings(
    open_stream_after_s=0.1, keep_alive_s=0.05, receive_within_s=0.5, send_within_s=0.5, max_header_bytes=20_000
)
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"model": "scripted", "messages": MESSAGES},
    "/completions": {"model": "scripted", "prompt": "hello"},
    "/responses": {"model": "scripted", "input": "hello"},
    "/messages": {"model": "scripted", "messages": MESSAGES, "max_tokens": 100},
}


def script(asked: Asked) -> str | Turn:
    """What the model says follows from the last message."""
    if "be slow" in asked.prompt:
        return Turn(text=says("slowly"), delay_s=SLOW_S)
    if "fail late" in asked.prompt:
        return Turn(delay_s=SLOW_S, error=RuntimeError("the device is gone"))
    if "fail" in asked.prompt:
        return Turn(error=RuntimeError("the device is gone"))
    if "be long" in asked.prompt:
        return "x" * LONG
    return says("good day")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedGateway]:
    root = create_root(str(folder / "run"), RunConfig(model="scripted", env=(RECORDED_ENV,)))
    settings = GatewaySettings(max_body_bytes=100_000)
    sampling = SamplingParams(max_tokens=10_000_000)
    with served(root, scripted_agent(script), settings=settings, http=HTTP, sampling=sampling) as here:
        yield here


@pytest.fixture(scope="module")
def episode(server: ServedGateway) -> Episode:
    """An episode without calls."""
    return server.open_episode()


def num_files(folder: Path) -> int:
    """Files of calls, which also have the intents."""
    return len([*folder.glob("run/calls/*")])


def connected(server: ServedGateway, room: int | None = None) -> socket.socket:
    """A connection. room: bytes that it may have received and not read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(5)
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.connect((host, int(port)))
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server closes or cuts the connection."""
    found = b""
    try:
        while piece := connection.recv(1 << 20):
            found += piece
    except ConnectionResetError:
        pass
    return found


def raw(server: ServedGateway, request: bytes) -> bytes:
    with connected(server) as connection:
        connection.sendall(request)
        return until_closed(connection)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("before", ["", "/v1"])
def test_each_dialect_is_served_below_an_episode_and_at_the_top_with_and_without_v1(
    server: ServedGateway, path: str, before: str
) -> None:
    episode = server.open_episode()
    by_header = {"x-api-key": episode.key} if path == "/messages" else episode.headers
    for base in (episode.base_url, episode.url):
        for stream in (False, True):
            body = {**BODIES[path], "stream": stream}
            found = httpx2.post(f"{base}{before}{path}", json=body, headers=by_header)
            assert found.status_code == 200, found.text
            kind = "text/event-stream" if stream else "application/json"
            assert found.headers["content-type"].startswith(kind)
            assert "good" in found.text
            if not stream:
                json.loads(found.text)
    stored = read_calls(server.root, episode.episode_id, 1).to_pylist()
    dialect = {"/chat/completions": "chat"}.get(path, path.removeprefix("/"))
    assert [row["dialect"] for row in stored if row["event"] == "call"] == [dialect] * 4


WRONG: list[tuple[str, str, dict[str, str], bytes, int, str]] = [
    ("POST", "/v1/chat/completions", {}, b"{}", 401, "no API key"),
    ("POST", "/v1/chat/completions", {"Authorization": "Bearer sk-wrong"}, b"{}", 401, "key"),
    ("POST", "/v1/chat/completions", {"Authorization": "Basic sk-wrong"}, b"{}", 401, "Bearer"),
    ("POST", "/v1/chat/completions", {"Authorization": "Bearer KEY", "api-key": "sk-other"}, b"{}", 401, "different"),
    ("POST", "/v1/chat/completions", {"Authorization": f"Bearer {OWN_KEY}"}, b"{}", 401, "gateway's own key"),
    ("POST", "/v1/messages", {"x-api-key": "KEY"}, b'{"messages": [', 400, "JSON"),
    ("POST", "/v1/chat/completions", {"Authorization": "Bearer KEY"}, b"[" * 90_000, 400, "nested"),
    ("POST", "/v1/responses", {"Authorization": "Bearer KEY"}, b'{"model": "gpt-5", "input": "a"}', 404, "gpt-5"),
    ("POST", "/v1/chat/completions", {"Authorization": "Bearer KEY"}, b"x" * 100_001, 413, "100,000"),
    (
        "POST", "/v1/chat/completions", {"Authorization": "Bearer KEY", "Content-Encoding": "gzip"}, b"{}", 415,
        "Content-Encoding",
    ),
    ("GET", "/v1/messages", {"x-api-key": "KEY"}, b"", 405, "POST"),
    ("DELETE", "/v1/models/scripted", {"x-api-key": "KEY"}, b"", 405, "GET"),
    ("POST", "/v1/embeddings", {"Authorization": "Bearer KEY"}, b"{}", 404, "embeddings"),
    ("GET", "/v1/responses/resp_1", {"Authorization": "Bearer KEY"}, b"", 404, "stored response"),
    ("POST", "/v1/responses/resp_1/cancel", {"Authorization": "Bearer KEY"}, b"", 404, "cancelled"),
    ("GET", "/v1/models/gpt-5", {"Authorization": "Bearer KEY"}, b"", 404, "gpt-5"),
    ("HEAD", "/", {"anthropic-version": "2023-06-01"}, b"", 404, ""),
    ("HEAD", "/api/hello", {}, b"", 404, ""),
    ("POST", "/api/event_logging/v2/batch", {"anthropic-version": "1", "x-api-key": "KEY"}, b"{}", 404, "event_log"),
    ("GET", "/v1/organizations/1/usage", {"Authorization": "Bearer KEY"}, b"", 404, "organizations"),
    ("POST", "/episodes", {"Authorization": "Bearer KEY"}, b"{}", 401, "own key"),
    ("POST", "/episodes", {"Authorization": f"Bearer {OWN_KEY}"}, b'{"epsiode_id": "a"}', 400, "epsiode_id"),
    ("POST", "/episodes", {"Authorization": f"Bearer {OWN_KEY}"}, b'{"facts": {"grop_id": 1}}', 400, "grop_id"),
    *(
        ("POST", "/episodes", {"x-api-key": OWN_KEY}, b'{"facts": {"columns": {%b}}}' % each, 400, words)
        for each, words in (
            (b'"reward": 1', "'reward', wanted example_columns, extra, wanted"),
            (b'"wanted": 4', "wanted 4, wanted a text"),
            (b'"extra": {"x_level": 1}', "'x_level'"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "headers", "body", "status", "words"), WRONG)
def test_what_is_refused_has_its_status_and_the_form_of_the_dialect_and_is_no_call(
    episode: Episode,
    folder: Path,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
    words: str,
) -> None:
    before = num_files(folder)
    sent = {name: value.replace("KEY", episode.key) for name, value in headers.items()}
    found = httpx2.request(method, episode.url + path, headers=sent, content=body)
    assert found.status_code == status, found.text
    assert found.headers["x-should-retry"] == "false"
    if method != "HEAD":
        error = found.json()["error"]
        assert words in error["message"]
        is_anthropic = "messages" in path or "anthropic-version" in headers
        assert (found.json().get("type") == "error") == is_anthropic
        assert episode.key not in found.text
        assert OWN_KEY not in found.text
    assert num_files(folder) == before


@pytest.mark.parametrize(
    "path",
    [
        "/e/{id}/1/../../other/1/v1/models",
        "/e/{id}/1/%2e%2e/%2e%2e/other/1/v1/models",
        "/e/{id}/1%2Fv1%2Fmodels",
        "/e/{id}%2f..%2fother/1/v1/models",
        "/e/../etc/1/v1/models",
        "/e/{id}/1/v1//models",
        "/%65/{id}/1/v1/models",
        "/e/{id}/1/v1/models/%00",
        "/e/{id}/1/v1/models/a%5c..%5cb",
        "/e/{id}/1/v1/models/%ff",
        "/e/{id}/01/v1/models",
        "/e/{id}/1/e/{id}/1/v1/models",
        "/e/{id}/1/v1/models/" + "a" * 3_000,
        "/e/other/1/v1/models",
    ],
)
def test_no_path_leaves_its_episode(server: ServedGateway, episode: Episode, folder: Path, path: str) -> None:
    before = sorted(folder.rglob("*"))
    target = path.replace("{id}", episode.episode_id)
    head = (
        f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {episode.key}\r\nConnection: close\r\n\r\n"
    )
    found = raw(server, head.encode())
    assert found.split(b" ")[1] in (b"404", b"401"), found
    assert sorted(folder.rglob("*")) == before


def test_a_chunked_body_is_counted(episode: Episode) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(11):
            yield b" " * 10_000

    found = httpx2.post(f"{episode.base_url}/v1/messages", content=pieces(), headers=episode.headers)
    assert found.status_code == 413
    assert found.json()["error"]["type"] == "request_too_large"


def test_a_slow_client_is_answered_408_or_cut(server: ServedGateway, episode: Episode) -> None:
    head = f"POST {episode.base_url.removeprefix(server.url)}/v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with connected(server) as slow_body, connected(server) as slow_headers:
        slow_body.sendall(f"{head}Authorization: Bearer {episode.key}\r\nContent-Length: 100\r\n\r\n{{".encode())
        slow_headers.sendall(head.encode())
        found = until_closed(slow_body)
        assert found.startswith(b"HTTP/1.1 408")
        assert b'"type":"error"' in found
        assert until_closed(slow_headers) == b""


def test_endless_headers_are_refused(server: ServedGateway) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nX-Long: " + b"a" * 200_000)
        time.sleep(0.05)
        with suppress(ConnectionError):
            connection.sendall(b"a" * 100_000)
        assert until_closed(connection)[:12] in (b"HTTP/1.1 431", b"")  # a reset may come first


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_and_its_call_is_stored(server: ServedGateway) -> None:
    episode = server.open_episode()
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "be long"}]}).encode()
    target = f"{episode.base_url.removeprefix(server.url)}/v1/chat/completions"
    head = f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {episode.key}\r\n"
    with connected(server, room=4_096) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_for_flight()
        server.wait_until_idle()
        time.sleep(2 * HTTP.send_within_s)
        assert len(until_closed(connection)) < LONG
    events = [row["event"] for row in read_calls(server.root, episode.episode_id, 1).to_pylist()]
    assert events[-1] == "call"


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_opens_before_its_answer_only_if_that_takes_long(server: ServedGateway, path: str) -> None:
    episode = server.open_episode()

    def ask(words: str) -> tuple[int, list[bytes], float]:
        told = json.loads(json.dumps({**BODIES[path], "stream": True}).replace("hello", words))
        began = time.monotonic()
        with httpx2.stream("POST", f"{episode.base_url}/v1{path}", json=told, headers=episode.headers) as found:
            return found.status_code, [*found.iter_raw()], time.monotonic() - began

    status, pieces, _ = ask("be slow")
    assert status == 200
    assert len(pieces) > 1
    assert b"slow" not in pieces[0]
    assert b"slow" in pieces[-1]
    status, pieces, _ = ask("fail late")
    assert status == 200
    assert b"error" in pieces[-1]
    status, _, spent_s = ask("fail")
    assert status == 500 or spent_s > HTTP.open_stream_after_s  # of a busy machine


def test_the_gateways_own_key_opens_scores_and_seals_episodes(server: ServedGateway) -> None:
    own = {"x-api-key": OWN_KEY}
    body = BODIES["/messages"]
    assert httpx2.post(f"{server.url}/e/no/1/messages", json={"model": "scripted"}, headers=own).status_code == 400
    url = f"{server.url}/e/by-url.1/2"
    threads = [
        threading.Thread(target=httpx2.post, args=(f"{url}/v1/messages",), kwargs={"json": body, "headers": own})
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert server.gateway is not None
    opened = server.open_episode(episode_id="named", attempt=3, facts={"group_id": "g", "group_size": 2})
    assert (opened.episode_id, opened.attempt) == ("named", 3)
    assert httpx2.post(f"{opened.base_url}/v1/messages", json=body, headers=opened.headers).status_code == 200
    assert httpx2.post(f"{url}/score", json={"reward": 1.0}, headers=opened.headers).status_code == 401
    assert httpx2.post(f"{server.url}/e/no/1/score", json={"reward": 1.0}, headers=own).status_code == 404
    assert httpx2.post(f"{server.url}/e/no/1/seal", headers=own).status_code == 404
    assert httpx2.post(f"{url}/score", json={"reward": 0.5}, headers=own).status_code == 200
    assert httpx2.post(f"{url}/seal", headers=own).status_code == 200
    opened.seal(reward=0.25)
    for base, key in ((url, OWN_KEY), (opened.base_url, opened.key)):
        found = httpx2.post(f"{base}/v1/messages", json=body, headers={"x-api-key": key})
        assert found.status_code == 409
        assert found.headers["x-should-retry"] == "false"  # the SDKs would try again
    claims = {claim.episode_id: claim for claim in episode_claims(server.root)}
    assert claims["by-url.1"].attempt == 2
    assert claims["by-url.1"].reward == 0.5
    assert (claims["named"].reward, claims["named"].group_id) == (0.25, "g")


def test_other_names_of_this_machine_are_refused(server: ServedGateway) -> None:
    for host, status in (("evil.example", b"400"), ("localhost:1", b"401")):
        found = raw(server, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert found.split(b" ")[1] == status


def test_models_and_counts_are_no_calls(server: ServedGateway, episode: Episode, folder: Path) -> None:
    before = num_files(folder)
    listed = httpx2.get(f"{episode.base_url}/v1/models?client_version=1", headers=episode.headers).json()
    assert [model["id"] for model in listed["data"]] == ["scripted"]
    assert httpx2.get(f"{server.url}/v1/models/scripted", headers=episode.headers).json()["id"] == "scripted"
    counted = httpx2.post(
        f"{episode.base_url}/v1/messages/count_tokens?beta=true",
        json={"model": "scripted", "messages": MESSAGES},
        headers={"x-api-key": episode.key},
    )
    assert counted.json()["input_tokens"] > len("hello")
    assert num_files(folder) == before


def test_a_large_body_is_read_beside_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = create_root(str(tmp_path / "run"), RunConfig(model="scripted", env=(RECORDED_ENV,)))
    begun, may_end, read = threading.Event(), threading.Event(), chat.read

    def read_slowly(body: bytes, **options: Any) -> CallRequest:
        begun.set()
        assert may_end.wait(5), "nothing else was answered"
        return read(body, **options)

    monkeypatch.setattr(chat, "read", read_slowly)
    with served(root, scripted_agent(script)) as here:
        episode = here.open_episode()
        large = {**BODIES["/chat/completions"], "metadata": {"trace": "a" * 300_000}}
        found: list[httpx2.Response] = []
        call = threading.Thread(target=lambda: found.append(episode.post("/v1/chat/completions", large)))
        call.start()
        assert begun.wait(60)
        assert httpx2.get(f"{episode.base_url}/v1/models", headers=episode.headers, timeout=60).status_code == 200
        may_end.set()
        call.join()
    assert found[0].status_code == 200, found[0].text


def test_counts_of_tokens_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = create_root(str(tmp_path / "run"), RunConfig(model="scripted", env=(RECORDED_ENV,)))
    begun, may_end = threading.Event(), threading.Event()

    async def count(request: CallRequest) -> int:
        begun.set()
        await asyncio.to_thread(may_end.wait, 60)
        return 3

    with served(root, scripted_agent(script), settings=GatewaySettings(max_in_flight=1)) as here:
        assert here.gateway is not None
        monkeypatch.setattr(here.gateway.backend, "count", count)
        episode, path, found = here.open_episode(), "/v1/messages/count_tokens", []
        first = threading.Thread(target=lambda: found.append(episode.post(path, BODIES["/messages"])))
        first.start()
        assert begun.wait(60)
        threading.Timer(5, may_end.set).start()  # without a limit the second one waits, too
        refused = episode.post(path, BODIES["/messages"])
        may_end.set()
        first.join()
        assert episode.post(path, BODIES["/messages"]).status_code == 200
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "--max-in-flight" in refused.json()["error"]["message"]
    assert found[0].json() == {"input_tokens": 3}


def test_keys_are_in_no_file_and_no_log(server: ServedGateway, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        episode = server.open_episode()
        headers = {**episode.headers, "session-token": episode.key, "x-session-id": episode.key}
        told = [*MESSAGES, {"role": "user", "content": f"OPENAI_API_KEY={episode.key} is what env prints"}]
        body = {"model": "scripted", "messages": told}
        assert httpx2.post(f"{episode.base_url}/v1/chat/completions", json=body, headers=headers).status_code == 200
        episode.seal()
    for secret in (episode.key, OWN_KEY):
        assert secret not in caplog.text
        for file in folder.rglob("*"):
            assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_a_stop_refuses_new_calls_and_answers_those_in_flight(tmp_path: Path) -> None:
    root = create_root(str(tmp_path / "run"), RunConfig(model="scripted", env=(RECORDED_ENV,)))
    with served(root, scripted_agent(script), http=HTTP) as here:
        episode = here.open_episode()
        body = {"model": "scripted", "messages": [{"role": "user", "content": "be slow"}]}
        found: list[httpx2.Response] = []
        call = threading.Thread(target=lambda: found.append(episode.post("/v1/chat/completions", body)))
        call.start()
        here.wait_for_flight()
        here.stop()
        time.sleep(0.05)
        refused = episode.post("/v1/chat/completions", body)
        call.join()
    assert refused.status_code == 503
    assert float(refused.headers["retry-after"]) >= 1
    assert found[0].status_code == 200
    assert read_all_calls(root).num_rows >= 1


@pytest.mark.slow
def test_5_000_open_connections_do_not_keep_out_a_call(server: ServedGateway) -> None:
    allow_many_files()
    episode = server.open_episode()
    idle: list[socket.socket] = []
    try:
        for _ in range(5_000):
            idle.append(connected(server))
        assert episode.post("/v1/messages", BODIES["/messages"]).status_code == 200
        head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        for each in (idle[0], idle[-1]):
            each.sendall(head)
            assert each.recv(100).startswith(b"HTTP/1.1 400")
    finally:
        for each in idle:
            each.close()
