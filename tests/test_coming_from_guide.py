"""docs/coming_from.md: its files run as they are, on a tiny model in the Hub's cache under the name of theirs."""

import json
import re
import shlex
import shutil
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import forks
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ludic
from ludic.adapters.foreign_settings import others
from ludic.app.cli.settings import parse
from ludic.app.operations.start import run
from ludic.models.tiny import make_tiny_model
from ludic.settings.table import settings_of
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import next_config

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "coming_from.md").read_text(encoding="utf-8")
TINY = ["--num-steps", "2", "--group-size", "4", "--groups-per-batch", "2", "--max-tokens", "8", "--device", "cpu"]
LISTS = {"env", "filters", "lora_targets"}
TEXTS = ("What is plus test train user reverse the text", *map("".join, product("abcdefghij", repeat=2)))
"""Vocabulary of the tiny model: more than the 100 entries that the check of packed sequences draws from."""
MODELS = ("Qwen/Qwen3-0.6B", "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def files() -> dict[str, str]:
    """The files of the page that ludic uses, by name."""
    rows, (_, rewards, compute_score), (sums, gsm8k, reverse) = blocks("json")[0], blocks("python"), blocks("toml")
    more = [{**json.loads(row), "level": number} for number in range(8) for row in rows.splitlines()]
    for row in more:
        row["prompt"][0]["content"] += f" ({row['level']})"
    texts = {"sums.jsonl": "\n".join(map(json.dumps, more)), "rewards.py": rewards, "gsm8k.py": compute_score}
    return {**texts, "sums.toml": sums, "gsm8k.toml": gsm8k, "reverse.toml": reverse}


def command(start: str) -> list[str]:
    """The arguments of the command of the page that begins so."""
    (found,) = re.findall(rf"^    ludic ({re.escape(start)}.*)$", PAGE, re.MULTILINE)
    return shlex.split(found)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(str(folder), [*TEXTS])
    return folder


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files of the page, data of verl, and a tiny model in the Hub's cache."""
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"What is {number} plus 2 ({split})?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
                "extra_info": {"split": split, "index": number},
            }
            for number in range(8)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "gsm8k" / f"{split}.parquet")
    for model in MODELS:
        repository = tmp_path / "hub" / f"models--{model.replace('/', '--')}"
        shutil.copytree(tiny_model, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path


def forked_in(folder: Path, *args: str) -> str:
    """Run a command in a forked process; returns its output.

    It has read where the Hub's cache is long ago, so the models lie in the folder.
    """
    for model in MODELS:
        snapshot = folder / "hub" / f"models--{model.replace('/', '--')}" / "snapshots" / COMMIT
        shutil.copytree(snapshot, folder / model, dirs_exist_ok=True)
    child = forks.ludic(*args, folder=folder)
    assert child.returncode == 0, child.stderr
    return child.stdout


def rollouts_of(root: str) -> pl.DataFrame:
    return ludic.open(root).sql("select error, episode_reward, reward_components from rollouts")


@pytest.mark.parametrize("name", ["sums", "gsm8k", "reverse"])
def test_each_file_is_read_whole(folder: Path, name: str) -> None:
    told = tomllib.loads((folder / f"{name}.toml").read_text())
    args = command(f"run runs/{name} ")[1:]
    values = parse(run, args, program="ludic run", description="")
    assert values == {**told, "root": f"runs/{name}", **{key: tuple(told[key]) for key in LISTS & told.keys()}}
    own = {each.name for each in settings_of(TrainConfig)} & values.keys()
    settings = next_config(values["root"], {key: values[key] for key in own}, values["algorithm"], online=True)
    assert settings.optimizer.learning_rate == told["learning_rate"]
    assert settings.batch.advantage == ("dr_grpo" if name == "reverse" else "grpo")
    # What the batch of the other program's script holds: 16 * 4 completions, 64 * 8, 128.
    sizes = {"sums": 64, "gsm8k": 512, "reverse": 128}
    assert values["group_size"] * values["groups_per_batch"] == sizes[name]


def test_each_setting_of_a_script_of_verl_is_in_the_table() -> None:
    (script,) = blocks("bash")
    known = {name for program in others().programs for row in program.settings for name in row.names.split()}
    assert {*re.findall(r"^    ([\w.]+)=", script, re.MULTILINE)} <= known
    arguments = re.findall(r"^        (\w+)=", blocks("python")[0], re.MULTILINE)
    assert {*arguments} <= known | {"args"}
    assert len(arguments) > 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_of_trl_runs(folder: Path) -> None:
    forked_in(folder, *command("run runs/sums "), *TINY)
    rows = rollouts_of("runs/sums")
    assert rows["error"].null_count() == len(rows) >= 16
    for row in rows.to_dicts():
        components: dict[str, Any] = dict(row["reward_components"])
        assert components.keys() == {"accuracy", "brevity"}
        assert row["episode_reward"] == pytest.approx(components["accuracy"] + 0.1 * components["brevity"], abs=1e-6)
    assert rows["episode_reward"].n_unique() > 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_of_verl_runs(folder: Path) -> None:
    forked_in(folder, *command("run runs/gsm8k "), *TINY, "--eval-options", '{"num_examples": 2}')
    rows = rollouts_of("runs/gsm8k")
    assert rows["error"].null_count() == len(rows) >= 16
    assert {key for row in rows.to_dicts() for key in dict(row["reward_components"])} == {"has_number"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_of_prime_rl_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "verifiers.v1.configs.select", reason="verifiers is in an environment of its own: make verifiers"
    )
    (folder / "installed" / "reverse_text").mkdir(parents=True)
    (folder / "installed" / "reverse_text" / "__init__.py").write_text(REVERSE_TEXT)
    monkeypatch.setenv("PYTHONPATH", str(folder / "installed"))
    # Answers of a random model are all wrong, and the filter would drop every group.
    forked_in(
        folder, *command("run runs/reverse "), *TINY, "--accept-incomplete", "--env-timeout-s", "600", "--filters"
    )
    rows = rollouts_of("runs/reverse")
    assert rows["error"].null_count() == len(rows) >= 16


REVERSE_TEXT = """
import verifiers.v1 as vf

__all__ = ["ReverseText"]


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_reversed(self, task, trace) -> float:
        return float(trace.last_reply == task.answer) + len(trace.last_reply)


class ReverseText(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            text = f"the text {number}"
            data = Data(prompt=f"reverse {text}", system_prompt="reverse", answer=text[::-1], name=f"n{number}")
            yield Task(data, self.config.task)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_trl_is_imported_and_looked_at(folder: Path) -> None:
    rows = {
        "step": [10] * 4,
        "prompt": ["What is 2 plus 2?"] * 2 + ["What is 3 plus 4?"] * 2,
        "completion": ["4", "2", "7", "is"],
        "accuracy": [1.0, 0.0, 1.0, None],
        "advantage": [0.7, -0.7, 0.7, -0.7],
    }
    file = folder / "sums" / "completions" / "completions_00010.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.table(rows), file)
    forked_in(folder, *command("import runs/theirs "))
    assert "sums" in forked_in(folder, *command("watch runs/theirs --totals"))
    (row,) = json.loads(forked_in(folder, *command("sql runs/theirs "), "--format", "json"))
    assert (row["env_name"], row["rollouts"]) == ("sums", 4)
    assert row["reward"] == pytest.approx(2 / 3)


def test_the_links_lead_to_pages() -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGE):
        page, _, anchor = target.partition("#")
        text = (DOCS / page).resolve().read_text(encoding="utf-8")
        titles = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)}
        assert not anchor or anchor in titles, target
