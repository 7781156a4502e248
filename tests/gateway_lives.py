"""Processes to be killed: lives of a gateway that store agents' calls, and go on with the episodes of dead lives.

A module of its own beside the tests, as lives.py is. A process says what was acknowledged: (event, call_id).
"""

import asyncio
import itertools
import os
import random
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from agent_calls import call_row, claimed, tokens

from ludic.errors import FencedError
from ludic.records import new_id
from ludic.root import EpisodeClaim, Life, LivesWatch, Root, held_life, open_episodes_of, seal_episode, take_over
from ludic.root.rows.calls import CallLog, read_calls, whole_prompts
from ludic.root.rows.calls import _answered as answered

AT_ONCE = 4
"""Episodes of a life that run at the same time."""
CALLS = 5
"""Calls of an episode."""


def serve(says: Connection, environment: Mapping[str, str], url: str, lease_s: float) -> None:
    """Store calls until killed, or until the lease is lost. environment: that of the fork server is older."""
    os.environ.update(environment)
    root = Root.open(url, writable=True)
    with held_life(root, lease_s=lease_s) as life:
        try:
            asyncio.run(_serve(root, life, says))
        except FencedError:
            says.send(("fenced", life.worker_id))


async def _serve(root: Root, life: Life, says: Connection) -> None:
    taken = await asyncio.to_thread(_take_over_all, root, life)
    numbers = itertools.count()

    async def play() -> None:
        while True:
            claim = taken.pop() if taken else claimed(life, f"{life.worker_id}-{next(numbers)}")
            await _play(root, life, log, claim, says)

    async with CallLog(root, life) as log:
        await asyncio.gather(*(play() for _ in range(AT_ONCE)))


def _take_over_all(root: Root, life: Life) -> list[EpisodeClaim]:
    watch = LivesWatch(root)
    over = [claim for claim in open_episodes_of(root) if claim.life != life.number and watch.is_over(claim.life)]
    found = [take_over(life, claim) for claim in random.sample(over, min(AT_ONCE, len(over)))]
    return [claim for claim in found if claim is not None]


async def _play(root: Root, life: Life, log: CallLog, claim: EpisodeClaim, says: Connection) -> None:
    """Go on with an episode from its last stored call, and seal it after CALLS calls."""
    stored = await asyncio.to_thread(read_calls, root, claim.episode_id, claim.attempt)
    prompts = whole_prompts(stored)
    ids, sampled = ([*answered(stored)[name].to_pylist()] for name in ("call_id", "response_tokens"))
    last: Mapping[str, Any] | None = {"id": ids[-1], "tokens": [*prompts[ids[-1]], *sampled[-1]]} if ids else None
    for number in range(len(ids), CALLS):
        call_id, begun = new_id(), tokens(number) if last is None else np.array([*last["tokens"], number], np.int32)
        base = {} if last is None else {"base_call_id": last["id"], "base_length": len(begun) - 1}
        row = call_row(
            claim.episode_id, call_id=call_id, prompt_tokens=begun, response_tokens=tokens(*range(100)), **base
        )
        await asyncio.gather(_intent(log, claim, call_id, says), _answer(log, row, says))
        last = {"id": call_id, "tokens": [*begun, *range(100)]}
    await asyncio.to_thread(seal_episode, life, claim, end="complete")


async def _intent(log: CallLog, claim: EpisodeClaim, call_id: str, says: Connection) -> None:
    await log.append(call_row(claim.episode_id, call_id=call_id, event="intent"))
    says.send(("intent", call_id))


async def _answer(log: CallLog, row: Mapping[str, Any], says: Connection) -> None:
    await asyncio.sleep(random.uniform(0, 0.02))  # the engine
    await log.append(row)
    says.send(("call", row["call_id"]))
