"""Serve the gateway of a worker whose agent is a program, and play its episodes (ludic.rollouts.program_episodes).

Reads and writes gateways/, episodes/, prompts/ and calls/ of the root. Raises the engine's errors, which the programs
would only see as failed calls; FencedError once its lease is lost, such as of a process that was paused: started again,
a worker goes on with its episodes as a new life; ConfigError without the packages of the gateway.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from ludic.agents import ENGINE_ERRORS, Agent, EpisodeRequest
from ludic.base import require
from ludic.engines import Completion, Engine, GenerationRequest, SamplingParams
from ludic.environments import LimitedEnvironments
from ludic.errors import FencedError
from ludic.gateway import EngineBackend, Gateway, GatewaySettings, running
from ludic.records import Rollout
from ludic.rollouts.program_episodes import Play, Player
from ludic.rollouts.programs import AgentProgram, Clients
from ludic.root import Life, Root, held_life
from ludic.run import RunConfig
from ludic.settings import SideThread

_DRAIN_S = 5.0
"""Seconds that a worker that stops waits for completions that are being sampled, so that they are stored."""
_CHECK_S = 1.0
"""Maximum seconds between looks whether the gateway has lost its lease."""


class ProgramEpisodes:
    """Runs the episodes of a run whose agent is a program: a RunEpisode, while `opened`."""

    def __init__(
        self,
        root: Root,
        run: RunConfig,
        agent: Agent,
        program: AgentProgram,
        params: SamplingParams,
        *,
        timeout_s: float | None,
    ) -> None:
        """params: of all episodes. timeout_s: of an episode; None is no limit."""
        require("uvicorn", "gateway", "an agent that makes its own calls")
        self._root, self._run, self._program = root, run, program
        self._params, self._timeout_s = params, timeout_s
        self._engine = _WatchedEngine(agent.engine, run.max_sequence_tokens)
        self._agent = replace(agent, engine=self._engine)
        self._player: Player | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Serve the gateway in this event loop; all episodes begin and end within it."""
        run = self._run
        settings = GatewaySettings(
            drain_timeout_s=_DRAIN_S, lenient=run.agent_lenient, keep_thinking=run.agent_keep_thinking
        )
        async with AsyncExitStack() as stack:
            life = stack.enter_context(held_life(self._root))
            watch = asyncio.create_task(self._watch(life))
            stack.callback(watch.cancel)
            backend = EngineBackend(self._agent, keep_thinking=run.agent_keep_thinking)
            gateway = Gateway(
                *(self._root, life, backend, settings, self._params), keeps_rows=True, takes_scores=run.posted_scores
            )
            address = await stack.enter_async_context(running(gateway))
            stack.push_async_callback(gateway.drain)
            thread = SideThread()
            stack.callback(thread.close)
            clients = await stack.enter_async_context(Clients.opened())
            self._player = Player(
                root=self._root,
                run=run,
                agent=self._agent,
                program=self._program,
                gateway=gateway,
                address=address,
                timeout_s=self._timeout_s,
                thread=thread,
                clients=clients,
            )
            yield

    async def __call__(self, environments: LimitedEnvironments, request: EpisodeRequest) -> Sequence[Rollout]:
        """Play an episode and return its rows, at least one. Raises EngineError, FencedError, ConfigError."""
        assert self._player is not None, "the episodes are opened"
        return await self._engine.raising(Play(self._player, request).run(environments))

    async def _watch(self, life: Life) -> None:
        """End all episodes once the gateway may answer no more; their agents would only see that it stops."""
        while True:
            try:
                life.check()
            except FencedError as error:
                self._engine.fail(error)
                return
            await asyncio.sleep(min(_CHECK_S, life.record.lease_s / 2))


class _WatchedEngine(Engine):
    """The engine of the gateway. Its errors, and that of its gateway, end all episodes."""

    name: str  # attributes of the engine, through __getattr__
    repeats_in_any_batch: bool
    policy_version: int
    max_batch: int

    def __init__(self, engine: Engine, max_sequence_tokens: int | None) -> None:
        self._engine = engine
        self.max_length = min(engine.max_length, max_sequence_tokens or engine.max_length)
        self._failed: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load_weights(self, folder: str, version: int) -> None:
        self._engine.load_weights(folder, version)

    async def generate(self, request: GenerationRequest) -> Completion:
        try:
            return await self._engine.generate(request)
        except ENGINE_ERRORS as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """End all episodes with an error."""
        if not (failed := self._future()).done():
            failed.set_exception(error)
            failed.exception()  # read, since no episode may wait

    async def raising(self, coroutine: Any) -> Any:
        """Return what a coroutine returns; raise an error that ends all episodes as soon as there is one."""
        task, failed = asyncio.ensure_future(coroutine), self._future()
        try:
            await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    def _future(self) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        if self._failed is None or self._failed.get_loop() is not loop:
            self._failed = loop.create_future()
        return self._failed
