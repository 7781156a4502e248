"""The notebook's cells run, and answer, on roots of every kind."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import peers
import pytest
from tiny_runs import create_root, fill, make_model, train_here

from ludic.interop.imports.importing import import_file
from ludic.interop.imports.formats import load_format
from ludic.models.chat import load_tokenizer
from ludic.interop.imports.formats import load_format
from ludic.interop.imports.importing import import_file
from ludic.models.chat import load_tokenizer
from ludic.store import Root
from ludic.training.presets import load_algorithm

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "rollouts.ipynb"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def filled(tmp_path: Path, model: str) -> Root:
    root = create_root(str(tmp_path / "run"), model)
    fill(root, num_files=2)
    return root


def answers(root: Root, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the notebook's cells define, in a process that draws to nowhere."""
    monkeypatch.setenv("LUDIC_ROOT", root.url)
    names: dict[str, Any] = {}
    with mpl.rc_context({"figure.max_open_warning": 0}):
        mpl.use("agg")
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
        plt.close("all")
    return names


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp", "dpo"])
def test_a_trained_root_shows_the_advantages_that_the_ledger_holds(
    filled: Root, model: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    train_here(filled, num_steps=2, **load_algorithm(algorithm) | ({"reference": model} if algorithm == "dpo" else {}))
    names = answers(filled, monkeypatch)
    assert names["trained"].startswith("2 gradient steps used ")
    group = names["group"].drop_nulls("advantage_in_the_ledger")
    assert (group["advantage_in_the_ledger"] - group["computed_now"]).abs().max() < 1e-9
    assert set(names["logprobs"]) == {0, 1, 2}  # sampled with, trained from, newest


def test_advantages_by_token_are_shown_by_their_mean(filled: Root, monkeypatch: pytest.MonkeyPatch):
    train_here(filled, num_steps=2, advantage="token_returns")
    group = answers(filled, monkeypatch)["group"]
    assert (group["advantage_in_the_ledger"] - group["computed_now"]).abs().max() < 1e-6  # float32


def test_a_root_trained_offline_shows_the_rollouts_of_its_source(
    filled: Root, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
):
    root = create_root(str(tmp_path / "offline"), model)
    train_here(root, num_steps=2, offline=True, sources=(filled.url,), objective="sft")
    names = answers(root, monkeypatch)
    assert names["trained"].startswith("2 gradient steps used ")
    assert names["lineage"].height == 1
    assert names["group"]["reward"].len() == root.run.group_size


def test_an_imported_root_has_rewards_and_no_steps(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch):
    root = create_root(str(tmp_path / "run"), model)
    records = [peers.verl_record(output, reward) for output, reward in (("cc", 1.0), ("dd", 0.0))]
    path = str(peers.write_verl(tmp_path, records))
    options = {"env_name": "cats", "tokenizer": model, "get_tokenizer": lambda: load_tokenizer(model)}
    import_file(root, path, load_format("verl"), **options)
    names = answers(root, monkeypatch)
    assert names["sampled"].startswith("Mean reward is 0.50, all of policy version")
    assert names["trained"] == "no gradient step was taken"


def test_a_root_that_was_just_started_says_that_nothing_is_there(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
):
    names = answers(create_root(str(tmp_path / "run"), model), monkeypatch)
    assert names["sampled"] == "0 rollouts are here, none with a reward"
    assert names["trained"] == "no gradient step was taken"
