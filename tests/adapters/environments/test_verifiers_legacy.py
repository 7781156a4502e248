"""verifiers/NAME of packages with load_environment, with the real package and environments that are written here."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import judge_replies
import pytest
from chat_models import chat_tokenizer, hermes_call
from worker_path import sampled

from ludic.adapters.environments import verifiers as adapter
from ludic.environments.environment import Environment
from ludic.environments.registry import make_environment, source_of
from ludic.errors import ConfigError
from ludic.models.decoding import decode
from ludic.records.rollout import Rollout

pytest.importorskip("verifiers.envs", reason="verifiers 0.1.11 to 0.3 is in an environment of its own: make verifiers")

Write = Callable[[str], str]

HEAD = """
import json

import verifiers as vf
from datasets import Dataset


def questions(*numbers):
    rows = [{"question": f"{number} + {number} = ?", "answer": str(2 * number)} for number in numbers]
    return Dataset.from_list(rows)


"""

SINGLE = (
    HEAD
    + """
def is_right(completion, answer, parser):
    return float(parser.parse_answer(completion) == answer)


async def length(completion, state, **others):
    assert others["info"] == {} and state["answer"] == others["answer"]
    return len(completion[-1].content)


def load_environment(weight=2.0, again=()):
    parser = vf.ThinkParser()
    rubric = vf.Rubric(funcs=[is_right, parser.get_format_reward_func()], weights=[weight, 0.5], parser=parser)
    rubric.add_metric(length)
    return vf.SingleTurnEnv(
        dataset=questions(3, *again),
        eval_dataset=questions(4, 5),
        system_prompt="Add.",
        few_shot=[{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "2"}],
        parser=parser,
        rubric=rubric,
    )
"""
)

GUESS = (
    HEAD
    + """
class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["hints"] = 0
        state["secret"] = int(state["answer"])

    async def env_response(self, messages, state, **options):
        state["hints"] += 1
        guess = int(messages[-1].content)
        return [{"role": "user", "content": "higher" if guess < state["secret"] else "lower"}]

    @vf.stop
    async def is_found(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1].content == state["answer"]


def found(completion, answer):
    return float(completion[-1].content == answer)


def hints(state, info, task):
    assert info["level"] == 2
    return state["hints"]


def load_environment(max_turns=3):
    row = {"prompt": [{"role": "user", "content": "Guess."}], "answer": "7", "info": json.dumps({"level": 2})}
    data = Dataset.from_list([row])
    other = Dataset.from_list([{**row, "prompt": [{"role": "user", "content": "Guess again."}]}])
    first = vf.Rubric(funcs=[found])
    return Guess(
        dataset=lambda: data,
        eval_dataset=other,
        max_turns=max_turns,
        rubric=vf.RubricGroup([first, vf.Rubric(funcs=[hints], weights=[-0.25])]),
    )
"""
)

TOOLS = (
    HEAD
    + """
def add(a: int, b: int = 1) -> int:
    \"\"\"Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    \"\"\"
    return a + b


async def fail(text: str) -> str:
    \"\"\"Fail.

    Args:
        text: Why.
    \"\"\"
    raise ValueError(text)


def is_right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment(max_turns=5, stop_errors=None):
    return vf.ToolEnv(
        dataset=questions(3),
        eval_dataset=questions(4),
        tools=[add, fail],
        max_turns=max_turns,
        error_formatter=lambda error: f"Oh: {error}",
        stop_errors=[ValueError] if stop_errors else None,
        rubric=vf.Rubric(funcs=[is_right], weights=[3.0]),
    )
"""
)

SHOP = (
    HEAD
    + """
class Shop(vf.StatefulToolEnv):
    def __init__(self, **options):
        super().__init__(**options)
        self.add_tool(self.buy, args_to_skip=["basket"])

    async def setup_state(self, state):
        state["basket"] = []

    def update_tool_args(self, tool_name, tool_args, messages, state, **options):
        return {**tool_args, "basket": state["basket"]}

    async def buy(self, thing: str, basket: list) -> str:
        \"\"\"Buy a thing.

        Args:
            thing: Its name.
            basket: Where it goes.
        \"\"\"
        basket.append(thing)
        return f"You have {', '.join(basket)}."

    async def env_response(self, messages, state, **options):
        answers = await super().env_response(messages, state, **options)
        if len(state["basket"]) >= 3:
            state["final_env_response"] = [*answers, {"role": "user", "content": "The shop shuts."}]
        elif len(state["basket"]) == 2:
            answers.append({"role": "user", "content": "One more?"})
        return answers


def bought(state):
    return len(set(state["basket"]))


def load_environment():
    return Shop(dataset=questions(3), eval_dataset=questions(4), max_turns=9, rubric=vf.Rubric(funcs=[bought]))
"""
)


def play(name: str, *replies: str, options: dict[str, object] | None = None, **run: object) -> Rollout:
    (row,) = sampled(name, replies, options, **run)
    return row


# --- A question and its score ----------------------------------------------------------------------------


def test_the_functions_of_a_rubric_are_weighted_and_read_by_its_parser(write: Write) -> None:
    row = play(write(SINGLE), "<think>three and three</think>6")
    assert (row.error, row.terminated, row.truncated, row.wanted) == (None, True, False, "6")
    assert not {"prompt", "question", "answer"} & json.loads(row.example_columns or "{}").keys()
    # 2.0 * is_right + 0.5 * format; a metric has no weight.
    assert row.episode_reward == 2.5
    assert row.reward_components == {"is_right": 2.0, "format_reward_func": 0.5, "length": 31.0, "num_turns": 1.0}
    assert [(message.role, message.content) for message in row.messages[:-1]] == [
        ("system", "Add."),
        ("user", "1 + 1 = ?"),
        ("assistant", "2"),
        ("user", "3 + 3 = ?"),
    ]
    assert row.environment_steps[0].info == {"stop_condition": "max_turns_reached"}


def test_a_wrong_answer_scores_by_its_form_alone(write: Write) -> None:
    assert play(write(SINGLE), "<think>hm</think>5").episode_reward == 0.5
    assert play(write(SINGLE), "5").episode_reward == 0


def test_options_are_the_arguments_of_load_environment(write: Write) -> None:
    assert play(write(SINGLE), "<think></think>6", options={"weight": 7.0}).reward_components["is_right"] == 7
    name = write(SINGLE)
    with pytest.raises(ConfigError, match=r"can't load it: TypeError: .*unexpected keyword argument 'wieght'"):
        make_environment(name, {"wieght": 7.0})


def prompts(environment: Environment, split: str, num: int = 4) -> set[str]:
    return {environment.example(index, split).messages[-1].content for index in range(num)}  # type: ignore[arg-type]


def test_the_data_sets_are_the_splits_and_no_question_is_in_both(write: Write) -> None:
    environment = make_environment(write(SINGLE), {"again": [4, 6]})()
    assert prompts(environment, "train") == {"3 + 3 = ?", "6 + 6 = ?"}
    assert prompts(environment, "heldout") == {"4 + 4 = ?", "5 + 5 = ?"}


def test_one_data_set_is_split_by_its_questions(write: Write) -> None:
    text = SINGLE.replace("eval_dataset=questions(4, 5),", "").replace("questions(3, *again)", "questions(*range(40))")
    one, other = (make_environment(write(text), seed=4)() for _ in range(2))
    served = {split: prompts(one, split, 40) for split in ("train", "heldout")}
    assert served == {split: prompts(other, split, 40) for split in served}
    assert not served["train"] & served["heldout"]
    assert len(served["train"] | served["heldout"]) == 40
    few = make_environment(write(text), {"num_tasks": 10})()
    assert len(prompts(few, "train", 40) | prompts(few, "heldout", 40)) == 10


# --- Several turns ---------------------------------------------------------------------------------------


def test_an_environment_of_several_turns_is_played(write: Write) -> None:
    row = play(write(GUESS), "3", "9", "7")
    assert (row.terminated, row.truncated, row.error) == (True, False, None)
    assert [step.next_observation for step in row.environment_steps] == ["higher", "lower", None]
    # 1.0 * found - 0.25 * 2 hints.
    assert row.episode_reward == 0.5
    assert row.reward_components == {"found": 1.0, "hints": -0.5, "num_turns": 3.0}
    assert row.environment_steps[-1].info == {"stop_condition": "is_found"}


def test_a_limit_of_the_package_truncates_and_the_episode_is_scored(write: Write) -> None:
    row = play(write(GUESS), "3", "9", options={"max_turns": 2})
    assert (row.terminated, row.truncation_reason) == (False, "env")
    assert row.episode_reward == -0.25  # found 0, one hint: the last guess got none


def test_an_error_of_the_package_fails_the_episode_with_its_line(write: Write) -> None:
    name = write(GUESS)
    row = play(name, "three")
    assert row.episode_reward is None
    assert row.error == (
        f"ValueError: invalid literal for int() with base 10: 'three' ({name.partition('/')[2]}.py:21, in env_response)"
    )


def test_a_reward_function_that_raises_fails_the_episode_with_its_line(write: Write) -> None:
    name = write(GUESS.replace('assert info["level"] == 2', 'state["no such key"]'))
    row = play(name, "7")
    assert (row.episode_reward, row.error) == (
        None,
        f"KeyError: 'no such key' ({name.partition('/')[2]}.py:35, in hints)",
    )


def test_a_conversation_that_is_rewritten_is_refused(write: Write) -> None:
    rewriting = """
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]

    @vf.stop
    async def is_found"""
    row = play(write(GUESS.replace("\n    @vf.stop\n    async def is_found", rewriting)), "3")
    assert "the environment rewrote the conversation, or asked its model aside" in (row.error or "")


# --- Tools -----------------------------------------------------------------------------------------------


def test_the_environment_runs_the_tools_and_stores_calls_with_results(write: Write) -> None:
    two = "Two at once. " + hermes_call("add", a=3, b=3) + hermes_call("fail", text="no")
    row = play(write(TOOLS), two, hermes_call("ad", a=3), hermes_call("add", b=3), "6")
    assert (row.terminated, row.error, row.num_turns) == (True, None, 4)
    called = [[(call.name, call.result) for call in step.tool_calls] for step in row.agent_steps]
    assert called[0] == [("add", "6"), ("fail", "Oh: no")]
    assert called[1] == [("ad", "Oh: 'ad'")]
    assert called[2] == [("add", "Oh: add() missing 1 required positional argument: 'a'")]
    assert [step.action_target for step in row.agent_steps] == ["external"] * 3 + ["env"]
    # 3.0 * is_right; the others are metrics of verifiers.
    assert row.episode_reward == 3
    assert row.reward_components == {
        "is_right": 3.0,
        "num_turns": 4.0,
        "total_tool_calls": 4.0,
        "add_calls": 2.0,
        "fail_calls": 1.0,
    }
    assert [message.role for message in row.messages] == [
        *("user", "assistant", "tool", "tool"),
        *("assistant", "tool", "assistant", "tool", "assistant"),
    ]


def test_the_model_sees_the_schemas_of_the_tools(write: Write) -> None:
    environment = make_environment(write(TOOLS))()
    assert environment.tools == ()  # type: ignore[attr-defined]
    row = play(write(TOOLS), "6")
    assert row.episode_reward == 3
    prompt = decode(chat_tokenizer(), row.prompt_tokens)
    assert "The second number." in prompt
    assert '"name": "fail"' in prompt


def test_an_agent_that_only_calls_tools_is_cut_by_the_package(write: Write) -> None:
    calls = [hermes_call("add", a=number) for number in range(2)]
    row = play(write(TOOLS), *calls, options={"max_turns": 2})
    assert (row.terminated, row.truncation_reason, row.episode_reward) == (False, "env", 0)
    last = row.agent_steps[-1].tool_calls[0]
    assert (last.result, last.error) == (None, "not run by the environment")
    # An answer in the last turn is no cut.
    row = play(write(TOOLS), calls[0], "6", options={"max_turns": 2})
    assert (row.terminated, row.truncated, row.episode_reward) == (True, False, 3)


def test_an_error_that_stops_the_environment_fails_the_episode(write: Write) -> None:
    row = play(write(TOOLS), hermes_call("fail", text="no"), options={"stop_errors": True})
    assert (row.error or "").startswith("ValueError: no (")
    assert row.episode_reward is None


def test_tools_share_the_state_of_their_episode(write: Write) -> None:
    name = write(SHOP)
    row = play(name, *(hermes_call("buy", thing=thing) for thing in ("tea", "cats", "tea")))
    results = [step.tool_calls[0].result for step in row.agent_steps]
    assert results == ["You have tea.", "You have tea, cats.", "You have tea, cats, tea."]
    steps = [step.next_observation for step in row.environment_steps]
    assert steps[1:] == ["You have tea, cats.\n\nOne more?", "You have tea, cats, tea.\n\nThe shop shuts."]
    assert [message.content for message in row.messages if message.role == "user"] == ["3 + 3 = ?", "One more?"]
    assert (row.terminated, row.truncated, row.episode_reward) == (True, False, 2.0)
    assert row.environment_steps[-1].info == {"stop_condition": "has_final_env_response"}
    # A second episode begins with a basket of its own, and the model sees no argument `basket`.
    again = play(name, hermes_call("buy", thing="gold"), "done")
    assert again.agent_steps[0].tool_calls[0].result == "You have gold."


def test_episodes_of_a_group_are_apart(write: Write) -> None:
    # Each buys three times, in whichever order their calls come.
    rows = sampled(write(SHOP), [hermes_call("buy", thing="tea")] * 6, group_size=2)
    assert [row.agent_steps[0].tool_calls[0].result for row in rows] == ["You have tea."] * 2


GROUP = (
    TOOLS
    + """

def load_tools():
    return load_environment()


load_one = load_environment


def load_environment():
    other = vf.SingleTurnEnv(dataset=questions(5), rubric=vf.Rubric(funcs=[is_right], weights=[3.0]))
    return vf.EnvGroup([load_one(), other], env_names=["tools", "plain"])
"""
)


def test_a_group_of_environments_plays_the_one_of_the_row(write: Write) -> None:
    environment = make_environment(write(GROUP))
    assert prompts(environment(), "train", 9) | prompts(environment(), "heldout", 9) >= {"3 + 3 = ?", "5 + 5 = ?"}
    name = write(GROUP.replace("questions(5)", "questions(3)"))
    row = play(name, "6")
    assert (row.error, row.episode_reward) == (None, 3)


SERVER = """
from mcp.server.fastmcp import FastMCP

server = FastMCP("sums")


@server.tool()
def add(a: int, b: int) -> int:
    \"""Add two numbers.\"""
    return a + b


server.run()
"""

SERVED = (
    HEAD
    + """
import sys


def is_right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment(server):
    from verifiers.envs.experimental.mcp_env import MCPEnv

    server = {"name": "sums", "command": sys.executable, "args": [server]}
    rubric = vf.Rubric(funcs=[is_right])
    return MCPEnv(mcp_servers=[server], dataset=questions(3), eval_dataset=questions(4), rubric=rubric)
"""
)


def test_a_server_of_mcp_that_the_package_starts_gives_tools(write: Write, tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    row = play(write(SERVED), hermes_call("add", a=3, b=3), "6", options={"server": str(server)})
    assert (row.error, row.episode_reward) == (None, 1)
    assert row.agent_steps[0].tool_calls[0].result == "6"


# --- Judges ----------------------------------------------------------------------------------------------


class Judging(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        judge_replies.answer(self, "yes" if "Response:\n```\nsix" in asked else "no")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def judge() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judging) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


JUDGED = (
    HEAD
    + """
from openai import AsyncOpenAI


async def agrees(judge, prompt, completion, answer, state):
    return float("yes" in await judge(prompt, completion, answer, state))


def load_environment(url):
    client = AsyncOpenAI(base_url=url, api_key="none")
    rubric = vf.JudgeRubric(judge_client=client, judge_model="judge")
    rubric.add_reward_func(agrees, weight=0.5)
    return vf.SingleTurnEnv(dataset=questions(3), eval_dataset=questions(4), rubric=rubric)
"""
)


def test_a_judge_of_the_package_is_asked(write: Write) -> None:
    with judge() as url:
        name = write(JUDGED)
        assert play(name, "six", options={"url": url}).episode_reward == 0.5
        assert play(name, "seven", options={"url": url}).episode_reward == 0


# --- What is refused, and the process around -------------------------------------------------------------


def test_the_signals_of_the_process_are_left_as_they_were(write: Write) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    make_environment(write(SINGLE))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


IMAGE = """[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Boxed(vf.SandboxEnv):\n    def __init__(self, **options):\n"
            "        vf.StatefulToolEnv.__init__(self, **options)\n\n"
            "    def update_tool_args(self, *args, **options):\n        return {}\n\n"
            "    async def teardown_sandbox_client(self):\n        pass\n\n"
            "    async def teardown_sandboxes(self):\n        pass\n\n\n"
            "def load_environment():\n    return Boxed(dataset=questions(3))",
            "is a SandboxEnv, which needs a sandbox",
        ),
        (
            "def best(completions) -> list[float]:\n    return [0.0 for _ in completions]\n\n\n"
            "def load_environment():\n    rubric = vf.Rubric(funcs=[best])\n"
            "    return vf.SingleTurnEnv(dataset=questions(3), rubric=rubric)",
            "has the reward function best, which sees the answers of a group",
        ),
        (
            f"def load_environment():\n    data = Dataset.from_list([{{'prompt': {IMAGE}}}])\n"
            "    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric())",
            "a message has a part of the type image_url",
        ),
        (
            "def load_environment():\n    return vf.SingleTurnEnv(dataset=Dataset.from_list([{'prompt': 'Once'}]))",
            "a prompt is the text 'Once', wanted messages",
        ),
        ("import no_such_package", "can't load it: ModuleNotFoundError: No module named 'no_such_package'"),
        ("def load_environment():\n    import no_such_package", "No module named 'no_such_package'"),
        ("def load_environment():\n    return {}['key']", r"KeyError: 'key' \(.*\.py:\d+, in load_environment\)"),
        ("__all__ = []", "it has no load_environment, and a Taskset needs verifiers 0.4; 0.3.1 is installed"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(write: Write, text: str, message: str) -> None:
    name = write(f"{HEAD}\n{text}\n")
    with pytest.raises(ConfigError, match=f"environment {name}: .*{message}"):
        make_environment(name)


def test_an_installed_package_is_listed_and_its_source_recorded(write: Write) -> None:
    name = write(SINGLE)
    assert name.partition("/")[2] in adapter.names()
    digest, package, _ = source_of(name, {})
    assert digest is not None
    assert len(digest) == 64
    assert package == f"{name.partition('/')[2]} 0.1"
