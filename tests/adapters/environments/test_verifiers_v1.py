"""verifiers/NAME of packages with a Taskset, with the real package and environments that are written here."""

import asyncio
import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chat_models import chat_tokenizer, hermes_call
from worker_path import sampled

from ludic.environments.environment import Environment, Example, Transition
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment, source_of
from ludic.errors import ConfigError, TimeLimitError
from ludic.models.decoding import decode
from ludic.records.rollout import Message

pytest.importorskip(
    "verifiers.v1.configs.select", reason="verifiers 0.4 is in an environment of its own: make verifiers"
)

Write = Callable[[str], str]

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


def turns(
    environment: Environment, example: Example, replies: Sequence[str]
) -> tuple[tuple[Message, ...], list[Transition]]:
    """The first messages of an episode, and what comes of each reply."""

    async def play() -> tuple[tuple[Message, ...], list[Transition]]:
        first: Any = environment.reset(example)
        return await first, [await environment.step(reply) for reply in replies]  # type: ignore[misc]

    return asyncio.run(play())


def some_example(environment: Environment) -> tuple[Example, int]:
    example = environment.example(0, "train")
    number = int(example.messages[-1].content.split()[0])
    return example, number


# --- A question and its score ----------------------------------------------------------------------------


def test_rewards_are_weighted_and_named_by_their_functions(write: Write) -> None:
    environment = make_environment(write(SUMS))()
    example, number = some_example(environment)
    first, (step,) = turns(environment, example, [str(2 * number)])
    assert [message.role for message in first] == ["system", "user"]
    assert (step.terminated, step.truncated, step.observation) == (True, False, None)
    assert step.reward_components == {
        "is_right": 2.0,
        "is_short": 0.5,
        "is_digits": 0.5,
        "by_math": 1.0,
        "length": len(str(2 * number)),
    }
    assert step.reward == 2 + 0.5 + 0.5 + 1
    _, (wrong,) = turns(environment, example, ["no idea"])
    assert wrong.reward == 0


def test_weights_can_be_set_by_options(write: Write) -> None:
    options = {"taskset": {"largest": 5, "task": {"rewards": {"is_right": {"weight": 7.0}}}}}
    environment = make_environment(write(SUMS), options)()
    example, number = some_example(environment)
    assert number < 5
    _, (step,) = turns(environment, example, [str(2 * number)])
    assert step.reward_components["is_right"] == 7


def test_examples_are_the_same_everywhere_and_no_task_is_in_both_splits(write: Write) -> None:
    name = write(SUMS)
    one, other = make_environment(name, seed=4)(), make_environment(name, seed=4)()
    served = {split: [one.example(i, split) for i in range(40)] for split in ("train", "heldout")}
    assert served == {split: [other.example(i, split) for i in range(40)] for split in served}
    texts = {split: {each.messages[-1].content for each in examples} for split, examples in served.items()}
    assert not texts["train"] & texts["heldout"]
    assert len(texts["train"] | texts["heldout"]) == 40


def test_a_worker_stores_the_wanted_answer_and_the_rewards(write: Write) -> None:
    name = write(SUMS)
    answer = make_environment(name)().example(0, "train").wanted
    (row,) = sampled(name, [answer])
    assert (row.wanted, row.terminated, row.error) == (answer, True, None)
    assert not {"prompt", "answer"} & json.loads(row.example_columns or "{}").keys()
    assert row.episode_reward == 2 + 0.5 + 0.5 + 1


# --- Several turns ---------------------------------------------------------------------------------------


def hints(environment: Environment, *, has_prompt: bool = True) -> Example:
    """An example of Hints that does or does not have a prompt."""
    examples = (environment.example(index, "train") for index in range(60))
    return next(example for example in examples if bool(example.messages) is has_prompt)


def secret_of(environment: Any, example: Example) -> int:
    return int(environment._loaded.tasks[example.data["number"]].data.secret)


def test_an_environment_of_several_turns_is_played(write: Write) -> None:
    environment = make_environment(write(HINTS), {"num_tasks": 60})()
    example = hints(environment)
    first, (low, high, last) = turns(environment, example, ["0", "99", str(secret_of(environment, example))])
    assert [message.content for message in first] == ["Guess my number."]
    assert [step.observation for step in (low, high, last)] == ["higher", "lower", None]
    assert [step.reward for step in (low, high)] == [0, 0]
    assert last.terminated
    assert last.reward == 1.25
    assert last.reward_components == {"is_found": 1, "patience": 0.25, "turns": 3, "finalized": 1}
    assert last.info == {"stop_condition": "user_closed"}


def test_a_worker_plays_and_its_row_holds_the_rewards(write: Write) -> None:
    name, options = write(HINTS), {"num_tasks": 60}
    (row,) = sampled(name, ["no", "enough"], options)
    assert (row.terminated, row.truncated, row.error) == (True, False, None)
    assert row.episode_reward == 0.25
    assert row.reward_components == {"is_found": 0, "patience": 0.25, "turns": 2, "finalized": 1}
    (cut,) = sampled(name, ["no", "no"], options, max_steps=2)
    assert cut.truncation_reason == "max_steps"


def test_an_environment_may_open_the_conversation_itself(write: Write) -> None:
    environment = make_environment(write(HINTS), {"num_tasks": 60})()
    first, _ = turns(environment, hints(environment, has_prompt=False), [])
    assert [message.content for message in first] == ["Guess."]


def test_a_stop_of_the_task_terminates_and_max_turns_truncates(write: Write) -> None:
    options = {"num_tasks": 60, "player": {"max_turns": 3}}
    environment = make_environment(write(HINTS), options)()
    assert environment.max_steps == 3
    example = environment.example(0, "train")
    _, (stopped,) = turns(environment, example, ["enough"])
    assert (stopped.terminated, stopped.truncated, stopped.info) == (True, False, {"stop_condition": "gave_up"})
    _, steps = turns(environment, example, ["x"] * 3)
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, False), (False, True)]
    assert steps[-1].reward == 0.25


MEETING = HINTS.replace("await asyncio.sleep(0.001)", "await MEETING.wait()").replace(
    "\nclass HintData", "\nMEETING = asyncio.Barrier(2)\n\n\nclass HintData"
)


def test_while_an_episode_waits_others_go_on(write: Write) -> None:
    # Each waits in its environment for the other.
    rows = sampled(write(MEETING), ["no"] * 2 + ["enough"] * 2, {"num_tasks": 60}, group_size=2)
    assert [(row.error, row.episode_reward) for row in rows] == [(None, 0.25)] * 2


def test_an_episode_that_is_left_behind_is_cancelled(write: Write) -> None:
    make = make_environment(write(HINTS), {"num_tasks": 60})

    async def leave() -> None:
        gc.collect()
        before = asyncio.all_tasks()
        environment = make()
        await environment.reset(environment.example(0, "train"))
        assert len(asyncio.all_tasks() - before) == 1
        del environment
        gc.collect()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before

    asyncio.run(leave())


FAULTY = HINTS.replace('hint = "higher"', "1 / 0; hint = 'higher'")
ENDLESS = HINTS.replace("await asyncio.sleep(0.001)", "await asyncio.Event().wait()")
SCORELESS = SUMS.replace("return float(trace.last_reply == task.answer)", "raise KeyError('score')")


def test_an_error_of_the_environment_fails_the_episode_with_its_line(write: Write) -> None:
    name = write(FAULTY)
    (faulty,) = sampled(name, ["no"], {"num_tasks": 60})
    assert faulty.error == f"ZeroDivisionError: division by zero ({name.partition('/')[2]}.py:44, in run)"
    (scoreless,) = sampled(write(SCORELESS), ["no"])
    assert scoreless.episode_reward is None
    assert "KeyError: 'score'" in (scoreless.error or "")


def test_a_time_limit_ends_a_wait(write: Write) -> None:
    make = LimitedEnvironments("hints", make_environment(write(ENDLESS), {"num_tasks": 60}), TimeLimit(timeout_s=0.5))

    async def wait() -> str:
        held = make()
        await held.call("reset", held.example(0, "train"))
        try:
            await held.call("step", "no")
        except TimeLimitError as error:
            return str(error)
        return ""

    assert "did not return within 0.5 s" in asyncio.run(wait())


# --- Tools -----------------------------------------------------------------------------------------------

SHOP = """
import verifiers.v1 as vf

__all__ = ["Shop"]


class ShopState(vf.State):
    basket: list[str] = []


class Prices(vf.Toolset[vf.SharedToolsetConfig]):
    \"""Of the Taskset: one of them serves all episodes.\"""

    async def setup(self):
        self.num_asked = 0

    @vf.tool
    async def price(self, thing: str) -> str:
        \"""Ask for a price.\"""
        self.num_asked += 1
        return f"{thing} costs {len(thing)}, says the shop when asked {self.num_asked} times"


class Till(vf.Toolset[vf.ToolsetConfig, ShopState]):
    \"""Of the Task: each episode has its own.\"""

    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.customer = task.customer

    @vf.tool
    def buy(self, thing: str, pieces: int = 1) -> str:
        \"""Buy a thing.\"""
        if thing == "gold":
            raise ValueError("no gold here")
        self.state.basket = [*self.state.basket, *[thing] * pieces]
        return f"{self.customer} has {', '.join(self.state.basket)}"


class Data(vf.TaskData):
    customer: str


class ShopTask(vf.Task[Data, ShopState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]

    @vf.stop
    async def is_full(self, trace: vf.Trace) -> bool:
        return len(trace.state.basket) > 3

    @vf.reward(weight=0.5)
    async def bought(self, trace) -> float:
        return float(len(trace.state.basket))

    @vf.metric
    async def calls(self, trace) -> float:
        return float(sum(len(message.tool_calls or ()) for message in trace.assistant_messages))


class Shop(vf.Taskset[ShopTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(vf.SharedToolsetConfig())]

    def load(self):
        for customer in ("Ann", "Bob", "Cleo", "Dan"):
            yield ShopTask(Data(prompt="Buy.", customer=customer), self.config.task)
"""


def test_toolsets_run_with_the_state_of_their_episode(write: Write) -> None:
    name = write(SHOP)
    environment: Any = make_environment(name)()
    who = environment._loaded.tasks[environment.example(0, "train").data["number"]].data.customer
    two = hermes_call("prices_price", thing="tea") + hermes_call("buy", thing="tea", pieces=2)
    wrong = hermes_call("buy", thing="gold") + hermes_call("buy", pieces="many") + hermes_call("sell")
    (row,) = sampled(name, [two, wrong, hermes_call("buy", thing="cats"), "thanks"])
    called = [[call.result for call in step.tool_calls] for step in row.agent_steps]
    assert called[0] == ["tea costs 3, says the shop when asked 1 times", f"{who} has tea, tea"]
    gold, many, sell = called[1]
    assert "no gold here" in gold
    assert "validation error" in many
    assert sell == "error: unknown tool 'sell'"
    assert called[2] == [f"{who} has tea, tea, cats"]
    assert (row.terminated, row.truncated, row.error) == (True, False, None)
    # 0.5 * 3 things; the state is that of the Trace.
    assert row.episode_reward == 1.5
    assert row.reward_components == {"bought": 1.5, "calls": 6}
    prompt = decode(chat_tokenizer(), row.prompt_tokens)
    assert all(text in prompt for text in ('"name": "prices_price"', '"name": "buy"', "Ask for a price."))


def test_a_stop_after_a_tool_ends_the_episode_with_the_result_stored(write: Write) -> None:
    (row,) = sampled(write(SHOP), [hermes_call("buy", thing="tea", pieces=4)])
    assert (row.terminated, row.truncated, row.episode_reward) == (True, False, 2)
    assert row.agent_steps[0].tool_calls[0].result.endswith("has tea, tea, tea, tea")
    assert row.environment_steps[0].info == {"stop_condition": "is_full"}


def test_max_turns_counts_completions_with_calls(write: Write) -> None:
    calls = [hermes_call("buy", thing="tea")] * 2
    (row,) = sampled(write(SHOP), calls, {"agent": {"max_turns": 2}})
    assert (row.truncation_reason, row.episode_reward) == ("env", 1)
    assert [step.tool_calls[0].error for step in row.agent_steps] == [None, None]


def test_episodes_of_a_group_have_toolsets_of_their_own(write: Write) -> None:
    # Each buys twice, in whichever order their calls come.
    calls = [hermes_call("buy", thing="tea")] * 4
    rows = sampled(write(SHOP), calls, {"agent": {"max_turns": 2}}, group_size=2)
    assert [row.episode_reward for row in rows] == [1.0, 1.0]


# --- What is refused -------------------------------------------------------------------------------------


URL = """@classmethod
    def toolsets(cls, config):
        return [vf.Toolset[vf.ToolsetConfig](vf.ToolsetConfig(url="http://tools.example/mcp"))]"""
BOXED = """@classmethod
    def toolsets(cls, config):
        return [vf.Toolset[vf.ToolsetConfig](vf.ToolsetConfig(runtime={"type": "docker"}))]"""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"task": "NEEDS_CONTAINER = True"}, "needs a container"),
        (
            {"task": URL},
            "has the tool server .* at http://tools.example/mcp, .* --tools 'mcp:http://tools.example/mcp'",
        ),
        ({"taskset": BOXED}, r"has the tool server .*, which wants a sandbox \(docker\)"),
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
def test_what_needs_more_than_text_is_refused_with_the_reason(
    write: Write, parts: dict[str, str], message: str
) -> None:
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
        (
            "def load_environment(): ...\n",
            {},
            "it has load_environment, which verifiers 0.4.0 can't load; pip install 'verifiers==0.3.1'",
        ),
        (
            "import verifiers as vf\nBASE = vf.SingleTurnEnv\ndef load_environment(): ...\n",
            {},
            "it has load_environment, which verifiers 0.4.0 can't load; pip install 'verifiers==0.3.1'",
        ),
    ],
)
def test_what_cannot_be_loaded_is_explained(write: Write, text: str, options: dict[str, Any], message: str) -> None:
    name = write(text)
    with pytest.raises(ConfigError, match=f"environment {name}: .*{message}"):
        make_environment(name, options)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="environment 'verifiers/no-such-module' is unknown; "):
        make_environment("verifiers/no-such-module")


def test_the_source_is_recorded(write: Write) -> None:
    digest, _, _ = source_of(write(SUMS), {})
    assert digest is not None
    assert len(digest) == 64
