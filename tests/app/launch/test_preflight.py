"""Checks before a run starts: what `ludic check` says, whose code it runs, and what is doubtful but no mistake."""

import json
import shutil
from pathlib import Path

import pytest
from call_templates import QWEN3_CODER, tokenizer_with
from tiny_runs import create_root, make_model

import ludic
from ludic.app.cli.main import main
from ludic.root.attempts import start_attempt
from ludic.settings.consent import CONFIG_VARIABLE
from ludic.training.inherited_settings import next_config

ENVIRONMENT = """
from pathlib import Path
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message

Path("ran").touch()

class Env:
    def example(self, index, split):
        prompt = Message(role="user", content="how many")
        return Example(example_id=f"{split}-{index}", messages=(prompt,), wanted="7")

    def score(self, example, answer):
        return Score(reward=float(answer))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and an environment, whose user has consented to nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "consents"))
    make_model(tmp_path / "model")
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    return tmp_path


def check(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Run `ludic check run ...`; returns its exit status, state and text by check, and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["check", "run", *args])
    out, err = capsys.readouterr()
    states = ("left out", "ok", "look", "wrong")
    found = {}
    for line in out.splitlines():
        state = next(each for each in states if line.startswith(each))
        name, _, text = line.removeprefix(state).strip().partition(": ")
        found[name] = state, text
    return int(ended.value.code or 0), found, err


def test_each_check_is_a_line_and_no_root_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = check(capsys, "--model", "model", "--env", "moar_cats", "addition", "--num-steps", "1e1")
    assert (code, err) == (0, "")
    assert {state for state, _ in found.values()} == {"ok"}
    environments = ["environment moar_cats", "environment addition"]
    of_model = ["model", "chat template", "tool calls", "reference", "adapters", "experts"]
    of_settings = ["settings", "packages", *of_model, "server", "disk", "memory"]
    assert list(found) == [*of_settings, "code", *environments, "prompts", "SQL"]
    assert found["settings"][1].startswith("10 steps on ")
    # Six groups of eight; an episode failed, and another one's reward was NaN.
    assert found["SQL"][1] == "advantage rloo gives 46 of 48 synthetic rollouts a finite number"
    assert not (folder / "run").exists()


def test_the_format_of_tool_calls_is_what_the_template_writes_or_is_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", "model", "--env", "moar_cats", "--tools", "calculator")
    _, found, _ = check(capsys, *args)
    assert found["tool calls"] == (
        "look",
        "read as hermes: the chat template shows no tool call in a format that ludic knows; --tool-format sets it",
    )
    tokenizer_with(QWEN3_CODER).save_pretrained("model")
    _, found, _ = check(capsys, *args)
    assert found["tool calls"] == ("ok", "qwen3_coder")
    _, found, _ = check(capsys, *args, "--tool-format", "llama")
    assert found["tool calls"] == ("ok", "llama")


def test_every_mistake_is_told_at_once_and_each_only_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = check(capsys, "--model", "./none", "--env", "moar_cats", "--group-size", "1", "--engine", "vllm")
    wrong = [name for name, (state, _) in found.items() if state == "wrong"]
    assert (code, wrong) == (1, ["packages", "model", "SQL"])
    assert [name for name, (state, _) in found.items() if state == "left out"] == [
        "chat template",
        "disk",
        "memory",
        "prompts",
    ]
    assert err == "ludic: 3 of 15 checks found a mistake\n"


def test_a_score_that_fails_for_some_answers_only_is_no_mistake(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    code, found, _ = check(capsys, "--model", "model", "--env", "env.py:Env")
    state, text = found["environment env.py:Env"]
    assert (code, state) == (0, "look")
    assert text == (
        "gives example 'train-0', and a test answer scores 7; but with the answer "
        "'This is a made-up answer.': environment env.py:Env: ValueError: could not convert string to float: "
        f"'This is a made-up answer.' ({folder / 'env.py'}, line 14)"
    )


def test_code_of_a_root_runs_only_with_consent_which_a_check_does_not_keep(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ludic.create("run", model="model", env="env.py:Env")
    monkeypatch.setenv(CONFIG_VARIABLE, str(folder / "of another user"))
    shutil.move("env.py", "moved.py")
    Path("ran").unlink()
    code, found, _ = check(capsys)
    assert (code, found["code"][0], "--trust-code" in found["code"][1]) == (1, "wrong", True)
    assert not Path("ran").exists()
    code, found, _ = check(capsys, "--trust-code")
    assert (code, found["environment env.py:Env"][0], Path("ran").exists()) == (0, "look", True)
    assert check(capsys)[0] == 1


def test_a_server_may_come_later_where_it_waits_for_the_runs_first_version(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ["--engine", "server", "--server-url", "http://127.0.0.1:9"]
    code, found, _ = check(capsys, "--model", "model", "--env", "moar_cats", *server)
    assert (code, found["server"][0]) == (1, "wrong")
    create_root("run", "model")
    code, found, _ = check(capsys, *server)
    assert (code, found["server"][0], "`ludic serve run`" in found["server"][1]) == (0, "look", True)


def test_a_method_checks_an_opened_run(folder: Path) -> None:
    checked = ludic.Run(create_root("run", "model")).check(lora_rank=2, lora_targets=["q_proj"])
    assert checked.failure is None
    assert {row["check"]: row["found"] for row in checked.rows}["adapters"] == "on 2 layers"


def test_a_reference_that_is_the_runs_own_model_may_have_moved(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ludic.create("run", model="model", env="moar_cats")
    shutil.move("model", "elsewhere")
    reference = ["--kl-weight", "0.1", "--reference"]
    assert check(capsys, *reference, "model")[1]["reference"] == ("ok", "the run's model")
    assert check(capsys, *reference, "elsewhere")[1]["reference"] == ("ok", "elsewhere")
    assert check(capsys, *reference, "nowhere")[1]["reference"][0] == "wrong"


def test_experts_of_a_dense_model_can_not_be_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = check(capsys, "--model", "model", "--env", "moar_cats", "--keep-experts")
    assert (code, found["experts"]) == (
        1,
        ("wrong", "model: a qwen3 model of this configuration has no experts to keep or replay"),
    )


def test_settings_that_differ_from_the_last_trainers_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = create_root("run", "model")
    start_attempt(root, config=next_config("run", {"num_steps": 3, "advantage": "grpo"}).flat())
    next_config("run", {"num_steps": 9})
    assert caplog.messages == []
    next_config("run", {"learning_rate": 1e-4}, "dapo")
    (message,) = caplog.messages
    assert message.startswith("run continues with other settings than its last trainer: ")
    assert "learning_rate 1e-06 becomes 0.0001" in message
    assert "objective 'reinforce' becomes 'ppo_clip'" in message
    assert "advantage" not in message.replace("whiten_advantages", "")


def test_rows_that_are_copies_and_ids_that_come_twice_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": number % 3, "question": f"What is {number}?", "answer": str(number)} for number in range(5)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, rows[0]]))
    code, found, _ = check(capsys, "--model", "model", "--env", "qa/rows.jsonl")
    state, text = found["environment qa/rows.jsonl"]
    assert (code, state) == (0, "look")
    assert "rows.jsonl: 1 of 6 rows are copies of an earlier row, and count as the same example" in text
    assert "all columns identify an example; column 'id': line 1 and line 4 both have 0" in text
