"""Calls through a toolbox: results, and errors that the model can act on."""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.errors import ConfigError
from ludic.records.rollout import ToolCall


def multiply(a: int, b: int = 2, unit: Literal["cm", "m"] | None = None) -> str:
    """Multiply two numbers.

    Args:
        a: First number.
        b: Second number.
        unit: Unit of the result.
    """
    return f"{a * b}{unit or ''}"


async def lengths(texts: list[str]) -> dict[str, int]:
    """Count characters.

    Args:
        texts: Texts to count.
    """
    await asyncio.sleep(0)
    return {text: len(text) for text in texts}


def repeat(text: str, times: int) -> str:
    """Repeat a text.

    Args:
        text: The text.
        times: How often.
    """
    return text * times


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"


async def wait_without_blocking(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def fail(how: str) -> str:
    """Fail.

    Args:
        how: The way to fail.
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "stop":
        raise StopIteration("over")
    raise ValueError(how)


async def fail_later(how: str) -> str:
    """Fail.

    Args:
        how: The way to fail.
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "cancel":
        raise asyncio.CancelledError
    raise ValueError(how)


@pytest.fixture(scope="module")
def toolbox() -> Toolbox:
    functions = (multiply, lengths, repeat, wait, wait_without_blocking, fail, fail_later)
    return Toolbox(map(function_tool, functions), time_limit_s=0.3, output_limit=100)


def call(toolbox: Toolbox, name: str, arguments: str) -> ToolCall:
    return asyncio.run(toolbox.run(ToolCall(id="7", name=name, arguments=arguments)))


def test_a_call_comes_back_with_its_result(toolbox: Toolbox) -> None:
    done = call(toolbox, "multiply", '{"a": 3, "b": 4}')
    assert done == ToolCall(id="7", name="multiply", arguments='{"a": 3, "b": 4}', result="12")


def test_defaults_apply_and_none_is_accepted_where_the_hint_allows_it(toolbox: Toolbox) -> None:
    assert call(toolbox, "multiply", '{"a": 3}').result == "6"
    assert call(toolbox, "multiply", '{"a": 3, "unit": null}').result == "6"
    assert call(toolbox, "multiply", '{"a": 3, "unit": "cm"}').result == "6cm"


def test_an_asynchronous_function_answers_in_json_with_letters_of_any_language(toolbox: Toolbox) -> None:
    assert call(toolbox, "lengths", '{"texts": ["Ωμέγα", "猫"]}').result == '{"Ωμέγα": 5, "猫": 1}'


def test_half_of_a_character_becomes_one_that_can_be_stored(toolbox: Toolbox) -> None:
    assert call(toolbox, "repeat", r'{"text": "\ud83d", "times": 2}').result == "??"


def test_the_schemas_are_those_of_transformers(toolbox: Toolbox) -> None:
    from transformers.utils import get_json_schema

    assert toolbox.schemas[0] == get_json_schema(multiply)
    assert [schema["function"]["name"] for schema in toolbox.schemas][:3] == ["multiply", "lengths", "repeat"]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("multipli", "{}", "tool 'multipli' is unknown; did you mean 'multiply'? There are multiply, lengths"),
        ("xyz", "{}", "tool 'xyz' is unknown; there are multiply, lengths"),
        ("multiply", "{a: 3}", "not valid JSON"),
        ("multiply", "", "not valid JSON"),
        ("multiply", '{"a": NaN}', "NaN is not a JSON number"),
        ("multiply", "[" * 100_000, "not valid JSON"),
        ("multiply", "[3, 4]", "the arguments are JSON, but an array; wanted one JSON object"),
        ("multiply", '"3"', "the arguments are JSON, but a string"),
        ("multiply", "null", "the arguments are JSON, but the value null"),
        ("multiply", "{}", "'a' is a required property"),
        ("multiply", '{"a": "3"}', "argument a: '3' is not of type 'integer'"),
        ("multiply", '{"a": 3.0}', "argument a: 3.0 is not of type 'integer'"),
        ("multiply", '{"a": true}', "argument a: True is not of type 'integer'"),
        ("multiply", '{"a": 3, "unit": "km"}', "argument unit: 'km' is not one of ['cm', 'm']"),
        ("multiply", '{"a": 3, "c": 1}', "there is no argument 'c' (there are: a, b, unit)"),
        ("lengths", '{"texts": ["a", 1]}', "argument texts[1]: 1 is not of type 'string'"),
    ],
)
def test_a_call_that_does_not_fit_is_an_error_that_says_what_does(name: str, arguments: str, error: str) -> None:
    toolbox = Toolbox([function_tool(multiply), function_tool(lengths)])
    done = call(toolbox, name, arguments)
    assert done.result is None
    assert error in (done.error or "")


def test_only_the_first_problems_of_many_are_listed() -> None:
    done = call(Toolbox([function_tool(lengths)]), "lengths", f'{{"texts": {list(range(12))}}}')
    assert (done.error or "").count("is not of type") == 5
    assert (done.error or "").endswith("and 7 more")


@pytest.mark.parametrize(
    ("name", "how", "error"),
    [
        ("fail", "broken", "ValueError: broken"),
        ("fail", "exit", "sys.exit(3) was called"),
        ("fail", "interrupt", "KeyboardInterrupt was raised"),
        ("fail", "stop", "StopIteration was raised: over"),
        ("fail_later", "broken", "ValueError: broken"),
        ("fail_later", "exit", "sys.exit(3) was called"),
        ("fail_later", "cancel", "fail_later cancelled itself"),
    ],
)
def test_a_tool_that_fails_is_an_error_of_its_call(toolbox: Toolbox, name: str, how: str, error: str) -> None:
    done = call(toolbox, name, f'{{"how": "{how}"}}')
    assert done.result is None
    assert error in (done.error or "")


def test_long_output_and_long_errors_are_cut_and_say_so(toolbox: Toolbox) -> None:
    done = call(toolbox, "repeat", '{"text": "ab", "times": 1000000}')
    assert done.result == "ab" * 50 + "\n[cut: 1,999,900 more characters]"
    assert call(toolbox, "repeat", '{"text": "ab", "times": 50}').result == "ab" * 50
    failed = call(toolbox, "fail", f'{{"how": "{"x" * 500}"}}')
    assert failed.error == "ValueError: " + "x" * 88 + "\n[cut: 412 more characters]"


@pytest.mark.parametrize("name", ["wait", "wait_without_blocking"])
def test_a_slow_tool_is_given_up_at_its_time_limit(toolbox: Toolbox, name: str) -> None:
    async def run() -> tuple[ToolCall, float]:
        start = time.monotonic()
        done = await toolbox.run(ToolCall(id="7", name=name, arguments='{"seconds": 3}'))
        return done, time.monotonic() - start

    done, seconds = asyncio.run(run())
    assert done.error == f"{name} took longer than 0.3 s and was stopped"
    assert seconds < 2


@pytest.mark.slow
def test_a_tool_that_ignores_its_cancellation_does_not_hold_the_episode() -> None:
    async def stubborn(seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                await asyncio.sleep(end - time.monotonic())
            except asyncio.CancelledError:
                continue
        return "done"

    async def run() -> tuple[ToolCall, float]:
        start = time.monotonic()
        toolbox = Toolbox([function_tool(stubborn)], time_limit_s=0.1)
        done = await toolbox.run(ToolCall(id="7", name="stubborn", arguments='{"seconds": 2.5}'))
        return done, time.monotonic() - start

    done, seconds = asyncio.run(run())
    assert "took longer than 0.1 s" in (done.error or "")
    assert seconds < 2


def test_a_cancelled_episode_cancels_its_tool() -> None:
    ended = []

    async def endless(text: str) -> str:
        """Wait.

        Args:
            text: Any text.
        """
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(text)
        return text

    async def run() -> None:
        toolbox = Toolbox([function_tool(endless)])
        episode = asyncio.create_task(toolbox.run(ToolCall(id="7", name="endless", arguments='{"text": "a"}')))
        await asyncio.sleep(0.05)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == ["a"]


def test_blocking_functions_run_side_by_side_even_more_than_there_are_cores() -> None:
    num_calls = 20 * (os.cpu_count() or 1)

    async def run() -> float:
        toolbox = Toolbox([function_tool(wait)])
        calls = [ToolCall(id=str(i), name="wait", arguments='{"seconds": 0.5}') for i in range(num_calls)]
        start = time.monotonic()
        done = await asyncio.gather(*map(toolbox.run, calls))
        assert {each.result for each in done} == {"done"}
        return time.monotonic() - start

    assert asyncio.run(run()) < 3  # one after the other: 20 s and more


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'wait'; rename one"):
        Toolbox([function_tool(wait), function_tool(wait)])


class Nameless:
    name = "odd"
    schema: Mapping[str, Any] = {"type": "function", "function": {"name": "odd", "parameters": {"type": "objekt"}}}

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        return 7


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="tool odd: its parameters are not a JSON schema: 'objekt'"):
        Toolbox([Nameless()])


def test_a_function_needs_hints_a_docstring_and_named_parameters() -> None:
    def unhinted(a):  # type: ignore[no-untyped-def]
        """Do it.

        Args:
            a: A number.
        """

    def undocumented(a: int) -> int:
        return a

    def starred(*numbers: int) -> int:
        """Add numbers."""
        return sum(numbers)

    with pytest.raises(ConfigError, match=r"tool unhinted: .*a is missing a type hint.*wanted such as def add"):
        function_tool(unhinted)
    with pytest.raises(ConfigError, match=r"tool undocumented: .*no docstring"):
        function_tool(undocumented)
    with pytest.raises(ConfigError, match=r"tool starred: parameter \*numbers: int can't be given by name"):
        function_tool(starred)


@given(name=st.sampled_from(["multiply", "lengths", "nothing"]), arguments=st.text() | st.from_regex(r'\{"a": .*\}'))
def test_no_call_raises(name: str, arguments: str) -> None:
    done = call(Toolbox([function_tool(multiply), function_tool(lengths)]), name, arguments)
    assert (done.result is None) != (done.error is None)
