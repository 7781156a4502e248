"""`ludic view --web` as a process: its address, its port, its names, and its end."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest
from app.cli.conftest import ludic
from hostile_folders import hostile_folder, imported_from

from benchmarks.ports import free_port
from ludic.root.root import Root

__all__ = ["ludic"]
ENDLESS = {"q": "select count(*) from range(100000000000) as a, range(1000) as b"}


def test_a_port_that_is_taken_is_refused_in_a_line(ludic, trained: Root):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = ludic("view", trained.url, "--web", "--port", str(taken.getsockname()[1]))
    assert (result.code, "give another --port" in result.err, result.err.count("\n")) == (1, True, 1)


@contextmanager
def served(shown: str, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """`ludic view --web` in a folder with modules that it must not import; the process, and the address it printed."""
    hostile = hostile_folder(folder / "hostile")
    words = [Path(sys.executable).with_name("ludic"), "view", shown, "--web", "--port", str(free_port()), *flags]
    with subprocess.Popen(words, cwd=hostile, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()
    assert imported_from(hostile) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_with_open_pages_and_a_running_query_ends_at_once(trained: Root, tmp_path: Path, number):
    with served(trained.url, tmp_path) as (process, address), httpx2.Client(timeout=60) as browser:
        assert "token" not in str(browser.get(address, follow_redirects=True).url)
        home = httpx2.URL(address).copy_with(query=None)
        answers: list[httpx2.Response] = []
        page = threading.Thread(target=lambda: answers.append(browser.get(home.join("/sql"), params=ENDLESS)))
        page.start()
        with closing(socket.create_connection((home.host, home.port))) as half:
            half.sendall(b"GET /overview HTTP/1.1\r\n")  # and never the rest
            time.sleep(1)  # the query runs
            assert page.is_alive()
            assert psutil.Process(process.pid).children(recursive=True) == []
            process.send_signal(number)
            begun = time.monotonic()
            assert process.wait(30) == 0
            assert time.monotonic() - begun < 10
        page.join(10)
        assert [answer.status_code for answer in answers] in ([400], [])
        out, err = process.communicate()
        assert (out.count("token="), "token" in err, "select" in err) == (1, False, False)


@pytest.mark.slow
def test_a_query_ends_when_its_page_is_closed(trained: Root, tmp_path: Path):
    with served(trained.url, tmp_path) as (process, address), httpx2.Client(timeout=60) as browser:
        browser.get(address, follow_redirects=True)
        with pytest.raises(httpx2.ReadTimeout):
            browser.get(httpx2.URL(address).join("/sql"), params=ENDLESS, timeout=3)
        watched = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while watched.cpu_percent(interval=1) > 20:  # the query would take all cores
            assert time.monotonic() < deadline


@pytest.mark.slow
def test_at_every_address_the_server_answers_to_the_names_of_its_machine_only(trained: Root, tmp_path: Path):
    flags = ("--host", "0.0.0.0", "--host-names", "viewer.lab")
    with served(trained.url, tmp_path, *flags) as (process, address), httpx2.Client(timeout=60) as browser:
        home = httpx2.URL(address)
        assert home.host == "127.0.0.1"
        for host in ("127.0.0.1", "localhost", socket.gethostname(), "viewer.lab", f"Viewer.Lab:{home.port}"):
            assert browser.get(home.copy_with(query=None), headers={"Host": host}).status_code == 401, host
        for host in ("evil.example", "0.0.0.0", "192.0.2.1", "127.0.0.1.evil.example", "[::1"):
            assert browser.get(home, headers={"Host": host}).status_code == 403, host
        assert browser.get(home, headers={"Origin": "http://evil.example"}).status_code == 403
        process.send_signal(signal.SIGINT)
        assert "without encryption" in process.communicate()[1]
