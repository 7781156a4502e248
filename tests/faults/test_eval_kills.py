"""Evaluators that are really killed, at random: the evaluation ends with the same report as an unbroken one."""

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest
from forks import Forked
from tiny_models import make_model

import ludic
from ludic.app.launch.evaluate import open_to_evaluate
from ludic.eval.config import EvalConfig
from ludic.root.root import Root
from ludic.settings.consent import CodeSettings

pytestmark = pytest.mark.slow

NUM_KILLS = 2
NUM_EXAMPLES, N = 96, 3
OPTIONS = ["--num-examples", NUM_EXAMPLES, "--n", N, "--examples-per-call", 2, "--device", "cpu", "--json"]


def start(root: Root, name: str) -> Forked:
    """name: of its log, beside the root."""
    return Forked(["ludic", "eval", root.url, *map(str, OPTIONS)], Path(f"{root.url}-{name}.log"))


def report(process: Forked) -> dict:
    """What the process printed after its log, but for the root's name."""
    assert process.wait(timeout=240) == 0, process.printed()
    return json.loads(re.search(r"^\{.*", process.printed(), re.DOTALL | re.MULTILINE)[0]) | {"root": ""}


def kill_after_a_while(root: Root, process: Forked, chance: random.Random) -> None:
    """Kill it after up to three more files, and a random moment later."""
    wanted = len(root.list("evals")) + chance.randint(1, 3)
    while process.poll() is None and len(root.list("evals")) < wanted:
        time.sleep(0.005)
    time.sleep(chance.random() * 0.1)
    process.kill()
    process.wait()


@pytest.mark.timeout(900)
def test_a_killed_evaluation_ends_with_the_report_of_an_unbroken_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    config = EvalConfig(env=("addition",), run={"max_tokens": 8})
    unbroken, killed = (open_to_evaluate(str(tmp_path / name), config, folder, CodeSettings()) for name in ("a", "b"))
    wanted = report(start(unbroken, "one"))
    assert wanted["samples"][0]["num_samples"] == NUM_EXAMPLES * N

    chance = random.Random(0)
    for number in range(NUM_KILLS):
        process = start(killed, f"killed-{number}")
        kill_after_a_while(killed, process, chance)
        assert process.returncode == -signal.SIGKILL
    assert 0 < len(killed.list("evals")) < len(unbroken.list("evals"))
    one, two = start(killed, "one"), start(killed, "two")
    kill_after_a_while(killed, one, chance)
    assert one.returncode == -signal.SIGKILL
    three = start(killed, "three")  # two and three make the rest, also the blocks that the dead ones had claimed
    assert [report(process) for process in (two, three)] == [wanted, wanted]
    rows = ludic.Run(killed).sql("select count(*) as stored, count(distinct request_index) as samples from evals")
    assert rows.rows() == [(NUM_EXAMPLES * N, NUM_EXAMPLES * N)]
    assert not ludic.Run(killed).verify().findings
