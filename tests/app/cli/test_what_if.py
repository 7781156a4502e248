"""`ludic what-if`, `ludic bisect` and `ludic cut`: output, errors, and the examples of docs/what_if.md."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tiny_runs import create_root, fill, make_model, train_here

from ludic.root.root import Root

GUIDE = (Path(__file__).parents[3] / "docs/what_if.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^    ludic (.+)$", GUIDE, re.MULTILINE)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/mine, three steps of two groups; ties are dropped."""
    folder = tmp_path_factory.mktemp("what-if")
    root = create_root(str(folder / "runs/mine"), make_model(folder / "model"), max_tokens=4, max_steps=1)
    rewards = [[0.0, 1.0, 0.0, 1.0], [0.5] * 4, [1.0, 0.0, 0.0, 0.0], [0.0, 0.25, 0.5, 1.0]]
    for seed in range(2):
        fill(root, num_files=1, worker_id=f"w{seed}-test", seed=seed, rewards=rewards)
    rules = {"filters": ("drop_zero_variance_groups",), "checkpoint_every": 1, "keep_checkpoints": None}
    assert train_here(root, num_steps=3, **rules) == 3
    (folder / "mine.sql").write_text("select rollout_id, episode_reward as advantage from rollouts")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_run_s_own_rules_are_said_to_give_the_ledger(ludic, here: Path) -> None:
    result = ludic("what-if", "runs/mine")
    assert (result.code, result.err) == (0, "")
    assert "The same as the ledger, bit for bit, in 3 steps." in result.out
    assert ["drop_zero_variance_groups", "drop_zero_variance_groups", "8"] in [
        line.split() for line in result.out.splitlines()
    ]


@pytest.mark.slow
def test_json_names_what_would_have_happened(ludic, here: Path) -> None:
    found = json.loads(ludic("what-if", "runs/mine", "--filters", "--json").out)
    assert not found["is_ledger"]
    assert {"happened": "drop_zero_variance_groups", "would_happen": "used", "num_rollouts": 8} in found["reasons"]
    assert [step["num_added"] for step in found["steps"]] == [8, 0, 0]
    assert ludic("what-if", "runs/mine", "--advantage", "mine.sql").code == 0


def test_bisect_prints_the_step_and_its_looks(ludic, here: Path) -> None:
    result = ludic("bisect", "runs/mine", "step >= 2")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0] == "(step >= 2) turns true at step 2; it is not at step 1."
    assert "(step >= 1) is true from the start, step 1." in ludic("bisect", "runs/mine", "step >= 1").out
    assert "is not true at the last step, 3" in ludic("bisect", "runs/mine", "step > 3").out
    assert json.loads(ludic("bisect", "runs/mine", "step >= 2", "--json").out)["found"] == 2


def test_cut_prints_the_command_and_the_fingerprint(ludic, here: Path) -> None:
    result = ludic("cut", "runs/mine", "--step", "3", "bug")
    assert (result.code, result.err) == (0, "")
    assert "ludic train again --replay-batches bug" in result.out
    assert re.search(r"SHA-256 of model.safetensors after the step: [0-9a-f]{64}", result.out)
    assert "sound" in ludic("verify", "bug").out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["what-if", "runs/mine", "--steps", "7"], "has no step 7"),
        (["what-if", "runs/mine", "--advantage", "grppo"], "did you mean 'grpo'"),
        (["what-if", "runs/mine", "--advantage", "other.sql"], "there is no file"),
        (["what-if", "runs/mine", "--train", "runs/b", "--from-step", "3"], "has no step 4 to train a branch on"),
        (["bisect", "runs/mine", "nothing > 1"], "nothing"),
        (["cut", "runs/mine", "--step", "7", "bug"], "has no step 7"),
        (["cut", "runs/none", "--step", "7", "bug"], "holds no run"),
    ],
)
def test_bad_input_gets_one_line(ludic, here: Path, args: list[str], message: str) -> None:
    result = ludic(*args)
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert message in line


def test_rules_that_contradict_each_other_are_wrong_usage(ludic, here: Path) -> None:
    result = ludic("what-if", "runs/mine", "--num-steps", "2")
    said = "train and from_step go together, and num_steps needs both; `ludic what-if --help` lists the options"
    assert (result.code, result.err) == (2, f"ludic: {said}\n")


def test_a_pruned_policy_to_branch_from_is_named(ludic, here: Path) -> None:
    Root.open("runs/mine").delete("policies/version=1/config.json")
    result = ludic("what-if", "runs/mine", "--train", "runs/b", "--from-step", "1")
    assert "no policy of step 1 is stored (policies/version=1 was pruned)" in result.err
    assert not (here / "runs/b").exists()


@pytest.mark.slow
def test_the_examples_of_the_guide_run_and_the_branch_is_compared_with_the_run(ludic, here: Path) -> None:
    assert len(COMMANDS) == 13
    outputs = {}
    for command in COMMANDS:
        sampled = ["--n", "2", "--num-examples", "2"] if command[0] == "eval" and "compare" not in command else []
        result = ludic(*command, *sampled)
        assert result.code == 0, (command, result.err)
        outputs[" ".join(command)] = result.out
    trained = outputs["what-if runs/mine --advantage grpo --train runs/branch --from-step 1 --num-steps 2"]
    for line in ("ludic eval runs/mine --versions 3", "ludic compare runs/mine@3 runs/branch@latest"):
        assert f"    {line}\n" in trained
    # Steps 2 and 3 of the run used two groups each, of which [1, 0, 0, 0] has the largest credit: 3/4 over the
    # standard deviation of the group, 1/2.
    query = "select step, count(*) as n, max(advantage) as most from batches where used group by 1 order by 1"
    rows = json.loads(ludic("sql", "runs/branch", query, "--format", "json").out)
    assert [(row["step"], row["n"]) for row in rows] == [(1, 8), (2, 8)]
    assert max(row["most"] for row in rows) == pytest.approx(1.5, abs=1e-3)
    (python,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(python, "docs/what_if.md", "exec"), names)
    assert "correlation" in str(names["flips"])
