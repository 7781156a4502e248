"""Random trees of calls over HTTP: each token that the engine sampled is in one row's mask, or in the audit."""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from gateway.dialects.clients import assembled, events
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
    messages = [{name: value for name, value in each.items() if name != "response"} for each in said]
    return "/v1/chat/completions", {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}


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


def continued_body(said: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """As responses, with what follows the last answer alone, which previous_response_id names."""
    last = max((index for index, message in enumerate(said) if "response" in message), default=None)
    if last is None:
        return responses_body(said)
    path, body = responses_body([said[0], *said[last + 1 :]])
    del body["instructions"]  # those of the call before
    return path, {**body, "previous_response_id": said[last]["response"]}


def continued_answer(answer: Any) -> dict[str, Any]:
    return {**responses_answer(answer), "response": answer["id"]}


def completions_body(said: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "\n".join(f"{message['role']}: {message['content']}" for message in said)}


def completions_answer(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": answer["choices"][0]["text"]}


def of_stream(dialect: str, answered: bytes) -> Any:
    """The response that a stream makes, as clients put it together."""
    found = events(iter([answered]))
    if dialect == "completions":
        return {"choices": [{"text": "".join(part["text"] for chunk in found for part in chunk["choices"])}]}
    return assembled(dialect.partition(" ")[0], found)


DIALECTS: dict[str, tuple[Any, Any]] = {
    "chat": (chat_body, chat_answer),
    "completions": (completions_body, completions_answer),
    "messages": (messages_body, messages_answer),
    "responses": (responses_body, responses_answer),
    "responses by id": (continued_body, continued_answer),
}
LIMITS = {
    "messages": {"max_tokens": 3_000, "stop_sequences": ["STOP"]},
    "chat": {"stop": ["STOP"]},
    "completions": {"stop": ["STOP"], "max_tokens": 3_000},
}


# --- The agent -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Client:
    """Says at each request how often it tried before, as the SDKs do, or does not; streams, or does not."""

    counts: bool
    streams: bool


class Agents:
    """Clients that work on one episode: conversations that grow, fork, are compacted and given up."""

    def __init__(self, episode: Episode, client: httpx2.AsyncClient, as_client: Client) -> None:
        self._episode, self._client, self._as = episode, client, as_client
        self._number = 0
        self.conversations: list[tuple[str, list[dict[str, Any]]]] = []
        self.lost: set[str] = set()
        """Digests of requests whose client hung up, and asked again without a count."""

    def begin(self, dialect: str, kind: str, system: str = "You are an agent.") -> int:
        """Begin a conversation: of the agent, of a sub-agent, or after a compaction. Returns its index."""
        self.conversations.append((dialect, [{"role": "system", "content": system}, self._user(kind)]))
        return len(self.conversations) - 1

    def branch(self, index: int, at: int, kind: str) -> int:
        """Begin another conversation behind an earlier answer of one."""
        dialect, said = self.conversations[index]
        ends = [place + 1 for place, message in enumerate(said) if message["role"] == "assistant"] or [1]
        self.conversations.append((dialect, [*said[: ends[at % len(ends)]]]))
        return self._go_on(len(self.conversations) - 1, kind)

    def _go_on(self, index: int, kind: str) -> int:
        """Add what follows the last answer: results of its calls, or a message; without an answer, ask otherwise."""
        said = self.conversations[index][1]
        last = said[-1]
        if last["role"] in ("user", "tool"):
            said[-1] = {**last, "content": self._text(kind)}
            return index
        calls = last.get("tool_calls", ())
        said += [{"role": "tool", "tool_call_id": call["id"], "content": self._text(kind)} for call in calls]
        if not calls:
            said.append(self._user(kind))
        return index

    def _user(self, kind: str) -> dict[str, Any]:
        return {"role": "user", "content": self._text(kind)}

    def _text(self, kind: str) -> str:
        self._number += 1
        return f"{self._number}: {kind}"

    async def turn(self, index: int, kind: str) -> None:
        await self.answer(self._go_on(index, kind))

    async def answer(self, index: int) -> None:
        await self._send(index, self._request(index))

    async def _send(self, index: int, request: httpx2.Request) -> bool:
        """Add the answer to a conversation; returns False if the engine failed, so that the client asks otherwise."""
        dialect, said = self.conversations[index]
        answered = await self._client.send(request)
        if answered.status_code == 500:
            return False
        assert answered.status_code == 200, answered.text
        value = of_stream(dialect, answered.content) if self._as.streams else answered.json()
        said.append(DIALECTS[dialect][1](value))
        return True

    def _request(self, index: int, *, count: int = 0, key: str | None = None) -> httpx2.Request:
        dialect, said = self.conversations[index]
        path, body = DIALECTS[dialect][0](said)
        body |= {"model": "scripted", "stream": self._as.streams, **LIMITS.get(dialect, {})}
        headers = {"idempotency-key": key} if key else {}
        headers |= {"x-stainless-retry-count": str(count)} if self._as.counts else {}
        url = f"{self._episode.base_url}{path}"
        return self._client.build_request("POST", url, json=body, headers={**self._episode.headers, **headers})

    async def hang_up(self, index: int, kind: str, *, after_bytes: bool, goes_on: bool) -> None:
        """Hang up before the answer, or within it; ask the same again, or go on otherwise, as an SDK does."""
        self._go_on(index, f"{kind} slow")
        request = self._request(index)
        answered = None
        try:
            async with asyncio.timeout(60 if after_bytes else 0.01):
                answered = await self._client.send(request, stream=True)
                async for _ in answered.aiter_bytes(16):
                    break
        except TimeoutError:
            pass
        if answered is not None:
            await answered.aclose()
        if goes_on:
            again = self._request(index, count=1)
            assert again.content == request.content
            if not self._as.counts:
                path = f"/v1{request.url.path.partition('/v1')[2]}"
                self.lost.add(hashlib.sha256(f"POST {path}\n".encode() + request.content).hexdigest())
            await self._send(index, again)

    async def ask_twice_with_a_key(self, index: int, kind: str) -> None:
        """Ask with one key twice, one after the other: the answers are one."""
        self._go_on(index, kind)
        said, key = self.conversations[index][1], f"key-{self._number}"
        if await self._send(index, self._request(index, key=key)):
            first = said.pop()
            assert await self._send(index, self._request(index, key=key))
            assert said[-1] == first

    async def best_of_n(self, index: int, kind: str, *, num_asked: int, at_once: bool, takes: bool) -> None:
        """Ask the same n times, and go on with one answer or with none; each of them counts."""
        self._go_on(index, kind)
        dialect, said = self.conversations[index]
        copies = [self._copy(dialect, said) for _ in range(num_asked)]
        if at_once:
            await asyncio.gather(*map(self.answer, copies))
        else:
            for copy in copies:
                await self.answer(copy)
        found = self.conversations[-num_asked:]
        del self.conversations[-num_asked:]
        if takes:
            self.conversations[index] = found[-1]

    def _copy(self, dialect: str, said: list[dict[str, Any]]) -> int:
        self.conversations.append((dialect, [*said]))
        return len(self.conversations) - 1


OPERATIONS = ("turn", "turn", "branch", "compact", "delegate", "hang up", "best of n", "with a key", "at once")
STEP = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5), st.integers(0, 7), st.sampled_from(KINDS))
CLIENTS = st.builds(Client, counts=st.booleans(), streams=st.booleans())


async def grow(agents: Agents, steps: list[tuple[str, int, int, str]], dialects: list[str]) -> None:
    agents.begin(dialects[0], "text")
    for operation, which, at, kind in steps:
        index = which % len(agents.conversations)
        dialect = dialects[at % len(dialects)]
        match operation:
            case "turn":
                await agents.turn(index, kind)
            case "branch":
                await agents.answer(agents.branch(index, at, kind))
            case "compact":
                await agents.answer(agents.begin(dialect, kind))
            case "delegate":
                await agents.answer(agents.begin(dialect, kind, "You are a helper."))
            case "hang up":
                await agents.hang_up(index, kind, after_bytes=at % 2 == 0, goes_on=at < 6)
            case "best of n":
                await agents.best_of_n(index, kind, num_asked=2 + at % 2, at_once=at < 4, takes=which < 4)
            case "with a key":
                await agents.ask_twice_with_a_key(index, kind)
            case "at once":  # two clients of the episode
                fork, other = agents.branch(index, at, kind), agents.begin(dialect, kind, "You are a helper.")
                await asyncio.gather(agents.answer(fork), agents.answer(other))


@contextmanager
def serve_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    root = put_run(str(tmp_path_factory.mktemp("trees") / "root"), RunConfig(model="scripted", env=("moar_cats",)))
    with served(root, scripted_agent(script)) as here:
        yield here


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    with serve_in(tmp_path_factory) as here:
        yield here


def grow_and_check(
    gateway: ServedGateway, steps: list[Any], dialects: list[str], as_client: Client
) -> tuple[int, Counter[str]]:
    """Returns the number of sampled calls, and the tokens by where they went."""
    first = len(gateway.agent.engine.log)
    episode = gateway.open_episode()

    async def run() -> set[str]:
        async with httpx2.AsyncClient(timeout=60, verify=False) as client:
            agents = Agents(episode, client, as_client)
            await grow(agents, steps, dialects)
            return agents.lost

    lost = asyncio.run(run())
    gateway.wait_until_idle()
    episode.seal()
    assert episode.post(*chat_body([{"role": "user", "content": "1: text"}])).status_code == 409
    calls = read_calls(gateway.root, episode.episode_id, episode.attempt)
    found, log = gateway.assembly(episode), gateway.agent.engine.log[first:]
    where = check_account(log, [found], calls)
    # Only answers that a client may have lost, and asked for again, leave tokens untrained; and the texts that stop.
    digests = dict(zip(calls["call_id"].to_pylist(), calls["request_digest"].to_pylist(), strict=True))
    dropped = {digests[row.call_id] for row in found.audit if row.reason in ("retry", "unresolved")}
    assert dropped <= lost
    assert where.keys() <= {"trained", "undelivered", "retry", "unresolved"}
    return sum(sample.completion is not None for sample in log), where


def tree_test(num_examples: int, num_steps: int) -> Any:
    some_dialects = st.lists(st.sampled_from(sorted(DIALECTS)), min_size=1, max_size=3)
    check = given(st.lists(STEP, max_size=num_steps), some_dialects, CLIENTS)
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    limits = settings(max_examples=num_examples, suppress_health_check=quiet)
    return lambda function: limits(check(function))


@tree_test(3, 4)
def test_each_sampled_token_of_a_small_tree_is_trained_once_or_accounted_for(
    gateway: ServedGateway, steps: list[Any], dialects: list[str], as_client: Client
) -> None:
    grow_and_check(gateway, steps, dialects, as_client)


@pytest.mark.slow
@tree_test(40 if "LUDIC_SOAK" in os.environ else 15, 20)
def test_each_sampled_token_of_a_large_tree_is_trained_once_or_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], dialects: list[str], as_client: Client
) -> None:
    # A root for each, since the calls of an episode are found among all that are stored.
    with serve_in(tmp_path_factory) as gateway:
        grow_and_check(gateway, steps, dialects, as_client)


@pytest.mark.parametrize("counts", [True, False])
def test_a_lost_answer_is_sampled_again_only_if_the_client_counts_no_retries_and_then_one_of_both_trains(
    gateway: ServedGateway, counts: bool
) -> None:
    steps = [("hang up", 0, 1, "call"), ("turn", 0, 0, "text"), ("with a key", 0, 0, "text"), ("hang up", 0, 7, "text")]
    sampled, where = grow_and_check(gateway, steps, ["chat"], Client(counts=counts, streams=False))
    assert sampled == (4 if counts else 5)
    assert ("retry" in where) == (not counts)


@pytest.mark.parametrize(("dialect", "counts"), [("responses by id", True), ("chat", False)])
def test_best_of_n_trains_all_n_answers(gateway: ServedGateway, dialect: str, counts: bool) -> None:
    steps = [("best of n", 0, 1, "text"), ("best of n", 5, 5, "text"), ("turn", 0, 0, "text")]
    sampled, where = grow_and_check(gateway, steps, [dialect], Client(counts=counts, streams=counts))
    assert sampled == 3 + 3 + 1
    assert where.keys() == {"trained"}
