"""Run a gateway in this process: before the engine of a run's newest weights, or before another server.

Reads policies/ and follows new versions, as a worker does. Writes what ludic.gateway.gateway writes, and run.json of a
new root for the calls of another server. With a command, opens an episode for it, runs it, and seals the episode.
Before another server it needs no torch.
"""

import asyncio
import logging
import os
import shlex
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Never

from ludic.app.launch.config import GatewayProcess
from ludic.base import LOCAL_HOSTS, RECORDED_ENV, keep_secret, listening, temporary_folder, url_of
from ludic.engines import EngineConfig, EngineSetup, SamplingParams, engine_maker
from ludic.errors import ConfigError, LudicError, MissingRootError, one_line
from ludic.gateway import (
    NO_LIMIT,
    Backend,
    EpisodeResult,
    Gateway,
    GatewaySettings,
    HttpSettings,
    UpstreamBackend,
    UpstreamSettings,
    agent_variables,
    check_upstream,
    find_model,
    key_digest,
    make_key,
    new_loop,
    running,
)
from ludic.records import new_id
from ludic.root import EpisodeEndKind, Root, held_life
from ludic.run import RunConfig, put_run, run_of

if TYPE_CHECKING:
    from ludic.agents import Agent
    from ludic.rollouts import RunEpisode, WeightSync

logger = logging.getLogger(__name__)

KEY_VARIABLE = "LUDIC_GATEWAY_KEY"
"""Environment variable with the gateway's own key; without it, one is made and printed."""
_BACKLOG = 4_096
_TICK_S = 0.1
"""Seconds between looks at `stop`: a signal does not wake an event loop."""
_POLL_S = 0.5
"""Seconds between looks for a newer version of the weights."""
_END_WITHIN_S = 10.0
"""Seconds between SIGTERM and SIGKILL to a command."""
_NOT_FOR_COMMANDS = (KEY_VARIABLE, "ANTHROPIC_AUTH_TOKEN")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStart:
    """What a gateway is started with."""

    process: GatewayProcess
    gateway: GatewaySettings
    http: HttpSettings
    upstream: UpstreamSettings
    engine: EngineConfig
    device: str | None = None
    model: str | None = None
    """Location of the run's first model; before another server its model's name there. None: that of the root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEpisode:
    """The episode of a command."""

    episode_id: str
    num_calls: int
    exit_code: int
    """128 + N for signal N."""


def run_gateway(
    url: str, start: GatewayStart, stop: threading.Event, say: Callable[[str], None]
) -> CommandEpisode | None:
    """Serve until `stop` is set, or until the command has ended; returns the command's episode.

    say: called with the lines that a user needs, which hold the key. Raises ConfigError, and MissingRootError without a
    root to sample from.
    """
    own = _own_key()
    if start.process.command is not None:
        split_command(start.process.command)
    with ExitStack() as stack:
        # First: a port in use is found before weights are loaded.
        listener = stack.enter_context(listening(start.process.host, start.process.port, _BACKLOG))
        address = url_of(start.process.host, listener.getsockname()[1])
        if start.process.upstream is None:
            served = stack.enter_context(_own_engine(url, start, stop))
        else:
            served = _upstream(url, start)
        if served is None:  # stopped before there were weights
            return None
        life = stack.enter_context(held_life(served.root, address))
        gateway = Gateway(served.root, life, served.backend, start.gateway, served.params)
        runner = stack.enter_context(new_loop())
        return runner.run(_serve(gateway, start, listener, address, own, stop, say))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    root: Root
    backend: Backend
    params: SamplingParams


# --- Before another server ----------------------------------------------------------------------------------------


def _upstream(url: str, start: GatewayStart) -> _Served:
    """Open or make the root for the calls of another server."""
    assert start.process.upstream is not None
    server = check_upstream(start.process.upstream)
    try:
        root = Root.open(url, writable=True)
        model = start.model or run_of(root).model
    except MissingRootError:
        model = start.model or asyncio.run(find_model(server, start.upstream))
        run = RunConfig(model=model, env=(RECORDED_ENV,), max_tokens=NO_LIMIT)
        root = put_run(url, run)
        logger.info("made %s for the calls of %s", root.url, model)
    run = run_of(root)
    params = SamplingParams(temperature=run.temperature, top_p=run.top_p, top_k=run.top_k, max_tokens=run.max_tokens)
    return _Served(root=root, backend=UpstreamBackend(server, model, start.upstream), params=params)


# --- Before the run's weights -------------------------------------------------------------------------------------


@contextmanager
def _own_engine(url: str, start: GatewayStart, stop: threading.Event) -> Iterator[_Served | None]:
    """Yield an engine with the run's newest weights, which a thread keeps up to date; None if `stop` came first."""
    from ludic.app.launch.sample import publish_first
    from ludic.gateway.conversation import EngineBackend
    from ludic.rollouts import WeightSync, sampling_params, with_tool_format
    from ludic.root.weights import base_of_run

    try:
        root = Root.open(url, writable=True)
    except MissingRootError as error:
        raise MissingRootError(
            f"{error}; `ludic run {shlex.quote(url)} --create-only --model MODEL --env ENV` makes one, and "
            "--upstream URL records the calls of another server"
        ) from None
    run = run_of(root)
    try:
        publish_first(root, start.model)
    except ConfigError as error:
        if RECORDED_ENV not in run.env:
            raise
        raise ConfigError(f"{error}; --upstream URL goes on recording another server's answers") from error
    with ExitStack() as stack:
        cache = stack.enter_context(temporary_folder("weights"))
        setup = EngineSetup(
            config=start.engine,
            device=start.device,
            base=stack.enter_context(base_of_run(root, start.model)),
            float32_head=run.float32_head,
            keep_experts=run.keep_experts,
            longrope=run.longrope,
            run_id=root.run_id,
        )
        agents: list[Agent] = []
        sync = WeightSync(root, cache, engine_maker(setup), {}, partial(_keep_agent, agents))
        while sync.follow() is None:
            if stop.wait(_POLL_S):
                yield None
                return
        done = threading.Event()
        thread = threading.Thread(target=_follow, args=(sync, done), name="ludic-gateway-weights", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(done.set)
        backend = EngineBackend(with_tool_format(agents[0], run), keep_thinking=start.gateway.keep_thinking)
        yield _Served(root=root, backend=backend, params=sampling_params(run))


def _keep_agent(agents: "list[Agent]", agent: "Agent") -> "RunEpisode":
    """Keep the agent that samples with the engine. Episodes are played by clients, so none is played here."""

    async def no_episode(*_: object) -> Never:
        raise AssertionError("the gateway's own process plays no episodes")

    agents.append(agent)
    return no_episode


def _follow(sync: "WeightSync", done: threading.Event) -> None:
    """Load newer weights until `done` is set."""
    while not done.wait(_POLL_S):
        try:
            sync.follow()
        except LudicError as error:  # the root is another run by now
            logger.error("%s; the weights in use stay", one_line(error))
            return


# --- Serving ------------------------------------------------------------------------------------------------------


async def _serve(
    gateway: Gateway,
    start: GatewayStart,
    listener: socket.socket,
    address: str,
    own: str,
    stop: threading.Event,
    say: Callable[[str], None],
) -> CommandEpisode | None:
    async with AsyncExitStack() as stack:
        if isinstance(gateway.backend, UpstreamBackend):
            await stack.enter_async_context(gateway.backend)
        await gateway.start()
        await stack.enter_async_context(running(gateway, start.http, own_key_digest=key_digest(own), listener=listener))
        stack.push_async_callback(gateway.drain)
        if start.process.command is not None:
            return await _run_command(gateway, start, address, stop)
        for line in _lines(gateway, start, address, own):
            say(line)
        while not stop.is_set():
            gateway.life.check()
            await asyncio.sleep(_TICK_S)
    return None


def _own_key() -> str:
    """Return the gateway's own key. Raises ConfigError for one of the environment that is easy to guess."""
    given = os.environ.get(KEY_VARIABLE)
    if given is not None and not 16 <= len(given) <= 512:
        raise ConfigError(f"{KEY_VARIABLE} has {len(given)} characters, wanted 16 to 512 that nobody can guess")
    return keep_secret(given or make_key())


def _lines(gateway: Gateway, start: GatewayStart, address: str, own: str) -> Iterator[str]:
    """Yield what a user needs to send an agent here: variables with an episode of its own, by the gateway's own key."""
    if start.process.host not in LOCAL_HOSTS:
        yield "# other machines reach this address, without encryption: who reads the key on the way can use it"
    yield f"# {gateway.backend.model} at {address}, stored in {gateway.root.url}; Ctrl-C stops the gateway"
    name = new_id().replace("-", "")[-12:]
    for variable, value in _variables(gateway, address, name, 1, own).items():
        # The name of the model may be another server's text.
        is_known = value == own and KEY_VARIABLE in os.environ
        yield f"export {variable}=" + (f'"${KEY_VARIABLE}"' if is_known else shlex.quote(value))
    yield f"# the agent's calls are the episode {name}; for another episode, write another name in its place"


def _variables(gateway: Gateway, address: str, episode_id: str, attempt: int, key: str) -> dict[str, str]:
    """Return the environment variables of an agent, with those of the model's name that some read."""
    model = gateway.backend.model
    return {
        **agent_variables(address, episode_id, attempt, key),
        "OPENAI_MODEL": model,
        "ANTHROPIC_MODEL": model,
    }


async def _run_command(gateway: Gateway, start: GatewayStart, address: str, stop: threading.Event) -> CommandEpisode:
    """Run a command as the agent of an episode, and seal the episode."""
    episode = await gateway.open_episode()
    assert episode.key is not None
    assert start.process.command is not None
    # The user's own key of Anthropic would be sent beside that of the episode; with the server's, calls could pass by
    # the gateway.
    hidden = {*_NOT_FOR_COMMANDS, start.upstream.upstream_key}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= _variables(gateway, address, episode.episode_id, episode.attempt, episode.key)
    process = await asyncio.create_subprocess_exec(*split_command(start.process.command), env=environment)
    ended = asyncio.ensure_future(process.wait())
    while not ended.done() and not stop.is_set():
        await asyncio.wait((ended,), timeout=_TICK_S)
    is_stopped = not ended.done()
    if is_stopped:
        process.terminate()
        await asyncio.wait((ended,), timeout=_END_WITHIN_S)
        if not ended.done():
            process.kill()
    code = await ended
    code = 128 - code if code < 0 else code
    error = "the gateway was stopped" if is_stopped else f"exit code {code}" if code else None
    outcome: EpisodeEndKind = "given_up" if is_stopped else "failed" if code else "complete"
    num_calls = gateway.counts(episode).num_calls
    await gateway.seal(episode, EpisodeResult(outcome=outcome, error=error, exit_code=code))
    return CommandEpisode(episode_id=episode.episode_id, num_calls=num_calls, exit_code=code)


def split_command(command: str) -> list[str]:
    """Return the words of a command, which is no shell's. Raises ConfigError if it can't be run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"command {command!r} can't be split into words: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"command {command!r}: there is no program {words[0] if words else ''!r} (PATH)")
    return words
