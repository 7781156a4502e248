"""Calls that another server answers: what it is asked, what is stored of its answer, and which answers are refused."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway.upstream_server import PROGRAM, Upstream, answer, upstream_server

from benchmarks.ports import free_port
from ludic.app.cli.main import main
from ludic.app.launch.gateway import split_command
from ludic.engines.engine import SamplingParams
from ludic.errors import ConfigError
from ludic.gateway.calls import CallRequest, Prompt, RefusedCallError, SampledCall, StoredCall
from ludic.gateway.config import UpstreamSettings
from ludic.gateway.server import new_loop
from ludic.gateway.upstream import NO_LIMIT, UpstreamBackend, check_upstream, find_model
from ludic.records.rollout import Message, ToolCall
from ludic.root.gateways import episode_claims
from ludic.root.root import Root
from ludic.root.rows.calls import read_all_calls
from ludic.run.run_json import run_of

KEY = "sk-upstream-0123456789"


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with upstream_server() as here:
        yield here


def sample(
    upstream: Upstream,
    request: CallRequest | None = None,
    params: SamplingParams | None = None,
    earlier: tuple[StoredCall, ...] = (),
    times: int = 1,
) -> tuple[SampledCall, Prompt]:
    request = request or CallRequest(dialect="messages", messages=(Message(role="user", content="hello"),))

    async def ask() -> tuple[SampledCall, Prompt]:
        async with UpstreamBackend(check_upstream(upstream.url), "theirs", UpstreamSettings()) as backend:
            for _ in range(times):
                prompt = await backend.prepare(request, earlier)
                sampled = await backend.sample(request, prompt, params or SamplingParams(max_tokens=NO_LIMIT), 5)
            return sampled, sampled.prompt or prompt

    with new_loop() as runner:
        return runner.run(ask())


def test_token_ids_and_logprobs_of_the_server_are_stored(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDIC_UPSTREAM_KEY", KEY)
    upstream.answers = [(200, {}, answer())]
    first, prompt = sample(upstream)
    assert (first.capture, first.usage) == ("sampler", (3, 2))
    assert first.completion is not None
    assert first.completion.tokens.tolist() == [7, 8]
    assert first.completion.logprobs.tolist() == [-0.5, -0.25]
    assert prompt.tokens is not None
    assert (prompt.tokens.tolist(), prompt.extends, prompt.made) == ([1, 2, 3], None, "whole")
    assert upstream.keys == [f"Bearer {KEY}"]
    assert upstream.asked[0] == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 1.0,
        "seed": 5,
        "logprobs": True,
        "return_token_ids": True,
    }

    # A prompt that begins with the tokens of the first call: 1 2 3 7 8, then two new ones.
    before = StoredCall(
        call_id="first",
        messages=(Message(role="user", content="hello"),),
        answer=first.message,
        tools_digest=None,
        prompt_tokens=prompt.tokens,
        completion=first.completion,
    )
    upstream.answers = [(200, {}, {**answer(), "prompt_token_ids": [1, 2, 3, 7, 8, 9, 10]})]
    call = ToolCall(id="call_1", name="look", arguments='{"at": 1}')
    messages = (
        *before.messages,
        before.answer,
        Message(role="user", content="again"),
        Message(role="assistant", content="", reasoning="I look", tool_calls=(call,)),
        Message(role="tool", content="seen", tool_call_id="call_1"),
    )
    tools = ({"type": "function", "function": {"name": "look"}},)
    request = CallRequest(dialect="responses", messages=messages, tools=tools, stop=("END",))
    _, prompt = sample(upstream, request, SamplingParams(max_tokens=9), (before,))
    assert (prompt.extends, prompt.messages_extend, prompt.num_known_messages) == ("first", "first", 2)
    told = upstream.asked[-1]
    assert (told["max_tokens"], told["stop"], told["tools"]) == (9, ["END"], list(tools))
    assert told["messages"][-2:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
            ],
        },
        {"role": "tool", "content": "seen", "tool_call_id": "call_1"},
    ]


def test_what_a_server_does_not_tell_lowers_the_capture(upstream: Upstream) -> None:
    cases: list[tuple[dict[str, Any], SamplingParams, str]] = [
        ({**answer(), "prompt_token_ids": None}, SamplingParams(), "text"),
        (answer(token_ids=None), SamplingParams(), "text"),
        (answer(logprobs=None), SamplingParams(), "ids"),
        (answer(logprobs={"content": [{"logprob": -0.5}]}), SamplingParams(), "ids"),
        (answer(logprobs={"content": [{"logprob": -0.5}, {"logprob": -9999.0}]}), SamplingParams(), "ids"),
        # Its logprobs are those of another distribution than the one sampled from.
        (answer(), SamplingParams(temperature=0.5), "ids"),
        (answer(), SamplingParams(top_p=0.9), "ids"),
    ]
    for body, params, capture in cases:
        upstream.answers = [(200, {}, body)]
        assert sample(upstream, params=params)[0].capture == capture


def test_fields_that_a_server_refuses_by_name_are_left_out_from_then_on(upstream: Upstream) -> None:
    upstream.answers = [
        (400, {}, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}),
        (400, {}, {"error": {"message": "'max_tokens' is not supported; use 'max_completion_tokens' instead"}}),
        (200, {}, answer(token_ids=None)),
    ]
    found, _ = sample(upstream, params=SamplingParams(max_tokens=9), times=2)
    assert found.capture == "text"
    assert len(upstream.asked) == 4
    for told in upstream.asked[2:]:
        assert "return_token_ids" not in told
        assert "max_tokens" not in told
        assert told["max_completion_tokens"] == 9


@pytest.mark.parametrize(
    ("status", "headers", "body", "reason", "retry_after_s", "words"),
    [
        (429, {"Retry-After": "7"}, {"error": "busy"}, "full", 7.0, "busy"),
        (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"", "upstream", 1.0, "503"),
        (400, {}, {"error": "no such tool"}, "invalid", None, "no such tool"),
        (401, {}, f"wrong key {KEY}".encode(), "upstream", None, "wrong key ***"),
        (500, {}, b"<html>", "upstream", None, "500"),
        (200, {}, b"<html>", "upstream", None, "can't be used"),
        (200, {}, {"choices": []}, "upstream", None, "0 choices"),
        (200, {}, answer(finish_reason="content_filter"), "upstream", None, "content_filter"),
        (200, {}, answer(token_ids=[-1, 3]), "upstream", None, "-1"),
    ],
)  # fmt: skip
def test_an_answer_that_cant_be_used_is_refused_by_name(
    upstream: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    headers: dict[str, str],
    body: Any,
    reason: str,
    retry_after_s: float | None,
    words: str,
) -> None:
    monkeypatch.setenv("LUDIC_UPSTREAM_KEY", KEY)
    upstream.answers = [(status, headers, body)]
    with pytest.raises(RefusedCallError) as found:
        sample(upstream)
    assert (found.value.reason, found.value.retry_after_s) == (reason, retry_after_s)
    assert words in str(found.value)
    assert KEY not in str(found.value)


@pytest.mark.parametrize("url", ["ftp://a/v1", "127.0.0.1:8000", "http://user:pass@host/v1", "http://host/v1?key=1"])
def test_the_url_of_an_upstream_holds_no_secret(url: str) -> None:
    with pytest.raises(ConfigError, match="wanted the base URL of a server") as found:
        check_upstream(url)
    assert "pass@" not in str(found.value)


@pytest.mark.parametrize(
    ("key", "status", "body", "words"),
    [
        ("", 401, {"error": "no key"}, r"/models answered 401: .*; the variable LUDIC_UPSTREAM_KEY .* is not set$"),
        (
            KEY,
            403,
            {"error": KEY},
            r"/models answered 403: .*; the variable LUDIC_UPSTREAM_KEY .* is not the server's$",
        ),
        (KEY, 404, b"<html>no page</html>", r"/models answered 404: a web page; give --model NAME, or correct --upstr"),
        (KEY, 200, b"<html>hello</html>", r"/models answered no list of models; give --model NAME, or correct --upstr"),
    ],
)
def test_a_server_without_a_list_of_models_is_refused_with_what_to_do(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, key: str, status: int, body: Any, words: str
) -> None:
    monkeypatch.setenv("LUDIC_UPSTREAM_KEY", key)
    upstream.models = (status, body)
    with pytest.raises(ConfigError, match=words) as found, new_loop() as loop:
        loop.run(find_model(check_upstream(upstream.url), UpstreamSettings()))
    assert KEY not in str(found.value)


def test_a_command_must_be_a_program() -> None:
    for command in ("", "no-such-program a", "python 'a"):
        with pytest.raises(ConfigError, match="command"):
            split_command(command)


@pytest.mark.slow
def test_the_command_records_a_program_as_an_episode(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDIC_UPSTREAM_KEY", KEY)
    monkeypatch.setenv("LUDIC_GATEWAY_KEY", KEY)
    upstream.answers = [(200, {}, answer())]
    agent = tmp_path / "agent.py"
    agent.write_text(f"import os\nassert {KEY!r} not in os.environ.values()\n{PROGRAM}")
    url = str(tmp_path / "run")
    command, port = f"{sys.executable} {agent}", str(free_port())
    with pytest.raises(SystemExit) as ended:
        main(["gateway", url, "--upstream", upstream.url, "--port", port, "--command", command])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "1 call, stored in" in shown.out
    assert "exit code 3" in shown.err
    root = Root.open(url)
    assert run_of(root).model == "theirs"
    (claim,) = episode_claims(root)
    assert (claim.end, claim.agent["exit_code"]) == ("failed", 3)
    rows = [row for row in read_all_calls(root).to_pylist() if row["event"] == "call"]
    assert [(row["dialect"], row["capture"], row["response_tokens"]) for row in rows] == [
        ("messages", "sampler", [7, 8])
    ]
