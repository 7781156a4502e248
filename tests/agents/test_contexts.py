"""Contexts: the messages that a model call sees, and what the model is asked on the way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from ludic.agents.contexts import SUMMARY_REQUEST, Context, make_context
from ludic.errors import ConfigError
from ludic.records.rollout import Message, ToolCall

SUMMARISED = "U1\n\nSummary of the dialogue so far:\n"
"""The first user message, before a summary."""

ROLES = {"S": "system", "D": "developer", "U": "user", "A": "assistant", "T": "tool"}


def dialogue(*texts: str) -> list[Message]:
    """Messages of the roles that the texts begin with: "U1" is the user's message "U1"."""
    return [Message(role=ROLES[text[0]], content=text) for text in texts]


class Asked:
    """A model that answers in turn with the given texts, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.views: list[list[str]] = []

    async def __call__(self, messages: Sequence[Message]) -> str:
        self.views.append([message.content for message in messages])
        await asyncio.sleep(0)
        return self.answers.pop(0)


def view(context: Context, messages: Sequence[Message], ask: Asked | None = None) -> Sequence[Message]:
    return asyncio.run(context.view(messages, ask or Asked()))


def seen(context: Context, messages: Sequence[Message], ask: Asked | None = None) -> list[str]:
    return [message.content for message in view(context, messages, ask)]


def test_the_full_context_is_the_dialogue_itself() -> None:
    messages = dialogue("S", "U1", "A1<think>a</think>", "T1")
    assert view(make_context("full")(), messages) is messages


def test_thinking_is_removed_before_the_last_user_message_only() -> None:
    call = ToolCall(id="1", name="add", arguments="{}")
    messages = [
        Message(role="user", content="<think>of a user</think> U1"),
        Message(role="assistant", content="<think>\na\n</think>\n\nA1", tool_calls=(call,)),
        Message(role="tool", content="<think>of a tool</think> T1"),
        Message(role="assistant", content="b</think>A2", reasoning="b"),
        Message(role="assistant", content="<think>cut off"),
        Message(role="user", content="U2"),
        Message(role="assistant", content="<think>c</think>A3"),
        Message(role="tool", content="T3"),
        Message(role="user", content="<tool_response>\n4\n</tool_response>"),
    ]
    expected = [message.content for message in messages]
    expected[1], expected[3] = "A1", "A2"
    found = view(make_context("no_thinking")(), messages)
    assert [message.content for message in found] == expected
    assert found[1].tool_calls == (call,)
    assert {message.reasoning for message in found} == {None}


def test_thinking_stays_where_there_is_no_user() -> None:
    messages = dialogue("S", "A1<think>a</think>b", "T1")
    assert view(make_context("no_thinking")(), messages) == messages


@pytest.mark.parametrize(
    ("size", "texts", "expected"),
    [
        (2, "", ""),
        (2, "S U1", "S U1"),
        (2, "S U1 A1 U2", "S U1 A1 U2"),
        (2, "S U1 A1 U2 A2 U3", "S U1 A2 U3"),
        # A window that would begin with a user's message begins with the turn before: turns alternate.
        (1, "S U1 A1 U2 A2 U3", "S U1 A2 U3"),
        (3, "S U1 A1 U2 A2 U3", "S U1 A1 U2 A2 U3"),
        (3, "U1 A1 U2 A2 U3 A3 U4", "U1 A2 U3 A3 U4"),
        (9, "S U1 A1 U2 A2 U3", "S U1 A1 U2 A2 U3"),
        (2, "U1 A1 U2 A2 U3", "U1 A2 U3"),
        (2, "S1 U1 A1 S2 U2 A2 U3", "S1 U1 S2 A2 U3"),
        # A window that would begin with a tool's result begins with the call instead.
        (1, "S U1 A1 T1", "S U1 A1 T1"),
        (2, "S U1 A1 T1 A2 T2a T2b T2c", "S U1 A2 T2a T2b T2c"),
        (3, "S U1 A1 T1 A2 T2", "S U1 A1 T1 A2 T2"),
        (2, "S U1 A1 T1 A2 T2", "S U1 A2 T2"),
        (1, "S A1 U1", "S A1 U1"),
        (2, "D U1 A1 U2 A2 U3", "D U1 A2 U3"),
    ],
)
def test_a_window_has_the_system_the_task_and_the_newest_messages(size: int, texts: str, expected: str) -> None:
    assert seen(make_context(f"window:{size}")(), dialogue(*texts.split())) == expected.split()


def test_a_window_keeps_results_in_markup_with_their_call() -> None:
    messages = [*dialogue("U1", "A1"), Message(role="user", content="<tool_response>4</tool_response>")]
    assert view(make_context("window:1")(), messages) == messages


def test_a_summary_replaces_older_messages_but_not_the_last_turn() -> None:
    context, ask = make_context("summary:3")(), Asked("<think>a</think>\nfirst", "second")
    texts = ["S", "U1", "A1", "U2", "A2"]
    assert seen(context, dialogue(*texts), ask) == texts  # A1, U2 and A2 are three
    texts += ["T2"]
    assert seen(context, dialogue(*texts), ask) == ["S", SUMMARISED + "first", "A2", "T2"]
    assert ask.views == [["S", "U1", "A1", "U2", "A2", "T2", SUMMARY_REQUEST]]

    texts += ["A3"]
    first = ["S", SUMMARISED + "first", "A2", "T2", "A3"]
    assert seen(context, dialogue(*texts), ask) == first
    texts += ["U3"]
    assert seen(context, dialogue(*texts), ask) == ["S", SUMMARISED + "second", "A3", "U3"]
    assert ask.views[1] == [*first, f"U3\n\n{SUMMARY_REQUEST}"]


def test_a_summary_without_a_first_question_is_a_users_message() -> None:
    found = view(make_context("summary:1")(), dialogue("S", "A1", "T1", "A2", "T2"), Asked("short"))
    assert [message.role for message in found] == ["system", "user", "assistant", "tool"]


def test_no_summary_is_asked_for_that_would_replace_nothing() -> None:
    context, ask = make_context("summary:1")(), Asked("short")
    messages = dialogue("S", "U1", "A1", "T1", "A2", "T2a", "T2b")
    expected = ["S", SUMMARISED + "short", "A2", "T2a", "T2b"]
    assert seen(context, messages, ask) == expected
    assert seen(context, messages, ask) == expected  # the same dialogue again asks nothing
    assert len(ask.views) == 1
    assert seen(make_context("summary:1")(), dialogue("S", "U1", "U2", "U3")) == ["S", "U1", "U2", "U3"]


def test_a_failed_summary_leaves_the_context_as_it_was() -> None:
    context, messages = make_context("summary:1")(), dialogue("U1", "A1", "U2", "A2")
    with pytest.raises(IndexError):
        view(context, messages, Asked())
    assert seen(context, messages, Asked("short")) == [SUMMARISED + "short", "A2"]


def test_each_episode_has_a_summary_of_its_own() -> None:
    make, messages = make_context("summary:1"), dialogue("U1", "A1", "U2", "A2")
    one, other = make(), make()
    assert seen(one, messages, Asked("one"))[0] == SUMMARISED + "one"
    assert seen(other, messages, Asked("other"))[0] == SUMMARISED + "other"


def test_a_context_of_ones_own_is_made_for_each_episode(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n    calls = 0\n    async def view(self, messages, ask):\n"
        "        self.calls += 1\n        return messages[-self.calls:]\n"
    )
    make = make_context(f"{tmp_path}/own.py:Own")
    one, other, messages = make(), make(), dialogue("U1", "A1", "U2")
    assert [seen(one, messages), seen(one, messages), seen(other, messages)] == [["U2"], ["A1", "U2"], ["U2"]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "windows:8",
            "context 'windows:8' is unknown; did you mean 'window:N'? There are full, no_thinking, window:N, ",
        ),
        ("", "context '' is unknown; there are full, no_thinking, window:N, summary:N; your own is path/to/"),
        ("full:1", "context 'full:1' is unknown"),
        ("window", "context 'window' is unknown; did you mean 'window:N'?"),
        ("summary:0", "context 'summary:0' counts '0' messages; wanted a number from 1, as in summary:8"),
        ("window:-1", "counts '-1' messages"),
        ("window:²", "counts '²' messages"),
        ("none.py:Own", "context none.py:Own: there is no file "),
    ],
)
def test_an_unknown_context_is_answered_with_what_there_is(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_context(spec)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise KeyError('ran')", "own.py, line 1, failed: KeyError: 'ran'"),
        ("class Other: pass", "has no class or function 'Own'"),
        ("class Own: pass", "Own has no method 'view', which a context needs"),
        (
            "class Own:\n    def __init__(self): raise SystemExit(1)",
            "could not be built without arguments: RuntimeError",
        ),
    ],
)
def test_a_file_that_gives_no_context_is_named(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        make_context(f"{tmp_path}/own.py:Own")
