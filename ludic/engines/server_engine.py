"""Sample on vLLM servers over HTTP: token ids in, token ids with logprobs out, never text.

Checks Hugging Face folders and passes their paths to the servers, which read the weights; writes nothing. Several
workers may share servers without a coordinator, by these rules (server_pool.py, server_loading.py):

- **Who loads.** Each worker brings each of its servers to the newest version that it knows. A server's label names its
  version and the worker that is loading (server_loading.py). If several workers want to load at the same time, one
  does; the others wait until the version is there. A server that `ludic serve` started loads weights itself, and
  workers only wait.
- **The newest version of the run wins.** A server with a newer version than a worker wants keeps it. The worker samples
  from it and stores, for each token, the version that the server reports.
- **A server gets requests** only while it holds the wanted version or a newer one. Excluded are a server that is down,
  one that was restarted and has not loaded yet, one whose load failed half-way until a load succeeds, and one that
  another run uses.
- **A worker that dies while it loads** leaves a claim in the label, a paused server, or both. After some seconds
  another worker, or its own next life, loads instead.

Raises ConfigError for a server that was started with other flags than ludic needs, ModelError for a folder that can't
be used, NoServerError if no server answers while weights are loaded, and EngineError if the answers are repeatedly
unusable.
"""

import asyncio
import logging
import os
import threading
from base64 import b64encode
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx2

from ludic.base import SERVER_LOGIN, Longrope, keep_secret
from ludic.engines.engine import Completion, GenerationRequest, check_keeps_experts, check_request
from ludic.engines.registry import EngineSetup
from ludic.engines.server_http import Server, check_url
from ludic.engines.server_loading import LoadedWeights, Wanted
from ludic.engines.server_pool import ServerPool
from ludic.errors import ConfigError, ModelError, NoServerError
from ludic.models import (
    base_of_adapter,
    check_folder,
    check_served,
    eos_token_ids,
    load_config,
    load_generation_config,
    max_positions,
    routing_of,
)
from ludic.settings.table import check

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 1800.0
"""Default time limit for an answer to a request, in seconds; then the request is sent again."""

_FLOAT32_HEAD = """'{"head_dtype": "float32"}'"""
_NO_URL = "engine server needs the URL of a server; set --server-url http://HOST:8000"
_T = TypeVar("_T")


class ServerEngine:
    """Engine that samples on vLLM servers; see ludic.engines.engine.Engine for the contract.

    While no server answers, `generate` waits for one. It does not promise equal tokens for a seed across servers.
    """

    def __init__(
        self,
        folder: str,
        urls: Sequence[str],
        *,
        version: int = 0,
        run_id: str | None = None,
        max_batch: int = 256,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        loads_all: bool = False,
        keep_experts: bool = False,
        longrope: Longrope | None = None,
    ) -> None:
        """Bring the servers to the weights of a folder, and return once one of them has these.

        urls: such as http://node1:8000. run_id: workers of the same run share servers; None does not share them.
        max_batch: maximum requests that each server has at a time; further ones wait here. request_timeout_s: time
        limit for an answer to a request. loads_all: also load into servers that `ludic serve` started, which is for
        `ludic serve` itself. keep_experts: requests may ask for the experts that tokens are sent to.
        longrope: of EngineSetup.
        """
        if not urls:
            raise ConfigError(_NO_URL)
        addresses = [check_url(url) for url in dict.fromkeys(urls)]
        self._config = load_config(folder)
        _check(folder, self._config)
        routing = routing_of(self._config, folder) if keep_experts else None
        self._keeps_experts, self._longrope = keep_experts, longrope
        self.max_batch = max_batch * len(addresses)
        self._run_id = run_id or f"none-{uuid4().hex}"
        self._vocab_size = self._config.get_text_config().vocab_size
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ludic-servers", daemon=True)
        self._thread.start()
        self._client = httpx2.AsyncClient(
            headers=_authorization(),
            # vLLM closes a connection that is idle for 5 s; a request at that moment must be sent again.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            trust_env=False,  # a proxy of the environment is for other hosts
        )
        self._pool = ServerPool(
            [Server(url, self._client, request_timeout_s) for url in addresses],
            vocab_size=self._vocab_size,
            max_length=max_positions(self._config, longrope),
            check_served=partial(check_served, self._config, longrope),
            eos_token_ids=eos_token_ids(self._config, load_generation_config(folder)),
            max_batch=max_batch,
            loads_all=loads_all,
            routing=routing,
        )
        try:
            self._load(folder, version)
        except BaseException:
            self.close()
            raise

    repeats_in_any_batch = False

    @property
    def name(self) -> str:
        return f"vllm server {self._pool.version}"

    @property
    def max_length(self) -> int:
        return self._pool.max_length

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, vocab_size=self._vocab_size, max_length=self.max_length)
        check_keeps_experts(request, self.name, is_kept=self._keeps_experts)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._pool.sample(request), self._loop))

    def load_weights(self, folder: str, version: int) -> None:
        _check(folder, self._config)
        self._load(folder, version)

    def close(self) -> None:
        """Stop managing the servers, and end the thread; requests in flight are cancelled."""
        if self._loop.is_closed():
            return
        self._wait_for(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await self._pool.close()
        await self._client.aclose()

    def _load(self, folder: str, version: int) -> None:
        wanted = Wanted(LoadedWeights(self._run_id, version), str(Path(folder).resolve()), self._longrope)
        self._wait_for(self._pool.want(wanted))
        self.policy_version = version

    def _wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the thread of the servers; an interruption of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


async def find_silent(urls: Sequence[str]) -> dict[str, str]:
    """Return why servers do not answer, by URL. Raises ConfigError for a bad URL, or if there is none."""
    if not urls:
        raise ConfigError(_NO_URL)
    silent: dict[str, str] = {}
    async with httpx2.AsyncClient(headers=_authorization(), trust_env=False) as client:
        for url in dict.fromkeys(urls):
            try:
                await Server(check_url(url), client, REQUEST_TIMEOUT_S).check_health()
            except NoServerError as error:
                silent[url] = str(error)
    return silent


def _authorization() -> dict[str, str]:
    """Return the header with the servers' key or login, from the environment. Raises ConfigError."""
    key, login = (keep_secret(os.environ.get(name, "")) for name in ("VLLM_API_KEY", SERVER_LOGIN))
    if key and login:
        raise ConfigError(
            f"VLLM_API_KEY and {SERVER_LOGIN} are both set, and a request has room for one; unset the other"
        )
    if login and ":" not in login:
        raise ConfigError(f"{SERVER_LOGIN} has no colon; wanted user:password")
    if login:
        return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Engine options of engine server."""

    request_timeout_s: float = REQUEST_TIMEOUT_S
    """Time limit for an answer to a request, in seconds; then the request is sent again."""

    def __post_init__(self) -> None:
        check(self)
        if self.request_timeout_s <= 0:
            raise ConfigError(f"engine_options: request_timeout_s is {self.request_timeout_s}, wanted more than 0")

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> "ServerOptions":
        """Raises ConfigError for an unknown option."""
        for name in options:
            if name not in cls.__slots__:
                raise ConfigError(
                    f"engine_options: engine server has no option {name}, only {', '.join(cls.__slots__)}; options of "
                    "vLLM are flags of the server"
                )
        return cls(**options)


def make_engine(folder: str, *, version: int, setup: EngineSetup) -> ServerEngine:
    """Return a worker's engine with the weights of a Hugging Face folder."""
    options = ServerOptions.from_json(setup.config.engine_options)
    if setup.float32_head:
        logger.warning("the run computes logits in float32: start the servers with --hf-overrides %s", _FLOAT32_HEAD)
    return ServerEngine(
        folder,
        setup.config.server_url,
        version=version,
        run_id=setup.run_id,
        max_batch=setup.config.max_batch,
        request_timeout_s=options.request_timeout_s,
        keep_experts=setup.keep_experts,
        longrope=setup.longrope,
    )


def _check(folder: str, config: Any) -> None:
    """Raise ModelError unless a folder holds whole weights of the architecture `config`."""
    if base_of_adapter(folder):
        raise ModelError(
            f"{folder} holds a LoRA adapter, which engine server does not load; use --engine vllm or transformers"
        )
    check_folder(folder, config)
