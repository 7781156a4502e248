"""Gateways that are really killed, and one that sleeps: no acknowledged call is lost or doubled, and open ones show."""

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import gateway_lives
import pytest

import ludic
from ludic.root import Root
from ludic.root.catalogue import CALLS
from ludic.root.maintenance.verify import check_root
from ludic.root.rows.tables import read_table

fork_server = multiprocessing.get_context("forkserver")
# A process then starts in some ms: what it imports is there already.
fork_server.set_forkserver_preload(["ludic.root.rows.calls", "ludic.root.gateways", "s3fs"])


@dataclass
class Gateway:
    """A process, and what it says."""

    process: BaseProcess
    said: Connection
    heard: list[tuple[str, str]] = field(default_factory=list)

    def listen(self) -> None:
        while self.said.poll():
            self.heard.append(self.said.recv())

    def kill(self) -> list[tuple[str, str]]:
        """Kill it; all that it said, but for a last message that the kill has cut."""
        self.process.kill()
        self.process.join()
        with self.said, suppress(EOFError):
            while True:
                self.heard.append(self.said.recv())
        return self.heard


def start(url: str, *, lease_s: float = 12.0) -> Gateway:
    said, says = fork_server.Pipe(duplex=False)
    with says:
        arguments = (says, dict(os.environ), url, lease_s)
        process = fork_server.Process(target=gateway_lives.serve, args=arguments, daemon=True)
        process.start()
    return Gateway(process, said)


def acknowledged(heard: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"intent": set(), "call": set(), "fenced": set()}
    for event, call_id in heard:
        found[event].add(call_id)
    return found


def findings(root: Root, said: dict[str, set[str]]) -> Counter[str]:
    tables = [read_table(root, CALLS, found) for found in CALLS.listed(root)]
    stored = Counter(row for table in tables for row in zip(*(table[n].to_pylist() for n in ("event", "call_id"))))
    open_calls = ludic.open(root.url).sql("select call_id from model_calls where is_open").rows()
    return Counter(
        calls=sum(event == "call" for event, _ in stored),
        open=len(open_calls),
        lost=sum((event, call_id) not in stored for event in ("intent", "call") for call_id in said[event]),
        doubled=sum(count > 1 for count in stored.values()),
        hidden=len(
            {call_id for call_id in said["intent"] if ("call", call_id) not in stored} - {i for (i,) in open_calls}
        ),
        unsound=len(check_root(root).findings),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("root_url", "num_kills"), [("local", 100), ("s3", 100)], indirect=["root_url"])
def test_no_acknowledged_call_is_lost_or_doubled_by_kills_at_any_moment(
    root: Root, num_kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    running, heard = [start(root.url) for _ in range(4)], list[tuple[str, str]]()
    for kill in range(num_kills):
        gateway = running[kill % len(running)]
        assert gateway.said.poll(60), "it never stored a call"
        time.sleep(random.uniform(0, 0.1))
        assert gateway.process.exitcode is None, "it ended by itself"
        heard += gateway.kill()
        running[kill % len(running)] = start(root.url)
    for gateway in running:
        heard += gateway.kill()
    said = acknowledged(heard)
    found = findings(root, said)
    with capsys.disabled():
        print(f"\n{num_kills} kills on {root.url.split('://')[0]}, {len(said['call'])} acknowledged: {dict(found)}")
    assert found["calls"] >= len(said["call"]) > 0
    assert found["open"] > 0
    assert not any(found[each] for each in ("lost", "doubled", "hidden", "unsound"))
