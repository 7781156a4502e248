"""Blocking methods run in the event loop while they are quick, and then in threads: all methods of the protocols."""

import asyncio
import inspect
import json
import logging
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from ludic.environments import environment as protocols
from ludic.environments import placement, qa
from ludic.environments.environment import MultiAgentEnvironment, SingleTurnEnvironment, tool
from ludic.environments.limits import HeldEnvironment, LimitedEnvironments, TimeLimit
from ludic.environments.placement import Placement
from ludic.environments.registry import make_environment
from ludic.environments.single_turn import SingleTurn
from ludic.errors import Interruption, TimeLimitError
from ludic.records.rollout import Message
from ludic.settings.kinds import ENVIRONMENT

EXAMPLE = protocols.Example(example_id="e", messages=(Message(role="user", content="?"),))
OVER = protocols.Transition(observation=None, reward=1.0, terminated=True)


def methods_of_protocols() -> Iterator[tuple[type, str]]:
    for protocol in vars(protocols).values():
        if inspect.isclass(protocol) and Protocol in protocol.__bases__:
            yield from ((protocol, name) for name, each in vars(protocol).items() if inspect.isfunction(each))


METHODS = sorted(
    {
        # An example is asked for when no episode has begun, and always in the event loop.
        *((protocol, name) for protocol, name in methods_of_protocols() if name[0] != "_" and name != "example"),
        (protocols.Environment, "look"),
        (protocols.Environment, "__init__"),
    },
    key=str,
)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "reset": (EXAMPLE,),
    "step": ("a",),
    "score_task": ("agent", "task", "a"),
    "score_group": (EXAMPLE, ()),
    "score_folder": (EXAMPLE, Path()),
    "run_tools": ("a", ()),
}


class Clock:
    """The time that placement sees, which passes only as methods say."""

    def __init__(self) -> None:
        self.now_s = self.busy_s = 0.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def compute(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    patched = SimpleNamespace(monotonic=lambda: clock.now_s, thread_time=lambda: clock.busy_s)
    monkeypatch.setattr(placement, "time", patched)
    return clock


def class_with(protocol: type, method: str, act: Callable[[], Any], *, awaits: bool = False) -> type:
    """A class with the methods of a protocol, of which one acts."""

    def plain(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            if name == method:
                act()
            return {"__init__": None, "example": EXAMPLE, "score": 1.0}.get(name, OVER)

        def call_later(self: Any, *args: Any) -> Any:
            act()  # as if other threads made the call slow

            async def later() -> Any:
                return call(self, *args)

            return later()

        return call_later if awaits and name == method else call

    names = {"example", "__init__", *(name for each, name in METHODS if each is protocol)}
    methods = {name: plain(name) for name in names | {method}}
    if "look" in methods:
        methods["look"] = tool(methods["look"])
    return type("Own", (), methods)


def limited(own: type, **options: Any) -> LimitedEnvironments:
    make: Any = partial(SingleTurn, own()) if hasattr(own, "score") else own
    return LimitedEnvironments("own", make, TimeLimit(**options))


async def play(limits: LimitedEnvironments, method: str) -> HeldEnvironment:
    """Open an episode and call a method, as an episode does."""
    held = await limits.open()
    try:
        if isinstance(held.environment, SingleTurn):
            await held.call("reset", EXAMPLE)
            method = "step"
        if method != "__init__":
            await held.call(method, *ARGUMENTS.get(method, ()))
    finally:
        held.close()
    return held


def threads_of(own: type, method: str, num_episodes: int, threads: list[str], **options: Any) -> list[str]:
    """Threads in which the method of episodes ran, one after the other."""
    limits = limited(own, **options)
    threads.clear()  # a question and a score is made before the first episode

    async def run() -> None:
        for _ in range(num_episodes):
            await play(limits, method)

    asyncio.run(run())
    return threads


def acting(clock: Clock, seconds: float, kind: str = "wait") -> tuple[list[str], Callable[[], None]]:
    threads: list[str] = []

    def act() -> None:
        threads.append(threading.current_thread().name)
        getattr(clock, kind)(seconds)

    return threads, act


MAIN, SIDE = "MainThread", "ludic-side"


def test_all_methods_of_the_protocols_are_tried() -> None:
    assert {name for _, name in METHODS} == {
        *("score", "reset", "step", "next_agents", "run_tools", "score_task", "score_group", "score_folder", "look"),
        "__init__",
    }


@pytest.mark.parametrize("kind", ["wait", "compute"])
@pytest.mark.parametrize(("protocol", "method"), METHODS)
def test_a_slow_method_moves_the_next_episode_into_a_thread_and_says_so_once(
    protocol: type, method: str, kind: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    announced: list[str] = []

    def announce(call: str) -> Callable[[], None]:
        announced.append(call)
        return lambda: announced.append(f"end of {call}")

    threads, act = acting(clock, 0.05, kind)
    own = class_with(protocol, method, act)
    found = threads_of(own, method, 6, threads, timeout_s=60, announce=announce)
    # Three calls of 50 ms hold up others for 3 x 48 ms, which is more than 100 ms.
    assert found == [MAIN] * 3 + [SIDE] * 3
    name = "its constructor" if method == "__init__" else method
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        f"environment own: {name} took 50 ms, during which all other episodes stopped. From now on each"
    )
    assert "run_in = 'loop', in the class or among the options of questions, keeps them here" in said
    calls = [call for call in announced if not call.startswith("end") and name in call]
    assert len(calls) == 6
    assert all(f"end of {call}" in announced for call in calls)


@pytest.mark.parametrize(("protocol", "method"), METHODS)
def test_a_quick_method_and_one_that_is_slow_at_first_stay(protocol: type, method: str, clock: Clock) -> None:
    seconds = iter([10.0, *[0.0005] * 33, 10.0, *[0.0019] * 100])
    threads: list[str] = []

    def act() -> None:
        threads.append(threading.current_thread().name)
        clock.wait(next(seconds))

    own = class_with(protocol, method, act)
    if protocol is SingleTurnEnvironment and method == "__init__":
        pytest.skip("is made once")
    # 10 s count as 50 ms, which 33 calls of 0.5 ms pay back: 33 x 1.5 ms = 49.5 ms
    assert threads_of(own, method, 100, threads) == [MAIN] * 100


@pytest.mark.parametrize(("protocol", "method"), [each for each in METHODS if each[1] != "__init__"])
def test_the_time_of_a_coroutine_is_no_time_of_a_blocking_call(protocol: type, method: str, clock: Clock) -> None:
    threads, act = acting(clock, 0.5)
    own = class_with(protocol, method, act, awaits=True)
    assert threads_of(own, method, 5, threads) == [MAIN] * 10  # of the calls, and of what they returned


@pytest.mark.parametrize(("run_in", "thread"), [("loop", MAIN), ("thread", SIDE)])
@pytest.mark.parametrize(("protocol", "method"), METHODS)
def test_a_class_may_pin_its_place(protocol: type, method: str, run_in: str, thread: str, clock: Clock) -> None:
    threads, act = acting(clock, 0.5)
    own = class_with(protocol, method, act)
    own.run_in = run_in  # type: ignore[attr-defined]
    assert threads_of(own, method, 5, threads) == [thread] * 5


def test_a_pin_holds_behind_a_function_that_makes_environments(clock: Clock) -> None:
    threads, act = acting(clock, 0.5)
    own = class_with(protocols.Environment, "step", act)
    own.run_in = "loop"  # type: ignore[attr-defined]
    limits = LimitedEnvironments("own", lambda: own())

    async def run() -> None:
        for _ in range(5):
            await play(limits, "step")

    asyncio.run(run())
    assert threads == [MAIN] * 5


def test_auto_may_be_written(tmp_path: Path, clock: Clock) -> None:
    threads, act = acting(clock, 0.05)
    own = class_with(protocols.Environment, "step", act)
    own.run_in = "auto"  # type: ignore[attr-defined]
    assert threads_of(own, "step", 4, threads) == [MAIN] * 3 + [SIDE]
    (tmp_path / "own.py").write_text(
        "class Own:\n    run_in = 'auto'\n    def example(self, i, s): ...\n    def score(self, e, a): ...\n"
    )
    make_environment(f"{tmp_path}/own.py:Own")


@pytest.mark.parametrize(
    ("seconds", "num_calls"),
    # 48 ms count of calls of 50 ms and more, and 3 ms of 5 ms: 33 of them are 99 ms
    [(0.5, 3), (0.05, 3), (0.027, 5), (0.005, 34), (0.002, None), (0.001, None)],
)
def test_a_balance_of_100_ms_moves(seconds: float, num_calls: int | None, clock: Clock) -> None:
    place = Placement("own", "auto")
    calls = 0
    while place.where == "loop" and calls < 1000:
        place.call("step", partial(clock.wait, seconds))
        calls += 1
    assert calls == (num_calls or 1000)


def test_methods_have_balances_of_their_own(clock: Clock) -> None:
    place = Placement("own", "auto")
    for method in ("reset", "step", "look") * 2:
        place.call(method, partial(clock.wait, 0.05))
    assert place.where == "loop"


# --- What runs in threads at the same time ---------------------------------------------------------------------------


def moved(limits: LimitedEnvironments, method: str) -> Any:
    """Run episodes until the environment has moved."""

    async def run() -> None:
        while limits.placement.where == "loop":
            await play(limits, method)

    return run()


def test_episodes_go_on_while_others_wait(clock: Clock) -> None:
    both = threading.Barrier(2)

    def act() -> None:
        clock.wait(0.05)
        if threading.current_thread().name == SIDE:
            both.wait(timeout=30)  # for the step of the other episode

    limits = limited(class_with(protocols.Environment, "step", act))

    async def run() -> None:
        await moved(limits, "step")
        for _ in range(3):
            await asyncio.gather(play(limits, "step"), play(limits, "step"))

    asyncio.run(run())


def test_methods_that_compute_take_turns_and_leave_the_event_loop_free(clock: Clock) -> None:
    running, most = 0, 0
    event = threading.Event()

    def act() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if threading.current_thread().name == SIDE:
            assert event.wait(timeout=30)  # for the event loop
            time.sleep(0.01)
        clock.compute(0.05)
        running -= 1

    limits = limited(class_with(protocols.Environment, "step", act))

    async def set_event() -> None:
        event.set()

    async def run() -> None:
        await moved(limits, "step")
        await asyncio.gather(*(play(limits, "step") for _ in range(4)), set_event())

    asyncio.run(run())
    assert most == 1


def test_a_scorer_that_episodes_share_is_called_once_at_a_time_in_one_thread(clock: Clock) -> None:
    running, most = 0, 0
    event = threading.Event()
    threads: list[int] = []

    def act() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if threading.current_thread().name == SIDE:
            threads.append(threading.get_ident())
            assert event.wait(timeout=30)  # for the event loop
            time.sleep(0.01)
        clock.wait(0.05)
        running -= 1

    limits = limited(class_with(SingleTurnEnvironment, "score", act))

    async def set_event() -> None:
        event.set()

    async def run() -> None:
        await moved(limits, "score")
        await asyncio.gather(*(play(limits, "score") for _ in range(4)), set_event())

    asyncio.run(run())
    assert most == 1
    assert (len(threads), len(set(threads))) == (4, 1)


def test_a_scorer_that_never_returns_fails_its_own_answer_only(clock: Clock) -> None:
    turn = iter(range(100))
    forever = threading.Event()

    def act() -> None:
        clock.wait(0.05)
        if next(turn) == 3:
            forever.wait()

    limits = limited(class_with(SingleTurnEnvironment, "score", act), timeout_s=0.3)

    async def run() -> list[Any]:
        await moved(limits, "score")
        return await asyncio.gather(*(play(limits, "score") for _ in range(3)), return_exceptions=True)

    found = asyncio.run(run())
    forever.set()
    assert [type(each) for each in found] == [TimeLimitError, HeldEnvironment, HeldEnvironment]


def test_there_is_a_thread_for_each_open_episode_only(clock: Clock) -> None:
    limits = limited(class_with(protocols.Environment, "step", partial(clock.wait, 0.05)))

    def side_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == SIDE}

    async def run() -> None:
        await moved(limits, "step")
        before = side_threads()
        held = [await limits.open() for _ in range(5)]
        new = side_threads() - before
        assert len(new) == 5
        for each in held:
            each.close()
        for thread in new:
            thread.join(timeout=30)
            assert not thread.is_alive()

    asyncio.run(run())


# --- The first episodes ----------------------------------------------------------------------------------------------


OF_SEVERAL_STEPS = [protocol for protocol, method in METHODS if method == "step"]


@pytest.mark.parametrize("protocol", OF_SEVERAL_STEPS)
def test_of_many_episodes_that_begin_at_once_three_hold_up_the_others(protocol: type, clock: Clock) -> None:
    threads, act = acting(clock, 0.05)
    limits = limited(class_with(protocol, "step", act))

    async def episode() -> None:
        held = await limits.open()
        await asyncio.sleep(0)  # the engine
        await held.call("step", "a")
        held.close()

    async def run() -> None:
        await asyncio.gather(*(episode() for _ in range(20)))

    asyncio.run(run())
    assert threads == [MAIN] * 3 + [SIDE] * 17


def test_a_shared_scorer_moves_in_episodes_that_have_begun(clock: Clock) -> None:
    threads, act = acting(clock, 0.05)
    limits = limited(class_with(SingleTurnEnvironment, "score", act))

    async def episode() -> None:
        held = await limits.open()
        await held.call("reset", EXAMPLE)
        await asyncio.sleep(0)  # the engine
        await held.call("step", "a")
        held.close()

    async def run() -> None:
        limits()  # for an example
        await asyncio.gather(*(episode() for _ in range(20)))

    asyncio.run(run())
    assert threads == [MAIN] * 3 + [SIDE] * 17


@pytest.mark.parametrize("is_awaited", [False, True])
def test_episodes_begin_side_by_side_once_a_call_was_quick(is_awaited: bool, clock: Clock) -> None:
    own = class_with(protocols.Environment, "step", lambda: None, awaits=is_awaited)
    limits = limited(own)
    order: list[str] = []

    async def episode(number: int) -> None:
        held = await limits.open()
        order.append(f"{number} begins")
        await asyncio.sleep(0)
        await held.call("step", "a")
        await asyncio.sleep(0.01)
        order.append(f"{number} ends")
        held.close()

    async def run() -> None:
        await asyncio.gather(*(episode(number) for number in range(3)))

    asyncio.run(run())
    assert order == [*(f"{number} begins" for number in range(3)), *(f"{number} ends" for number in range(3))]


def test_episodes_wait_for_no_call_that_does_not_come(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PROBE_S", 0.01)
    limits = limited(class_with(protocols.Environment, "step", lambda: None))

    async def run() -> None:
        held = [await limits.open() for _ in range(3)]
        for each in held:
            each.close()

    asyncio.run(run())


def test_episodes_wait_for_no_episode_that_could_not_begin(clock: Clock) -> None:
    numbers = iter(range(9))

    def act() -> None:
        if next(numbers) == 0:
            raise KeyError("own")

    limits = limited(class_with(protocols.Environment, "__init__", act))

    async def run() -> list[Any]:
        found = await asyncio.gather(limits.open(), play(limits, "step"), return_exceptions=True)
        return [type(each) for each in found]

    assert asyncio.run(run()) == [KeyError, HeldEnvironment]


# --- What keeps an environment in the event loop, or brings it back --------------------------------------------------


def test_a_class_that_sets_alarms_stays_and_is_told_why(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    threads: list[str] = []

    def act() -> None:
        threads.append(threading.current_thread().name)
        clock.compute(0.05)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

    own = class_with(protocols.Environment, "step", act)
    for options in ({"timeout_s": 60}, {}):
        assert threads_of(own, "step", 5, threads, **options) == [MAIN] * 5
        (record,) = caplog.records
        assert record.getMessage().endswith("It stays there: it sets alarms, which only the main thread can")
        caplog.clear()


def test_a_method_that_computed_until_its_time_limit_stays(clock: Clock) -> None:
    place = Placement("own", "auto")

    def meets_its_limit() -> None:
        clock.compute(1.0)
        raise Interruption

    with pytest.raises(Interruption):
        place.call("step", meets_its_limit)
    for _ in range(9):
        place.call("step", partial(clock.compute, 0.05))
    assert place.where == "loop"


def calls_sqlite(connection: sqlite3.Connection) -> None:
    connection.execute("select 1")


def sets_a_handler(_: Any) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def asks_for_the_loop_of_its_thread(_: Any) -> None:
    asyncio.get_event_loop_policy().get_event_loop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("use", [calls_sqlite, sets_a_handler, asks_for_the_loop_of_its_thread])
@pytest.mark.parametrize("protocol", [SingleTurnEnvironment, MultiAgentEnvironment])
def test_what_works_in_the_main_thread_only_comes_back(
    protocol: type, use: Callable[[Any], None], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    connection = sqlite3.connect(":memory:")
    method = "score" if protocol is SingleTurnEnvironment else "step"
    threads: list[str] = []

    def act() -> None:
        threads.append(threading.current_thread().name)
        clock.wait(0.05)
        use(connection)

    limits = limited(class_with(protocol, method, act))

    async def run() -> list[Any]:
        found: list[Any] = []
        for _ in range(9):
            found += await asyncio.gather(play(limits, method), return_exceptions=True)
        return found

    failed = [isinstance(each, Exception) for each in asyncio.run(run())]
    assert threads == [MAIN] * 3 + [SIDE] + [MAIN] * 5
    assert failed == [False] * 3 + [True] + [False] * 5
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith(f"environment own: {method} on example ")
    assert "failed in a thread:" in warning
    assert "write run_in = 'loop' in the class" in warning
    connection.close()


# --- Scorers of questions, and ludic's own environments --------------------------------------------------------------


def questions(folder: Path, **options: Any) -> LimitedEnvironments:
    (folder / "rows.jsonl").write_text(json.dumps({"question": "?", "answer": "a"}) + "\n")
    (folder / "own.py").write_text("def own(example, answer):\n    return 0.5\n")
    make = make_environment(f"qa/{folder}/rows.jsonl", {"heldout_share": 0, **options})
    return LimitedEnvironments("own", make)


@pytest.mark.slow
def test_ludics_own_scorers_move_to_processes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    numbers: list[int] = []
    exact = qa.score_exact

    def slow(example: Any, answer: str) -> Any:
        numbers.append(threading.get_ident())
        clock.compute(0.05)
        return exact(example, answer)

    monkeypatch.setattr(qa, "score_exact", slow)
    limits = questions(tmp_path)

    async def run() -> list[float]:
        found = []
        for answer in "ababab":
            held = await limits.open()
            example = held.example(0, "train")
            await held.call("reset", example)
            found.append((await held.call("step", answer)).reward)
            held.close()
        return found

    assert asyncio.run(run()) == [1.0, 0.0] * 3
    assert len(numbers) == 3  # those after them were scored in a process
    (said,) = (record.getMessage() for record in caplog.records)
    assert "score took 50 ms" in said
    assert "each new episode is scored in a process; run_in = 'loop', in the class" in said


@pytest.mark.parametrize(
    ("scorer", "group_scorer", "where"),
    [
        ("exact", None, "process"),
        ("regex", None, "process"),
        (["exact", "regex"], None, "process"),
        ("own.py:own", None, "thread"),
        (["exact", "own.py:own"], None, "thread"),
        ("exact", "own.py:own", "thread"),
        # Only the main thread can interrupt `re`.
        (["regex", "own.py:own"], None, "loop"),
        ("regex", "own.py:own", "loop"),
    ],
)
def test_only_what_keeps_nothing_moves_to_processes(
    scorer: Any, group_scorer: str | None, where: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = questions(tmp_path, scorer=scorer, group_scorer=group_scorer)
    limits()
    for _ in range(3):
        limits.placement.call("score", partial(clock.compute, 0.05))
    assert limits.placement.where == where


def test_an_option_pins_the_place_of_scorers(tmp_path: Path, clock: Clock) -> None:
    for run_in, where in {"loop": "loop", "thread": "thread", "process": "loop"}.items():
        limits = questions(tmp_path, run_in=run_in)
        assert not limits.placement.is_auto
        assert limits.placement.where == where


@pytest.mark.parametrize("name", ENVIRONMENT.names())
def test_environments_of_ludic_stay_in_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Time of the processor, so that a busy machine moves none.
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=time.thread_time, thread_time=time.thread_time))
    limits = LimitedEnvironments(name, make_environment(name))

    async def run() -> None:
        for index in range(60):
            held = await limits.open()
            first = await held.call("reset", held.example(index, "train"))
            if hasattr(held.environment, "next_agents"):
                (agent,) = await held.call("next_agents")
                assert agent in first
                await held.call("step", {agent: "1"})
            else:
                await held.call("step", "The answer is 1.")
            held.close()

    asyncio.run(run())
    assert (limits.placement.where, limits.placement.is_auto) == ("loop", True)
