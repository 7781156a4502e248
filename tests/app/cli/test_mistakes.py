"""What people get wrong: each mistake is one line that names the file, the line or the setting, and makes no root."""

import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ludic.root.root import Root

# What users write, wrong. FILES holds the text of each file; mistakes.txt the commands and their answers.
_EXAMPLE = """
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message

class Env:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="hello"),))

    def score(self, example, answer):
        return Score(reward=float(len(answer)))
"""
_GROUP = "from rollouts window g as (partition by group_id)"
FILES = {
    "good.py": _EXAMPLE,
    "two.py": f"{_EXAMPLE}\n\nclass Other(Env):\n    pass\n",
    "empty.py": "x = 1\n",
    "syntax.py": "class Env:\n    def example(self, index, split)\n        return None\n",
    "imports.py": "import no_such_module\n\nclass Env:\n    pass\n",
    "no_score.py": _EXAMPLE.replace("def score", "def scores"),
    "text_example.py": _EXAMPLE.replace("return Example(", "return str("),
    "key_error.py": _EXAMPLE.replace("return Example(", "return {}['text'] or Example("),
    "dict_message.py": _EXAMPLE.replace(
        'Message(role="user", content="hello")', '{"role": "user", "content": "hello"}'
    ),
    "one_argument.py": _EXAMPLE.replace("(self, index, split)", "(self, index)").replace("{split}", "train"),
    "trl_score.py": _EXAMPLE.replace("(self, example, answer)", "(self, prompt, completion, answer)"),
    "index_error.py": _EXAMPLE.replace("float(len(answer))", "float(answer.split()[7])"),
    "nan.py": _EXAMPLE.replace("float(len(answer))", 'float("nan")'),
    "text_score.py": _EXAMPLE.replace("Score(reward=float(len(answer)))", '"good"'),
    "none_score.py": _EXAMPLE.replace("return Score(reward=float(len(answer)))", "len(answer)"),
    "constructor.py": _EXAMPLE.replace("class Env:", "class Env:\n    def __init__(self):\n        1 / 0\n"),
    "run_in.py": _EXAMPLE.replace("class Env:", "class Env:\n    run_in = 'rocket'\n"),
    "reward.py": "def accuracy(example, answer):\n    return float(answer == missing)\n",
    "tools.py": "def double(number):\n    return 2 * number\n",
    "advantage.py": (
        "import pyarrow.compute as pc\n\ndef mine(rollouts):\n    return rollouts['no_such_column']\n\n"
        "def twice(rollouts, more):\n    return rollouts\n"
    ),
    "good.jsonl": '{"question": "1 + 1", "answer": "2"}\n{"question": "2 + 2", "answer": "4"}\n' * 8,
    "broken.jsonl": '{"question": "1 + 1", "answer": "2"}\n{"question": 2 + 2}\n',
    "columns.jsonl": '{"text": "1 + 1", "label": "2"}\n',
    "empty.jsonl": "",
    "experiment.toml": 'env = ["moar_cats"]\nnum_steps = 2\n',
    "broken.toml": 'env = ["moar_cats"\nnum_steps = 2\n',
    "unknown.toml": 'env = ["moar_cats"]\nlerning_rate = 2\n',
    "type.toml": 'env = ["moar_cats"]\nnum_steps = "many"\n',
    "list.json": "[1, 2]",
    "verl.yaml": "actor_rollout_ref:\n  actor:\n    optim:\n      lr: 1e-6  # of AdamW\ntrainer:\n  nnodes: 1\n",
    "yaml.txt": "# mine\nlearning_rate: 1e-6\nenv:\n  - moar_cats\n",
    "json.toml": '{"learning_rate": 1e-6}',
    "tables.toml": "num_steps = 2\n[trainer]\nlearning_rate = 1e-6\n",
    "nan.sql": f"select rollout_id, (episode_reward - avg(episode_reward) over g) / stddev_pop(episode_reward) over g as advantage {_GROUP}",  # noqa: E501
    "drops.sql": "select rollout_id, episode_reward as advantage from rollouts where episode_reward < 0.4",
    "column.sql": "select rollout_id, episode_rewrad as advantage from rollouts",
    "output.sql": "select rollout_id, episode_reward as adv from rollouts",
    "syntax.sql": "select rollout_id, episode_reward as advantage frm rollouts",
    "delete.sql": "delete from rollouts",
    "parameter.sql": "select rollout_id, $scale * episode_reward as advantage from rollouts",
    "twice.sql": "select rollout_id, 1.0 as advantage from rollouts union all select rollout_id, 2.0 from rollouts",
    "number.sql": "response_length + 1",
    "select.sql": "select env_name from groups",
    "suite.toml": "[[entries]]\nnmae = 'a'\n",
}

MISTAKES = Path(__file__).with_name("mistakes.txt").read_text()


def _rows() -> list[tuple[str, list[str]]]:
    lines = [line for line in MISTAKES.splitlines() if line and not line.startswith("#")]
    pairs = [line.replace("RUN", "run new --model $MODEL --env moar_cats", 1).split(" => ") for line in lines]
    return [(command, wanted.split(" && ")) for command, wanted in pairs]


ROWS = _rows()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Path:
    """A user's folder, with FILES and some folders of models."""
    folder = tmp_path_factory.mktemp("desk")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty_folder").mkdir()
    for name in ("base_model", "big_model"):
        shutil.copytree(model_folder, folder / name)
    with (folder / "big_model" / "model.safetensors").open("r+b") as file:
        file.truncate(shutil.disk_usage(folder).free // 4)  # sparse; a checkpoint takes three times as much
    (folder / "base_model" / "chat_template.jinja").unlink()
    return folder


@pytest.fixture
def at_desk(desk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """The user's folder as the working directory; at the end it must hold what it held before."""
    monkeypatch.chdir(desk)
    for variable in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(desk / "none"))  # where an account of W&B would be
    before = sorted(desk.iterdir())
    with caplog.at_level(logging.CRITICAL):
        yield desk
    assert sorted(desk.iterdir()) == before


def test_there_are_a_hundred_mistakes() -> None:
    assert len({command for command, _ in ROWS}) == len(ROWS) >= 100


@pytest.mark.parametrize(("command", "wanted"), ROWS, ids=[command for command, _ in ROWS])
def test_a_mistake_is_one_line_that_says_where_and_what_to_do(
    ludic: Any, at_desk: Path, trained: Root, started: Root, model_folder: str, command: str, wanted: list[str]
) -> None:
    places = {"$MODEL": model_folder, "$TRAINED": trained.url, "$STARTED": started.url}
    for name, place in places.items():
        command = command.replace(name, place)
    result = ludic(*shlex.split(command))
    assert (result.code in (1, 2), result.out) == (True, "")
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("ludic: ")
    assert all(text in lines[0] for text in wanted), lines[0]


def test_a_package_of_an_environment_that_lacks_a_package_of_its_own_is_one_line(
    ludic: Any, at_desk: Path, tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"": "", "v1": "import a_package_that_is_absent.part\n", "v1/tasksets": ""}.items():
        (tmp_path / "verifiers" / name).mkdir(exist_ok=True)
        (tmp_path / "verifiers" / name / "__init__.py").write_text(text)
    loaded: dict[str, ModuleType] = {name: sys.modules[name] for name in sys.modules if name.startswith("verifiers")}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    result = ludic("run", "new", "--model", model_folder, "--env", "verifiers/mine")
    assert result.err == (
        "ludic: environment verifiers/mine: the package verifiers can't be imported: ModuleNotFoundError: "
        "No module named 'a_package_that_is_absent'; pip install a_package_that_is_absent\n"
    )
    for name in [name for name in sys.modules if name.startswith("verifiers")]:
        monkeypatch.delitem(sys.modules, name)
