"""Workers that are killed again and again while they sample long answers: requests/ says how each group ended."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forked
from tiny_models import committed_rows, publish

import ludic
from ludic.app.launch.roots import create_run
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.run.config import RunConfig
from ludic.settings.consent import CodeSettings
from ludic.training.config import TrainConfig

pytestmark = pytest.mark.slow

NUM_KILLS = 100 if "LUDIC_SOAK" in os.environ else 8

# Answers of 4 to 2,000 tokens, most of them short, of 0.2 ms each. Each token that it samples is a byte of TOKENS.
ENGINE = """\
import asyncio
import os
import random

import numpy as np

from ludic.engines.engine import Completion
from ludic.records.rollout import WeightSpan

TOKENS = os.open("PATH", os.O_CREAT | os.O_APPEND | os.O_WRONLY)


class Talker:
    name, max_length, max_batch, repeats_in_any_batch = "talker 1", 10_000, 16, True

    def __init__(self, folder, *, version, **options):
        self.policy_version = version

    async def generate(self, request):
        length = min(2000, 4 + int(random.Random(request.seed).lognormvariate(4, 1.2)))
        left = length
        while left > 0:
            num_tokens = min(50, left)
            await asyncio.sleep(0.0002 * num_tokens)
            os.write(TOKENS, b"x" * num_tokens)
            left -= num_tokens
        return Completion(
            tokens=np.full(length, 5, np.int32),
            columns={"response_logprobs": np.full(length, -0.5, np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=length),),
        )

    def load_weights(self, folder, version):
        self.policy_version = version
"""


@pytest.fixture
def root(tmp_path: Path, run_config: Callable[..., RunConfig], folder: str) -> Root:
    (tmp_path / "talker.py").write_text(ENGINE.replace("PATH", str(tmp_path / "tokens")))
    run = run_config(env=("addition",), group_size=4, max_tokens=2000)
    root = create_run(str(tmp_path / "run"), run, TrainConfig(), CodeSettings())
    publish(root, folder, budget=10**6)
    return root


def start(root: Root, *flags: str) -> Forked:
    folder = Path(root.path).parent
    words = ["ludic", "worker", root.url, "--slot", "0", "--engine", f"{folder}/talker.py:Talker", *flags]
    return Forked(words, folder / f"{time.time_ns()}.log")


@pytest.mark.timeout(900)
def test_each_group_has_an_end_and_none_is_lost_or_doubled(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(6)
    for _ in range(NUM_KILLS):
        before = len(list_files(root))
        process = start(root)
        while len(list_files(root)) == before:
            assert process.poll() is None, process.printed()
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    process = start(root, "--num-groups", "30")
    assert process.wait(60) == 0, process.printed()

    rows = committed_rows(root, "group_id", "request_index", "action_length")
    assert sorted(row["request_index"] for row in rows) == list(range(len(rows)))
    with ludic.connect(root.url) as con:
        found = con.sql("select group_id, group_number, outcome, num_tokens, next_group_id from requests").fetchall()
    outcomes = Counter(outcome for _, _, outcome, _, _ in found)
    assert outcomes.keys() == {"complete", "lost"}
    # Each lost group was sampled again, under the same number, until it was complete.
    for _, _, outcome, _, next_group_id in found:
        assert (next_group_id is not None) == (outcome == "lost")
    stored = Counter[str]()
    for row in rows:
        stored[row["group_id"]] += row["action_length"]
    complete = {group_id: num_tokens for group_id, _, outcome, num_tokens, _ in found if outcome == "complete"}
    assert complete == stored

    num_sampled = (Path(root.path).parent / "tokens").stat().st_size
    num_stored = stored.total()
    assert num_sampled > num_stored
    with capsys.disabled():
        price = (num_sampled - num_stored) / NUM_KILLS
        print(
            f"\n{NUM_KILLS} kills: {len(stored)} groups complete, {outcomes['lost']} sampled again; a kill costs "
            f"{price:,.0f} tokens, {price / (num_stored / len(rows)):.1f} mean answers of 16 in flight"
        )
