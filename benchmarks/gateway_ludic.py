"""Serve ludic's gateway before the fake engine in one process, for benchmarks.gateway.

    LUDIC_GATEWAY_KEY=secret python -m benchmarks.gateway_ludic --root run --port 8001

A worker runs its gateway so. Before the engine's server, `ludic gateway ROOT --upstream URL` is measured.
"""

import asyncio
import os
import socket
from pathlib import Path

from benchmarks.gateway_engine import MODEL, FakeEngine, make_tokenizer
from ludic.agents import Agent
from ludic.base import RECORDED_ENV
from ludic.engines import SamplingParams
from ludic.gateway import EngineBackend, Gateway, GatewaySettings, key_digest, new_loop, running
from ludic.root import held_life
from ludic.run import RunConfig, put_run
from ludic.settings import run_script


def main(root: str, port: int, num_tokens: int | None = None, latency_s: float = 0.0, log: Path | None = None) -> None:
    """Serve until the process is ended.

    Args:
        root: Folder or URL of the root, which is made if it is absent.
        port: Port on 127.0.0.1.
        num_tokens: Tokens of the completion that each call gets; none samples at random.
        latency_s: Seconds that each completion takes.
        log: File that each completion is appended to as a line of JSON.
    """
    tokenizer = make_tokenizer()
    engine = FakeEngine(tokenizer, num_tokens=num_tokens, latency_s=latency_s, log=log)
    agent = Agent(engine=engine, tokenizer=tokenizer, model=MODEL, vocab_size=len(tokenizer))

    async def serve() -> None:
        made = put_run(root, RunConfig(model=MODEL, env=(RECORDED_ENV,), max_tokens=2_048))
        with held_life(made) as life, socket.create_server(("127.0.0.1", port), backlog=1_024) as listener:
            gateway = Gateway(made, life, EngineBackend(agent), GatewaySettings(), SamplingParams(max_tokens=2_048))
            await gateway.start()
            own = key_digest(os.environ["LUDIC_GATEWAY_KEY"])
            async with running(gateway, own_key_digest=own, listener=listener):
                await asyncio.Event().wait()

    with new_loop() as runner:
        runner.run(serve())


if __name__ == "__main__":
    run_script(main, description=__doc__)
