"""`ludic view`: in a real terminal, as a picture, in a browser's process, and what it refuses."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from app.cli.conftest import ludic as run_ludic
from hostile_folders import hostile_folder, imported_from

from benchmarks.ports import free_port
from ludic.app.show.terminal.options import ViewOptions
from ludic.app.show.terminal.web import command
from ludic.root.root import Root

ludic = run_ludic


def test_a_picture_shows_the_first_screen_and_names_no_other_server(ludic, made: Root, tmp_path: Path):
    picture = tmp_path / "view.svg"
    assert ludic("view", made.url, "--picture", picture).code == 0
    text = picture.read_text(encoding="utf-8")
    assert ET.fromstring(text).tag.endswith("svg")
    assert "versions:" in text.replace("&#160;", " ")
    assert "url(http" not in text.replace('"', "")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 1, "the viewer needs a terminal"),
        (("no-such-id",), 1, "has no rollout or group 'no-such-id'"),
        (("--web", "--picture", "x.svg"), 2, "contradict"),
    ],
)
def test_what_can_not_be_shown_is_refused_in_a_line(ludic, made: Root, options, code, message):
    result = ludic("view", made.url, *options)
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_port_that_is_none_is_wrong_usage(ludic, made: Root):
    result = ludic("view", made.url, "--web", "--port", "0")
    assert (result.code, result.err) == (
        2,
        "ludic: --port is 0, wanted at least 1; `ludic view --help` lists the options\n",
    )


def test_without_textual_the_command_says_how_to_install_it(ludic, made: Root, monkeypatch):
    monkeypatch.setattr("ludic.base.installed.is_installed", lambda package: package != "textual")
    result = ludic("view", made.url)
    assert result.code == 1
    assert "pip install 'ludic-rl[view]'" in result.err


def test_a_port_that_is_taken_is_refused(ludic, made: Root):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = ludic("view", made.url, "--web", "--port", str(taken.getsockname()[1]))
    assert (result.code, "give another --port" in result.err) == (1, True)


def test_the_command_of_a_browser_is_quoted(made: Root):
    options = ViewOptions(rollout_id="$(touch stolen)", author="a'b; c", web=True)
    assert shlex.split(command(made, options)) == [
        "PYTHONSAFEPATH=1",
        "exec",
        sys.executable,
        "-P",
        "-m",
        "ludic",
        "view",
        made.url,
        "$(touch stolen)",
        "--author=a'b; c",
    ]


def _request(port: int, path: str = "/", **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers.get("Content-Security-Policy", "")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", ""


@contextmanager
def served(made: Root, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """`ludic view --web` in a folder with modules that it must not import; the server's process and its port."""
    port = free_port()
    hostile = hostile_folder(folder / "hostile")
    words = [Path(sys.executable).with_name("ludic"), "view", made.url, "--web", "--port", str(port), *flags]
    options = {"cwd": hostile, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, **options) as process:
        try:
            deadline = time.monotonic() + 120
            while True:
                with closing(socket.socket()) as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield process, port
        finally:
            process.kill()
    assert imported_from(hostile) == []


@pytest.mark.slow
def test_the_web_server_answers_its_own_page_only(made: Root, tmp_path: Path):
    with served(made, tmp_path) as (_, port):
        status, page, policy = _request(port)
        assert (status, f"ws://127.0.0.1:{port}/ws" in page) == (200, True)
        assert "default-src 'self'" in policy
        assert _request(port, Host=f"localhost:{port}")[0] == 200
        for host in ("evil.example", "[::1", "", socket.gethostname()):
            assert _request(port, Host=host)[0] == 403, host
        for origin in ("http://evil.example", "http://[::1", "[::1", "null", f"http://localhost:{port}"):
            assert _request(port, "/ws", Origin=origin)[0] == 403, origin


@pytest.mark.slow
def test_at_every_address_the_web_server_answers_to_the_names_of_its_machine_only(made: Root, tmp_path: Path):
    with served(made, tmp_path, "--host", "0.0.0.0", "--host-names", "viewer.lab") as (_, port):
        for host in ("127.0.0.1", "localhost", socket.gethostname(), "viewer.lab", f"Viewer.Lab:{port}"):
            assert _request(port, Host=host)[0] == 200, host
        for host in ("evil.example", "0.0.0.0", "192.0.2.1", "127.0.0.1.evil.example", "[::1"):
            assert _request(port, Host=host)[0] == 403, host
        # The page of another name that leads to this machine, as after DNS rebinding.
        assert _request(port, "/ws", Host="evil.example", Origin="http://evil.example")[0] == 403


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_with_an_open_page_ends_at_once_and_so_does_the_pages_process(made: Root, tmp_path: Path, number):
    """The browser neither reads nor answers when the server ends."""
    with served(made, tmp_path) as (process, port):
        with closing(socket.create_connection(("127.0.0.1", port), timeout=60)) as page:
            key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
            host = f"127.0.0.1:{port}"
            page.sendall(
                f"GET /ws HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nUpgrade: websocket\r\n"
                f"Connection: Upgrade\r\n{key}\r\n\r\n".encode()
            )
            seen = b""
            while b"versions" not in seen:
                seen += page.recv(1 << 16)
                assert process.poll() is None
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == 1
            process.send_signal(number)
            assert process.wait(15) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
            _, alive = psutil.wait_procs(children, timeout=15)
            assert alive == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_keys_drive_it_in_a_real_terminal(made: Root, tmp_path: Path):
    socket_path = str(tmp_path / "tmux")

    def tmux(*words: str) -> str:
        done = subprocess.run(["tmux", "-S", socket_path, *words], capture_output=True, text=True, timeout=60)
        return done.stdout

    def wait_for(text: str) -> str:
        deadline = time.monotonic() + 120
        while text not in (screen := tmux("capture-pane", "-p")):
            assert time.monotonic() < deadline, screen
            time.sleep(0.2)
        return screen

    words = shlex.join([sys.executable, "-m", "ludic", "view", made.url])
    environment = [f"-e{name}={os.environ[name]}" for name in ("PYTHONPATH", "LUDIC_CACHE_DIR") if name in os.environ]
    tmux("new-session", "-d", *environment, "-x", "130", "-y", "40", f"{words}; echo it has ended; sleep 60")
    try:
        wait_for("versions: 1 to 2 of 2")
        tmux("send-keys", "a")
        wait_for("rollouts of version 1")
        tmux("send-keys", "/")
        wait_for("SQL predicate")
        tmux("send-keys", "-l", "episode_reward = 0.125")
        tmux("send-keys", "Enter")
        wait_for("1 to 1 of 1")
        tmux("send-keys", "Enter")
        assert "[bold red]x[/]" in wait_for("\\x1b[2Jcleared")
        tmux("send-keys", "q")
        wait_for("it has ended")
    finally:
        tmux("kill-server")
