"""`ludic import`: what came in, what was lost, and roots that are not there yet."""

import json
import shutil
from pathlib import Path

import peers
import pytest

from ludic.root.root import Root


@pytest.fixture
def verl_file(tmp_path: Path) -> Path:
    records = [
        peers.verl_record("cc", 1.0, trace=["x" * 300], acc=True),
        peers.verl_record("dd", 0.0, acc=False),
        "no json",
    ]
    return peers.write_verl(tmp_path, records)


def test_a_root_is_started_and_the_losses_are_told(ludic, model_folder: str, verl_file: Path, tmp_path: Path):
    root = tmp_path / "run"
    result = ludic("import", root, "--from", "verl", verl_file, "--model", model_folder)
    assert result.code == 0
    assert result.out == f"{verl_file}: 2 rollouts in 1 group, of 3 records\n"
    assert result.err.splitlines() == [
        f"ludic: {verl_file}: kept as metadata: acc (2)",
        f"ludic: {verl_file}: not kept: trace (1)",
        f"ludic: {verl_file}: refused, line 3: is not JSON: Expecting value at character 1",
        f"ludic: {verl_file}: 2 rollouts without the sampler's logprobs (2 made from texts, by the tokenizer of "
        f"{model_folder}): sft, dpo, ipo and orpo "
        "train on them, and nothing that takes a ratio to the sampler",
    ]
    assert Root.open(str(root)).record.env == ("verl",)


def test_a_function_named_on_the_command_line_runs_without_more_consent(
    ludic, model_folder: str, verl_file: Path, tmp_path: Path
):
    function = tmp_path / "mine.py"
    function.write_text(
        "from ludic.adapters.imports.formats import verl\n"
        "def cats(record):\n    record.used.add('trace')\n    return verl(record)\n"
    )
    result = ludic("import", tmp_path / "run", "--from", f"{function}:cats", verl_file, "--model", model_folder)
    assert (result.code, result.out) == (0, f"{verl_file}: 2 rollouts in 1 group, of 3 records\n")
    assert "not kept" not in result.err
    assert Root.open(str(tmp_path / "run")).record.env == ("cats",)


@pytest.mark.slow
def test_the_other_commands_work_on_what_came_in(ludic, model_folder: str, verl_file: Path, tmp_path: Path):
    root = tmp_path / "run"
    ludic("import", root, "--from", "verl", verl_file, "--model", model_folder, "--env", "cats")
    assert ludic("verify", root).out == f"{root} is sound\n"
    assert ludic("watch", root, "--totals").code == 0
    row = json.loads(ludic("sql", root, "select rollout_id, env_name from rollouts limit 1", "--format", "json").out)[0]
    assert row["env_name"] == "cats"
    shown = ludic("view", root, row["rollout_id"])
    assert (shown.code, "aa bb" in shown.out) == (0, True)


def test_the_whole_report_as_json(ludic, model_folder: str, verl_file: Path, tmp_path: Path):
    options = ["--from", "verl", "--model", model_folder, "--json"]
    reports = [json.loads(ludic("import", tmp_path / "run", verl_file, *options).out)["files"][0] for _ in range(2)]
    assert [report.pop("was_there") for report in reports] == [False, True]
    assert reports[0] == reports[1]
    assert reports[0]["refused"] == [{"line": 3, "reason": "is not JSON: Expecting value at character 1"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "verl"], "holds no run; --model FOLDER_OR_ID starts one"),
        (["--from", "verll", "--model", "m"], "format 'verll' is unknown; did you mean 'verl'?"),
        (["--from", "missing.py:mine", "--model", "m"], "missing.py:mine: there is no file "),
        (["--from", "verl", "--model", "no/such/model"], "no/such/model: there is no such folder"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_line(
    ludic, verl_file: Path, tmp_path: Path, options: list[str], message: str
):
    result = ludic("import", tmp_path / "run", verl_file, *options)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert message in result.err


def test_another_model_than_the_runs_is_refused(ludic, started: Root, verl_file: Path, tmp_path: Path):
    other = shutil.copytree(started.record.model, tmp_path / "other")
    options = ["--from", "verl", "--model", other]
    assert ludic("import", started.url, verl_file, *options).code == 0  # another path of the same model
    (other / "tokenizer.json").write_text("{}")
    result = ludic("import", started.url, verl_file, *options)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "tokenizer differs (tokenizer.json)" in result.err
