"""An environment that runs the tool calls of a completion itself, all of them in one step."""

from collections.abc import Sequence
from typing import Any

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import run_episode, without_place

from ludic.environments.environment import Example, Transition
from ludic.errors import ConfigError
from ludic.records.rollout import Message, ToolCall

PRESS = {
    "type": "function",
    "function": {
        "name": "press",
        "description": "Press a button.",
        "parameters": {"type": "object", "properties": {"button": {"type": "string"}}},
    },
}


class Buttons:
    """Ends when a completion presses two buttons at once; pressing none is an answer."""

    tools: Any = (PRESS,)

    def __init__(self) -> None:
        self.pressed: list[tuple[str, list[tuple[str, str]]]] = []

    def example(self, index: int, split: str) -> Example:
        return Example(example_id="0", messages=(Message(role="user", content="begin"),))

    def reset(self, example: Example) -> tuple[Message, ...]:
        return example.messages

    async def run_tools(self, text: str, calls: Sequence[ToolCall]) -> Transition:
        self.pressed.append((text, [(call.name, call.arguments) for call in calls]))
        if len(calls) == 2:
            return Transition(observation=None, reward=2.0, terminated=True, tool_results=("click", None))
        observation = "Try two at once." if len(self.pressed) == 2 else None
        return Transition(observation=observation, reward=0.25, terminated=False, tool_results=("click",))

    def step(self, action: str) -> Transition:
        return Transition(observation=None, reward=-1.0, terminated=True)


def press(*buttons: str) -> str:
    return "".join(hermes_call("press", button=button) for button in buttons)


def test_each_completion_with_calls_is_a_step_that_may_end_the_episode() -> None:
    environment = Buttons()
    (row,) = run_episode(scripted_agent(["I press. " + press("a"), press("b"), press("a", "b")]), environment)
    assert (row.error, row.terminated, row.truncated) == (None, True, False)
    assert row.episode_reward == 2.5
    assert environment.pressed == [
        ("I press.", [("press", '{"button": "a"}')]),
        ("", [("press", '{"button": "b"}')]),
        ("", [("press", '{"button": "a"}'), ("press", '{"button": "b"}')]),
    ]
    assert [step.action_target for step in row.agent_steps] == ["external"] * 3
    results = [[(call.result, call.error) for call in step.tool_calls] for step in row.agent_steps]
    assert results[:2] == [[("click", None)]] * 2
    assert results[2] == [("click", None), (None, "not run by the environment")]
    steps = [(step.observation, step.next_observation, step.reward) for step in row.environment_steps]
    assert steps == [
        ("begin", "click", 0.25),
        ("click", "click\n\nTry two at once.", 0.25),
        ("click\n\nTry two at once.", "click", 2.0),
    ]
    assert [(message.role, message.content) for message in row.messages if message.role != "assistant"] == [
        ("user", "begin"),
        ("tool", "click"),
        ("tool", "click"),
        ("user", "Try two at once."),
    ]
    # Each reward is stored at the last token of its completion.
    assert [row.token_rewards[step.end - 1] for step in row.agent_steps] == [0.25, 0.25, 2.0]


def test_an_answer_without_calls_goes_to_step() -> None:
    (row,) = run_episode(scripted_agent([press("a"), "enough"]), Buttons())
    assert row.episode_reward == 0.25 - 1
    assert [step.action_target for step in row.agent_steps] == ["external", "env"]


def test_the_steps_of_an_episode_count_completions_with_calls() -> None:
    (row,) = run_episode(scripted_agent([press("a")] * 3), Buttons(), max_steps=2)
    assert (row.truncation_reason, row.num_turns, row.episode_reward) == ("max_steps", 2, 0.5)


def test_a_tool_of_the_agent_is_run_beside_and_an_unknown_one_goes_to_the_environment() -> None:
    def shout(word: str) -> str:
        """Shout.

        Args:
            word: A word.
        """
        return word.upper()

    from ludic.agents.tools.registry import function_tool
    from ludic.agents.tools.toolbox import Toolbox

    environment = Buttons()
    agent = scripted_agent(
        [hermes_call("shout", word="cat") + hermes_call("pres"), hermes_call("shout", word="dog"), "enough"],
        toolbox=Toolbox([function_tool(shout)]),
    )
    (row,) = run_episode(agent, environment)
    assert [[(call.name, call.result) for call in step.tool_calls] for step in row.agent_steps] == [
        [("shout", "CAT"), ("pres", "click")],
        [("shout", "DOG")],
        [],
    ]
    assert [step.action_target for step in row.agent_steps] == ["external", "internal", "env"]
    assert [calls for _, calls in environment.pressed] == [[("pres", "{}")]]
    assert len(row.environment_steps) == 2

    class Same(Buttons):
        tools = ({**PRESS, "function": {**PRESS["function"], "name": "shout"}},)

    with pytest.raises(ConfigError, match="the environment and the run's tools have a tool 'shout' each"):
        run_episode(agent, Same())


class Faulty(Buttons):
    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    async def run_tools(self, text: str, calls: Sequence[ToolCall]) -> Transition:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (KeyError("button"), "KeyError: 'button'"),
        (
            Transition(observation=None, reward=0.0, terminated=False, tool_results=("a", "b")),
            "ValueError: run_tools returned 2 tool_results, wanted one for each of 1 calls",
        ),
        (
            Transition(observation=None, reward=0.0, terminated=False, tool_results=(3,)),  # type: ignore[arg-type]
            "TypeError: a result that run_tools returned is 3, wanted a str",
        ),
        ("click", "TypeError: run_tools returned 'click', wanted a ludic.environments.environment.Transition"),
    ],
)
def test_a_mistake_of_run_tools_fails_the_episode(found: Any, error: str) -> None:
    (row,) = run_episode(scripted_agent([press("a")]), Faulty(found))
    assert without_place(row.error) == error
    assert row.episode_reward is None
    assert len(row.agent_steps) == 1


def test_without_tools_in_the_episode_a_call_is_text() -> None:
    class Plain(Buttons):
        tools = ()

    environment = Plain()
    (row,) = run_episode(scripted_agent([press("a")]), environment)
    assert (environment.pressed, row.episode_reward) == ([], -1)
    assert row.environment_steps[0].action == press("a")


def test_tools_that_are_no_schemas_fail_the_episode() -> None:
    class Named(Buttons):
        tools = ("press",)

    (row,) = run_episode(scripted_agent([]), Named())
    assert without_place(row.error).startswith(
        "TypeError: tools of the environment has 'press', wanted a schema such as"
    )
