"""Answer HTTP requests of agents: routes, keys, limits, errors and streams of the gateway, as an ASGI application.

Below `/e/EPISODE/ATTEMPT` or at the top, each with or without `/v1`:

- POST chat/completions, completions, responses, messages: model calls of an episode.
- GET models and models/ID, POST messages/count_tokens: answered, and never calls of an episode.
- POST /episodes opens an episode; POST /e/EPISODE/ATTEMPT/score and seal score and end it.

All else is answered 404, also what clients ask for beside their calls. Errors have the form of the path's dialect. A
stream is made from the complete answer, so a call that fails has a real HTTP status. Only if the answer takes long does
the stream open before it, and sends what keeps the connection alive; then an error is an event of the stream.

Writes nothing; the gateway stores (ludic.gateway.gateway). No key is stored or logged.
"""

import asyncio
import hashlib
import hmac
import logging
import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from ludic.base import host_of, mask
from ludic.base.masking import SECRET_NAME
from ludic.errors import LudicError, one_line
from ludic.gateway.calls import STATUS, Answer, Caller, CallRequest, Delivery, Dialect, RefusedCallError, refused
from ludic.gateway.config import HttpSettings
from ludic.gateway.dialects import DIALECTS, DialectModule, count_tokens, models
from ludic.gateway.episodes import EpisodeFacts, EpisodeResult, OpenEpisode, key_digest
from ludic.gateway.gateway import Gateway
from ludic.root import EPISODE
from ludic.settings import RequestLimit, in_thread

logger = logging.getLogger(__name__)

_Handler = Callable[[Request], Awaitable[Response]]

T = TypeVar("T")

_JSON = "application/json"
_EVENTS = "text/event-stream"
_IN_EPISODE = re.compile(rf"/e/({EPISODE})/([1-9][0-9]{{0,8}})(?=/|$)")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")
_MOST_PATH = 2_048
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_MOST_KEY = 512
_HINT = re.compile(r"session|conversation|thread|subagent|agent-id|parent|traceparent")
"""Names of headers that are stored as hints."""
_PARENT = re.compile(r"parent-(?:agent|call|thread|session|request|response|id)|(?<!trace)parent$")
_MOST_HINTS, _MOST_HINT = 16, 256
_RETRY_AFTER_S = 1.0
_LARGE_BODY = 256_000
"""Bytes from which a body is read in a thread: many small objects of this size take 0.1 s."""
_NOT_HERE = {
    "/embeddings": "the gateway serves no embeddings, which train nothing; send them to another server",
    "/responses/": "a stored response is not served again, cancelled, deleted or compacted; its call is in the root",
}
"""What is said of addresses that begin so."""
_HERE = "it serves chat/completions, completions, responses, messages and models"


@dataclass(slots=True, eq=False)
class _Asked:
    """What the path of a request says."""

    path: str
    """Path below the episode and /v1, such as /chat/completions."""
    episode_id: str | None = None
    attempt: int | None = None
    held_bytes: int = 0
    """Bytes of body and answer that are held for the request."""

    @property
    def in_episode(self) -> str:
        return "" if self.episode_id is None else f"/e/{self.episode_id}/{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenEpisode:
    """Body of POST /episodes."""

    episode_id: str | None = None
    attempt: int = 1
    seed: int | None = None
    timeout_s: float | None = None
    replay: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    """Body of POST score."""

    reward: float | None
    reward_components: dict[str, float] | None = None
    correct: bool | None = None
    scored_call_id: str | None = None


def make_app(
    gateway: Gateway,
    http: HttpSettings | None = None,
    *,
    own_key_digest: str | None = None,
    names: Collection[str] | None = None,
) -> "GatewayApp":
    """Return the ASGI application before a gateway.

    own_key_digest: of the gateway's own key (see `key_digest`), which opens episodes; None: only the program opens
    them. names: the only hosts that requests may name; None allows all.
    """
    return GatewayApp(gateway, http or HttpSettings(), own_key_digest, names)


class GatewayApp:
    """The ASGI application."""

    def __init__(
        self, gateway: Gateway, http: HttpSettings, own_key_digest: str | None, names: Collection[str] | None
    ) -> None:
        self._gateway, self._http, self._own_key_digest = gateway, http, own_key_digest
        self._names = None if names is None else {name.lower() for name in names}
        self._opening: dict[tuple[str, int], asyncio.Task[OpenEpisode]] = {}
        self._held_bytes = 0
        self._num_counted = 0
        """Requests whose tokens are being counted."""
        self._reading = RequestLimit(1)
        """Of large bodies, which take much memory."""
        routes: Sequence[tuple[str, _Handler, str]] = [
            ("/chat/completions", self._model_call("chat"), "POST"),
            ("/completions", self._model_call("completions"), "POST"),
            ("/responses", self._model_call("responses"), "POST"),
            ("/messages", self._model_call("messages"), "POST"),
            ("/messages/count_tokens", self._count_tokens, "POST"),
            ("/models", self._models, "GET"),
            ("/models/{model:path}", self._models, "GET"),
            ("/episodes", self._open_episode, "POST"),
            ("/score", self._score, "POST"),
            ("/seal", self._seal, "POST"),
        ]
        self._router = Router(
            [Route(path, _Endpoint(handler), methods=[method]) for path, handler, method in routes],
            redirect_slashes=False,
            default=_not_found,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"the gateway serves HTTP, not {scope['type']}")
        request = Request(scope)
        asked = _Asked(path=scope["path"])
        try:
            try:
                self._check_host(request)
                asked = _read_path(scope)
                # Starlette raises its errors of methods and paths if there is an `app`.
                inner = {**scope, "path": asked.path, "raw_path": None, "root_path": "", "app": self, "asked": asked}
                await self._router(inner, receive, send)
            except ClientDisconnect:
                pass
            except Exception as error:
                await _error_response(error, _dialect(asked.path, request))(scope, receive, send)
        finally:
            self._held_bytes -= asked.held_bytes

    def _check_host(self, request: Request) -> None:
        host = host_of(f"//{request.headers.get('host', '')}")
        if self._names is not None and host not in self._names:
            raise refused(
                "invalid", "the gateway answers requests for this machine only; --host-names adds a name of it"
            )

    # --- Model calls --------------------------------------------------------------------------------------

    def _model_call(self, dialect: Dialect) -> _Handler:
        module = DIALECTS[dialect]

        async def answer(request: Request) -> Response:
            asked: _Asked = request.scope["asked"]
            episode = await self._episode(request, asked)
            body = await self._body(request, asked)
            call = await self._read(module, body)
            # Only a call that can be read opens an episode.
            episode = episode or await self._named(asked, opens=True)
            caller = _caller(request, asked.path, body)
            delivery = Delivery(is_gone=partial(_has_hung_up, request.receive))
            if not call.stream:
                done = await self._gateway.call(episode, call, caller, delivery)
                return self._held(asked, _Answer(delivery, module.response(done, call), media_type=_JSON))
            task = asyncio.ensure_future(self._gateway.call(episode, call, caller, delivery))
            await asyncio.wait((task,), timeout=self._http.open_stream_after_s)
            if not task.done():
                return _HeldBackStream(task, call, module, self._http.keep_alive_s, delivery)
            events = b"".join(module.stream(task.result(), call))
            return self._held(asked, _Answer(delivery, events, media_type=_EVENTS, headers=_UNCACHED))

        return answer

    async def _read(self, module: DialectModule, body: bytes) -> CallRequest:
        """Read the body of a call; a large one in a thread, one at a time, while other requests are answered."""
        read = partial(module.read, body, lenient=self._gateway.settings.lenient, names=self._model_names)
        if len(body) < _LARGE_BODY:
            return read()
        async with self._reading.turn():
            return await in_thread(read)

    @property
    def _model_names(self) -> tuple[str, ...]:
        return (self._gateway.backend.model,)

    async def _count_tokens(self, request: Request) -> Response:
        asked: _Asked = request.scope["asked"]
        await self._check_key(request, asked)
        body = await self._body(request, asked)
        most = self._gateway.settings.max_in_flight
        if self._num_counted >= most:
            sentence = f"the tokens of {most} requests are counted, the gateway's limit (--max-in-flight); try again"
            raise refused("full", sentence, retry_after_s=_RETRY_AFTER_S)
        self._num_counted += 1
        try:
            call = await self._read(DIALECTS["messages"], body)
            return Response(count_tokens(await self._gateway.backend.count(call)), media_type=_JSON)
        finally:
            self._num_counted -= 1

    async def _models(self, request: Request) -> Response:
        await self._check_key(request, request.scope["asked"])
        listed = models(self._model_names)
        name = request.path_params.get("model")
        if name is None:
            return Response(listed, media_type=_JSON)
        if name not in self._model_names:
            raise refused("unknown_model", f"there is no model {name[:100]!r}; {self._gateway.backend.model} is served")
        found = next(each for each in msgspec.json.decode(listed)["data"] if each["id"] == name)
        return Response(msgspec.json.encode(found), media_type=_JSON)

    # --- Episodes -----------------------------------------------------------------------------------------

    async def _open_episode(self, request: Request) -> Response:
        asked: _Asked = request.scope["asked"]
        if not self._is_own(_key(request)):
            raise refused("wrong_key", "only the gateway's own key opens episodes")
        if asked.episode_id is not None:
            raise refused("not_found", "episodes are opened at /episodes")
        given = _decode(await self._body(request, asked), _OpenEpisode)
        episode = await self._gateway.open_episode(
            episode_id=given.episode_id,
            attempt=given.attempt,
            seed=given.seed,
            facts=_convert(given.facts, EpisodeFacts, "facts"),
            timeout_s=given.timeout_s,
            replay=given.replay,
        )
        base = f"{request.scope['scheme']}://{request.headers.get('host', '')}/e/{episode.episode_id}/{episode.attempt}"
        opened = {
            "episode_id": episode.episode_id,
            "attempt": episode.attempt,
            "key": episode.key,
            "openai_base_url": f"{base}/v1",
            "anthropic_base_url": base,
            "expires_at": episode.expires_at.isoformat(),
        }
        return Response(msgspec.json.encode(opened), 201, media_type=_JSON)

    async def _score(self, request: Request) -> Response:
        asked: _Asked = request.scope["asked"]
        episode = await self._episode(request, asked)
        if episode is None:
            try:
                episode = await self._named(asked)
            except RefusedCallError as error:
                if error.reason != "sealed":
                    raise
        given = _decode(await self._body(request, asked), _Score)
        values = {each.name: getattr(given, each.name) for each in fields(given)}
        if episode is not None:
            await self._gateway.score(episode, **values)
        else:
            assert asked.episode_id is not None and asked.attempt is not None  # noqa: PT018
            result = EpisodeResult(**{**values, "reward_components": given.reward_components or {}})
            await self._gateway.score_sealed(asked.episode_id, asked.attempt, result)
        return Response(b"{}", media_type=_JSON)

    async def _seal(self, request: Request) -> Response:
        asked: _Asked = request.scope["asked"]
        episode = await self._episode(request, asked) or await self._named(asked)
        body = await self._body(request, asked)
        result = _decode(body, EpisodeResult) if body.strip() else None
        await self._gateway.seal(episode, result)
        return Response(b"{}", media_type=_JSON)

    # --- Keys ---------------------------------------------------------------------------------------------

    def _is_own(self, key: str) -> bool:
        own = self._own_key_digest
        return own is not None and hmac.compare_digest(key_digest(key), own)

    async def _check_key(self, request: Request, asked: _Asked) -> None:
        """Raise RefusedCallError unless the key is the gateway's own or that of an open episode."""
        key = _key(request)
        if not self._is_own(key):
            await self._gateway.find(key, asked.episode_id, asked.attempt)

    async def _episode(self, request: Request, asked: _Asked) -> OpenEpisode | None:
        """Return the open episode of a request's key; None for the gateway's own key, if the address names one."""
        key = _key(request)
        if not self._is_own(key):
            return await self._gateway.find(key, asked.episode_id, asked.attempt)
        if asked.episode_id is None:
            raise refused(
                "wrong_key",
                "the gateway's own key is for addresses that name an episode, such as /e/EPISODE/1/v1; "
                "or use the key of an episode, which POST /episodes returns",
            )
        return None

    async def _named(self, asked: _Asked, *, opens: bool = False) -> OpenEpisode:
        """Return the open episode of an address, by the gateway's own key. opens: one that does not exist is opened."""
        assert asked.episode_id is not None, "the address names an episode"
        assert asked.attempt is not None, "with its attempt"
        try:
            return await self._gateway.find(None, asked.episode_id, asked.attempt)
        except RefusedCallError as error:
            if error.reason != "not_found" or not opens:
                raise
        return await self._opened(asked.episode_id, asked.attempt)

    async def _opened(self, episode_id: str, attempt: int) -> OpenEpisode:
        """Open an episode, once for all requests that come at the same time."""
        named = episode_id, attempt
        task = self._opening.get(named)
        if task is None:
            task = asyncio.ensure_future(self._gateway.open_episode(episode_id=episode_id, attempt=attempt))
            self._opening[named] = task
            task.add_done_callback(lambda _: self._opening.pop(named))
        return await asyncio.shield(task)

    # --- Limits -------------------------------------------------------------------------------------------

    async def _body(self, request: Request, asked: _Asked) -> bytes:
        """Return the body of a request, within the limits of size and time."""
        most, length = self._gateway.settings.max_body_bytes, request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 15 or int(length) > most):
            raise _too_large(most)
        coding = request.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise _refused(415, f"the body is sent as {coding[:40]!r}; send it without Content-Encoding")
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self._http.receive_within_s):
                async for piece in request.stream():
                    self._hold(asked, len(piece))
                    if asked.held_bytes > most:
                        raise _too_large(most)
                    pieces.append(piece)
        except TimeoutError:
            raise _refused(408, f"the body took more than {self._http.receive_within_s:g} s") from None
        return b"".join(pieces)

    def _hold(self, asked: _Asked, num_bytes: int) -> None:
        if self._held_bytes + num_bytes > self._http.max_held_mb * 1_000_000:
            raise refused("full", "the gateway holds too many bytes of requests", retry_after_s=_RETRY_AFTER_S)
        asked.held_bytes += num_bytes
        self._held_bytes += num_bytes

    def _held(self, asked: _Asked, response: Response) -> Response:
        """Count the bytes of an answer until it is sent. It is stored, so it is never refused."""
        asked.held_bytes += len(response.body)
        self._held_bytes += len(response.body)
        return response


class _Endpoint:
    """What a route calls; Starlette's own wrapper would look for handlers of errors, which are handled above."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class _Answer(Response):
    """An answer that is sent when the client has read nearly all of it."""

    def __init__(
        self, delivery: Delivery, body: bytes, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(body, media_type=media_type, headers=headers)
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_all(send, self.body, self._delivery)


async def _has_hung_up(receive: Receive) -> bool:
    """Return whether a client whose request was read has hung up, without waiting.

    Request.is_disconnected says the same, and takes a tenth of the time that a short call takes here.
    """
    waiting = receive().__await__()
    try:
        next(waiting)
    except StopIteration as ended:
        return bool(ended.value["type"] == "http.disconnect")
    waiting.close()
    return False


async def _send_all(send: Send, body: bytes | memoryview, delivery: Delivery) -> None:
    """Send a body, and record whether the client got it; returns when it has read it but for some kilobytes."""
    try:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits for room
        if delivery.state == "waiting" and not await delivery.is_lost():  # the end of a response looks like a loss
            delivery.end("sent")
        await send({"type": "http.response.body", "body": b""})
    finally:
        if delivery.state == "waiting":
            delivery.end("lost")


class _HeldBackStream(Response):
    """A stream that opens before the answer is complete."""

    def __init__(
        self,
        task: "asyncio.Future[Answer]",
        call: CallRequest,
        module: DialectModule,
        keep_alive_s: float,
        delivery: Delivery,
    ) -> None:
        super().__init__(media_type=_EVENTS, headers=_UNCACHED)
        del self.headers["content-length"]
        self._task, self._call, self._module, self._keep_alive_s = task, call, module, keep_alive_s
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not self._task.done():
            await send({"type": "http.response.body", "body": self._module.keep_alive(), "more_body": True})
            await asyncio.wait((self._task,), timeout=self._keep_alive_s)
        try:
            events = b"".join(self._module.stream(self._task.result(), self._call))
        except Exception as error:
            events = self._module.stream_error(_as_refusal(error))
        await _send_all(send, events, self._delivery)


_UNCACHED = {"cache-control": "no-store"}


# --- Requests -----------------------------------------------------------------------------------------------------


def _read_path(scope: Scope) -> _Asked:
    """Return the episode and the path below it. Raises RefusedCallError for one that is not plain.

    Percent-encoded characters are decoded below the episode alone, so none can lead out of it.
    """
    raw = scope.get("raw_path")
    path = scope["path"] if raw is None else raw.decode("latin-1")
    if len(path) > _MOST_PATH or not _PLAIN_PATH.fullmatch(path):
        raise _no_path()
    found = _IN_EPISODE.match(path)
    rest = path[found.end() :] if found else path
    rest = rest.removeprefix("/v1").removeprefix("/v1")  # a base URL with /v1, for a client that adds it
    decoded = unquote_to_bytes(rest)
    try:
        rest = decoded.decode()
    except UnicodeDecodeError:
        raise _no_path() from None
    parts = rest.split("/")
    if not rest.isprintable() or "\\" in rest or {"", ".", ".."} & {*parts[1:]} or parts[0] or parts[1:2] == ["e"]:
        raise _no_path()
    return _Asked(rest, found[1], int(found[2])) if found else _Asked(rest)


def _no_path() -> RefusedCallError:
    return refused("not_found", f"the gateway has no such address; {_HERE}, below /e/EPISODE/ATTEMPT/v1 or /v1")


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["asked"].path
    for name, sentence in _NOT_HERE.items():
        if path.startswith(name):
            raise refused("not_found", sentence)
    raise refused("not_found", f"the gateway has no {path[:100]!r}; {_HERE}")


def _dialect(path: str, request: Request) -> Dialect:
    """Return the dialect of the errors of a path."""
    first = path.removeprefix("/").partition("/")[0]
    if first == "messages" or "anthropic-version" in request.headers:
        return "messages"
    return first if first in ("completions", "responses") else "chat"  # type: ignore[return-value]


def _key(request: Request) -> str:
    """Return the API key of a request. Raises RefusedCallError if there is none, or two that differ."""
    given = {name: value for name in _KEY_HEADERS if (value := request.headers.get(name)) is not None}
    if (value := given.get("authorization")) is not None:
        scheme, _, key = value.partition(" ")
        if scheme.lower() != "bearer":
            raise refused("wrong_key", "the header Authorization is not Bearer KEY")
        given["authorization"] = key.strip()
    keys = {*given.values()}
    if len(keys) > 1:
        raise refused("wrong_key", f"the headers {' and '.join(given)} hold different keys; send one of them")
    if not keys or not (key := keys.pop()):
        raise refused("wrong_key", "the request has no API key; send it as Authorization: Bearer KEY, or as x-api-key")
    if len(key) > _MOST_KEY:
        raise refused("wrong_key", "no key of the gateway is so long")
    return key


def _caller(request: Request, path: str, body: bytes) -> Caller:
    headers = request.headers
    idempotency = headers.get("idempotency-key")
    count = headers.get("x-stainless-retry-count", "")
    hints: dict[str, str] = {}
    for name, value in headers.items():
        if len(hints) < _MOST_HINTS and _HINT.search(name) and not SECRET_NAME.search(name):
            hints[name[:100]] = _masked(value)
    agent = headers.get("user-agent")
    digest = hashlib.sha256(f"{request.method} /v1{path}\n".encode())
    digest.update(body)
    return Caller(
        request_digest=digest.hexdigest(),
        idempotency_key=None if idempotency is None else hashlib.sha256(idempotency.encode()).hexdigest(),
        retry_count=int(count) if count.isdecimal() and len(count) < 5 else None,
        declared_parent=next((value for name, value in hints.items() if _PARENT.search(name)), None),
        hints=hints,
        user_agent=None if agent is None else _masked(agent),
    )


@lru_cache(4_096)
def _masked(value: str) -> str:
    return mask(value)[:_MOST_HINT]


def _decode(body: bytes, kind: type[T]) -> T:
    """Return a body of the gateway's own routes. Raises RefusedCallError."""
    try:
        values = msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused("invalid", f"the body is no JSON object: {one_line(error)}") from error
    return _convert(values, kind, "the body")


def _convert(values: Mapping[str, Any], kind: type[T], where: str) -> T:
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise refused("invalid", f"{where} has {name[:100]!r}; wanted {', '.join(known)}", field=name[:100])
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise refused("invalid", f"{where} is not as wanted: {one_line(error)}") from error


# --- Errors -------------------------------------------------------------------------------------------------------


class _HttpRefusalError(RefusedCallError):
    """A refusal with a status of HTTP itself."""

    status = 400


def _refused(status: int, sentence: str) -> RefusedCallError:
    error = _HttpRefusalError(sentence)
    error.status = status
    return error


def _too_large(most: int) -> RefusedCallError:
    return refused("too_large", f"the body has more than {most:,} bytes, the gateway's limit (--max-body-bytes)")


def _as_refusal(error: Exception) -> RefusedCallError:
    """Return any error as one that a dialect can write; a mistake of ours is logged, and not told to the client."""
    if isinstance(error, RefusedCallError):
        return error
    if isinstance(error, HTTPException):
        methods = (error.headers or {}).get("Allow", "")
        return _refused(error.status_code, f"this address takes {methods} only" if methods else str(error.detail))
    if isinstance(error, LudicError):
        return refused("engine", one_line(error))
    logger.error("a request failed", exc_info=error)
    return refused("engine", "the gateway failed; its log says why")


def _error_response(error: Exception, dialect: Dialect) -> Response:
    refusal = _as_refusal(error)
    status = refusal.status if isinstance(refusal, _HttpRefusalError) else STATUS[refusal.reason]
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    if refusal.owner is not None:
        headers["x-ludic-gateway"] = refusal.owner
    if status < 500 and status not in (408, 429):
        # The SDKs of OpenAI and Anthropic would send a call to a sealed episode (409) again.
        headers["x-should-retry"] = "false"
    return Response(DIALECTS[dialect].error(refusal), status, headers, media_type=_JSON)
