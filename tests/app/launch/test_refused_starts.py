"""What would end a run again and again is refused before its start, by every way to start, and leaves no root."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import create_root, make_model

import ludic
from ludic.app.cli.main import main
from ludic.app.launch.config import LaunchConfig, Start
from ludic.app.launch.preflight import checks, code_checks
from ludic.app.launch.trial import Trial
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError, LudicError
from ludic.records.rollout import ROLES
from ludic.run.config import RunConfig
from ludic.settings.table import to_flags
from ludic.training.config import TrainConfig

SHOWS_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
KNOWN_ROLES = MESSAGES.replace("%}<|", "%}{% if m.role in ['system', 'user', 'assistant'] %}<|", 1).replace(
    "\n{% endfor", "\n{% endif %}{% endfor"
)
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {"all": SHOWS_TOOLS + MESSAGES + BEGIN, "no_tools": MESSAGES + BEGIN, "known": KNOWN_ROLES + BEGIN}

ENVIRONMENT = '''
from ludic.environments.environment import Example, Score, Transition, tool
from ludic.records.rollout import Message


class Env:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="how many"),))

    def score(self, example, answer):
        return Score(reward=float(len(answer)))


class Steps:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=())

    def reset(self, example):
        return (Message(role="user", content="how many"),)

    def step(self, action):
        return Transition(observation=None, reward=1.0, terminated=True)


class Agents(Steps):
    def reset(self, example):
        return {"x": (Message(role="user", content="how many"),)}

    def next_agents(self):
        return ["x"]

    def step(self, actions):
        return {agent: Transition(observation=None, reward=1.0, terminated=True) for agent in actions}


class Lookup:
    @tool
    def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word


class EnvWithTool(Lookup, Env):
    pass


class StepsWithTool(Lookup, Steps):
    pass


class AgentsWithTool(Lookup, Agents):
    pass


class Runner(Steps):
    @property
    def tools(self):
        return [{"type": "function", "function": {"name": "go", "description": "Go.", "parameters": {}}}]

    def run_tools(self, text, calls):
        return Transition(observation=None, reward=1.0, terminated=True, tool_results=("",) * len(calls))


class NoScore:
    def example(self, index, split):
        return None
'''
TOOLS = '''
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number
'''


def prompts(name: str, *roles: str) -> str:
    """Classes of each protocol whose first prompt has messages of these roles."""
    messages = "".join(f'Message(role="{role}", content="how many {number}"), ' for number, role in enumerate(roles))
    return f"""
class {name}(Env):
    def example(self, index, split):
        return Example(example_id=str(index), messages=({messages}))


class {name}Steps(Steps):
    def reset(self, example):
        return ({messages})


class {name}Agents(Agents):
    def reset(self, example):
        return {{"x": ({messages})}}
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with models of each template, environments and tools."""
    folder = tmp_path_factory.mktemp("desk")
    make_model(folder / "all")
    for name, template in TEMPLATES.items():
        if name != "all":
            shutil.copytree(folder / "all", folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    for name in ("base", "big"):
        shutil.copytree(folder / "all", folder / name)
    (folder / "base" / "chat_template.jinja").unlink()
    with (folder / "big" / "model.safetensors").open("r+b") as file:
        file.truncate(shutil.disk_usage(folder).free // 4)  # sparse; a checkpoint takes three times as much
    classes = prompts("Human", "human") + prompts("Answered", "user", "assistant") + prompts("Result", "tool", "user")
    (folder / "env.py").write_text(ENVIRONMENT + classes)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "drops.sql").write_text(
        "select rollout_id, episode_reward as advantage from rollouts where episode_reward < 0.4"
    )
    return folder


@pytest.fixture
def at_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(desk)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return desk


def call_check(**settings: Any) -> str:
    """What `ludic check` says, one mistake a line; the names of checks first."""
    checked = ludic.Run.check("run", **settings)  # type: ignore[arg-type]
    return "\n".join(f"{row['check']}: {row['found']}" for row in checked.rows if row["state"] == "wrong")


def call_run(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["run", "run", *to_flags(settings)])
    assert ended.value.code in (1, 2)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def call_fit(**settings: Any) -> str:
    with pytest.raises(LudicError) as caught:
        ludic.fit(algorithm="rloo", root="run", **settings)
    return str(caught.value)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("settings", {"device": "cuda"}, "this machine shows no GPU"),
    ("packages", {"engine": "vllm"}, "the package vllm is not installed"),
    ("model", {"model": "./none"}, "./none: there is no such folder"),
    ("chat template", {"model": "base"}, "base: the tokenizer has no chat template"),
    ("reference", {"kl_weight": 0.1, "reference": "nowhere"}, "reference nowhere: there is no such folder"),
    ("reference", {"kl_weight": 0.1, "reference": "."}, "reference .: holds no config.json"),
    ("adapters", {"lora_rank": 2, "lora_targets": ["nope"]}, "lora_targets has 'nope'"),
    ("experts", {"keep_experts": True}, "has no experts to keep"),
    ("server", {"engine": "server", "server_url": ["http://127.0.0.1:9"]}, "no server answers"),
    ("disk", {"model": "big"}, "free some space"),
    ("code", {"env": ["env.py:NoScore"]}, "environment env.py:NoScore: NoScore fits neither protocol"),
    ("SQL", {"advantage": "drops.sql"}, "drops.sql: "),
    *(
        (f"environment env.py:{name}", {"env": [f"env.py:{name}"]}, "has the role 'human', wanted one of system, dev")
        for name in ("Human", "HumanSteps", "HumanAgents")
    ),
    *(
        ("prompts", {"env": [f"env.py:{name}"]}, f"environment env.py:{name}: its first prompt ends with a message of")
        for name in ("Answered", "AnsweredSteps", "AnsweredAgents")
    ),
    *(
        ("prompts", {"env": [f"env.py:{name}"], "model": "known"}, "does not show messages of role 'tool'")
        for name in ("Result", "ResultSteps", "ResultAgents")
    ),
    *(
        ("prompts", {"env": [f"env.py:{name}"], "model": "no_tools"}, "no_tools: the chat template does not show tools")
        for name in ("EnvWithTool", "StepsWithTool", "AgentsWithTool", "Runner")
    ),
    *(
        ("prompts", {**tools, "model": "no_tools"}, "env.py:Env: no_tools: the chat template does not show tools")
        for tools in (
            {"tools": ["calculator"]},
            {"tools": ["python"]},
            {"tools": ["tools.py:double"]},
            {"tools": ["mcp:cat"]},
            {"sub_agents": ["helper"]},
        )
    ),
]
ANSWERED_OTHERWISE = {"memory", "tool calls"}
"""Checks that find what is doubtful, and no mistake."""
BASE = {"model": "all", "env": ["env.py:Env"]}
IDS = [f"{name}-{json.dumps(settings)}" for name, settings, _ in MISTAKES]


def names_of_checks() -> set[str]:
    """All checks, by the code; those of environments without their names."""
    settings = {"run": RunConfig(model="all", env=("env.py:Env",)), "train": TrainConfig(), "root": None}
    start = Start(url="run", processes=LaunchConfig(), engine=EngineConfig(), **settings)  # type: ignore[arg-type]
    with checks(start) as found:
        return {name.partition(" env.py")[0] for name in (*found, *code_checks(start))}


def test_there_is_a_mistake_for_each_check() -> None:
    assert {name.partition(" env.py")[0] for name, _, _ in MISTAKES} | ANSWERED_OTHERWISE == names_of_checks()


@pytest.mark.parametrize(("check", "settings", "said"), MISTAKES, ids=IDS)
def test_a_check_names_it(at_desk: Path, check: str, settings: dict[str, Any], said: str) -> None:
    found = call_check(**(BASE | settings))
    assert said in found
    assert found.startswith(f"{check}: ")
    assert not Path("run").exists()


@pytest.mark.parametrize("way", ["run", "fit"])
@pytest.mark.parametrize(("check", "settings", "said"), MISTAKES, ids=IDS)
def test_each_start_refuses_it_in_one_line_and_leaves_no_root(
    at_desk: Path, capsys: pytest.CaptureFixture[str], way: str, check: str, settings: dict[str, Any], said: str
) -> None:
    before = sorted(at_desk.iterdir())
    assert said in (call_run(capsys, **(BASE | settings)) if way == "run" else call_fit(**(BASE | settings)))
    assert sorted(at_desk.iterdir()) == before


OF_TRAINERS = ("model", "chat template", "reference", "adapters", "disk")


@pytest.mark.parametrize(
    ("call", "case"),
    [
        (call, each)
        for call in (ludic.sft, ludic.dpo)
        for each in MISTAKES
        if each[0] in OF_TRAINERS and not (call is ludic.sft and "reference" in each[1])  # sft has none
    ],
    ids=lambda each: each.__name__ if callable(each) else str(each[:2]),
)
def test_a_training_on_stored_rows_refuses_what_it_would_die_of(
    at_desk: Path, call: Callable[..., Any], case: Any
) -> None:
    _, settings, said = case
    row = (
        {"prompt": "how many", "completion": "9"}
        if call is ludic.sft
        else {"prompt": "a", "chosen": "b", "rejected": "c"}
    )
    given = {name: each for name, each in settings.items() if name != "kl_weight"}
    before = sorted(at_desk.iterdir())
    with pytest.raises(LudicError, match=said.replace(".", r"\.")):
        call(root="run", dataset=[row], **({"model": "all"} | given))
    assert sorted(at_desk.iterdir()) == before


def test_the_method_of_an_opened_run_refuses_it_too(at_desk: Path, tmp_path: Path) -> None:
    run = ludic.Run(create_root(str(tmp_path / "run"), "no_tools", env=("env.py:EnvWithTool",)))
    with pytest.raises(ConfigError, match=r"EnvWithTool: no_tools: the chat template does not show"):
        run.run(num_steps=1, trust_code=True)
    assert not (tmp_path / "run" / "attempts").exists()


@pytest.mark.parametrize("role", [role for role in ROLES if role != "assistant"])
def test_each_role_that_the_template_shows_is_taken(at_desk: Path, tmp_path: Path, role: str) -> None:
    (tmp_path / "own.py").write_text(ENVIRONMENT + prompts("Own", role))
    for name in ("Own", "OwnSteps", "OwnAgents"):
        assert call_check(model="all", env=[f"{tmp_path}/own.py:{name}"]) == ""


PROTOCOL = """
async def play(player, environment, example):
    raise NotImplementedError
"""


@pytest.mark.parametrize("name", ["Steps", "Agents", "Env"])
def test_a_protocol_of_the_users_own_may_begin_without_the_prompt_of_the_example(
    at_desk: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "own.py").write_text(PROTOCOL)
    settings = BASE | {"env": [f"env.py:{name}"], "protocol": f"{tmp_path}/own.py:play"}
    rows = {row["check"]: row for row in ludic.Run.check("run", **settings).rows}  # type: ignore[arg-type]
    assert {row["state"] for row in rows.values()} <= {"ok", "look"}
    wanted = "the longest of the first prompts" if name == "Env" else "none: no environment gives a first prompt"
    assert rows["prompts"]["found"].startswith(wanted)


# --- What is doubtful -------------------------------------------------------------------------------------------


def doubts(caplog: pytest.LogCaptureFixture, **settings: Any) -> dict[str, str]:
    rows = ludic.Run.check("run", **(BASE | settings)).rows  # type: ignore[arg-type]
    assert {row["state"] for row in rows} <= {"ok", "look"}
    return {row["check"]: row["found"] for row in rows if row["state"] == "look"}


def test_a_prompt_and_max_tokens_above_the_models_positions_are_told_with_what_fits(
    at_desk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    positions = json.loads(Path("all/config.json").read_text())["max_position_embeddings"]
    # The tokenizer splits at punctuation: twice < | im _ start | >, once < | im _ end | >; user, how, many, assistant.
    length = 7 + 7 + 7 + 4
    fits = positions - length
    found = doubts(caplog, max_tokens=fits + 1)
    assert found == {
        "prompts": f"environment env.py:Env: a prompt of {length} tokens and max_tokens {fits + 1} exceed the "
        f"{positions} positions of all, and such episodes fail; lower --max-tokens to {fits}"
    }
    assert doubts(caplog, max_tokens=fits) == {}


@pytest.mark.parametrize(("rate", "is_told"), [(1.0, False), (1.5, True), (1000.0, True)])
def test_a_learning_rate_above_one_is_told(
    at_desk: Path, caplog: pytest.LogCaptureFixture, rate: float, is_told: bool
) -> None:
    found = doubts(caplog, learning_rate=rate)
    assert ("learning_rate is" in found.get("settings", "")) == is_told


SLOW = """
import time

class {name}(Env):
    def score(self, example, answer):
        time.sleep({seconds})
        return Score(reward=1.0)
"""


def try_slow(folder: Path, seconds: float, timeout_s: float) -> Any:
    (folder / "slow.py").write_text(ENVIRONMENT + SLOW.format(name="Slow", seconds=seconds))
    name = f"{folder}/slow.py:Slow"
    processes = LaunchConfig(env_timeout_s=timeout_s)
    run = RunConfig(model="all", env=(name,))
    start = Start(url="run", run=run, train=TrainConfig(), processes=processes, engine=EngineConfig(), root=None)
    return Trial(start, slow_s=0.2).check_environment(name)


def test_what_a_slow_score_waits_for_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert "and a test answer scores 1" in try_slow(tmp_path, 0.4, 5.0)
    assert [each.split("slow.py:Slow: ")[1] for each in caplog.messages] == [
        f"score of the made-up answer {answer!r} takes more than 0.2 s; it is waited for up to 5 s "
        "(--env-timeout-s) for each call"
        for answer in ("42", "This is a made-up answer.")
    ]


def test_a_score_that_does_not_return_is_refused_after_the_first_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Slow: score .* did not return within 2 s; --env-timeout-s sets the limit"):
        try_slow(tmp_path, 60.0, 2.0)
