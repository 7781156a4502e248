"""Gateways that are really killed, and one that sleeps: no acknowledged call is lost or doubled, and open ones show."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import gateway_lives
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from preloaded import fork_server
from tiny_runs import create_root

import ludic
from ludic.root import LivesWatch, Root, held_life, newest_episode_claim, open_episodes_of, take_over
from ludic.root.catalogue import CALLS
from ludic.root.maintenance.verify import check_root
from ludic.root.rows.calls import read_calls
from ludic.root.rows.tables import read_table

processes = fork_server("ludic.root.rows.calls", "ludic.root.gateways", "s3fs")


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
    said, says = processes.Pipe(duplex=False)
    with says:
        arguments = (says, dict(os.environ), url, lease_s)
        process = processes.Process(target=gateway_lives.serve, args=arguments, daemon=True)
        process.start()
    return Gateway(process, said)


def acknowledged(heard: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"intent": set(), "call": set(), "fenced": set()}
    for event, call_id in heard:
        found[event].add(call_id)
    return found


def keys_of(table: pa.Table) -> Iterator[tuple[str, str]]:
    return zip(table["event"].to_pylist(), table["call_id"].to_pylist(), strict=True)


def findings(root: Root, said: dict[str, set[str]]) -> Counter[str]:
    tables = [read_table(root, CALLS, found) for found in CALLS.listed(root)]
    stored = Counter(row for table in tables for row in keys_of(table))
    shown = {call_id for (call_id,) in ludic.open(root.url).sql("select call_id from model_calls where is_open").rows()}
    unanswered = {call_id for call_id in said["intent"] if ("call", call_id) not in stored}
    return Counter(
        calls=sum(event == "call" for event, _ in stored),
        open=len(shown),
        lost=sum((event, call_id) not in stored for event in ("intent", "call") for call_id in said[event]),
        doubled=sum(count > 1 for count in stored.values()),
        hidden=len(unanswered - shown),
        unsound=len(check_root(root).findings),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("root_url", ["local", "s3"], indirect=True)
def test_no_acknowledged_call_is_lost_or_doubled_by_kills_at_any_moment(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    num_kills = int(os.environ.get("LUDIC_KILLS", "12"))
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


@pytest.mark.slow
def test_a_gateway_that_slept_longer_than_its_lease_acknowledges_nothing_more(tmp_path: Path) -> None:
    root = create_root(str(tmp_path / "run"), "tiny")
    sleeper = start(root.url, lease_s=1.0)
    assert sleeper.said.poll(60), "it never stored a call"
    pid = sleeper.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    sleeper.listen()
    watch = LivesWatch(root)
    before = {claim.life for claim in open_episodes_of(root)}
    while not all(watch.is_over(life) for life in before):
        time.sleep(0.1)
    with held_life(root) as life:
        taken = [take_over(life, claim) for claim in open_episodes_of(root)]
        assert taken
        assert None not in taken
        calls = {
            claim.episode_id: set(answered(root, claim.episode_id)) for claim in open_episodes_of(root, life.number)
        }
        os.kill(pid, signal.SIGCONT)
        sleeper.process.join(60)
        said = acknowledged(sleeper.kill())
        assert len(said["fenced"]) == 1
        # What it acknowledged, the life that took its episodes over could read; also if it stored more since.
        of_taken = set().union(*(answered(root, episode_id) for episode_id in calls))
        assert said["call"] & of_taken <= set().union(*calls.values())
        assert all(newest_episode_claim(root, episode_id, 1).life == life.number for episode_id in calls)


def answered(root: Root, episode_id: str) -> list[str]:
    rows = read_calls(root, episode_id, 1)
    return rows.filter(pc.equal(rows["event"], "call"))["call_id"].to_pylist()
