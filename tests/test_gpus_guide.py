"""docs/gpus.md: its commands that need no GPU run, the others have known flags, and its figures are the plan's."""

import json
import re
import shlex
from pathlib import Path

import pytest
from command_settings import parsed
from tiny_runs import create_root, make_model
from transformers import Qwen3Config

from ludic.cli.main import main
from ludic.operations.start import create, run

PAGE = (Path(__file__).parents[1] / "docs/gpus.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(text.replace("\\\n", " "), comments=True)[1:]
    for text in re.findall(r"^    (ludic (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
]
SIZES = {
    "Qwen/Qwen3-8B": (4096, 12_288, 36, 32, False),
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, True),
}
"""Hidden size, width of the MLP, layers, heads, and whether embeddings are tied, as the Hub's config.json has them."""


def named(name: str) -> list[list[str]]:
    return [words for words in COMMANDS if words[0] == name]


def test_the_page_has_the_commands_that_are_tested_below() -> None:
    assert [words[0] for words in COMMANDS] == ["plan", "plan", "run", "run", "create", "launch"]


@pytest.mark.parametrize("words", [*named("run"), *named("create")], ids=" ".join)
def test_its_flags_are_settings_that_fit_together(words: list[str]) -> None:
    operation = {"run": run, "create": create}[words[0]]
    assert parsed(operation, *words[1:]) is not None


def test_its_files_for_slurm_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    root = create_root(str(tmp_path / "7"), make_model(tmp_path / "model"), num_workers=8)
    ((_, system, _, *flags),) = named("launch")
    with pytest.raises(SystemExit) as ended:
        main(["launch", system, root.url, *flags])
    assert not ended.value.code, capsys.readouterr().err
    for file in (tmp_path / "jobs").iterdir():
        text = file.read_text()
        assert {"#SBATCH --exclusive", "export NCCL_SOCKET_IFNAME=eth0"} <= set(text.splitlines())
    assert "#SBATCH --nodes=2\n" in text or "#SBATCH --array=0-7\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("words", named("plan"), ids=["8B", "0.6B"])
def test_its_plans_run_and_its_figures_are_theirs(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = words[words.index("--model") + 1]
    hidden, width, layers, heads, is_tied = SIZES[name]
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=is_tied,
        max_position_embeddings=40_960,
    ).save_pretrained(tmp_path)
    found = planned([str(tmp_path) if word == name else word for word in words], capsys)
    assert found["problems"] == []
    if name == "Qwen/Qwen3-0.6B":
        return
    rows = {key[2]: value / 1e9 for key, value in needs(found).items() if key[:2] == ("each rank", "GPU")}
    shown = [float(figure) for figure in re.findall(r"^\| .* \| +([\d.]+) \|$", PAGE, re.MULTILINE)]
    states = sum(rows[part] for part in ("weights", "gradients", "AdamW's moments"))
    others = ["activations", "logits, gradients on their way", "layers gathered by FSDP2", "CUDA and libraries", "all"]
    assert shown == pytest.approx([states, *(rows[part] for part in others)], abs=0.06)
    assert needs(found)["rank 0", "host", "all"] == pytest.approx(151e9, rel=0.01)
    assert sum(found["disk"].values()) == pytest.approx(590e9, rel=0.01)


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    return json.loads(out)


def needs(found: dict) -> dict[tuple[str, str, str], int]:
    return {(row["process"], row["place"], row["part"]): row["needed_bytes"] for row in found["memory"]}
