"""Gateways of other projects, for benchmarks.gateway: how each is started, called and read.

Each is in an environment of its own, PEERS/NAME with a bin/python, and stands before the fake engine
(benchmarks.gateway_engine) in a process of its own. An environment that is missing is left out, and named:

    rllm-model-gateway==0.1.0             SQLite; by default it stores in a background task, after the answer
    openenv==0.10.0                       openenv.core.harness.capture; memory
    agentcore-rl-toolkit[gateway]==0.2.0  memory
    litellm[proxy]                        a plain proxy, which keeps nothing

nemo-gym 0.7.0 and agentlightning 1.0.2 want Python 3.12.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway_engine import MODEL
from benchmarks.ports import free_port

_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One row that a gateway kept of a session; a token is known by its logprob."""

    logprobs: tuple[float, ...]
    """Of the tokens that would be trained."""
    reason: str | None = None
    """Why the row would not be trained, if it says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running gateway."""

    url: str
    """http://HOST:PORT"""
    process: "subprocess.Popen[bytes]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway before the fake engine."""

    name: str
    keeps: str
    """Where it keeps calls, and when."""
    environment: str | None
    """Folder of its environment; None is this one."""
    command: Callable[[str, str, int, Path], Sequence[str]]
    """Arguments of its process: given its python, the engine's URL, a port, and a folder for what it keeps."""
    path: str = "/v1/chat/completions"
    """Path of chat completions; {session} is replaced."""
    key: str = "{session}"
    """Bearer token of a session."""
    kept: Callable[[str, str], list[Kept]] | None = None
    """Reads a session: given the gateway's URL and the session."""
    open: Callable[[str, str], str] | None = None
    """Opens a session and returns its bearer token: given the gateway's URL and the session."""

    def python(self, peers: Path) -> Path:
        return Path(sys.executable) if self.environment is None else peers / self.environment / "bin" / "python"

    def token(self, url: str, session: str) -> str:
        """Return the bearer token of a session, which is opened."""
        return self.open(url, session) if self.open else self.key.format(session=session)

    @contextmanager
    def serving(
        self, peers: Path, engine_url: str, folder: Path, *, latency_s: float = 0.0, samples: Path | None = None
    ) -> Iterator[Served]:
        """Run it with an empty or earlier folder. Raises RuntimeError with its log if it does not start.

        latency_s, samples: of an engine in the gateway's own process; the engine's server has its own.
        """
        port = free_port()
        command = self.command(str(self.python(peers)), engine_url, port, folder)
        with (
            (folder / "log").open("ab") as log,
            subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process,
        ):
            try:
                wait_for(f"http://127.0.0.1:{port}", process, folder / "log")
                yield Served(url=f"http://127.0.0.1:{port}", process=process)
            finally:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until a server answers, with whatever status."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=5)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{url} does not answer; its log ends with {log.read_text(errors='replace')[-2_000:]}")


def fetched(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON that a URL answers; with a body, to a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


# --- The engine's own server -----------------------------------------------------------------------------------------

DIRECT = Gateway(name="the engine's own server", keeps="nothing", environment=None, command=lambda *_: [])

# --- rllm-model-gateway ----------------------------------------------------------------------------------------------


def _rllm(config: Mapping[str, Any]) -> Callable[[str, str, int, Path], Sequence[str]]:
    def command(python: str, engine_url: str, port: int, folder: Path) -> Sequence[str]:
        # YAML reads JSON.
        (folder / "config.yaml").write_text(json.dumps(config))
        settings = ["--host", "127.0.0.1", "--port", str(port), "--config", str(folder / "config.yaml")]
        place = ["--worker", f"{engine_url}/v1", "--db-path", str(folder / "traces.db"), "--log-level", "ERROR"]
        return [python, "-m", "rllm_model_gateway", *settings, *place]

    return command


def _kept_by_rllm(url: str, session: str) -> list[Kept]:
    """Read a session's traces: one a call, each of which is a step of its trainer."""
    traces = fetched(f"{url}/sessions/{session}/traces")
    return [Kept(logprobs=tuple(each["logprobs"] or ())) for each in traces]


def _rllm_gateway(name: str, keeps: str, **config: Any) -> Gateway:
    path = "/sessions/{session}/v1/chat/completions"
    return Gateway(
        name=name,
        keeps=keeps,
        environment="p-rllm-model-gateway",
        command=_rllm(config),
        path=path,
        kept=_kept_by_rllm,
    )


RLLM = _rllm_gateway("rllm-model-gateway", "SQLite, after the answer")
RLLM_SYNC = _rllm_gateway(
    "rllm-model-gateway, sync_traces", "SQLite, before the answer unless streamed", sync_traces=True
)

# --- openenv ---------------------------------------------------------------------------------------------------------


def _openenv(python: str, engine_url: str, port: int, folder: Path) -> Sequence[str]:
    settings = ["--llm-url", engine_url, "--model", MODEL, "--port", str(port), "--capture-level", "tokens"]
    return [python, "-m", "openenv.core.harness.capture.server", *settings, "--allow-unregistered"]


def _kept_by_openenv(url: str, session: str) -> list[Kept]:
    document = fetched(f"{url}/sessions/{session}/rollout?include_discarded=true")
    return [
        Kept(
            logprobs=tuple(
                logprob for logprob, is_trained in zip(row["logprobs"], row["loss_mask"], strict=True) if is_trained
            ),
            reason=None if row["trainable"] else f"{row['role']}: {'; '.join(row['validation'])}",
        )
        for row in document["sequences"]
    ]


OPENENV = Gateway(
    name="openenv",
    keeps="memory",
    environment="p-openenv",
    command=_openenv,
    kept=_kept_by_openenv,
)

# --- agentcore-rl-toolkit --------------------------------------------------------------------------------------------

_AGENTCORE = """
import sys
from aiohttp import web
from transformers import AutoTokenizer
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway
from agentcore_rl_toolkit.rollout_gateway.parsing import parse_tool_uses
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import VllmHttpBackend

url, port, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
gateway = RolloutGateway(
    backend=VllmHttpBackend(url),
    renderer=HfTemplateRenderer(tokenizer, tool_parser=parse_tool_uses),
    tokenizer=tokenizer,
    adapters=["openai"],
)

async def finish(request):
    records = await gateway.finish_session(request.match_info["session"])
    return web.json_response([{"logprobs": list(each.logprobs), "mask": list(each.loss_mask)} for each in records])

gateway.app.router.add_get("/finish/{session}", finish)
web.run_app(gateway.app, host="127.0.0.1", port=int(port), print=None, access_log=None, handler_cancellation=True)
"""


def _agentcore(python: str, engine_url: str, port: int, folder: Path) -> Sequence[str]:
    from benchmarks.gateway_engine import make_tokenizer

    make_tokenizer().save_pretrained(folder / "tokenizer")
    return [python, "-c", _AGENTCORE, engine_url, str(port), str(folder / "tokenizer")]


def _kept_by_agentcore(url: str, session: str) -> list[Kept]:
    return [
        Kept(logprobs=tuple(value for value, is_on in zip(row["logprobs"], row["mask"], strict=True) if is_on))
        for row in fetched(f"{url}/finish/{session}")
    ]


AGENTCORE = Gateway(
    name="agentcore-rl-toolkit",
    keeps="memory",
    environment="p-agentcore-rl-toolkit",
    command=_agentcore,
    kept=_kept_by_agentcore,
)

# --- litellm ---------------------------------------------------------------------------------------------------------


def _litellm(python: str, engine_url: str, port: int, folder: Path) -> Sequence[str]:
    model = {"model": f"openai/{MODEL}", "api_base": f"{engine_url}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": model}],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    local = ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true", "LITELLM_LOCAL_MODEL_COST_MAP=True"]
    program = ["env", *local, str(Path(python).parent / "litellm")]
    return [*program, "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]


LITELLM = Gateway(name="litellm", keeps="nothing", environment="p-litellm", command=_litellm)

PEERS = (RLLM, RLLM_SYNC, OPENENV, AGENTCORE, LITELLM)
