"""Tools of a real MCP server, over stdio and HTTP."""

import asyncio
import gc
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.ports import free_port
from ludic.agents.tools import mcp
from ludic.agents.tools.mcp import McpServer
from ludic.agents.tools.registry import make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.errors import ConfigError
from ludic.records.rollout import ToolCall

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow
SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = shlex.join([sys.executable, SERVER])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module", params=["stdio", "http"])
def toolbox(request: pytest.FixtureRequest) -> Toolbox:
    target = COMMAND if request.param == "stdio" else request.getfixturevalue("address")
    return Toolbox(make_tools([f"mcp:{target}"]), time_limit_s=5.0)


def call(toolbox: Toolbox, name: str, arguments: str = "{}") -> ToolCall:
    return asyncio.run(toolbox.run(ToolCall(id="1", name=name, arguments=arguments)))


def test_every_tool_of_a_server_is_there_with_its_schema(toolbox: Toolbox) -> None:
    functions = {schema["function"]["name"]: schema["function"] for schema in toolbox.schemas}
    assert set(functions) == {"shout", "fail", "secret", "wait", "pid"}
    assert functions["shout"]["description"].startswith("Say it loudly.")
    assert functions["shout"]["parameters"]["required"] == ["text"]


def test_calls_from_several_event_loops_reach_the_server(toolbox: Toolbox) -> None:
    assert call(toolbox, "shout", '{"text": "größe", "times": 2}').result == "GRÖSSE!GRÖSSE!"
    assert call(toolbox, "shout", '{"text": "a"}').result == "A!"


def test_calls_run_side_by_side(toolbox: Toolbox) -> None:
    async def run_all() -> list[ToolCall]:
        waits = [ToolCall(id=str(i), name="wait", arguments='{"seconds": 1}') for i in range(6)]
        return await asyncio.gather(*map(toolbox.run, waits))

    start = time.monotonic()
    assert [done.result for done in asyncio.run(run_all())] == ["done"] * 6
    assert time.monotonic() - start < 4


def test_an_error_of_the_server_is_the_error_of_the_call(toolbox: Toolbox) -> None:
    done = call(toolbox, "fail")
    assert done.result is None
    assert "fail" in (done.error or "")


def test_arguments_are_checked_before_the_server_is_asked(toolbox: Toolbox) -> None:
    assert "argument times: 'x' is not of type 'integer'" in (
        call(toolbox, "shout", '{"text": "a", "times": "x"}').error or ""
    )


def test_a_slow_call_is_given_up_and_the_next_one_works(toolbox: Toolbox) -> None:
    impatient = Toolbox(toolbox._tools.values(), time_limit_s=0.3)
    assert "took longer than 0.3 s" in (call(impatient, "wait", '{"seconds": 20}').error or "")
    assert call(toolbox, "shout", '{"text": "a"}').result == "A!"


def test_a_program_inherits_no_secrets_but_may_be_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    toolbox = Toolbox(make_tools([f"mcp:env GIVEN=given NAMED=$SECRET_TOKEN {COMMAND}"]))
    assert call(toolbox, "secret").result == "none"
    assert call(toolbox, "secret", '{"variable": "GIVEN"}').result == "given"
    assert call(toolbox, "secret", '{"variable": "NAMED"}').result == "hush"


def test_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SECRET_TOKEN=\$NOT_SET names a variable that is not set; set NOT_SET"):
        make_tools([f"mcp:env SECRET_TOKEN=$NOT_SET {COMMAND}"])


def test_a_server_whose_tools_are_in_use_no_more_ends(ends: Callable[[int], bool]) -> None:
    tools = make_tools([f"mcp:{COMMAND}"])
    pid = int(call(Toolbox(tools), "pid").result or "")
    assert psutil.pid_exists(pid)
    del tools
    gc.collect()
    assert ends(pid)


def test_a_server_that_dies_fails_the_calls_on_their_way_and_is_started_again(ends: Callable[[int], bool]) -> None:
    server = McpServer(COMMAND)
    toolbox = Toolbox(server.tools, time_limit_s=60.0)
    first = int(call(toolbox, "pid").result or "")

    async def kill_during_calls() -> list[ToolCall]:
        waits = [ToolCall(id=str(i), name="wait", arguments='{"seconds": 120}') for i in range(3)]
        calls = asyncio.gather(*map(toolbox.run, waits))
        await asyncio.sleep(0.5)
        psutil.Process(first).kill()
        return await calls

    lost = asyncio.run(kill_during_calls())
    assert all(done.result is None and done.error for done in lost)
    second = int(call(toolbox, "pid").result or "")
    assert second != first
    server.close()
    assert ends(second)


def test_a_server_that_does_not_come_back_is_an_error_of_each_call(tmp_path: Path) -> None:
    copy = tmp_path / "server.py"
    copy.write_text(Path(SERVER).read_text())
    server = McpServer(shlex.join(["env", "SECRET_TOKEN=hunter2", sys.executable, str(copy)]))
    toolbox = Toolbox(server.tools, time_limit_s=10.0)
    psutil.Process(int(call(toolbox, "pid").result or "")).kill()
    copy.unlink()
    errors = [call(toolbox, "pid").error or "" for _ in range(3)]
    assert all(errors)
    assert errors[-1] == f"MCP server {Path(sys.executable).name} could not be reached: MCPError"
    assert "hunter2" not in "".join(errors)
    server.close()


def test_a_server_that_never_answers_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[int], bool]
) -> None:
    before = threading.enumerate()
    monkeypatch.setattr(mcp, "CONNECT_LIMIT_S", 1.0)
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(300)"
    with pytest.raises(ConfigError, match="it could not be reached: TimeoutError"):
        make_tools(["mcp:" + shlex.join([sys.executable, "-c", code, str(tmp_path / "pid")])])
    assert ends(int((tmp_path / "pid").read_text()))
    for thread in set(threading.enumerate()) - set(before):
        thread.join(20)
        assert not thread.is_alive()


def test_it_ends_with_the_process_that_started_it(tmp_path: Path, ends: Callable[[int], bool]) -> None:
    script = tmp_path / "user.py"
    script.write_text(f"""
import asyncio
from ludic.agents.tools.registry import make_tools
tools = make_tools([{f"mcp:{COMMAND}"!r}])
print(asyncio.run({{tool.name: tool for tool in tools}}["pid"]({{}})))
""")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ends(int(ended.stdout))


def test_a_server_that_cant_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MCP server 127\.0\.0\.1: it could not be reached") as refused:
        make_tools([f"mcp:http://127.0.0.1:{free_port()}/mcp?key=hunter2"])
    assert "hunter2" not in str(refused.value)
    silent = shlex.join([sys.executable, "-c", "pass"])
    with pytest.raises(ConfigError, match="it could not be reached"):
        make_tools([f"mcp:{silent}"])
