"""Episodes of agents that make their own calls: their rows, scores, failures, and what a second life finds of them."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway.scripted import Turn, says, scripted_agent

from ludic.agents.agent import Agent
from ludic.environments.environment import Example, Score, tool
from ludic.environments.limits import LimitedEnvironments
from ludic.environments.single_turn import SingleTurn
from ludic.errors import ConfigError, EngineError, FencedError
from ludic.records.rollout import Message, Rollout
from ludic.rollouts.sampler import GroupSampler, check_agent, episodes_of_run
from ludic.root.gateways import episode_claims, held_life, newest_episode_claim
from ludic.root.root import Root
from ludic.root.rows.calls import read_all_calls
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

HTTP = """
import httpx2

async def ask(base_url, api_key, model, messages):
    async with httpx2.AsyncClient(trust_env=False, verify=False) as http:
        said = await http.post(
            f"{base_url}/chat/completions",
            json={"model": model, "messages": messages},
            headers={"Authorization": f"Bearer {api_key}"},
        )
    said.raise_for_status()
    return said.json()["choices"][0]["message"]
"""
TWO_TURNS = (
    HTTP
    + """
async def run(example, base_url, api_key, model):
    messages = list(example["messages"])
    messages += [await ask(base_url, api_key, model, messages), {"role": "user", "content": "And again?"}]
    return (await ask(base_url, api_key, model, messages))["content"]
"""
)
COMMAND = """
import json, os, sys, urllib.request
from pathlib import Path

def post(path, body):
    request = urllib.request.Request(
        path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))

example = json.loads(Path(os.environ["LUDIC_EXAMPLE"]).read_text())
said = post(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    {"model": os.environ["OPENAI_MODEL"], "messages": example["messages"]},
)
text = said["choices"][0]["message"]["content"]
Path("said.txt").write_text(text)
print("said", text, os.environ["OPENAI_API_KEY"])
if "post" in sys.argv:
    post(os.environ["ANTHROPIC_BASE_URL"] + "/score", {"reward": 0.25})
sys.exit(3 if "fail" in sys.argv else 0)
"""


class Questions:
    """The reward is the length of the answer; a folder is worth 7 if the agent wrote a file."""

    def example(self, index: int, split: str) -> Example:
        return Example(example_id=str(index), messages=(Message(role="user", content=f"Question {index}?"),))

    def score(self, example: Example, answer: str) -> Score:
        return Score(reward=float(len(answer)), correct=True)


class Folders(Questions):
    def score_folder(self, example: Example, folder: Path) -> float:
        return 7.0 if (folder / "said.txt").read_text() == "cats" else 0.0


def settings(tmp_path: Path, source: str = TWO_TURNS, **values: Any) -> dict[str, Any]:
    """Settings of an agent that is a function."""
    (tmp_path / "agent.py").write_text(source)
    return {"agent": f"{tmp_path}/agent.py:run", **values}


def command(tmp_path: Path, *args: str, **values: Any) -> dict[str, Any]:
    """Settings of an agent that is a command."""
    (tmp_path / "program.py").write_text(COMMAND)
    return {"agent_command": " ".join([sys.executable, "-I", str(tmp_path / "program.py"), *args]), **values}


def sample(
    tmp_path: Path,
    model: Agent,
    environment: Callable[[], Any] = Questions,
    *,
    numbers: Sequence[int] = (0,),
    timeout_s: float | None = 30,
    **values: Any,
) -> list[Rollout]:
    """Sample groups in a root in tmp_path, which later calls go on with."""
    run = RunConfig(model="scripted", env=("moar_cats",), max_tokens=200, **{"group_size": 2, **values})
    root = put_run(str(tmp_path / "root"), run)
    run_episode = episodes_of_run(run, model, root=root, timeout_s=timeout_s)
    environments = {"moar_cats": LimitedEnvironments("moar_cats", lambda: SingleTurn(environment()))}
    sampler = GroupSampler(run=run, run_episode=run_episode, environments=environments)
    return [row for group in sampler.sample(numbers, "w").groups for row in group.rollouts]


def sampled_tokens(rows: Sequence[Rollout]) -> list[list[int]]:
    """Return the trained tokens of each row."""
    masks = [np.ones(row.response_length, bool) if row.action_mask is None else row.action_mask for row in rows]
    return [row.response_tokens[mask].tolist() for row, mask in zip(rows, masks, strict=True)]


def test_the_rows_hold_what_the_engine_sampled_and_the_score_of_the_final_text(tmp_path: Path) -> None:
    agent = scripted_agent(lambda asked: "b" * 5 if "again" in asked.prompt else "a" * 3)
    rows = sample(tmp_path, agent, numbers=(0, 1), **settings(tmp_path))
    assert [(row.group_index, row.env_example_id) for row in rows] == [(0, "0"), (1, "0"), (0, "1"), (1, "1")]
    assert len({row.group_id for row in rows}) == 2
    sampled = [token for each in agent.engine.log for token in each.tokens]
    assert sorted(token for row in sampled_tokens(rows) for token in row) == sorted(sampled)
    for row in rows:
        assert (row.num_turns, row.episode_reward, row.correct, row.error) == (2, 5.0, True, None)
        assert float(row.token_rewards.sum()) == 5.0
        assert [step.action for step in row.environment_steps] == ["b" * 5]
        assert row.model == "scripted"


class Doubles(Questions):
    @tool
    def double(self, number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number


CLIENT = """
{kind} run(example, client: "openai.{client}", model, tools, folder):
    messages = example["messages"]
    said = {wait} client.chat.completions.create(model=model, messages=messages, tools=tools.schemas)
    (call,) = said.choices[0].message.tool_calls
    return {wait} tools.call(call.function.name, call.function.arguments) + folder[-4:]
"""


@pytest.mark.slow  # imports openai
@pytest.mark.parametrize(
    ("kind", "client", "wait"), [("async def", "AsyncOpenAI", "await"), ("def", "OpenAI", "")], ids=["async", "sync"]
)
def test_a_function_gets_a_client_of_openai_and_the_environments_tools(
    tmp_path: Path, kind: str, client: str, wait: str
) -> None:
    agent = scripted_agent(lambda asked: says("", ("double", {"number": 4})))
    source = CLIENT.format(kind=kind, client=client, wait=wait)
    rows = sample(tmp_path, agent, Doubles, **settings(tmp_path, source))
    assert [(row.environment_steps[0].action, row.error) for row in rows] == [("8work", None)] * 2


FAILURES = {
    "raise KeyError('words')": r"KeyError: 'words' \(agent.py:15, in run\)",
    "return 3": r"TypeError: agent .*agent.py:run returned 3, wanted its final text, or None",
    "return 'x'": "^the agent ended without a call of the model$",
    "import sys; sys.exit(2)": r"sys.exit\(2\) was called",
}


@pytest.mark.parametrize("body", FAILURES)
@pytest.mark.parametrize("kind", ["async def", "def"])
def test_an_agent_that_fails_fails_its_episode_alone(tmp_path: Path, body: str, kind: str) -> None:
    source = f"{HTTP}\n{kind} run(example, model='m'):\n    {body}\n"
    rows = sample(tmp_path, scripted_agent(["x"]), **settings(tmp_path, source))
    assert len(rows) == 2
    for row in rows:
        assert row.error is not None
        assert row.episode_reward is None
        assert re.search(FAILURES[body], row.error), row.error


def test_an_error_of_the_engine_ends_everything(tmp_path: Path) -> None:
    agent = scripted_agent(lambda asked: Turn(error=EngineError("the engine is gone")))
    with pytest.raises(EngineError, match="the engine is gone"):
        sample(tmp_path, agent, **settings(tmp_path))


@pytest.mark.slow  # waits for the renewal of a lease
def test_a_worker_whose_gateway_lost_its_lease_ends_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.rollouts.program_gateway.held_life", partial(held_life, lease_s=1.0))
    loses = """
    import asyncio, pathlib, shutil
    life = pathlib.Path(__file__).parent / "root" / "gateways" / "1.json"
    text = await ask(base_url, api_key, model, example["messages"])
    if life.exists() and not life.with_suffix(".new").exists():
        life.unlink()  # as if another gateway had taken its place while this process was paused
    while not life.parent.joinpath("2.json").exists() and not life.with_suffix(".new").exists():
        await asyncio.sleep(0.05)
    return text["content"]
"""
    source = f"{HTTP}\nasync def run(example, base_url, api_key, model):{loses}"
    with pytest.raises(FencedError, match=r"gateways/1.json (is not of this gateway|was not renewed for 1 s)"):
        sample(
            tmp_path, scripted_agent(lambda asked: "abc"), timeout_s=None, group_size=1, **settings(tmp_path, source)
        )
    Path(tmp_path, "root", "gateways", "1.new").touch()
    agent = scripted_agent(lambda asked: "other")
    rows = sample(tmp_path, agent, group_size=1, **settings(tmp_path, source))
    assert [row.environment_steps[0].action for row in rows] == ["abc"]
    assert agent.engine.log == []


def test_a_call_that_the_agent_left_behind_does_not_hold_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.rollouts.program_gateway._DRAIN_S", 0.1)
    body = """
    import asyncio
    behind = asyncio.ensure_future(ask(base_url, api_key, model, [{"role": "user", "content": "hang"}]))
    text = await ask(base_url, api_key, model, example["messages"])
    await asyncio.sleep(0.1)
    behind.add_done_callback(lambda task: task.cancelled() or task.exception())
    return text["content"]
"""
    agent = scripted_agent(lambda asked: Turn(text="abc", delay_s=600 if "hang" in asked.prompt else 0))
    source = f"{HTTP}\nasync def run(example, base_url, api_key, model):{body}"
    rows = sample(tmp_path, agent, timeout_s=0.8, group_size=1, **settings(tmp_path, source))
    assert [(row.error, row.num_turns, row.episode_reward) for row in rows] == [(None, 1, 3.0)]
    stored = read_all_calls(Root.open(str(tmp_path / "root"))).to_pylist()
    failed = [row["error"] for row in stored if row["event"] == "failed"]
    assert failed == ["the episode ended before this call was answered"]


def test_an_episode_that_takes_too_long_is_truncated_with_its_calls(tmp_path: Path) -> None:
    source = TWO_TURNS.replace("    return", "    import asyncio; await asyncio.sleep(60)\n    return")
    rows = sample(tmp_path, scripted_agent(lambda asked: "abc"), timeout_s=0.3, **settings(tmp_path, source))
    assert {(row.truncation_reason, row.truncated, row.error, row.num_turns) for row in rows} == {
        ("time_limit", True, None, 1)
    }


@pytest.mark.parametrize(
    ("args", "values", "environment", "reward"),
    [
        ((), {}, Questions, 4.0),
        ((), {}, Folders, 7.0),
        ((), {"score_command": "grep -q cats said.txt"}, Questions, 1.0),
        ((), {"score_command": "grep -q dogs said.txt"}, Questions, 0.0),
        (("post",), {"posted_scores": True}, Questions, 0.25),
        (("fail",), {}, Questions, 4.0),
    ],
)
def test_a_command_is_scored_and_what_it_left_is_kept(
    tmp_path: Path, args: tuple[str, ...], values: dict[str, Any], environment: Any, reward: float
) -> None:
    rows = sample(tmp_path, scripted_agent(lambda asked: "cats"), environment, **command(tmp_path, *args, **values))
    assert [(row.episode_reward, row.error) for row in rows] == [(reward, None)] * 2
    assert {row.metadata["exit_code"] for row in rows} == {"3" if args == ("fail",) else "0"}
    assert {row.metadata["last_output"] for row in rows} == {"said cats ***"}


def test_a_command_without_a_call_says_why(tmp_path: Path) -> None:
    (row, _) = sample(tmp_path, scripted_agent(["x"]), agent_command="sh -c 'echo no key >&2; exit 4'")
    assert row.error == "the agent's command made no call of the model; exit code 4, last output: no key"


def test_a_score_that_the_run_does_not_take_is_refused(tmp_path: Path) -> None:
    (row, _) = sample(tmp_path, scripted_agent(lambda asked: "cats"), **command(tmp_path, "post"))
    assert (row.episode_reward, row.metadata["exit_code"]) == (4.0, "1")
    assert "HTTP Error 400" in row.metadata["last_output"]
    (claim, _) = episode_claims(Root.open(str(tmp_path / "root")))
    assert claim.reward == 4.0


def test_posted_scores_that_do_not_come_fail_the_episode(tmp_path: Path) -> None:
    rows = sample(tmp_path, scripted_agent(lambda asked: "x"), **command(tmp_path, posted_scores=True))
    assert {row.error for row in rows} == {"the agent posted no score to its gateway, and posted_scores is set"}


# --- Another life ----------------------------------------------------------------------------------------------

TWENTY = (
    HTTP
    + """
async def run(example, base_url, api_key, model):
    messages = list(example["messages"])
    for number in range(20):
        messages += [await ask(base_url, api_key, model, messages), {"role": "user", "content": f"{number}?"}]
    return messages[-2]["content"]
"""
)


def killed_after(num_calls: int) -> Callable[[Any], Turn]:
    """A script whose engine fails for good after so many calls; the episode stays open, as after a kill."""
    return lambda asked: Turn(text="abc", error=None if asked.number < num_calls else EngineError("killed"))


@pytest.fixture
def second_life(tmp_path: Path) -> Callable[..., tuple[list[Rollout], int]]:
    """Plays an episode whose first life ended after 7 calls; returns its rows, and the calls that were sampled."""

    def play(**values: Any) -> tuple[list[Rollout], int]:
        with pytest.raises(EngineError, match="killed"):
            sample(tmp_path, scripted_agent(killed_after(7)), group_size=1, **values)
        agent = scripted_agent(lambda asked: "abc", first_number=100)
        rows = sample(tmp_path, agent, group_size=1, **values)
        return rows, len(agent.engine.log)

    return play


def test_an_episode_goes_on_from_its_last_stored_call(tmp_path: Path, second_life: Any) -> None:
    (row,), num_sampled = second_life(**settings(tmp_path, TWENTY))
    assert num_sampled == 13
    assert (row.num_turns, row.episode_reward, row.metadata["attempt"]) == (20, 3.0, "1")
    assert row.action_length == 20 * len(sampled_of("abc"))


def test_an_episode_that_does_not_repeat_begins_again_and_leaves_its_old_calls_out(
    tmp_path: Path, second_life: Any
) -> None:
    drawn = TWENTY.replace("{number}?", "{number}{__import__('random').random()}?")
    (row,), num_sampled = second_life(**settings(tmp_path, drawn))
    assert num_sampled == 19  # the first request is the same
    assert row.action_length == 20 * len(sampled_of("abc"))


def test_without_replay_an_episode_is_the_next_attempt(tmp_path: Path, second_life: Any) -> None:
    (row,), num_sampled = second_life(agent_replay=False, **settings(tmp_path, TWENTY))
    assert num_sampled == 20
    assert (row.num_turns, row.metadata["attempt"]) == (20, "2")
    claim = newest_episode_claim(Root.open(str(tmp_path / "root")), row.episode_id, 1)
    assert claim is not None
    assert (claim.end, claim.error) == ("given_up", "the worker ended, and the episode began again")


def test_a_sealed_episode_whose_group_was_not_stored_is_not_sampled_again(tmp_path: Path) -> None:
    values = settings(tmp_path)
    before = sample(tmp_path, scripted_agent(lambda asked: "abc"), **values)
    agent = scripted_agent([])
    after = sample(tmp_path, agent, **values)
    assert agent.engine.log == []
    assert [row.rollout_id for row in after] == [row.rollout_id for row in before]
    assert [row.episode_reward for row in after] == [3.0, 3.0]
    assert {row.group_id for row in after} != {row.group_id for row in before}


def sampled_of(text: str) -> list[int]:
    """Tokens of a turn, with the one that ends it."""
    agent = scripted_agent([text])
    return [*agent.tokenizer(text, add_special_tokens=False)["input_ids"], agent.tokenizer.eos_token_id]


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"agent": "codex", "agent_command": "true"}, "agent and agent_command are set; one of them"),
        ({"agent": "codex", "protocol": "single_agent"}, "agent and protocol are set"),
        ({"agent": "codex", "parser": "boxed"}, "parser has no effect on an agent that makes its own calls"),
        ({"agent": "codex", "max_steps": 3}, "max_steps has no effect"),
        ({"agent": "codex", "sweep": {"temperature": [1.0]}}, "sweep has no effect"),
        ({"agent_cpu_s": 3}, "agent_cpu_s has no effect without agent or agent_command"),
        ({"agent": "codex", "score_command": "true", "posted_scores": True}, "one of them scores"),
    ],
)
def test_settings_that_have_no_effect_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig(model="m", env=("moar_cats",), **values)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def run(examples): ...", "takes examples, wanted parameters of these names: api_key, base_url, client"),
        ("def run(example, /): ...", "takes example, wanted parameters"),
        ("run = 3", "has no function 'run'"),
    ],
)
def test_a_function_that_can_not_be_called_is_refused_at_the_start(tmp_path: Path, source: str, words: str) -> None:
    run = RunConfig(model="m", env=("moar_cats",), **settings(tmp_path, source))
    with pytest.raises(ConfigError, match=words):
        check_agent(run)


def test_a_harness_that_is_not_installed_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="agent codex: there is no program 'codex' on this machine"):
        check_agent(RunConfig(model="m", env=("moar_cats",), agent="codex"))
    with pytest.raises(ConfigError, match="agent 'codx' is unknown; did you mean 'codex'"):
        check_agent(RunConfig(model="m", env=("moar_cats",), agent="codx"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("os.mkfifo(answer)", "no plain file"),
        ("Path.home().rmdir(); Path.home().write_text('')", None),
        ("import shutil; shutil.rmtree(Path.home().parent)", "No such file or directory"),
        # As Go's cache of modules is.
        ("Path('cache').mkdir(); Path('cache/module').write_text(''); Path('cache').chmod(0o500)", None),
        ("answer.write_text(os.environ['OPENAI_API_KEY'])", None),
        # What it is led to stays.
        ("Path('../work').rename('../old'); Path('../work').symlink_to(os.environ['PRECIOUS'])", None),
    ],
    ids=["pipe", "home", "all", "read-only", "key", "link"],
)
def test_a_command_that_spoils_its_folder_spoils_its_episode_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, error: str | None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PRECIOUS", str(tmp_path / "precious"))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("")
    given = command(tmp_path, agent_variables=("PRECIOUS",), score_command="true", group_size=1)
    (tmp_path / "program.py").write_text(
        COMMAND.replace("sys.exit", f"answer = Path(os.environ['LUDIC_ANSWER'])\n{act}\nsys.exit")
    )
    (row,) = sample(tmp_path, scripted_agent(lambda asked: "cats"), **given)
    assert (row.error is None) == (error is None), row.error
    assert error is None or error in row.error
    assert "sk-ludic-" not in repr(row)
    assert [*tmp_path.glob("ludic-agents-*/*")] == []
    assert (tmp_path / "precious/file").is_file()


@pytest.mark.slow
def test_a_folder_that_is_too_deep_to_be_deleted_ends_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = command(tmp_path, group_size=1)
    deep = "for _ in range(1_500):\n    os.mkdir('d')\n    os.chdir('d')\n"
    (tmp_path / "program.py").write_text(COMMAND.replace("sys.exit", f"{deep}sys.exit"))
    (row,) = sample(tmp_path, scripted_agent(lambda asked: "cats"), **given)
    assert (row.episode_reward, row.error) == (4.0, None)
    left = [*tmp_path.glob("ludic-agents-*/*")]
    assert (len(left) == 1) == ("could not be deleted" in caplog.text)
    subprocess.run(["rm", "-rf", *left], check=True)
