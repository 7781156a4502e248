"""One worker samples with many bad environments at once: each fails its own episodes, and the others go on."""

import re
from dataclasses import dataclass

import pytest
from tiny_models import committed_rows, publish

from ludic.root.sql.connection import connect
from ludic.run.run_json import create_root

BASE = """
import asyncio, math, os, signal, sys, threading, time
from dataclasses import replace
from ludic.environments.environment import Example, Transition
from ludic.records.rollout import Message

class Good:
    max_steps = 2

    def example(self, index, split):
        return Example(example_id=f"e{index}", messages=(Message(role="user", content="1+1"),))

    def reset(self, example):
        return example.messages

    def step(self, action):
        return self.reply()

    def reply(self, **values):
        return replace(Transition(observation=None, reward=1.0, terminated=True), **values)

async def pause():
    await asyncio.sleep(0.01)

class GoodAndWaits(Good):
    async def step(self, action):
        for _ in range(8):
            await pause()
        return self.reply()
"""
LIMIT = "did not return within 3 s|was not called, after timeouts in a row"


@dataclass(frozen=True, slots=True)
class Bad:
    """Members of a class, and the error of its episodes; None if they do not fail."""

    members: str
    error: str | None


def step(line: str, *, waits: bool = False, run_in: str = "loop") -> str:
    head = f"run_in = {run_in!r}\n" if run_in != "loop" else ""
    return f"{head}{'async ' if waits else ''}def step(self, action):\n    {line}\n    return self.reply()\n"


BAD = {
    "raises": Bad(step("raise KeyError('lost')"), "KeyError: 'lost'"),
    "raises_in_a_thread": Bad(step("raise KeyError('lost')", run_in="thread"), "KeyError: 'lost'"),
    "raises_awaited": Bad(step("raise KeyError('lost')", waits=True), "KeyError: 'lost'"),
    "raises_in_reset": Bad("def reset(self, example):\n    raise OSError('no disk')\n", "OSError: no disk"),
    "can_be_made_twice": Bad(
        "made = []\ndef __init__(self):\n    self.made.append(1)\n    if len(self.made) > 2: raise OSError('full')\n",
        "OSError: full",
    ),
    "interrupts": Bad(step("raise KeyboardInterrupt"), "KeyboardInterrupt was raised"),
    "interrupts_awaited": Bad(step("raise KeyboardInterrupt", waits=True), "KeyboardInterrupt was raised"),
    "interrupts_in_a_thread": Bad(step("raise KeyboardInterrupt", run_in="thread"), "KeyboardInterrupt was raised"),
    "exits": Bad(step("sys.exit(3)"), r"sys\.exit\(3\) was called"),
    "exits_awaited": Bad(step("sys.exit(3)", waits=True), r"sys\.exit\(3\) was called"),
    "exits_in_a_thread": Bad(step("sys.exit(3)", run_in="thread"), r"sys\.exit\(3\) was called"),
    "ends_a_generator": Bad(step("raise GeneratorExit"), "GeneratorExit was raised"),
    "stops_iteration": Bad(step("raise StopIteration"), "StopIteration"),
    "stops_iteration_in_a_thread": Bad(step("raise StopIteration", run_in="thread"), "StopIteration"),
    "recurses": Bad(step("self.step(action)"), "RecursionError"),
    "has_no_memory": Bad(step("raise MemoryError"), "MemoryError"),
    "is_cancelled": Bad(step("raise asyncio.CancelledError"), "CancelledError was raised"),
    "is_cancelled_awaited": Bad(step("raise asyncio.CancelledError", waits=True), "cancelled itself"),
    "is_cancelled_in_a_thread": Bad(step("raise asyncio.CancelledError", run_in="thread"), "CancelledError was raised"),
    "cancels_its_task": Bad(step("asyncio.current_task().cancel()"), "no running event loop"),
    "cancels_its_task_awaited": Bad(step("asyncio.current_task().cancel(); await pause()", waits=True), "cancelled"),
    "loops": Bad(step("while True: pass"), LIMIT),
    "loops_in_a_thread": Bad(step("while True: pass", run_in="thread"), LIMIT),
    "sleeps_in_a_thread": Bad(step("time.sleep(3600)", run_in="thread"), LIMIT),
    "locks_a_thread": Bad(step("threading.Event().wait()", run_in="thread"), LIMIT),
    "awaits_for_ever": Bad(step("await asyncio.Event().wait()", waits=True), LIMIT),
    "ignores_its_end": Bad(
        step("while True:\n        try: await asyncio.Event().wait()\n        except BaseException: pass", waits=True),
        LIMIT,
    ),
    "awaits_a_thread_for_ever": Bad(step("await asyncio.to_thread(threading.Event().wait)", waits=True), LIMIT),
    "leaves_threads": Bad(step("threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"), None),
    "leaves_tasks": Bad(
        step("self.task = asyncio.ensure_future(asyncio.sleep(3600)); await pause()", waits=True), None
    ),
    "leaves_files": Bad(step("os.open(os.devnull, os.O_RDONLY)"), None),
    "keeps_much": Bad("def __init__(self):\n    self.kept = bytearray(50_000_000)\n", None),
    "says_10_mb": Bad(
        "def reset(self, example):\n    return (Message(role='user', content='ab ' * 3_300_000),)\n",
        "a prompt of .* tokens|exceed",
    ),
    "rewards_nan": Bad(
        "def step(self, action):\n    return self.reply(reward=math.nan)\n", "reward that step returned is nan"
    ),
    "rewards_too_much": Bad(
        "def step(self, action):\n    return self.reply(reward=1e300)\n", "reward that step returned is 1e"
    ),
    "rewards_a_text": Bad(
        "def step(self, action):\n    return self.reply(reward='1')\n", "reward that step returned is '1', wanted"
    ),
    "rewards_nothing": Bad("def step(self, action):\n    return self.reply(reward=None)\n", "TypeError"),
    "says_half_a_character": Bad(
        "def step(self, action):\n    return self.reply(observation='\\ud800', terminated=False)\n", "surrogate"
    ),
    "says_a_number": Bad("def step(self, action):\n    return self.reply(observation=1, terminated=False)\n", "is 1"),
    "returns_nothing": Bad("def step(self, action):\n    pass\n", "step returned None, wanted"),
    "begins_with_texts": Bad("def reset(self, example):\n    return ('1+1',)\n", "wanted a ludic.records.Message"),
    "begins_with_nothing": Bad("def reset(self, example):\n    return None\n", "returned no message"),
    "spans_more_than_said": Bad(
        "def step(self, action):\n    from ludic.environments.environment import SpanReward\n"
        "    return self.reply(span_rewards=(SpanReward(start=0, end=10**6, reward=1.0),))\n",
        "a span that step returned is 0 to 1000000",
    ),
    "has_a_column_of_its_own": Bad("def step(self, action):\n    return self.reply(extra={'x_mine': 1})\n", "x_mine"),
    "takes_the_alarm": Bad(step("signal.signal(signal.SIGALRM, signal.SIG_DFL)"), None),
    "moves_away": Bad(step("os.chdir('/')"), None),
    "runs_a_loop_of_its_own": Bad(step("asyncio.run(pause())"), None),
    "gives_no_second_example": Bad(
        "def example(self, index, split):\n    return super().example(index, split) if index != 1 else None\n",
        "example returned None, wanted",
    ),
    "loses_its_second_example": Bad(
        "def example(self, index, split):\n    if index == 1: raise KeyError('row 1')\n"
        "    return super().example(index, split)\n",
        "KeyError: 'row 1'",
    ),
    "names_its_second_example_wrongly": Bad(
        "def example(self, index, split):\n    found = super().example(index, split)\n"
        "    return replace(found, example_id=index or 'e0')\n",
        "the example_id of an example is 1, wanted a str",
    ),
}
ONLY_THE_SECOND = {"gives_no_second_example", "loses_its_second_example", "names_its_second_example_wrongly"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bad_environments_fail_their_own_episodes_only(tmp_path, run_config, folder, work, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.py"
    classes = [f"class {name}(Good):\n{indented(bad.members)}" for name, bad in BAD.items()]
    path.write_text("\n".join([BASE, *classes]))
    # Between the bad ones are good ones, of which some need the event loop that bad ones block.
    names = [name for bad in BAD for name in (bad, "Good", "GoodAndWaits")]
    root = create_root(
        str(tmp_path / "run"),
        run_config(env=tuple(f"{path}:{name}" for name in names), accept_incomplete=True),
    )
    publish(root, folder, budget=1)
    num_groups = 2 * len(names)
    assert work(root, env_timeout_s=3.0, in_flight=64, num_groups=num_groups, follow_budget=False) == num_groups
    rows = committed_rows(root, "env_name", "env_example_id", "error")
    assert len(rows) == 2 * num_groups
    wrong = [text for row in rows if (text := misjudged(row))]
    assert wrong == []
    assert connect(root).execute("select count(*) from requests where outcome = 'complete'").fetchall() == [
        (num_groups,)
    ]


def indented(members: str) -> str:
    return "".join(f"    {line}\n" for line in members.splitlines())


def misjudged(row: dict[str, str | None]) -> str | None:
    """What is wrong with the error of a row; None if it is as wanted."""
    name = str(row["env_name"]).rpartition(":")[2]
    wanted = BAD[name].error if name in BAD else None
    if name in ONLY_THE_SECOND and row["env_example_id"] == "e0":
        wanted = None
    found = row["error"]
    is_right = found is None if wanted is None else found is not None and re.search(wanted, found)
    return None if is_right else f"{name}: {found}, wanted {wanted}"
