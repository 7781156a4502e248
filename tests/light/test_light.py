"""The package without torch reads, writes and keeps roots, and records calls (extra gateway); others name their extra.

`make light` runs these tests in an environment in which nothing else is installed. In the environment of all tests, an
import finder refuses what that one lacks.
"""

import json
import shutil
import socket
import subprocess
import sys
import uuid
from importlib.metadata import distributions
from pathlib import Path

import light_runs
import pytest
from gateway.upstream_server import PROGRAM, answer, upstream_server
from light_runs import GOLDEN, TRAIN_PACKAGES

from ludic.app.cli.commands import COMMANDS
from ludic.base.installed import EXTRAS, is_installed

pytestmark = pytest.mark.slow
IS_BARE = not is_installed("torch")
REFUSED = () if IS_BARE else TRAIN_PACKAGES


def run(*commands: list[str], folder: Path) -> list[tuple[int, str, str]]:
    """Run commands in one process that can import no package of the extra train; see light_runs."""
    asked = [sys.executable, light_runs.__file__, json.dumps([REFUSED, commands])]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=["folder", "s3"])
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where roots are made; a URL without a slash at its end."""
    if request.param == "folder":
        return str(tmp_path)
    return f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4()}"


def test_commands_read_write_and_keep_a_run(parent: str, tmp_path: Path) -> None:
    model = light_runs.write_tokenizer(tmp_path / "model")
    ids = light_runs.make_run(f"{parent}/run", model)
    of_run = light_runs.commands(f"{parent}/run", model, ids, tmp_path)
    wanted = [*of_run.items(), *light_runs.recorded_commands(f"{parent}/recorded", model).items()]
    found = run(*(args for _, args in wanted), folder=tmp_path)
    for (words, args), (code, out, err) in zip(wanted, found, strict=True):
        assert code == 0, (args, err)
        assert words in out + err, (args, out, err)


def test_commands_read_the_oldest_and_the_newest_of_the_golden_stores(parent: str, tmp_path: Path) -> None:
    wanted: list[tuple[str, list[str]]] = []
    stores = sorted(each for each in GOLDEN.glob("v1.*") if each.is_dir())
    for store in (stores[0], stores[-1]):  # tests/golden reads all of them
        copy(store, f"{parent}/{store.name}")
        wanted += light_runs.golden_commands(f"{parent}/{store.name}").items()
    for (words, args), (code, out, err) in zip(
        wanted, run(*(args for _, args in wanted), folder=tmp_path), strict=True
    ):
        assert code == (1 if args[0] == "verify" else 0), (args, out, err)
        assert words in out + err, (args, out, err)


def copy(store: Path, url: str) -> None:
    from ludic.root.storage.filesystem import Storage

    if "://" not in url:
        shutil.copytree(store, url)
        return
    storage = Storage.connect(url)
    for file in store.rglob("*"):
        if file.is_file():
            storage.put(file.relative_to(store).as_posix(), file.read_bytes())


def test_the_gateway_records_the_calls_to_another_server(tmp_path: Path) -> None:
    agent, url = tmp_path / "agent.py", str(tmp_path / "recorded")
    agent.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with upstream_server() as upstream:
        upstream.answers = [(200, {}, answer())]
        command = ["gateway", url, "--upstream", upstream.url, "--port", port, "--command", f"{sys.executable} {agent}"]
        stored = ["sql", url, "select dialect, capture, response_tokens::text as tokens from model_calls"]
        (ended, said, _), (code, rows, err) = run(command, stored, folder=tmp_path)
    assert ended == 1  # the program's exit code is 3
    assert "1 call, stored in" in said
    assert code == 0, err
    assert all(word in rows for word in ("messages", "sampler", "[7, 8]"))


def test_commands_that_sample_and_train_name_the_extra_and_begin_nothing(tmp_path: Path) -> None:
    model = light_runs.write_tokenizer(tmp_path / "model")
    light_runs.make_run(str(tmp_path / "run"), model)
    before = sorted(tmp_path.rglob("*"))
    heavy = light_runs.heavy_commands(str(tmp_path / "run"), model, tmp_path)
    functions = [light_runs.FUNCTIONS, str(tmp_path / "run"), str(tmp_path)]
    *found, (_, said, _) = run(*heavy.values(), functions, folder=tmp_path)
    for name, text in json.loads(said).items():
        assert text == f"{name}the package torch is not installed; pip install 'ludic-rl[train]'"
    assert len(json.loads(said)) == 4
    for name, (code, out, err) in zip(heavy, found, strict=True):
        assert (code, out) == (1, "")
        package = "torch" if name else "transformers"
        assert err == f"ludic: {name}the package {package} is not installed; pip install 'ludic-rl[train]'\n"
    assert sorted(each for each in tmp_path.rglob("*") if not each.is_relative_to(tmp_path / "config")) == before


def test_the_help_of_all_commands_and_their_completion_need_no_extra(tmp_path: Path) -> None:
    wanted = [
        ["--help"],
        *([*name.split(), "--help"] for name in COMMANDS),
        *(["--completion", each] for each in ("bash", "zsh", "fish")),
    ]
    for args, (code, out, err) in zip(wanted, run(*wanted, folder=tmp_path), strict=True):
        assert (code, err) == (0, ""), args
        assert "ludic" in out


@pytest.mark.skipif(not IS_BARE, reason="this environment has all extras; `make light` makes one without them")
def test_the_package_brings_nothing_that_an_extra_brings() -> None:
    assert not [each for each in TRAIN_PACKAGES if is_installed(each)]
    assert {*EXTRAS} == {*TRAIN_PACKAGES}
    assert not {each.name.lower() for each in distributions()} & {"torch", "nvidia-cublas", "pandas", "datasets"}
