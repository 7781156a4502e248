"""Environments that wait: coroutines, and methods in the thread of their episode, by the path that a worker takes."""

import asyncio
import contextlib
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import without_place

from ludic.agents.agent import Agent
from ludic.environments.environment import Example, Score, Transition, tool
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment
from ludic.environments.single_turn import SingleTurn
from ludic.errors import ConfigError
from ludic.records.rollout import Message, Rollout
from ludic.rollouts.sampler import GroupSampler, episodes_of_run
from ludic.run.config import RunConfig

EXAMPLE = Example(example_id="e", messages=(Message(role="user", content="?"),))


class Base:
    """Ends at the first step with reward 1."""

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> Any:
        return example.messages

    def step(self, action: str) -> Any:
        return over(1.0)


def over(reward: float) -> Transition:
    return Transition(observation=None, reward=reward, terminated=True)


def sample(
    make: Any, agent: Agent, *, timeout_s: float | None = None, announce: Any = None, **run: Any
) -> list[Rollout]:
    """Rows of one group of episodes of an environment, with limits as in a worker."""
    config = RunConfig(model="m", env=("own",), **({"group_size": 2, "max_tokens": 128} | run))
    limited = LimitedEnvironments("own", make, TimeLimit(timeout_s=timeout_s, announce=announce))
    sampler = GroupSampler(run=config, run_episode=episodes_of_run(config, agent), environments={"own": limited})
    return list(sampler.sample([0], "worker").groups[0].rollouts)


def rewards(rows: list[Rollout]) -> list[float | None]:
    return [row.episode_reward for row in rows]


def test_coroutines_are_awaited_side_by_side() -> None:
    class Meets(Base):
        """Each step waits for the other episode's, which blocking calls could not."""

        both = asyncio.Barrier(2)

        async def reset(self, example: Example) -> Any:
            await asyncio.sleep(0)
            return example.messages

        async def step(self, action: str) -> Transition:
            await self.both.wait()
            return over(1.0)

    assert rewards(sample(Meets, scripted_agent(["a", "b"]), timeout_s=10)) == [1.0, 1.0]


def test_methods_in_threads_run_side_by_side() -> None:
    class Meets(Base):
        run_in = "thread"
        both = threading.Barrier(2)

        def step(self, action: str) -> Transition:
            self.both.wait(timeout=10)
            return over(1.0)

    assert rewards(sample(Meets, scripted_agent(["a", "b"]), timeout_s=10)) == [1.0, 1.0]


def test_methods_that_block_the_event_loop_run_side_by_side_from_the_next_episodes_on() -> None:
    class Meets(Base):
        """Blocks, and in threads waits for the other episode of its group, which blocking calls could not."""

        both = threading.Barrier(2)
        meets = False

        def step(self, action: str) -> Transition:
            time.sleep(0.06)
            if not self.meets or threading.current_thread() is threading.main_thread():
                return over(0.5)
            self.both.wait(timeout=10)
            return over(1.0)

    config = RunConfig(model="m", env=("own",), group_size=2)
    episodes = episodes_of_run(config, scripted_agent(["a"] * 6))
    sampler = GroupSampler(run=config, run_episode=episodes, environments={"own": LimitedEnvironments("own", Meets)})
    sampler.sample([0, 1], "worker")
    Meets.meets = True
    assert rewards(list(sampler.sample([2], "worker").groups[0].rollouts)) == [1.0, 1.0]


def test_an_environment_is_made_and_called_in_one_thread() -> None:
    class Stateful(Base):
        """A connection of SQLite works in the thread that made it only."""

        run_in = "thread"

        def __init__(self) -> None:
            self.made_in = threading.get_ident()
            self.table = sqlite3.connect(":memory:")

        def reset(self, example: Example) -> Any:
            self.table.execute("create table t as select 2.0 as reward")
            return example.messages

        def step(self, action: str) -> Transition:
            assert threading.get_ident() == self.made_in != threading.main_thread().ident
            return over(self.table.execute("select reward from t").fetchone()[0])

    before = threads_of_episodes()
    assert rewards(sample(Stateful, scripted_agent(["a", "b"]))) == [2.0, 2.0]
    assert all_end(threads_of_episodes() - before)


def threads_of_episodes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "ludic-side"}


def all_end(threads: set[threading.Thread]) -> bool:
    """Whether all of these threads end within some seconds."""
    for thread in threads:
        thread.join(timeout=10)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("run_in", ["auto", "loop", "thread"])
def test_a_question_may_have_a_judge_that_is_awaited(run_in: str) -> None:
    class Judged:
        def example(self, index: int, split: str) -> Example:
            return EXAMPLE

        async def score(self, example: Example, answer: str) -> Score:
            await asyncio.sleep(0.01)
            return Score(reward=float(answer == "a"), components={"judge": 3.0})

    Judged.run_in = run_in  # type: ignore[attr-defined]
    judged = Judged()
    rows = sample(lambda: SingleTurn(judged), scripted_agent(["a", "b"]))
    assert sorted(map(str, rewards(rows))) == ["0.0", "1.0"]
    assert rows[0].reward_components == {"judge": 3.0}


def bad(**methods: Any) -> type[Base]:
    """An environment whose first episode is bad, and whose other one is good."""
    turn = iter(range(100))

    class Bad(Base):
        def __init__(self) -> None:
            self.is_bad = next(turn) == 1  # number 0 gives the example

        def step(self, action: str) -> Any:
            return methods["step"](self) if self.is_bad else over(1.0)

    Bad.run_in = methods.get("run_in", "loop")  # type: ignore[attr-defined]
    return Bad


async def awaits_for_ever(_: Any) -> None:
    await asyncio.Event().wait()


async def ignores_its_end(_: Any) -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(100)


async def raises(_: Any) -> None:
    raise KeyError("own")


async def presses_ctrl_c(_: Any) -> None:
    raise KeyboardInterrupt


async def exits(_: Any) -> None:
    raise SystemExit(3)


async def cancels_itself(_: Any) -> None:
    raise asyncio.CancelledError


async def returns_nothing(_: Any) -> None:
    return None


def loops(_: Any) -> None:
    while True:
        pass


def swallows(_: Any) -> None:
    while True:
        try:
            loops(None)
        except Exception:
            continue


def sleeps(_: Any) -> None:
    threading.Event().wait()


def exits_in_thread(_: Any) -> None:
    raise SystemExit(3)


def presses_ctrl_c_in_thread(_: Any) -> None:
    raise KeyboardInterrupt


def stops(_: Any) -> None:
    raise StopIteration("own")


IN_TIME = "environment own: step on example 'e' did not return within 1 s; --env-timeout-s sets the limit"


@pytest.mark.parametrize(
    ("step", "run_in", "error"),
    [
        (awaits_for_ever, "loop", IN_TIME),
        (awaits_for_ever, "thread", IN_TIME),
        (ignores_its_end, "loop", IN_TIME),
        (raises, "loop", "KeyError: 'own'"),
        (presses_ctrl_c, "loop", "KeyboardInterrupt was raised"),
        (exits, "loop", r"sys.exit(3) was called"),
        (cancels_itself, "loop", "step on example 'e' cancelled itself"),
        (returns_nothing, "loop", "step returned None, wanted a ludic.environments.environment.Transition"),
        (loops, "thread", IN_TIME),
        (swallows, "thread", IN_TIME),
        (sleeps, "thread", IN_TIME),
        (exits_in_thread, "thread", "sys.exit(3) was called"),
        (presses_ctrl_c_in_thread, "thread", "KeyboardInterrupt was raised"),
        (stops, "thread", "StopIteration"),
    ],
)
def test_a_bad_step_fails_its_own_episode_only(step: Any, run_in: str, error: str) -> None:
    rows = sample(bad(step=step, run_in=run_in), scripted_agent(["a", "b"]), timeout_s=1.0)
    assert sorted(map(str, rewards(rows))) == ["1.0", "None"]
    (failed,) = (row for row in rows if row.error)
    assert error in str(failed.error)


def test_a_loop_in_a_thread_is_interrupted() -> None:
    before = threads_of_episodes()
    sample(bad(step=loops, run_in="thread"), scripted_agent(["a", "b"]), timeout_s=0.3)
    assert all_end(threads_of_episodes() - before)


@pytest.mark.slow
def test_the_time_in_which_others_block_the_event_loop_is_no_part_of_a_limit() -> None:
    class Either(Base):
        """The second episode blocks all, four times of a third of the limit; the first one needs a tenth of it."""

        max_steps = 4
        num_steps = 0

        def step(self, action: str) -> Any:
            if action == "waits":
                return self.waits()
            time.sleep(0.3)
            self.num_steps += 1
            return Transition(observation="on", reward=0.0, terminated=self.num_steps == 4)

        async def waits(self) -> Transition:
            for _ in range(10):
                await asyncio.sleep(0.01)
            return over(1.0)

    rows = sample(Either, scripted_agent(["waits", "blocks", "blocks", "blocks", "blocks"]), timeout_s=0.9)
    assert [row.error for row in rows] == [None, None]


def test_blocking_methods_may_run_an_event_loop_of_their_own() -> None:
    class Asks(Base):
        def step(self, action: str) -> Any:
            return asyncio.run(self.ask())

        async def ask(self) -> Transition:
            await asyncio.sleep(0)
            return over(2.0)

    assert rewards(sample(Asks, scripted_agent(["a", "b"]), timeout_s=10)) == [2.0, 2.0]


@pytest.mark.parametrize("act", [asyncio.current_task, lambda: cancels(asyncio.CancelledError())])
def test_blocking_methods_can_not_cancel_their_episode(act: Any) -> None:
    class Cancels(Base):
        def step(self, action: str) -> Any:
            return act().cancel()

    first, second = sample(Cancels, scripted_agent(["a", "b"]))
    assert first.error == second.error
    assert without_place(first.error) in {
        "RuntimeError: no running event loop",
        "RuntimeError: CancelledError was raised; raise an Exception instead",
    }


def cancels(error: BaseException) -> Any:
    raise error


def test_a_task_of_another_event_loop_is_named() -> None:
    class Gathers(Base):
        def step(self, action: str) -> Any:
            loop = asyncio.new_event_loop()
            try:
                return loop.create_future()
            finally:
                loop.close()

    (row, _) = sample(Gathers, scripted_agent(["a", "b"]))
    assert row.error == (
        "RuntimeError: environment own: step on example 'e' returned a task of another event loop; make the method a "
        "coroutine (async def)"
    )


@pytest.mark.slow
def test_calls_wait_for_the_thread_of_their_episode_without_losing_their_time() -> None:
    class Slow(Base):
        run_in = "thread"

        @tool
        def look(self) -> str:
            "Look."
            time.sleep(0.4)
            return "seen"

    said = "\n".join(hermes_call("look") for _ in range(4))  # together 1.6 s, and 1 s for each
    (row,) = sample(Slow, scripted_agent([said, "a"]), timeout_s=1.0, group_size=1, max_tokens=512)
    assert row.error is None
    assert [call.result for step in row.agent_steps for call in step.tool_calls] == ["seen"] * 4


@pytest.mark.slow
def test_calls_in_threads_do_not_hold_up_the_limits_of_others() -> None:
    class Either(Base):
        """Ends by its own limit, while three episodes have nested limits in threads."""

        run_in = "thread"
        max_steps = 8
        num_steps = 0

        def step(self, action: str) -> Any:
            if action == "waits":
                return self.waits()
            self.num_steps += 1
            TimeLimit(timeout_s=5).call("a scorer", lambda: time.sleep(0.2))
            return Transition(observation="on", reward=0.0, terminated=self.num_steps == 8)

        async def waits(self) -> Transition:
            await asyncio.Event().wait()
            return over(1.0)

    began = time.monotonic()
    rows = sample(Either, scripted_agent(["waits", *["busy"] * 24]), timeout_s=0.5, group_size=4)
    assert sum(row.error is not None for row in rows) == 1
    assert next(row.error for row in rows if row.error).endswith("--env-timeout-s sets the limit")
    assert time.monotonic() - began < 60


def test_a_thread_ends_with_the_time_of_its_episode() -> None:
    class Loops(Base):
        run_in = "thread"

        def step(self, action: str) -> Transition:
            loops(None)
            raise AssertionError

    before = threads_of_episodes()
    config = RunConfig(model="m", env=("own",), group_size=1)
    episodes = episodes_of_run(config, scripted_agent(["a"]), timeout_s=0.3)
    sampler = GroupSampler(run=config, run_episode=episodes, environments={"own": LimitedEnvironments("own", Loops)})
    (row,) = sampler.sample([0], "worker").groups[0].rollouts
    assert (row.truncation_reason, row.error) == ("time_limit", None)
    assert all_end(threads_of_episodes() - before)


def test_a_constructor_in_a_thread_has_a_time_limit() -> None:
    class Slow(Base):
        run_in = "thread"
        num_made = 0

        def __init__(self) -> None:
            Slow.num_made += 1
            if Slow.num_made == 2:
                loops(None)

    rows = sample(Slow, scripted_agent(["a", "b"]), timeout_s=0.3)
    assert sorted(map(str, rewards(rows))) == ["1.0", "None"]
    assert any("own: its constructor did not return" in str(row.error) for row in rows)


def test_calls_are_announced_until_their_end() -> None:
    told: list[str] = []

    def announce(call: str) -> Any:
        told.append(call)
        return lambda: told.append(f"-{call}")

    class Waits(Base):
        async def step(self, action: str) -> Transition:
            await asyncio.sleep(0.01)
            return over(1.0)

    sample(Waits, scripted_agent(["a"]), timeout_s=10, announce=announce, group_size=1)
    step = "environment own: step on example 'e'"
    # The call that makes the coroutine, and the coroutine itself.
    assert [call for call in told if call.endswith(step)] == [step, f"-{step}", step, f"-{step}"]
    assert all(told.count(call) == told.count(f"-{call}") for call in told if not call.startswith("-"))


def test_a_wrong_run_in_is_named(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n    run_in = 'clouds'\n    def example(self, i, s): ...\n    def score(self, e, a): ...\n"
    )
    with pytest.raises(
        ConfigError, match=r"own.py:Own: its run_in is 'clouds', wanted 'auto' or 'loop' or 'thread' or"
    ):
        make_environment(f"{file}:Own")


# --- What a protocol and tools see --------------------------------------------------------------------------------


def test_a_limit_of_steps_that_reset_sets_counts() -> None:
    class Limited(Base):
        def reset(self, example: Example) -> Any:
            self.max_steps = 2
            return example.messages

        def step(self, action: str) -> Transition:
            return Transition(observation="more", reward=1.0, terminated=False)

    rows = sample(Limited, scripted_agent(["a"] * 4))
    assert [(row.truncation_reason, row.episode_reward) for row in rows] == [("max_steps", 2.0)] * 2


OWN = """\
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox


async def with_state(play):
    def secret() -> str:
        "Tell the secret of this episode."
        return play.environment.secret

    player = play.join(messages=await play.reset())
    player.external = Toolbox([function_tool(secret)])
    player.take(await play.step(await player.act()))
"""


@pytest.mark.parametrize("is_question", [False, True])
def test_a_protocol_reaches_the_users_environment(is_question: bool, tmp_path: Path) -> None:
    class Secretive(Base):
        secret = "cat"

        def score(self, example: Example, answer: str) -> Score:
            return Score(reward=float(answer == "cat"))

        def step(self, action: str) -> Transition:
            return over(float(action == "cat"))

    (tmp_path / "own.py").write_text(OWN)
    make = (lambda: SingleTurn(Secretive())) if is_question else Secretive
    agent = scripted_agent([hermes_call("secret"), "cat"])
    (row,) = sample(make, agent, group_size=1, protocol=f"{tmp_path}/own.py:with_state", timeout_s=10)
    assert (row.error, row.episode_reward) == (None, 1.0)
    assert [call.result for step in row.agent_steps for call in step.tool_calls] == ["cat"]


class Maze(Base):
    """Two tools over the state of an episode, and a judge that is awaited."""

    def reset(self, example: Example) -> Any:
        self.place, self.seen = 0, []
        return example.messages

    @tool
    def look(self) -> str:
        """Tell where you are."""
        self.seen.append(self.place)
        return f"place {self.place}"

    @tool
    async def walk(self, steps: int) -> dict[str, int]:
        """Walk on.

        Args:
            steps: How far.
        """
        await asyncio.sleep(0)
        self.place += steps
        return {"place": self.place}

    async def step(self, action: str) -> Transition:
        await asyncio.sleep(0)
        return over(float(self.place == 3 and self.seen == [3]))


@pytest.mark.parametrize("run_in", ["auto", "loop", "thread"])
def test_tools_of_an_environment_are_bound_to_the_episode(run_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maze, "run_in", run_in, raising=False)
    agent = scripted_agent([hermes_call("walk", steps=3), hermes_call("look"), "done"])
    (row,) = sample(Maze, agent, group_size=1, timeout_s=10)
    calls = [call for step in row.agent_steps for call in step.tool_calls]
    assert [(call.name, call.result, call.error) for call in calls] == [
        ("walk", '{"place": 3}', None),
        ("look", "place 3", None),
    ]
    assert [step.action_target for step in row.agent_steps] == ["external", "external", "env"]
    assert row.episode_reward == 1.0


def test_a_mistake_in_a_call_of_an_environments_tool_is_told_to_the_model() -> None:
    agent = scripted_agent([hermes_call("walk", steps="far"), hermes_call("run"), "done"])
    (row,) = sample(Maze, agent, group_size=1)
    wrong, unknown = (call.error for step in row.agent_steps for call in step.tool_calls)
    assert "steps" in str(wrong)
    assert "integer" in str(wrong)
    assert "tool 'run' is unknown" in str(unknown)
    assert "look, walk" in str(unknown)


def test_a_tool_that_takes_too_long_ends_its_episode_only() -> None:
    class Hangs(Maze):
        run_in = "thread"

        @tool
        def look(self) -> str:
            """Look for ever."""
            return sleeps(None)  # type: ignore[return-value]

    agent = scripted_agent([hermes_call("look"), "done"])
    (row,) = sample(Hangs, agent, group_size=1, timeout_s=0.3)
    ((call,),) = (step.tool_calls for step in row.agent_steps if step.tool_calls)
    assert "look on example 'e' did not return within 0.3 s" in str(call.error)
    assert "step on example 'e' was not called: environment own: look on example 'e' took too long" in str(row.error)


def test_a_tool_of_the_run_with_the_same_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text('def look() -> str:\n    """Look."""\n    return "x"\n')
    with pytest.raises(ConfigError, match="have a tool 'look' each; rename one"):
        sample(Maze, scripted_agent(["done"]), group_size=1, tools=(f"{tmp_path}/tools.py:look",))


def test_a_tool_without_hints_is_refused() -> None:
    class Vague(Base):
        @tool
        def look(self, where):  # type: ignore[no-untyped-def]
            """Look."""

    with pytest.raises(ConfigError, match="tool look: no schema could be made"):
        sample(Vague, scripted_agent(["done"]), group_size=1)
