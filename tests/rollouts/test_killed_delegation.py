"""Workers that are killed in the middle of episodes with delegated tasks: each group is stored whole, once."""

import random
import signal
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chat_models import chat_tokenizer
from forks import Forked
from tiny_models import committed_rows, publish
from transformers import AutoModelForCausalLM

from ludic.app.launch.roots import create_run
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import run_of
from ludic.settings.consent import CodeSettings
from ludic.training.config import TrainConfig

pytestmark = pytest.mark.slow

NUM_KILLS, NUM_GROUPS = 5, 40

# Delegates, acts, or is cut off, as the request's seed says, after a short wait.
ENGINE = """\
import asyncio
import random

import numpy as np

from ludic.engines.engine import Completion
from ludic.models.chat import load_tokenizer
from ludic.records.rollout import WeightSpan

CALL = '<tool_call>{"name": "delegate", "arguments": {"task": "guess"}}</tool_call>'
TEXTS = (CALL, CALL + CALL, "5", "7", "no number")


class Talker:
    name, max_length = "talker 1", 10_000

    def __init__(self, folder, *, version, **options):
        self.policy_version, self.tokenizer = version, load_tokenizer(folder)

    async def generate(self, request):
        chance = random.Random(request.seed)
        text = chance.choice(TEXTS)
        await asyncio.sleep(chance.uniform(0, 0.01))
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        tokens = np.array(ids[: request.params.max_tokens], np.int32)
        return Completion(
            tokens=tokens,
            columns={"response_logprobs": np.full(len(tokens), -0.5, np.float32)},
            finish_reason="stop" if len(tokens) == len(ids) else "length",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=len(tokens)),),
        )

    def load_weights(self, folder, version):
        self.policy_version = version
"""


@pytest.fixture
def start(tmp_path: Path, run_config: Callable[..., RunConfig], folder: str) -> Callable[[str], Root]:
    (tmp_path / "talker.py").write_text(ENGINE)
    model = tmp_path / "model"
    larger = AutoModelForCausalLM.from_pretrained(folder)
    larger.resize_token_embeddings(len(chat_tokenizer()), mean_resizing=False)
    larger.save_pretrained(model)
    chat_tokenizer().save_pretrained(model)

    def make(name: str) -> Root:
        run = run_config(
            model=str(model),
            env=("guess_number",),
            env_options={"guess_number": {"max_steps": 3}},
            sub_agents=("helper",),
            max_children=3,
            max_tokens=64,
        )
        root = create_run(str(tmp_path / name), run, TrainConfig(), CodeSettings())
        publish(root, str(model), budget=10**6)
        return root

    return make


@contextmanager
def worker(root: Root, folder: Path, num_groups: int) -> Iterator[Forked]:
    flags = ("--slot", "0", "--engine", f"{folder}/talker.py:Talker", "--in-flight", "8", "--no-follow-budget")
    log = folder / f"{uuid.uuid4()}.log"
    process = Forked(["ludic", "worker", root.url, *flags, "--num-groups", str(num_groups)], log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stored(root: Root) -> dict[int, list[tuple]]:
    """Rows by request_index, without ids; of each row also the number of its children."""
    names = ("rollout_id", "parent_rollout_id", "request_index", "depth", "agent_id", "response_tokens", "agent_steps")
    rows = committed_rows(root, *names, "episode_reward", "group_id")
    assert len({row["rollout_id"] for row in rows}) == len(rows)
    group_of = {row["rollout_id"]: row["group_id"] for row in rows}
    children = Counter(row["parent_rollout_id"] for row in rows)
    found = defaultdict(list)
    for row in rows:
        if row["parent_rollout_id"] is not None:
            assert group_of[row["parent_rollout_id"]] == row["group_id"]
        num_answers = sum(call["result"] is not None for step in row["agent_steps"] for call in step["tool_calls"])
        num_children = children[row["rollout_id"]]
        assert num_children >= num_answers
        told = (row["depth"], row["agent_id"], row["response_tokens"], row["episode_reward"], num_children)
        found[row["request_index"]].append(told)
    return {index: sorted(of_request) for index, of_request in found.items()}


def test_no_group_is_lost_doubled_or_without_its_children(tmp_path: Path, start: Callable[[str], Root]) -> None:
    chance, killed, whole = random.Random(5), start("killed"), start("whole")
    for _ in range(NUM_KILLS):
        with worker(killed, tmp_path, NUM_GROUPS) as process:
            before = len(stored(killed))
            while len(stored(killed)) == before:
                assert process.poll() is None, process.printed()
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
    num_done = len(stored(killed)) // run_of(killed).group_size
    for root, num_groups in ((killed, NUM_GROUPS), (whole, num_done + NUM_GROUPS)):
        with worker(root, tmp_path, num_groups) as process:
            assert process.wait(timeout=120) == 0, process.printed()
    rows, expected = stored(killed), stored(whole)
    assert sorted(rows) == list(range(len(rows)))
    assert len(rows) == len(expected)
    assert rows == expected
    assert any(depth == 1 for of_request in rows.values() for depth, *_ in of_request)
