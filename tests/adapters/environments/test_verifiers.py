"""verifiers/NAME, with the real package and environments that are written here."""

import asyncio
import gc
import sys
from pathlib import Path

import pytest
from chat_models import scripted_agent
from episodes import run_episode

from ludic.environments import event_loops
from ludic.environments.environment import Environment
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment, source_of
from ludic.errors import ConfigError, TimeLimitError

pytest.importorskip("verifiers.v1", reason="verifiers is in the extra verifiers")

SUMS = """
import asyncio

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumsConfig(vf.TasksetConfig):
    largest: int = 40


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def is_right(self, task, trace) -> float:
        await asyncio.sleep(0)
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def parts(self, trace) -> dict:
        return {"is_short": float(len(trace.last_reply) < 4), "is_digits": float(trace.last_reply.isdigit())}

    @vf.reward
    async def by_math(self, task, trace) -> float:
        return vf.verify_boxed_math_answer(f"\\\\boxed{{{trace.last_reply}}}", task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for number in range(self.config.largest):
            question = f"{number} + {number} = ?"
            data = SumData(prompt=question, system_prompt="Add.", answer=str(2 * number), name=f"n{number}")
            yield SumTask(data, self.config.task)
"""

HINTS = """
import asyncio

import verifiers.v1 as vf

__all__ = ["Hints", "HintsEnv"]


class HintData(vf.TaskData):
    secret: int


class HintTask(vf.Task[HintData, vf.State, vf.TaskConfig]):
    async def setup(self, trace):
        trace.info["guesses"] = 0

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "enough"

    @vf.reward
    async def is_found(self, task, trace) -> float:
        return float(trace.last_reply == str(task.secret))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class HintsEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HintsEnv(vf.Env[HintsEnvConfig]):
    async def setup(self, agents):
        agents.player.trainable = True

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn("Guess." if task.data.prompt is None else None)
            while not segment.terminated and segment.last_reply != str(task.data.secret):
                await asyncio.sleep(0.001)
                guess = segment.last_reply
                hint = "higher" if guess.isdigit() and int(guess) < task.data.secret else "lower"
                segment = await talk.turn(hint)
        talk.trace.record_reward("patience", 0.25)

    async def finalize(self, task, episode):
        episode.traces[0].record_metric("finalized", 1.0)


class Hints(vf.Taskset[HintTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield HintTask(HintData(prompt=None if number % 2 else "Guess my number.", secret=number), self.config.task)
            number += 1
"""

REFUSED = """
import verifiers.v1 as vf

__all__ = ["Refused"{exports}]


class Data(vf.TaskData):
    pass


class RefusedTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    {task}


class Refused(vf.Taskset[RefusedTask, vf.TasksetConfig]):
    def load(self):
        yield RefusedTask(Data(prompt="?"{data}), self.config.task)

    {taskset}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module that can be imported, and returns the name of the environment."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(text: str) -> str:
        name = f"made_by_a_test_{tmp_path.name}_{len(names)}".replace("[", "_").replace("]", "_").lower()
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return f"verifiers/{name}"

    yield write
    for name in names:
        sys.modules.pop(name, None)


def find(environment: Environment, prompt: str, split: str = "train"):
    """Return the example whose last message is this prompt."""
    examples = (environment.example(index, split) for index in range(40))
    return next(example for example in examples if example.messages and example.messages[-1].content == prompt)


def some_example(environment: Environment):
    example = environment.example(0, "train")
    number = int(example.messages[-1].content.split()[0])
    return example, number


def test_rewards_are_weighted_and_named_by_their_functions(write):
    environment = make_environment(write(SUMS))()
    example, number = some_example(environment)
    assert [message.role for message in environment.reset(example)] == ["system", "user"]
    step = environment.step(str(2 * number))
    assert (step.terminated, step.truncated, step.observation) == (True, False, None)
    assert step.reward_components == {
        "is_right": 2.0,
        "is_short": 0.5,
        "is_digits": 0.5,
        "by_math": 1.0,
        "length": len(str(2 * number)),
    }
    assert step.reward == 2 + 0.5 + 0.5 + 1
    environment.reset(example)
    assert environment.step("no idea").reward == 0


def test_weights_can_be_set_by_options(write):
    options = {"taskset": {"largest": 5, "task": {"rewards": {"is_right": {"weight": 7.0}}}}}
    environment = make_environment(write(SUMS), options)()
    example, number = some_example(environment)
    assert number < 5
    environment.reset(example)
    assert environment.step(str(2 * number)).reward_components["is_right"] == 7


def test_examples_are_the_same_everywhere_and_no_task_is_in_both_splits(write):
    name = write(SUMS)
    one, other = make_environment(name, seed=4)(), make_environment(name, seed=4)()
    served = {split: [one.example(i, split) for i in range(40)] for split in ("train", "heldout")}
    assert served == {split: [other.example(i, split) for i in range(40)] for split in served}
    texts = {split: {each.messages[-1].content for each in examples} for split, examples in served.items()}
    assert not texts["train"] & texts["heldout"]
    assert len(texts["train"] | texts["heldout"]) == 40


def test_an_environment_of_several_turns_is_played(write):
    environment = make_environment(write(HINTS), {"num_tasks": 60})()
    example = next(each for each in (environment.example(i, "train") for i in range(60)) if each.messages)
    secret = environment._loaded.tasks[example.data["number"]].data.secret
    assert [message.content for message in environment.reset(example)] == ["Guess my number."]
    low, high = environment.step("0"), environment.step("99")
    last = environment.step(str(secret))
    assert [step.observation for step in (low, high, last)] == ["higher", "lower", None]
    assert [step.reward for step in (low, high)] == [0, 0]
    assert last.terminated
    assert last.reward == 1.25
    assert last.reward_components == {"is_found": 1, "patience": 0.25, "turns": 3, "finalized": 1}
    assert last.info == {"stop_condition": "user_closed"}


def test_an_agent_plays_and_its_row_holds_the_rewards(write):
    make = make_environment(write(HINTS), {"num_tasks": 60})
    example = make().example(0, "train")
    (row,) = run_episode(scripted_agent(["no", "enough"]), make, example=example)
    assert (row.terminated, row.truncated, row.error) == (True, False, None)
    assert row.episode_reward == 0.25
    assert row.reward_components == {"is_found": 0, "patience": 0.25, "turns": 2, "finalized": 1}
    (cut,) = run_episode(scripted_agent(["no", "no"]), make, example=example, max_steps=2)
    assert cut.truncation_reason == "max_steps"


def test_an_environment_may_open_the_conversation_itself(write):
    environment = make_environment(write(HINTS), {"num_tasks": 60})()
    example = next(each for each in (environment.example(i, "train") for i in range(60)) if not each.messages)
    assert [message.content for message in environment.reset(example)] == ["Guess."]


def test_a_stop_of_the_task_terminates_and_max_turns_truncates(write):
    options = {"num_tasks": 60, "player": {"max_turns": 3}}
    environment = make_environment(write(HINTS), options)()
    assert environment.max_steps == 3
    example = environment.example(0, "train")
    environment.reset(example)
    stopped = environment.step("enough")
    assert (stopped.terminated, stopped.truncated, stopped.info) == (True, False, {"stop_condition": "gave_up"})
    environment.reset(example)
    steps = [environment.step("x") for _ in range(3)]
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, False), (False, True)]
    assert steps[-1].reward == 0.25


def test_it_plays_inside_a_running_loop_and_episodes_are_apart(write):
    make = make_environment(write(HINTS), {"num_tasks": 60})
    one, other = make(), make()
    examples = [one.example(0, "train"), one.example(1, "train")]
    secrets = [one._loaded.tasks[example.data["number"]].data.secret for example in examples]

    async def play() -> list[float]:
        task = asyncio.current_task()
        for environment, example in zip((one, other), examples, strict=True):
            environment.reset(example)
            environment.step("no")
        rewards = [
            environment.step(str(secret)).reward for environment, secret in zip((one, other), secrets, strict=True)
        ]
        await asyncio.sleep(0)
        assert asyncio.current_task() is task
        return rewards

    assert asyncio.run(play()) == [1.25, 1.25]


def test_an_episode_that_is_left_behind_is_cancelled(write):
    make = make_environment(write(HINTS), {"num_tasks": 60})
    loop = event_loops._loop()
    gc.collect()
    before = len(asyncio.all_tasks(loop))
    environment = make()
    environment.reset(environment.example(0, "train"))
    assert len(asyncio.all_tasks(loop)) == before + 1
    del environment
    gc.collect()
    loop.run_until_complete(asyncio.sleep(0))
    assert len(asyncio.all_tasks(loop)) == before


FAULTY = HINTS.replace('hint = "higher"', "1 / 0; hint = 'higher'")
ENDLESS = HINTS.replace("await asyncio.sleep(0.001)", "while True: pass")
SCORELESS = SUMS.replace("return float(trace.last_reply == task.answer)", "raise KeyError('score')")


def test_an_error_of_the_environment_fails_the_episode(write):
    faulty = make_environment(write(FAULTY), {"num_tasks": 60})()
    faulty.reset(faulty.example(0, "train"))
    with pytest.raises(ZeroDivisionError):
        faulty.step("no")
    scoreless = make_environment(write(SCORELESS))()
    scoreless.reset(scoreless.example(0, "train"))
    with pytest.raises(Exception, match="score"):
        scoreless.step("no")


def test_a_time_limit_ends_an_endless_loop(write):
    make = LimitedEnvironments("hints", make_environment(write(ENDLESS), {"num_tasks": 60}), TimeLimit(timeout_s=0.5))
    held = make()
    asyncio.run(held.call("reset", held.example(0, "train")))
    with pytest.raises(TimeLimitError, match=r"did not return within 0\.5 s"):
        asyncio.run(held.call("step", "no"))


TOOLS = """@classmethod
    def toolsets(cls, config):
        return [object()]"""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"task": "NEEDS_CONTAINER = True"}, "needs a container"),
        ({"task": TOOLS}, r"has tools of its own, in toolsets\(\)"),
        ({"taskset": TOOLS}, r"has tools of its own, in toolsets\(\)"),
        (
            {"task": "@vf.reward\n    async def ran(self, trace, runtime): ..."},
            "has the function ran, which wants a runtime",
        ),
        ({"task": "async def setup(self, trace, runtime): ..."}, "has the function setup, which wants a runtime"),
        (
            {"task": "@vf.stop\n    async def long(self, request: vf.Request): ..."},
            "has the stop long, which wants a Req",
        ),
        (
            {"task": "@vf.intercept\n    async def cut(self, request: vf.Request): ..."},
            "changes requests, by @vf.intercept",
        ),
        ({"task": "pass", "data": ", image='python:3.11'"}, "has tasks with the field image"),
    ],
)
def test_what_needs_more_than_text_is_refused_with_the_reason(write, parts, message):
    text = REFUSED.format(**{"exports": "", "task": "pass", "data": "", "taskset": "", **parts})
    with pytest.raises(ConfigError, match=f"{message}.*; ludic runs environments of verifiers that need only text"):
        make_environment(write(text))


TWO_AGENTS = HINTS.replace(
    "player: vf.AgentConfig = vf.AgentConfig()",
    "player: vf.AgentConfig = vf.AgentConfig()\n    judge: vf.AgentConfig = vf.AgentConfig()",
)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TWO_AGENTS, {"num_tasks": 9}, "has several agents, player, judge"),
        (HINTS, {}, "the Taskset is infinite; the option num_tasks says how many tasks to take"),
        (SUMS, {"taskset": {"smallest": 3}}, "can't load it: ValidationError: .*smallest"),
        (SUMS, {"taskset": {"task": {"rewards": {"x": {"fn": "x.py:f"}}}}}, "has the function x.py:f of a file"),
        (SUMS, {"turns": 3}, "can't load it: ValidationError: .*turns"),
        ("import no_such_package\n", {}, "can't load it: "),
        ("raise SystemExit(3)\n", {}, "can't load it: RuntimeError"),
        ("__all__ = []\n", {}, "can't load it: TypeError: .* exports no Taskset subclass"),
    ],
)
def test_what_cannot_be_loaded_is_explained(write, text, options, message):
    name = write(text)
    with pytest.raises(ConfigError, match=f"environment {name}: .*{message}"):
        make_environment(name, options)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="environment 'verifiers/no-such-module' is unknown; "):
        make_environment("verifiers/no-such-module")


def test_the_source_is_recorded(write):
    digest, package, _ = source_of(write(SUMS), {})
    assert len(digest) == 64
    assert package is None
