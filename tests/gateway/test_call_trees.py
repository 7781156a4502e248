"""Random trees of calls over HTTP: each token that the engine sampled is in one row's mask, or in the audit."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from gateway.scripted import Asked, Turn, says, scripted_agent
from gateway.served import Episode, ServedGateway, check_account, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludic.errors import EngineError
from ludic.root.rows.calls import read_calls
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

KINDS = ("text", "text", "call", "two calls", "think", "cut", "stop", "weights", "fail")
TOOL = {
    "name": "look",
    "description": "Look at a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}},
}


def script(asked: Asked) -> Turn:
    """The last message says what the model does, so that calls in any order get their turns."""
    asks = asked.prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    delay_s = 0.03 if "slow" in asks else 0.0
    # The number of the call makes answers to equal requests different.
    text = f"Answer {asked.number}."
    turns = {
        "two calls": Turn(text=says(text, ("look", {"path": "ä b", "depth": 2}), ("look", {"path": "c"}))),
        "call": Turn(text=says("", ("look", {"path": f"{asked.number}/x"}))),
        "think": Turn(text=says(text, thinks="Let me see.")),
        "cut": Turn(text=f"{text} It was cut", finish_reason="length"),
        "stop": Turn(text=says(f"{text} STOP and more")),
        "weights": Turn(text=says(f"{text} Longer than a few tokens."), new_weights_at=4),
        "fail": Turn(error=EngineError("no memory left")),
        "text": Turn(text=says(text)),
    }
    turn = next(turn for kind, turn in turns.items() if f" {kind}" in asks)
    return Turn(
        text=turn.text,
        finish_reason=turn.finish_reason,
        error=turn.error,
        new_weights_at=turn.new_weights_at,
        delay_s=delay_s,
    )


# --- Conversations in three dialects ---------------------------------------------------------------------------------


def chat_body(said: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": said, "tools": [{"type": "function", "function": TOOL}]}


def chat_answer(answer: Any) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    calls = [
        {**call, "function": {**call["function"], "arguments": _written_again(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})


def _written_again(arguments: str) -> str:
    """As clients do that keep them as values."""
    return json.dumps(json.loads(arguments), indent=1, sort_keys=True)


def messages_body(said: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in said[1:]:
        if message["role"] == "assistant":
            blocks = [{"type": "text", "text": message["content"]}] if message["content"] else []
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                name = call["function"]["name"]
                blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
            turns.append({"role": "assistant", "content": blocks})
        elif message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if turns[-1]["role"] == "user":
                turns[-1]["content"].append(block)
            else:
                turns.append({"role": "user", "content": [block]})
        else:
            turns.append({"role": "user", "content": [{"type": "text", "text": message["content"]}]})
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    return "/v1/messages", {"system": said[0]["content"], "messages": turns, "tools": [tool]}


def messages_answer(answer: Any) -> dict[str, Any]:
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def responses_body(said: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for message in said[1:]:
        if message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
            )
            continue
        if message["content"]:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ]
    return "/v1/responses", {
        "instructions": said[0]["content"],
        "input": items,
        "tools": [{"type": "function", **TOOL}],
    }


def responses_answer(answer: Any) -> dict[str, Any]:
    text = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


DIALECTS = {
    "chat": (chat_body, chat_answer),
    "messages": (messages_body, messages_answer),
    "responses": (responses_body, responses_answer),
}


# --- The agent -------------------------------------------------------------------------------------------------------


class Agents:
    """Clients that work on one episode: conversations that grow, fork, are compacted and given up."""

    def __init__(self, episode: Episode, client: httpx2.AsyncClient) -> None:
        self._episode, self._client = episode, client
        self._number = 0
        self.conversations: list[tuple[str, list[dict[str, Any]]]] = []

    def begin(self, dialect: str, kind: str, system: str = "You are an agent.") -> int:
        """Begin a conversation: of the agent, of a sub-agent, or after a compaction. Returns its index."""
        self.conversations.append((dialect, [{"role": "system", "content": system}, self._user(kind)]))
        return len(self.conversations) - 1

    def branch(self, index: int, at: int, kind: str) -> int:
        """Begin another conversation behind an earlier answer of one."""
        dialect, said = self.conversations[index]
        ends = [place + 1 for place, message in enumerate(said) if message["role"] == "assistant"] or [2]
        self.conversations.append((dialect, [*said[: ends[at % len(ends)]]]))
        return self._go_on(len(self.conversations) - 1, kind)

    def _go_on(self, index: int, kind: str) -> int:
        """Add what follows the last answer: results of its calls, or a message."""
        said = self.conversations[index][1]
        if said[-1]["role"] != "assistant":
            said[-1] = said[-1] if said[-1]["role"] == "tool" else self._user(kind)
            return index
        calls = said[-1].get("tool_calls", ())
        said += [{"role": "tool", "tool_call_id": call["id"], "content": self._text(kind)} for call in calls]
        if not calls:
            said.append(self._user(kind))
        return index

    def _user(self, kind: str) -> dict[str, Any]:
        return {"role": "user", "content": self._text(kind)}

    def _text(self, kind: str) -> str:
        self._number += 1
        return f"{self._number}: {kind}"

    async def turn(self, index: int, kind: str, **headers: str) -> None:
        await self._answer(self._go_on(index, kind), **headers)

    async def _answer(self, index: int, **headers: str) -> Any:
        dialect, said = self.conversations[index]
        _, read = DIALECTS[dialect]
        answered = await self._client.send(self._request(index, **headers))
        if answered.status_code == 500:
            return None  # the engine failed; the conversation goes on with another message
        assert answered.status_code == 200, answered.text
        message = read(answered.json())
        said.append(message)
        return message

    def _request(self, index: int, *, stream: bool = False, **headers: str) -> httpx2.Request:
        dialect, said = self.conversations[index]
        path, body = DIALECTS[dialect][0](said)
        body |= {"model": "scripted", "stream": stream}
        if dialect == "messages":
            body |= {"max_tokens": 3_000, "stop_sequences": ["STOP"]}
        elif dialect == "chat":
            body |= {"stop": ["STOP"]}
        return self._client.build_request(
            "POST",
            f"{self._episode.base_url}{path}",
            json=body,
            headers={**self._episode.headers, **{name.replace("_", "-"): value for name, value in headers.items()}},
        )

    async def retry_given_up(self, index: int, kind: str) -> None:
        """Hang up before the answer and ask again, as an SDK with a time limit."""
        self._go_on(index, f"{kind} slow")
        for count in range(2):
            request = self._request(index, x_stainless_retry_count=str(count))
            with_limit = asyncio.wait_for(self._client.send(request), 0.01 if count == 0 else 60)
            try:
                answered = await with_limit
            except TimeoutError:
                continue
            if answered.status_code == 200:
                self.conversations[index][1].append(DIALECTS[self.conversations[index][0]][1](answered.json()))

    async def ask_twice(self, index: int, kind: str, *, has_key: bool) -> None:
        """Ask the same twice, one after the other; the second answer counts."""
        self._go_on(index, kind)
        headers = {"idempotency_key": f"key-{self._number}"} if has_key else {}
        if await self._answer(index, **headers) is not None:
            first = self.conversations[index][1].pop()
            second = await self._answer(index, **headers)
            assert not has_key or first == second

    async def cut_stream(self, index: int, kind: str, *, is_read: bool, goes_on: bool) -> None:
        """Hang up within a stream, or before it begins; ask again, or not."""
        self._go_on(index, f"{kind} slow")
        try:
            async with asyncio.timeout(60 if is_read else 0.01):
                answered = await self._client.send(self._request(index, stream=True), stream=True)
                async for _ in answered.aiter_bytes(16):
                    break
                await answered.aclose()
        except TimeoutError:
            pass
        if goes_on:
            await self._answer(index)


OPERATIONS = ("turn", "turn", "branch", "compact", "delegate", "hang up", "twice", "twice with a key", "cut", "at once")
STEP = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5), st.integers(0, 5), st.sampled_from(KINDS))


async def grow(agents: Agents, steps: list[tuple[str, int, int, str]], dialects: list[str]) -> None:
    agents.begin(dialects[0], "text")
    for operation, which, at, kind in steps:
        index = which % len(agents.conversations)
        dialect = dialects[at % len(dialects)]
        match operation:
            case "turn":
                await agents.turn(index, kind)
            case "branch":
                await agents._answer(agents.branch(index, at, kind))
            case "compact":
                await agents._answer(agents.begin(dialect, kind))
            case "delegate":
                await agents._answer(agents.begin(dialect, kind, "You are a helper."))
            case "hang up":
                await agents.retry_given_up(index, kind)
            case "twice" | "twice with a key":
                await agents.ask_twice(index, kind, has_key=operation != "twice")
            case "cut":
                await agents.cut_stream(index, kind, is_read=at % 2 == 0, goes_on=at < 3)
            case "at once":
                # Two clients, and a third one that begins as the first.
                fork = agents.branch(index, at, kind)
                other = agents.begin(dialect, kind, "You are a helper.")
                same = [agents.conversations[other][1][1]]
                third = agents.begin(dialect, kind, "You are a helper.")
                agents.conversations[third][1][1:] = same
                await asyncio.gather(*map(agents._answer, (fork, other, third)))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    root = put_run(str(tmp_path_factory.mktemp("trees") / "root"), RunConfig(model="scripted", env=("moar_cats",)))
    with served(root, scripted_agent(script)) as here:
        yield here


def grow_and_check(gateway: ServedGateway, steps: list[Any], dialects: list[str]) -> None:
    first = len(gateway.agent.engine.log)
    episode = gateway.open_episode()

    async def run() -> None:
        async with httpx2.AsyncClient(timeout=60, verify=False) as client:
            await grow(Agents(episode, client), steps, dialects)

    asyncio.run(run())
    gateway.wait_until_idle()
    episode.seal()
    assert episode.post(*chat_body([{"role": "user", "content": "1: text"}])).status_code == 409
    calls = read_calls(gateway.root, episode.episode_id, episode.attempt)
    where = check_account(gateway.agent.engine.log[first:], [gateway.assembly(episode)], calls)
    # Only requests that were sent more than once leave tokens untrained, and stop texts.
    repeats = {step[0] for step in steps} & {"hang up", "twice", "cut", "at once"}
    assert where.keys() <= {"trained", "undelivered"} | ({"retry", "unresolved"} if repeats else set())


def tree_test(num_examples: int, num_steps: int) -> Any:
    check = given(
        st.lists(STEP, max_size=num_steps), st.lists(st.sampled_from(sorted(DIALECTS)), min_size=1, max_size=3)
    )
    limits = settings(
        max_examples=num_examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    )
    return lambda function: limits(check(function))


@tree_test(3, 4)
def test_each_sampled_token_of_a_small_tree_is_trained_once_or_accounted_for(
    gateway: ServedGateway, steps: list[Any], dialects: list[str]
) -> None:
    grow_and_check(gateway, steps, dialects)


@pytest.mark.slow
@pytest.mark.timeout(900)
@tree_test(200, 20)
def test_each_sampled_token_of_a_large_tree_is_trained_once_or_accounted_for(
    gateway: ServedGateway, steps: list[Any], dialects: list[str]
) -> None:
    grow_and_check(gateway, steps, dialects)


def test_a_request_that_is_sent_again_is_sampled_once(gateway: ServedGateway) -> None:
    first = len(gateway.agent.engine.log)
    steps = [
        ("hang up", 0, 0, "call"),
        ("turn", 0, 0, "text"),
        ("cut", 0, 2, "text"),
        ("twice with a key", 0, 0, "text"),
    ]
    grow_and_check(gateway, steps, ["chat"])
    # Asked again with a higher retry count, and with the same key: one call each. What follows the cut stream is
    # another request, which does not stream: two calls.
    assert len(gateway.agent.engine.log) - first == 5
