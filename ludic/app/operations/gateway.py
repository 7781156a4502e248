"""Serve the model to agents that call it over HTTP, and store each call."""

import threading
from typing import TYPE_CHECKING, Literal, Unpack

from ludic.app.launch.config import GatewayProcess
from ludic.app.operations.operation import operation
from ludic.app.operations.start import engine_config
from ludic.base import ENGINE, TRAIN, require
from ludic.engines import EngineConfig
from ludic.gateway import GatewaySettings, HttpSettings, UpstreamSettings
from ludic.settings import convert, split

if TYPE_CHECKING:
    from ludic.app.operations.outcomes import GatewayEnded
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import GatewaySettings as OwnSettings

_EXTRA = "gateway"


@operation(
    group="Start",
    place=7,
    on_sigterm="stop",
    process=GatewayProcess,
    calls=GatewaySettings,
    http=HttpSettings,
    upstream=UpstreamSettings,
    engine=EngineConfig,
)
def gateway(
    run: "Run | str",
    *,
    engine: "str | EngineConfig" = ENGINE,
    device: Literal["cpu", "cuda"] | None = None,
    model: str | None = None,
    stop: threading.Event | None = None,
    **settings: Unpack["OwnSettings"],
) -> "GatewayEnded":
    """Serve the run's model to agents by the APIs of OpenAI and Anthropic, and store each call before its answer.

    Samples with the newest weights, or, with --upstream, records the calls of another server. Prints the variables that
    an agent needs. On SIGTERM or Ctrl-C it refuses new calls and answers those in flight. settings: fields of
    GatewayProcess, GatewaySettings, HttpSettings, UpstreamSettings and EngineConfig. Raises ConfigError.

    Args:
        run: Folder or URL of the run; with --upstream, created if it does not exist.
        engine: Engine of the run's weights, by name, path/to/file.py:ClassName, or its settings.
        device: Device to sample on; None uses CUDA if available.
        model: With --upstream, the model's name at that server, if it serves several. Else the location of the run's
            first model, which adapters need. None takes the one in run.json.
        stop: Ends the call when it is set, instead of Ctrl-C.
    """
    from ludic.app.operations.outcomes import GatewayEnded
    from ludic.app.operations.run import Run

    for package in ("uvicorn", "starlette", "httptools"):
        require(package, _EXTRA, "ludic gateway")
    parts = split(
        settings,
        process=GatewayProcess,
        calls=GatewaySettings,
        http=HttpSettings,
        upstream=UpstreamSettings,
        engine=EngineConfig,
    )
    process = convert(GatewayProcess, parts["process"])
    if process.upstream is None:
        require("torch", TRAIN, "ludic gateway without --upstream URL, which records another server's answers")
    from ludic.app.launch.gateway import GatewayStart, run_gateway
    from ludic.app.launch.process import interruptible_unless

    start = GatewayStart(
        process=process,
        gateway=convert(GatewaySettings, parts["calls"]),
        http=convert(HttpSettings, parts["http"]),
        upstream=convert(UpstreamSettings, parts["upstream"]),
        engine=engine_config(engine, parts["engine"]),
        device=device,
        model=model,
    )
    url = run.url if isinstance(run, Run) else str(run)
    with interruptible_unless(stop) as stopped:
        ended = run_gateway(url, start, stopped, say=lambda line: print(line, flush=True))
    if ended is None:
        return GatewayEnded(root=url)
    return GatewayEnded(root=url, episode_id=ended.episode_id, num_calls=ended.num_calls, exit_code=ended.exit_code)
