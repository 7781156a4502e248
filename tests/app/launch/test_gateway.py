"""`ludic gateway` before the weights of a run: it samples with the newest ones, and a stop ends it well."""

import threading
import time
from pathlib import Path

import httpx2
import pytest
from tiny_models import WORDS, make_model, publish

from benchmarks.ports import free_port
from ludic.app.launch.config import GatewayProcess
from ludic.app.launch.gateway import KEY_VARIABLE, GatewayStart, run_gateway
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError, MissingRootError
from ludic.gateway.config import GatewaySettings, HttpSettings, UpstreamSettings
from ludic.root.rows.calls import read_all_calls
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

OWN = "own-key-of-this-test-0123456789"


def start_of(port: int) -> GatewayStart:
    return GatewayStart(
        process=GatewayProcess(port=port),
        gateway=GatewaySettings(),
        http=HttpSettings(),
        upstream=UpstreamSettings(),
        engine=EngineConfig(engine="transformers"),
        device="cpu",
    )


@pytest.mark.slow
def test_calls_are_sampled_with_the_newest_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, OWN)
    model = make_model(tmp_path / "model", seed=1)
    root = create_root(str(tmp_path / "run"), RunConfig(model=model, env=("addition",), max_tokens=8))
    stop, lines, port = threading.Event(), [], free_port()
    thread = threading.Thread(target=run_gateway, args=(root.url, start_of(port), stop, lines.append))
    thread.start()

    def ask() -> None:
        url = lines[1].partition("=")[2]  # of OPENAI_BASE_URL
        body = {"model": model, "messages": [{"role": "user", "content": WORDS}]}
        found = httpx2.post(f"{url}/chat/completions", json=body, headers={"api-key": OWN}, timeout=60)
        assert found.status_code == 200, found.text

    def versions() -> list[int]:
        return [row["policy_version"] for row in read_all_calls(root).to_pylist() if row["event"] == "call"]

    try:
        wait_for(lambda: len(lines) > 4)
        ask()
        assert versions() == [0]
        publish(root, make_model(tmp_path / "other", seed=2), budget=1)
        wait_for(lambda: ask() or versions()[-1] == 1)
    finally:
        stop.set()
        thread.join()
    assert f"http://127.0.0.1:{port}/e/" in lines[1]
    assert not [line for line in lines if OWN in line]  # the variable is named instead
    with pytest.raises(httpx2.ConnectError):
        ask()


def wait_for(is_so) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_start_that_cant_work_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "run")
    with pytest.raises(MissingRootError, match="--upstream URL records the calls of another server"):
        run_gateway(url, start_of(free_port()), threading.Event(), print)
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="has 5 characters, wanted 16"):
        run_gateway(url, start_of(free_port()), threading.Event(), print)
    assert not [*tmp_path.iterdir()]
