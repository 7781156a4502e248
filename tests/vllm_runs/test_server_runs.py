"""Whole runs whose workers sample on real vLLM servers, which are killed and come back."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import a_request
from forks import Forked
from tiny_models import make_model, publish
from vllm_servers import RECOMMENDED, VllmServer, running_servers

import ludic
from benchmarks.ports import free_port
from ludic.app.demos.words import demo_config, open_demo
from ludic.engines.engine import generate_all
from ludic.engines.server_engine import ServerEngine
from ludic.errors import ModelError
from ludic.models.families import logprobs_alone
from ludic.models.weight_files import load_config, load_pretrained
from ludic.root.root import Root
from ludic.root.weights.policies import latest_policy
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root
from ludic.settings.table import to_flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_STEPS = 16


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Connections to killed servers go with their test: else the end of the session finds and reports them."""
    yield
    gc.collect()


def wait_until(condition: Callable[[], bool], within_s: float = 600.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def version_of(root: Root) -> int:
    latest = latest_policy(root)
    return -1 if latest is None else latest.version


@pytest.mark.timeout(1500)
def test_a_run_goes_on_when_its_server_is_killed_and_started_again(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    root = open_demo(url)
    with running_servers(str(root.record.model), tmp_path) as [server]:
        flags = ["--engine", "server", "--server-url", server.url, *to_flags(demo_config(NUM_STEPS).flat())]
        run = Forked(["ludic", "run", url, *flags], tmp_path / "run.log")
        try:
            wait_until(lambda: version_of(root) >= 4)
            server.kill()
            at, killed = version_of(root), time.monotonic()
            time.sleep(5)
            server.start()
            server.wait()
            gap_s = time.monotonic() - killed
            run.wait(600)
        finally:
            run.kill()
    assert run.returncode == 0, run.printed()
    assert version_of(root) == NUM_STEPS

    con = ludic.connect(root)
    # Of one version there may be few rollouts, or none. How far a run gets is shown by test_runs.py.
    mean = "select avg(episode_reward) from rollouts where policy_version between ? and ?"
    (first,), (last,) = (con.execute(mean, span).fetchone() for span in ([0, 0], [NUM_STEPS - 6, NUM_STEPS]))
    assert last >= 1.5 * first
    assert con.execute("select count(*) from rollouts where error is not null").fetchall() == [(0,)]
    # Rows of the restarted server say which weights sampled them: those that it was given, not those it started with.
    assert con.execute("select count(*) from rollouts where policy_version > ?", [at + 2]).fetchone()[0] > 0
    assert con.execute("select count(*) - count(distinct rollout_id) from rollouts").fetchall() == [(0,)]
    # A worker notices within a call, or before the next one.
    longest = con.execute("select max(step_s + wait_s) from metrics where worker_id is not null").fetchall()
    assert longest[0][0] >= 0.5 * gap_s
    log = (Path(url) / "logs" / "worker-0.log").read_text()
    assert log.count("does not answer") >= 1
    assert "gets requests again" in log
    assert ludic.open(url).verify().findings == []


@pytest.mark.timeout(900)
def test_when_one_of_two_servers_is_killed_the_other_takes_its_requests(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    with running_servers(folder, tmp_path, count=2) as [first, second]:
        with contextlib.closing(ServerEngine(folder, [first.url, second.url])) as engine:
            requests = [a_request(seed=seed, max_tokens=240) for seed in range(200)]
            threading.Timer(0.5, first.kill).start()
            completions = generate_all(engine, requests)
            assert len(completions) == 200
            assert not first.answers()
            assert {completion.weight_versions[0].version for completion in completions} == {0}


@pytest.mark.timeout(1500)
def test_the_recommended_command_computes_with_new_weights_and_a_server_without_the_extension_is_refused(
    tmp_path: Path,
) -> None:
    folder, other = make_model(tmp_path / "model", seed=1), make_model(tmp_path / "other", seed=2)
    assert load_config(folder).tie_word_embeddings
    with (
        running_servers(folder, tmp_path, flags=RECOMMENDED) as [server],
        contextlib.closing(ServerEngine(folder, [server.url])) as engine,
    ):
        engine.load_weights(other, 1)
        request = a_request(max_tokens=16)
        [completion] = generate_all(engine, [request])
        model = load_pretrained(other, dtype=torch.float32)
        with torch.inference_mode():
            alone = logprobs_alone(model, np.concatenate([request.prompt_tokens, completion.tokens]))
        assert abs(alone[-len(completion.tokens) :].numpy() - completion.logprobs).max() < 1e-4
    without = RECOMMENDED[: RECOMMENDED.index("--worker-extension-cls")]
    (tmp_path / "without").mkdir()
    with running_servers(folder, tmp_path / "without", flags=without) as [server]:
        with pytest.raises(ModelError, match=r"keeps the old head .*--worker-extension-cls ludic\.engines"):
            ServerEngine(folder, [server.url])


@contextlib.contextmanager
def ludic_serve(root: Root, log: Path) -> Iterator[VllmServer]:
    """`ludic serve`, with an object that knows its URL."""
    server = VllmServer(root.record.model, log)
    with log.open("ab") as file:
        command = [sys.executable, "-m", "ludic", "serve", root.url, "--port", str(server.port), "--max-batch", "16"]
        server.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.timeout(900)
def test_ludic_serve_follows_the_run_restarts_vllm_and_stops_cleanly_on_sigterm(tmp_path: Path) -> None:
    folder, other = make_model(tmp_path / "model", seed=1), make_model(tmp_path / "other", seed=2)
    root = create_root(str(tmp_path / "run"), RunConfig(model=folder, env=("addition",)))
    publish(root, folder, budget=1)
    log = tmp_path / "serve.log"
    with ludic_serve(root, log) as server:
        wait_until(lambda: "serving version 0" in log.read_text())
        with contextlib.closing(ServerEngine(folder, [server.url], run_id=root.run_id)) as engine:
            first = generate_all(engine, [a_request()])[0]
            publish(root, other, budget=1)
            engine.load_weights(other, 1)  # waits until it is there
            second = generate_all(engine, [a_request()])[0]
            assert (first.policy_version, second.policy_version) == (0, 1)
            assert first.tokens.tolist() != second.tokens.tolist()

            api_server, *_ = children_of(server.process.pid)
            os.kill(api_server, signal.SIGKILL)
            wait_until(lambda: api_server not in children_of(server.process.pid))
            again = generate_all(engine, [a_request()])[0]  # waits for the next one
            assert again.tokens.tolist() == second.tokens.tolist()
            assert again.policy_version == 1
        family = descendants_of(server.process.pid)
        assert len(family) >= 2
        server.process.terminate()
        assert server.process.wait(120) == 0
        wait_until(lambda: not any(map(is_running, family)), within_s=10)
    assert "Traceback" not in log.read_text()


@pytest.mark.timeout(900)
def test_vllm_ends_with_ludic_serve(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    root = create_root(str(tmp_path / "run"), RunConfig(model=folder, env=("addition",)))
    publish(root, folder, budget=1)
    with ludic_serve(root, tmp_path / "serve.log") as server:
        # Its engine has begun, and need not be ready.
        wait_until(lambda: len(descendants_of(server.process.pid)) >= 2)
        family = descendants_of(server.process.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, family)), within_s=120)


def test_ludic_serve_refuses_a_port_in_use(tmp_path: Path) -> None:
    import socket

    folder = make_model(tmp_path / "model", seed=1)
    create_root(str(tmp_path / "run"), RunConfig(model=folder, env=("addition",)))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port := free_port()))
        holder.listen()
        command = [sys.executable, "-m", "ludic", "serve", str(tmp_path / "run"), "--port", str(port)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.strip().endswith(f"ludic: 127.0.0.1:{port} is in use; choose another --port")


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.glob("*/children") for child in task.read_text().split()]


def descendants_of(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
