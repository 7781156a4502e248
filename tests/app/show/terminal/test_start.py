"""`ludic view`: in a real terminal, as a picture, in a browser's process, and what it refuses."""

import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from app.cli.conftest import ludic as run_ludic

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
