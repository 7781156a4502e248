"""docs/gpus.md: its commands that need no GPU run, the others have known flags, and its figures are the plan's."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
from command_settings import parsed
from tiny_runs import create_root, make_model
from transformers import Qwen3Config, Qwen3MoeConfig

from ludic.app.cli.main import main
from ludic.app.launch.config import LaunchConfig
from ludic.app.launch.plan import Machine, Settings, plan
from ludic.app.operations.start import run
from ludic.engines.config import EngineConfig
from ludic.run.config import RunConfig
from ludic.settings.table import convert, split
from ludic.training.config import TrainConfig

PAGE = (Path(__file__).parents[1] / "docs/gpus.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(text.replace("\\\n", " "), comments=True)[1:]
    for text in re.findall(r"^    (ludic (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960, "num_key_value_heads": 8}
MODELS = {
    "8B": Qwen3Config(
        **QWEN3,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "30B-A3B": Qwen3MoeConfig(
        **QWEN3 | {"num_key_value_heads": 4},
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
}
"""Configurations by the end of their names, with the sizes that the Hub's config.json has."""


def named(name: str) -> list[list[str]]:
    return [words for words in COMMANDS if words[0] == name]


def cells(first: str) -> list[list[str]]:
    """Return the rows of the table whose head begins with these words, with each first cell that is not empty."""
    start = next(index for index, row in enumerate(ROWS) if row[0] == first)
    rows = []
    for row in ROWS[start + 2 :]:
        if row[0].startswith("---"):
            return rows[:-1]
        rows.append([row[0] or rows[-1][0], *row[1:]])
    return rows


def test_the_page_has_the_commands_that_are_tested_below() -> None:
    assert [words[0] for words in COMMANDS] == ["run", "run", "run", "plan", "run", "cluster"]


@pytest.mark.parametrize("words", named("run"), ids=" ".join)
def test_its_flags_are_settings_that_fit_together(words: list[str]) -> None:
    # A run that goes on has its model and its environment in the root.
    stored = [] if "--model" in words else ["--model", "m", "--env", "moar_cats"]
    assert parsed(run, *words[1:], *stored) is not None


def test_its_call_has_the_settings_of_its_command() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) == "ludic.grpo")
    own = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg != "reward"}
    assert (own.pop("dataset"), own.pop("root"), own.pop("eval_every")) == ("questions.jsonl", "runs/eight", None)
    groups = {"run": RunConfig, "train": TrainConfig, "launch": LaunchConfig}
    parts = split(own | {"env": ("qa/questions.jsonl",)}, **groups)
    command = parsed(run, *named("run")[1][1:])
    assert command.algorithm == "grpo"
    assert {name: convert(kind, parts[name]) for name, kind in groups.items()} == {
        name: getattr(command, name) for name in groups
    }


def test_its_files_for_slurm_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (settings,) = re.findall(r"^```toml\n# experiment.toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("experiment.toml").write_text(settings)
    root = create_root(str(tmp_path / "7"), make_model(tmp_path / "model"), num_workers=8)
    ((_, _, system, *flags),) = named("cluster")
    with pytest.raises(SystemExit) as ended:
        main(["cluster", root.url, system, *flags])
    assert not ended.value.code, capsys.readouterr().err
    trainer, workers = (file.read_text() for file in sorted((tmp_path / "jobs").iterdir()))
    assert {"export NCCL_SOCKET_IFNAME=eth0", "export GLOO_SOCKET_IFNAME=eth0"} <= set(trainer.splitlines())
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=h100:8"} <= set(trainer.splitlines())
    assert "--nproc-per-node=8" in trainer
    assert "--num-steps 500" in trainer
    assert "--engine vllm" in workers
    assert {"#SBATCH --array=0-7", "#SBATCH --gpus-per-node=h100:1"} <= set(workers.splitlines())


@pytest.mark.slow
def test_the_figures_of_its_command_are_those_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = named("plan")
    MODELS["8B"].save_pretrained(tmp_path)
    found = planned([str(tmp_path) if word == "Qwen/Qwen3-8B" else word for word in words], capsys)
    assert found["problems"] == []
    parts = {key: value / 1e9 for key, value in needs(found).items()}
    rank = [value for key, value in parts.items() if key[:2] == ("each rank", "GPU")]
    worker = [value for key, value in parts.items() if key[:2] == ("each worker", "GPU")]
    host = [value for key, value in parts.items() if key[:2] == ("all processes", "host")]
    disk = [value / 1e9 for value in found["disk"].values()]
    assert [float(row[2]) for row in cells("where")] == pytest.approx(
        [
            *(sum(rank[:3]), *rank[3:]),
            *(worker[0], sum(worker[1:3]), *worker[3:]),
            *(host[0], sum(host[1:3]), host[3]),
            *(*disk, sum(disk)),
        ],
        abs=0.06,
    )
    # What the rows say their figures are of.
    text, names = PAGE.replace("\n", " "), " ".join(part for _, _, part in parts)
    for told in ("activations of 56,320 tokens", "logits of 2,048 tokens", "key-value cache of 67 sequences of 5,120"):
        assert told in text
        assert told in names
    (temporary,) = (note for note in found["notes"] if note.startswith("TMPDIR"))
    assert re.findall(r"([\d.]+) GB", temporary) == ["114.7", "49.1"]
    assert re.search(r"needs 114.7 GB in TMPDIR, and each worker 49.1", text)
    assert 56_320 // 5_120 == 11


@pytest.mark.slow
@pytest.mark.parametrize("row", cells("other cases, default groups and steps"), ids=lambda row: row[0])
def test_other_cases_fit_with_the_figures_of_the_plan(
    row: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, flags = re.findall(r"(.*), `(.*)`", row[0])[0]
    MODELS[name].save_pretrained(tmp_path)
    found = planned(["plan", "--model", str(tmp_path), "--gpu", "H100", *flags.split()], capsys)
    assert found["problems"] == []
    parts = needs(found)
    (cache,) = (part for process, _, part in parts if process == "each worker" and part.startswith("key-value"))
    in_gb = [parts["each rank", "GPU", "all"], parts["all processes", "host", "all"], sum(found["disk"].values())]
    rank, sequences, host, disk = (float(cell.replace(",", "")) for cell in row[1:])
    assert [rank, host, disk] == pytest.approx([value / 1e9 for value in in_gb], abs=0.06)
    assert cache.startswith(f"key-value cache of {sequences:.0f} sequences of ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "ranks", "words"),
    [("8B", 4, 2, "8B on two ranks"), ("30B-A3B", 8, 4, "30B-A3B on four")],
)
def test_what_it_says_does_not_fit_does_not(name: str, gpus: int, ranks: int, words: str) -> None:
    settings = Settings(
        run=RunConfig(model="m", env=("moar_cats",), max_tokens=4096, num_workers=gpus - ranks),
        train=TrainConfig(),
        processes=LaunchConfig(ranks=ranks),
        engine=EngineConfig(),
    )
    found = plan(MODELS[name], settings, Machine(gpus=gpus, gpu_bytes=80 * 10**9))
    (needed,) = re.findall(rf"{words} \(([\d.]+) GB\)", PAGE)
    (problem,) = found.problems
    assert problem.startswith(f"each rank needs {needed} GB of its GPU, and has 72.0 GB")


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    return json.loads(out)


def needs(found: dict) -> dict[tuple[str, str, str], int]:
    return {(row["process"], row["place"], row["part"]): row["needed_bytes"] for row in found["memory"]}
