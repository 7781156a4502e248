"""Scorers in processes beside: they may crash, hang and print, and fail only their own call."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_models import scripted_agent

from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment
from ludic.environments.single_turn import ScorerProcesses
from ludic.errors import ConfigError
from ludic.records.rollout import Rollout
from ludic.rollouts.sampler import GroupSampler, episodes_of_run
from ludic.run.config import RunConfig
from ludic.settings.user_files import Files, read_user_file

OWN = """\
import asyncio
import ctypes
import datetime
import os
import time

import numpy as np

import own_words
from ludic.environments.environment import Example, Score, SpanReward
from ludic.records.rollout import Message


class Own:
    run_in = "process"

    def __init__(self, weight=1.0):
        self.weight = weight
        self.num_calls = 0

    def example(self, index, split):
        data = {"level": 3, "day": datetime.date(2026, 1, 1), "parts": ("a", {"b": b"c"}), "count": np.int64(4)}
        data["nothing"] = float("nan")
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="?"),), data=data)

    def score(self, example, answer):
        self.num_calls += 1
        if answer == "exit":
            os._exit(3)
        if answer == "fault":
            ctypes.string_at(0)
        if answer == "hang":  # keeps the lock of Python in C code
            ctypes.PyDLL(None).sleep(1000)
        if answer == "raise":
            raise KeyError("own")
        if answer == "quit":
            raise SystemExit(4)
        print("printed by a scorer", flush=True)
        assert example.data["parts"] == ("a", {"b": b"c"}) and example.data["count"] == 4.0, example.data
        assert example.data["nothing"] != example.data["nothing"], "NaN"
        return Score(
            reward=np.float32(self.weight * len(answer)),
            components={"level": example.data["level"], "day": float(example.data["day"].year)},
            span_rewards=(SpanReward(start=0, end=1, reward=0.5),),
            info={"pid": os.getpid(), "word": own_words.WORD, "calls": self.num_calls},
            extra={"x_tags": ["a", "b"]},
        )
"""


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Users' files as a worker has them: their texts, which are no longer on the disk."""
    (tmp_path / "own_words.py").write_text("WORD = 'beside'\n")
    (tmp_path / "own.py").write_text(OWN)
    file = read_user_file(tmp_path / "own.py")
    for each in ("own.py", "own_words.py"):
        (tmp_path / each).unlink()
    return {"own.py": file}


def sample(
    make: Callable[[], Any], script: Sequence[str], timeout_s: float | None = None, told: Any = None
) -> list[Rollout]:
    run = RunConfig(
        model="m", env=("own",), group_size=len(script), max_tokens=64, extra_columns={"x_tags": "list<string>"}
    )
    limited = LimitedEnvironments("own", make, TimeLimit(timeout_s=timeout_s))
    episodes = episodes_of_run(run, scripted_agent(script))
    sampler = GroupSampler(run=run, run_episode=episodes, environments={"own": limited})
    return list(sampler.sample([0], "worker").groups[0].rollouts)


def info(row: Rollout) -> dict[str, str]:
    return dict(row.environment_steps[0].info)


def test_a_score_comes_back_whole_from_another_process(files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    make = make_environment("own.py:Own", {"weight": 2.0}, files=files)
    (row,) = sample(make, ["abc"])
    assert (row.error, row.episode_reward) == (None, 6.5)
    assert row.reward_components == {"level": 3.0, "day": 2026.0}
    assert row.extra == {"x_tags": ["a", "b"]}
    assert (info(row)["word"], info(row)["calls"]) == ("beside", "1")
    assert int(info(row)["pid"]) != os.getpid()
    assert "printed by a scorer" in capfd.readouterr().err


def test_processes_are_kept_between_calls(files: Files) -> None:
    make = make_environment("own.py:Own", files=files)
    first, second = (sample(make, ["a"])[0] for _ in range(2))
    assert (info(first)["pid"], info(second)["calls"]) == (info(second)["pid"], "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("exit", "ScorerError: the process that scored for environment own.py:Own ended with exit code 3"),
        ("fault", "ScorerError: the process that scored for environment own.py:Own ended by signal SIGSEGV"),
        ("hang", "environment own: score on example 'train-0' did not return within 2 s"),
        ("raise", "ScorerError: KeyError: 'own'"),
        ("quit", "ScorerError: RuntimeError: sys.exit(4) was called; raise an error instead"),
    ],
)
def test_a_bad_call_fails_its_own_episode_only(files: Files, answer: str, error: str) -> None:
    make = make_environment("own.py:Own", files=files)
    rows = sample(make, ["abc", answer, "ab", "a"], timeout_s=2.0)
    assert [row.episode_reward for row in rows] == [3.5, None, 2.5, 1.5]
    assert error in str(rows[1].error)
    assert [row.error for row in sample(make, ["abc"] * 3, timeout_s=2.0)] == [None] * 3


@pytest.mark.slow
def test_the_start_of_a_process_is_no_part_of_the_time_limit(files: Files) -> None:
    slow = files["own.py"].source.replace(b"self.weight = weight", b"self.weight = weight; time.sleep(1.0)")
    files = {"own.py": type(files["own.py"])(path=files["own.py"].path, source=slow, imports=files["own.py"].imports)}
    (row,) = sample(make_environment("own.py:Own", files=files), ["a"], timeout_s=0.5)
    assert row.error is None


def test_processes_end_with_the_environment(files: Files) -> None:
    make = make_environment("own.py:Own", files=files)
    (row,) = sample(make, ["a"])
    pid = int(info(row)["pid"])
    os.kill(pid, 0)
    del make
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("the process is still there")


def test_what_can_not_be_sent_is_named(tmp_path: Path) -> None:
    (tmp_path / "own_words.py").write_text("WORD = 'beside'\n")
    (tmp_path / "own.py").write_text(OWN.replace('"level": 3', '"level": object()'))
    (row,) = sample(make_environment(f"{tmp_path}/own.py:Own"), ["a"])
    assert "example 'train-0' of environment" in str(row.error)
    assert "can't be sent to a process: it holds a object; wanted texts, numbers" in str(row.error)


def test_answers_are_scored_together_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "group.py").write_text(
        "import asyncio, os\n"
        "from ludic.environments.environment import Score\n"
        "async def together(example, answers):\n"
        "    await asyncio.sleep(0)\n"
        "    return [Score(reward=len(a.text) + a.reward, info={'pid': os.getpid()}) for a in answers]\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "?", "answer": "aa"}) + "\n")
    options = {"group_scorer": f"{tmp_path}/group.py:together", "run_in": "process", "heldout_share": 0}
    rows = sample(make_environment(f"qa/{tmp_path}/rows.jsonl", options), ["a", "aa"])
    assert [(row.error, row.episode_reward) for row in rows] == [(None, 1.0), (None, 3.0)]
    assert int(info(rows[0])["pid"]) != os.getpid()


def test_an_environment_of_several_steps_has_no_processes(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text(
        "class Steps:\n    run_in = 'process'\n    def example(self, i, s): ...\n"
        "    def reset(self, e): ...\n    def step(self, a): ...\n"
    )
    with pytest.raises(ConfigError, match="run_in 'process' is for environments with a question and a score"):
        make_environment(f"{file}:Steps")


def test_no_process_starts_before_it_is_needed(files: Files) -> None:
    processes = ScorerProcesses("own.py:Own", {}, 0, files)
    assert processes._all == set()


def test_the_traceback_of_the_process_is_kept(files: Files) -> None:
    (row,) = sample(make_environment("own.py:Own", files=files), ["raise"])
    line = OWN.splitlines().index('            raise KeyError("own")') + 1
    assert row.error == f"ScorerError: KeyError: 'own' (own.py:{line}, in score)"
    lines = (row.traceback or "").splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "KeyError: 'own'")
    assert lines[1].endswith(f'own.py", line {line}, in score')
    assert lines[2] == '    raise KeyError("own")'
