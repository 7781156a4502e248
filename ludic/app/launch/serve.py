"""Run a vLLM server on this machine that serves the newest policy of a run.

Reads policies/, keeps copies of the newest ones in a temporary folder if the root is remote, and writes nothing to the
root. Restarts vLLM when it dies; vLLM ends with this process. Workers find that the server loads weights itself, and
load none into it (ludic.engines.server_engine).
"""

import contextlib
import errno
import logging
import socket
import threading
from dataclasses import asdict
from pathlib import Path

from ludic.app.launch.config import ServeConfig
from ludic.app.launch.local import log_folder
from ludic.app.launch.supervisor import ChildProcess, stop_processes
from ludic.app.launch.vllm_server import ServerArguments
from ludic.base import temporary_folder, url_of
from ludic.engines import EngineConfig, ServerEngine, check_installed
from ludic.errors import ConfigError, ModelError, NoServerError, SchemaError, StoreError
from ludic.root import Root
from ludic.root.weights import fetch_policy, latest_policy
from ludic.run import run_of

logger = logging.getLogger(__name__)

_POLL_EVERY_S = 0.5


def serve(root: Root, config: ServeConfig, stop: threading.Event) -> None:
    """Serve the run's newest policy until `stop` is set.

    Raises ConfigError if vLLM is missing, the port is in use or an option is wrong, and ProcessDiedError if vLLM dies
    repeatedly.
    """
    check_installed()
    _check_port(config)
    with temporary_folder("serve") as cache:
        weight_sync = _WeightSync(root, cache)
        while not weight_sync.poll() and not stop.wait(_POLL_EVERY_S):
            pass
        if not stop.is_set():
            _serve(root, config, weight_sync, stop)


def _serve(root: Root, config: ServeConfig, weight_sync: "_WeightSync", stop: threading.Event) -> None:
    child = ChildProcess(
        name="vLLM",
        args=lambda: _arguments(root, config, weight_sync.folder).to_args(),
        log=log_folder(root) / f"serve-{config.port}.log",
    )
    with contextlib.ExitStack() as stack:
        stack.callback(stop_processes, [child], {})
        child.start({})
        logger.info("vLLM starts at http://%s:%d; its log is %s", config.host, config.port, child.log)
        server = _Server(root, config)
        stack.callback(server.close)
        while not stop.wait(_POLL_EVERY_S):
            if child.process.poll() is not None:
                child.restart({})
            weight_sync.poll()
            server.bring_to(weight_sync.folder, weight_sync.version)


class _WeightSync:
    """Knows the newest policy that can be read, and has its folder."""

    def __init__(self, root: Root, cache: Path) -> None:
        self._root, self._cache = root, cache
        self.folder, self.version = "", -1
        self._said: str | None = None

    def poll(self) -> bool:
        """Fetch a newer policy, if there is one; returns whether there is any."""
        try:
            latest = latest_policy(self._root)
            if latest is not None and latest.version > self.version:
                self.folder = fetch_policy(self._root, latest.version, self._cache)
                self.version = latest.version
        except (FileNotFoundError, SchemaError, StoreError) as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("trying again: %s", error)
        if self.version < 0 and self._said is None:
            self._said = ""
            logger.info("waiting for a policy; `ludic train` publishes policies")
        return self.version >= 0


class _Server:
    """The weights of the vLLM that runs here."""

    def __init__(self, root: Root, config: ServeConfig) -> None:
        self._url, self._run_id = url_of(config.host, config.port), root.run_id
        self._longrope = run_of(root).longrope
        self._engine: ServerEngine | None = None
        self._version = -1
        self._said: str | None = None

    def bring_to(self, folder: str, version: int) -> None:
        """Load a version, unless it is loaded; a failed load is retried at the next call."""
        if version == self._version:
            return
        try:
            if self._engine is None:
                self._engine = ServerEngine(
                    folder,
                    [self._url],
                    version=version,
                    run_id=self._run_id,
                    loads_all=True,
                    longrope=self._longrope,
                )
            else:
                self._engine.load_weights(folder, version)
        except NoServerError:  # vLLM is starting or restarting
            return
        except ModelError as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("version %d is not loaded: %s", version, error)
            return
        self._version = version
        logger.info("serving version %d at %s", version, self._url)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def _arguments(root: Root, config: ServeConfig, folder: str) -> ServerArguments:
    run = run_of(root)
    engine = EngineConfig(
        engine="vllm",
        max_batch=config.max_batch,
        tensor_parallel=config.tensor_parallel,
        gpu_memory=config.gpu_memory,
        engine_options=config.engine_options,
    )
    return ServerArguments(
        folder=str(Path(folder).absolute()),
        host=config.host,
        port=config.port,
        float32_head=run.float32_head,
        keep_experts=run.keep_experts,
        longrope=run.longrope,
        engine=asdict(engine),
    )


def _check_port(config: ServeConfig) -> None:
    """Raise ConfigError if another program listens at the port: weights would be loaded into it."""
    try:
        address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], address[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except OSError as error:
        why = "is in use; choose another --port" if error.errno == errno.EADDRINUSE else f"can't be used: {error}"
        raise ConfigError(f"{config.host}:{config.port} {why}") from error
