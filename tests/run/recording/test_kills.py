"""Recorders that are really killed at any moment, and the lives that follow them."""

import os
import random
import time
from contextlib import suppress
from typing import Any

import lives
import pytest
from preloaded import fork_server
from recorded import MODEL, claims_of, ledger_of, metrics_of, problems_of, rows_of

import ludic

processes = fork_server("lives", "ludic.run.recording.recorder")


def live(url: str, first_step: int, seconds: float) -> dict[int, list[str]]:
    """Record from a step on, and kill the process that many seconds after its first step; what it said of each step."""
    said, says = processes.Pipe(duplex=False)
    with says:
        process = processes.Process(target=lives.live, args=(lives.record, dict(os.environ), says, url, first_step))
        process.start()
    found: dict[int, list[str]] = {}
    with said, suppress(EOFError):
        assert said.poll(60), "it never took a step"
        time.sleep(seconds)
        process.kill()
        while True:
            step, ids = said.recv()
            found[step] = ids
    process.join()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("root_url", "num_kills"), [("local", 12), ("s3", 6)], indirect=["root_url"])
def test_kills_at_any_moment_lose_and_double_nothing(root_url: str, num_kills: int):
    kept: dict[int, list[str]] = {}
    said_by_all: set[str] = set()
    step = 1
    for _ in range(num_kills):
        said = live(root_url, step, random.uniform(0, 0.3))
        kept = {known: ids for known, ids in kept.items() if known < step} | said
        said_by_all.update(name for ids in said.values() for name in ids)
        step = max(1, max(kept) + 1 - random.randint(0, 3))  # of the newest checkpoint, which may be some steps old

    rows = [row["rollout_id"] for row in rows_of(root_url)]
    assert len(rows) == len(set(rows))
    assert said_by_all <= set(rows)
    ledger = {step: rows for (_, step), rows in ledger_of(root_url).items()}
    assert set(ledger) - set(kept) <= {max(kept) + 1}  # stored, and killed before it could say so
    assert {step: ids_of(ledger[step]) for step in kept} == kept
    assert [claim.ended_at for claim in claims_of(root_url)] == [None] * num_kills
    assert {(claim.slot, claim.life) for claim in claims_of(root_url)} == {(0, life + 1) for life in range(num_kills)}
    assert len(metrics_of(root_url)) == len({(row["attempt_id"], row["step"]) for row in metrics_of(root_url)})
    assert problems_of(root_url) == []


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local"], indirect=True)
def test_a_trainer_takes_the_rows_of_samplers_that_are_killed(root_url: str):
    taken: list[list[str]] = []
    with ludic.record(root_url, model=MODEL) as trainer:
        for life in range(3):
            said, says = processes.Pipe(duplex=False)
            args = (lives.sample, dict(os.environ), says, root_url, life * 1000)
            sampler = processes.Process(target=lives.live, args=args)
            with says:
                sampler.start()
            with said:
                for _ in range(5):
                    assert said.poll(60)
                    taken.append(said.recv())
                    trainer.step(len(taken), advantages=dict.fromkeys(taken[-1], 0.5))
                time.sleep(random.uniform(0, 0.1))
                sampler.kill()
            sampler.join()
    assert [ids_of(rows) for rows in ledger_of(root_url).values()] == taken
    rows = [row["rollout_id"] for row in rows_of(root_url)]
    assert len(rows) == len(set(rows))
    assert {(claim.slot, claim.life) for claim in claims_of(root_url)} == {(0, 1), (1, 1), (1, 2), (1, 3)}
    assert not trainer.lost
    assert problems_of(root_url) == []


def ids_of(rows: list[dict[str, Any]]) -> list[str]:
    return [row["rollout_id"] for row in rows]
