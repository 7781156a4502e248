"""Gateways, ludic's and those of other projects, for benchmarks.gateway: how each is started, called and read.

Each runs in a process of its own before the fake engine's server (benchmarks.gateway_engine); ludic's also with the
engine in its own process. The others are in environments of their own, PEERS/NAME with a bin/python. One that is
missing is left out, and named:

    rllm-model-gateway==0.1.0             SQLite; by default it stores in a background task, after the answer
    openenv==0.10.0                       openenv.core.harness.capture; memory
    agentcore-rl-toolkit[gateway]==0.2.0  memory
    litellm[proxy]==1.108.7               a plain proxy, which keeps nothing

nemo-gym 0.7.0 and agentlightning 1.0.2 want Python 3.12.
"""

import json
import os
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

from benchmarks.gateway_engine import MODEL, make_tokenizer
from benchmarks.ports import free_port
from benchmarks.s3_server import BUCKET

_START_S = 60.0
_REPOSITORY = Path(__file__).parents[1]


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
    root: str
    """Where ludic keeps its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a gateway is started with."""

    python: str
    engine_url: str
    port: int
    folder: Path
    """For what it keeps; the same one if it is started again."""
    root: str
    """Folder or URL of ludic's root."""
    num_tokens: int | None = None
    latency_s: float = 0.0
    samples: Path | None = None
    """Tokens, seconds and log of an engine in the gateway's own process; the engine's server has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway before the fake engine."""

    name: str
    keeps: str
    """Where it keeps calls, and when."""
    environment: str | None
    """Folder of its environment; None is this one."""
    command: Callable[[Start], Sequence[str]]
    """Returns the arguments of its process."""
    path: str = "/v1/chat/completions"
    """Path of chat completions; {session} is replaced."""
    key: str = "{session}"
    """Bearer token of a session."""
    kept: Callable[[Served, str], list[Kept]] | None = None
    """Reads a session."""
    on_s3: bool = False
    """Whether its root is on S3."""

    def python(self, peers: Path) -> Path:
        return Path(sys.executable) if self.environment is None else peers / self.environment / "bin" / "python"

    @contextmanager
    def serving(self, peers: Path, engine_url: str, folder: Path, **engine: Any) -> Iterator[Served]:
        """Run it with an empty or earlier folder. Raises RuntimeError with its log if it does not start.

        engine: num_tokens, latency_s and samples of `Start`.
        """
        port, log = free_port(), folder / "log"
        root = f"s3://{BUCKET}/{folder.name}" if self.on_s3 else str(folder / "root")
        python = str(self.python(peers))
        start = Start(python=python, engine_url=engine_url, port=port, folder=folder, root=root, **engine)
        environment = os.environ | {"PYTHONPATH": str(_REPOSITORY)} if self.environment is None else os.environ
        with log.open("ab") as out:
            process = subprocess.Popen(self.command(start), stdout=out, stderr=out, cwd=folder, env=environment)
            try:
                wait_for(f"http://127.0.0.1:{port}", process, log)
                yield Served(url=f"http://127.0.0.1:{port}", process=process, root=root)
            finally:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


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


def fetched(url: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
    """Return the JSON that a URL answers; with a body, to a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


# --- The engine's own server -----------------------------------------------------------------------------------------

DIRECT = Gateway(name="the engine's own server", keeps="nothing", environment=None, command=lambda _: [])

# --- ludic -----------------------------------------------------------------------------------------------------------

_OWN_KEY = "sk-key-of-the-benchmark"


def _ludic(start: Start) -> Sequence[str]:
    args = ["--root", start.root, "--port", str(start.port), "--latency-s", str(start.latency_s)]
    args += [] if start.num_tokens is None else ["--num-tokens", str(start.num_tokens)]
    args += [] if start.samples is None else ["--log", str(start.samples)]
    return ["env", f"LUDIC_GATEWAY_KEY={_OWN_KEY}", start.python, "-m", "benchmarks.gateway_ludic", *args]


def _ludic_upstream(start: Start) -> Sequence[str]:
    args = [start.root, "--upstream", f"{start.engine_url}/v1", "--model", MODEL, "--port", str(start.port)]
    return ["env", f"LUDIC_GATEWAY_KEY={_OWN_KEY}", start.python, "-m", "ludic", "gateway", *args]


def _kept_by_ludic(served: Served, session: str) -> list[Kept]:
    """Assemble a session from what is stored; the audit gives the reasons of calls in no row."""
    from ludic.gateway import SealedEpisode, assemble_episodes
    from ludic.root import Root
    from ludic.root.rows.calls import read_calls, read_prompt

    root = Root.open(served.root)
    calls = read_calls(root, session, 1)
    prompts = {digest: read_prompt(root, digest) for digest in set(calls["system_digest"].to_pylist()) - {None}}
    logprobs = {
        call_id: tuple(values)
        for call_id, values in zip(*(calls[name].to_pylist() for name in ("call_id", "response_logprobs")), strict=True)
        if values is not None
    }
    (found,) = assemble_episodes(calls, [SealedEpisode(episode_id=session)], prompts)
    rows = [
        Kept(
            logprobs=tuple(row.response_logprobs[slice(None) if row.action_mask is None else row.action_mask].tolist())
        )
        for row in found.rollouts
    ]
    return rows + [
        Kept(logprobs=logprobs.get(row.call_id, ()), reason=row.reason) for row in found.audit if row.fate == "dropped"
    ]


def _ludic_gateway(name: str, keeps: str, command: Callable[[Start], Sequence[str]], *, on_s3: bool = False) -> Gateway:
    return Gateway(
        name=name,
        keeps=keeps,
        environment=None,
        command=command,
        path="/e/{session}/1/v1/chat/completions",
        key=_OWN_KEY,
        kept=_kept_by_ludic,
        on_s3=on_s3,
    )


LUDIC = _ludic_gateway("ludic", "files, before the answer", _ludic)
LUDIC_S3 = _ludic_gateway("ludic, on S3", "S3, before the answer", _ludic, on_s3=True)
LUDIC_UPSTREAM = _ludic_gateway("ludic --upstream", "files, before the answer", _ludic_upstream)

# --- rllm-model-gateway ----------------------------------------------------------------------------------------------


def _rllm(config: Mapping[str, Any]) -> Callable[[Start], Sequence[str]]:
    def command(start: Start) -> Sequence[str]:
        # YAML reads JSON.
        (start.folder / "config.yaml").write_text(json.dumps(config))
        settings = ["--host", "127.0.0.1", "--port", str(start.port), "--config", str(start.folder / "config.yaml")]
        database = ["--db-path", str(start.folder / "traces.db"), "--log-level", "ERROR"]
        worker = ["--worker", f"{start.engine_url}/v1"]
        return [start.python, "-m", "rllm_model_gateway", *settings, *worker, *database]

    return command


def _kept_by_rllm(served: Served, session: str) -> list[Kept]:
    """Read a session's traces: one a call, each of which is a step of its trainer."""
    traces = fetched(f"{served.url}/sessions/{session}/traces")
    return [Kept(logprobs=tuple(each["logprobs"] or ())) for each in traces]


def _rllm_gateway(name: str, keeps: str, **config: Any) -> Gateway:
    path = "/sessions/{session}/v1/chat/completions"
    return Gateway(
        name=name,
        keeps=keeps,
        environment="rllm-model-gateway",
        command=_rllm(config),
        path=path,
        kept=_kept_by_rllm,
    )


RLLM = _rllm_gateway("rllm-model-gateway", "SQLite, after the answer")
RLLM_SYNC = _rllm_gateway(
    "rllm-model-gateway, sync_traces", "SQLite, before the answer unless streamed", sync_traces=True
)

# --- openenv ---------------------------------------------------------------------------------------------------------


def _openenv(start: Start) -> Sequence[str]:
    settings = ["--llm-url", start.engine_url, "--model", MODEL, "--port", str(start.port), "--capture-level", "tokens"]
    return [start.python, "-m", "openenv.core.harness.capture.server", *settings, "--allow-unregistered"]


def _kept_by_openenv(served: Served, session: str) -> list[Kept]:
    document = fetched(f"{served.url}/sessions/{session}/rollout?include_discarded=true")
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
    environment="openenv",
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


def _agentcore(start: Start) -> Sequence[str]:
    make_tokenizer().save_pretrained(start.folder / "tokenizer")
    return [start.python, "-c", _AGENTCORE, start.engine_url, str(start.port), str(start.folder / "tokenizer")]


def _kept_by_agentcore(served: Served, session: str) -> list[Kept]:
    return [
        Kept(logprobs=tuple(value for value, is_on in zip(row["logprobs"], row["mask"], strict=True) if is_on))
        for row in fetched(f"{served.url}/finish/{session}")
    ]


AGENTCORE = Gateway(
    name="agentcore-rl-toolkit",
    keeps="memory",
    environment="agentcore-rl-toolkit",
    command=_agentcore,
    kept=_kept_by_agentcore,
)

# --- litellm ---------------------------------------------------------------------------------------------------------


def _litellm(start: Start) -> Sequence[str]:
    model = {"model": f"openai/{MODEL}", "api_base": f"{start.engine_url}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": model}],
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }
    path = start.folder / "config.yaml"
    path.write_text(json.dumps(config))
    local = ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true", "LITELLM_LOCAL_MODEL_COST_MAP=True"]
    program = ["env", *local, str(Path(start.python).parent / "litellm")]
    return [*program, "--config", str(path), "--host", "127.0.0.1", "--port", str(start.port)]


LITELLM = Gateway(name="litellm", keeps="nothing", environment="litellm", command=_litellm)

GATEWAYS = (LUDIC, LUDIC_UPSTREAM, LUDIC_S3, RLLM_SYNC, RLLM, OPENENV, AGENTCORE, LITELLM)
