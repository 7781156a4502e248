"""Judges of environments ask a real server, with a limit of requests at a time, by the path that a worker takes."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from chat_models import scripted_agent
from episodes import without_place
from judge_replies import answer, send

from ludic.adapters.judge import Judge
from ludic.environments import event_loops
from ludic.environments.environment import Example, GroupAnswer, Score, Transition
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.single_turn import SingleTurn
from ludic.errors import ConfigError, JudgeError
from ludic.records.rollout import Message, Rollout
from ludic.rollouts.sampler import GroupSampler, episodes_of_run
from ludic.run.config import RunConfig

EXAMPLE = Example(example_id="e", messages=(Message(role="user", content="?"),))


class Server(ThreadingHTTPServer):
    """Counts the requests that it works on at a time."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.reply: Callable[[Any, dict[str, Any]], None] = lambda handler, body: answer(handler, "0.5")
        self.delay_s = 0.0
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.lock, self.num_running, self.most_running = threading.Lock(), 0, 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing when the client has gone away."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append((self.path, body))
            server.num_running += 1
            server.most_running = max(server.most_running, server.num_running)
        time.sleep(server.delay_s)
        with server.lock:
            server.num_running -= 1
        server.reply(self, body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def run(coroutine: Any) -> Any:
    """What a coroutine returns, in an event loop as of a worker."""
    results = []

    async def main() -> None:
        results.append(await coroutine)

    event_loops.run(main())
    return results[0]


class Judged:
    """A question whose score is the judge's."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    async def score(self, example: Example, answer: str) -> Score:
        return Score(reward=await self.judge.score(answer))


def sample(make: Callable[[], Any], size: int, timeout_s: float | None = None, announce: Any = None) -> list[Rollout]:
    config = RunConfig(model="m", env=("own",), group_size=size, max_tokens=64)
    limited = LimitedEnvironments("own", make, TimeLimit(timeout_s=timeout_s, announce=announce))
    episodes = episodes_of_run(config, scripted_agent([str(number) for number in range(size)]))
    sampler = GroupSampler(run=config, run_episode=episodes, environments={"own": limited})
    return list(sampler.sample([0], "worker").groups[0].rollouts)


def test_the_requests_of_all_episodes_are_limited_together(server: Server) -> None:
    server.delay_s = 0.05

    class Steps:
        """Each episode has an instance and a judge of its own."""

        def __init__(self) -> None:
            self.judge = Judge(server.url, "big", max_in_flight=3)

        def example(self, index: int, split: str) -> Example:
            return EXAMPLE

        def reset(self, example: Example) -> tuple[Message, ...]:
            return example.messages

        async def step(self, action: str) -> Transition:
            return Transition(observation=None, reward=await self.judge.score(action), terminated=True)

    rows = sample(Steps, 12)
    assert [row.episode_reward for row in rows] == [0.5] * 12
    assert (server.most_running, len(server.bodies)) == (3, 12)


@pytest.mark.slow
def test_the_wait_for_a_turn_is_no_part_of_the_time_limit(server: Server) -> None:
    server.delay_s = 0.2
    judged = Judged(Judge(server.url, "big", max_in_flight=1))
    told: list[str] = []

    def announce(call: str) -> Callable[[], None]:
        told.append("+")
        return lambda: told.append("-")

    # The last of eight waits 1.4 s for its turn, longer than the limit of a call.
    rows = sample(lambda: SingleTurn(judged), 8, timeout_s=1.0, announce=announce)
    assert [row.error for row in rows] == [None] * 8
    assert server.most_running == 1
    assert told.count("+") == told.count("-")


def test_a_judge_that_takes_too_long_meets_the_time_limit(server: Server) -> None:
    server.delay_s = 5.0
    judged = Judged(Judge(server.url, "big", max_in_flight=2))
    began = time.monotonic()
    rows = sample(lambda: SingleTurn(judged), 2, timeout_s=0.3)
    assert all("score on example 'e' did not return within 0.3 s" in str(row.error) for row in rows)
    assert time.monotonic() - began < 4.5


def test_a_judge_that_fails_fails_the_episode_that_asked(server: Server) -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        asked = body["messages"][0]["content"]
        if asked == "1":
            send(handler, "no such model", 404)
        else:
            answer(handler, "very good" if asked == "2" else "1")

    server.reply = reply
    judged = Judged(Judge(server.url, "big"))
    rows = sample(lambda: SingleTurn(judged), 4)
    assert [row.episode_reward for row in rows] == [1.0, None, None, 1.0]
    said = [without_place(row.error) for row in rows[1:3]]
    assert said[0] == "JudgeError: the server answered 404: 'no such model'"
    assert said[1] == "JudgeError: the judge answered 'very good', wanted a JSON number"


def test_answers_are_judged_in_pairs(server: Server) -> None:
    def reply(handler: Any, body: dict[str, Any]) -> None:
        a, b = body["messages"][0]["content"].split(" or ")
        answer(handler, str(float(int(a) > int(b))))

    server.reply = reply
    server.delay_s = 0.01

    class Pairs(Judged):
        async def score(self, example: Example, answer: str) -> Score:
            return Score(reward=0.0)

        async def score_group(self, example: Example, answers: list[GroupAnswer]) -> list[float]:
            pairs = [[self.judge.score(f"{a.text} or {b.text}") for b in answers if b is not a] for a in answers]
            return [sum(wins) for wins in await asyncio.gather(*(asyncio.gather(*of_one) for of_one in pairs))]

    pairs = Pairs(Judge(server.url, "big", max_in_flight=4))
    rows = sample(lambda: SingleTurn(pairs), 4, timeout_s=20)
    assert [row.episode_reward for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert (server.most_running, len(server.bodies)) == (4, 12)


def test_a_reward_model_is_asked_by_post(server: Server) -> None:
    server.reply = lambda handler, body: send(handler, json.dumps({"data": [{"probs": [0.25, 0.75]}]}))
    judge = Judge(server.url, "reward", options={})
    assert run(judge.post("/classify", {"input": "a cat"}))["data"][0]["probs"][1] == 0.75
    assert server.bodies == [("/v1/classify", {"input": "a cat", "model": "reward"})]


def test_an_overloaded_server_is_asked_again(server: Server) -> None:
    numbers = iter(range(10))
    server.reply = lambda handler, body: answer(handler, "1") if next(numbers) else send(handler, "busy", 429)
    judge = Judge(server.url, "big", max_in_flight=1)
    assert run(judge.score("a")) == 1.0
    assert len(server.bodies) == 2


def test_a_server_that_keeps_failing_is_an_error(server: Server) -> None:
    server.reply = lambda handler, body: send(handler, "out of memory", 500)
    with pytest.raises(JudgeError, match="the server answered 500: 'out of memory'"):
        run(Judge(server.url, "big", tries=2).score("a"))
    assert len(server.bodies) == 2


def test_a_judge_works_in_one_event_loop_after_another(server: Server) -> None:
    judge = Judge(server.url, "big")
    assert [run(judge.score("a")) for _ in range(3)] == [0.5] * 3


def test_judges_of_a_server_want_one_limit(server: Server) -> None:
    async def ask() -> None:
        await Judge(server.url, "big", max_in_flight=2).score("a")
        await Judge(server.url, "other", max_in_flight=3).score("a")

    with pytest.raises(ConfigError, match=r"max_in_flight is 3 for a judge at .*, and 2 for another one"):
        run(ask())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "localhost:8000"}, "url is 'localhost:8000', wanted such as http"),
        ({"url": "http://a:b@host/v1"}, "url holds a user"),
        ({"pattern": "("}, "pattern '\\(' is no regular expression"),
        ({"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which key_env names, is not set"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"timeout_s": 0}, "timeout_s 0"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Judge(**{"url": "http://localhost:1/v1", "model": "big", **settings})
