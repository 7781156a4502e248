"""Roots that hold what a run needs: the model of a new run, of the demo, and of a run like another."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Phi3Config

from ludic.app.demos.words import open_demo
from ludic.app.launch.roots import open_or_start, start_like
from ludic.errors import ConfigError, ModelError
from ludic.models.tiny import make_tiny_model
from ludic.root.catalogue import IDENTITY
from ludic.root.root import Root
from ludic.root.weights.model_location import first_model
from ludic.root.weights.weight_folders import read_identity
from ludic.run.config import RunConfig
from ludic.run.run_json import run_of


@pytest.fixture
def model(tmp_path: Path, model_folder: str) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "models" / "mine"))


def test_the_demo_keeps_its_model_under_any_root_and_nowhere_else(
    root_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    root = open_demo(root_url)
    assert root.record.model == f"{root_url}/model"
    assert list((tmp_path / "here").iterdir()) == []
    with first_model(root) as folder:
        weights = (folder / "model.safetensors").read_bytes()
    assert weights == root.read("model/model.safetensors")
    # A start that was cut short is finished by the next, which makes the same bytes.
    root.delete(IDENTITY.template)
    root.delete("model/config.json")
    assert open_demo(f"{root_url}/").read("model/model.safetensors") == weights
    assert root.exists(IDENTITY.template)


def test_a_demo_that_moved_finds_its_model(tmp_path: Path) -> None:
    open_demo(str(tmp_path / "run"))
    moved = Root.open(str((tmp_path / "run").rename(tmp_path / "moved")))
    with first_model(moved) as folder:
        assert folder == tmp_path / "moved" / "model"


def test_a_run_is_started_with_its_model_kept_and_another_place_of_it_is_no_other_model(
    tmp_path: Path, model: Path
) -> None:
    url, run = str(tmp_path / "run"), RunConfig(model=str(model), env=("moar_cats",))
    assert read_identity(open_or_start(url, run)) is not None
    moved = str(model.rename(tmp_path / "moved"))
    root = open_or_start(url, RunConfig(model=moved, env=("moar_cats",)))
    assert run_of(root) == run
    (tmp_path / "moved" / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(ModelError, match=r"tokenizer differs \(tokenizer.json\)"):
        open_or_start(url, RunConfig(model=moved, env=("moar_cats",)))
    with pytest.raises(ConfigError, match="group_size is 8 there, 4 was asked for"):
        open_or_start(url, RunConfig(model=moved, env=("moar_cats",), group_size=4))


def test_a_run_like_another_has_its_model(tmp_path: Path, model: Path, model_folder: str) -> None:
    like = open_or_start(str(tmp_path / "run"), RunConfig(model=str(model), env=("moar_cats",)))
    assert read_identity(start_like(str(tmp_path / "again"), like, None)) == read_identity(like)
    other = start_like(str(tmp_path / "other"), like, model_folder)
    assert (other.record.model, other.record.env) == (model_folder, like.record.env)


def test_the_factors_of_a_longrope_model_are_recorded_once_and_another_choice_is_another_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny_model(str(model), ["a", "b"])
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "original_max_position_embeddings": 512}
    Phi3Config(**sizes, max_position_embeddings=1024, rope_parameters=rope).save_pretrained(model)
    run = RunConfig(model=str(model), env=("moar_cats",))
    long = replace(run, max_sequence_tokens=600)
    for name, asked, found in (("short", run, "short"), ("long", long, "long")):
        root = open_or_start(str(tmp_path / name), asked)
        assert json.loads(root.read("run.json"))["longrope"] == found
        assert run_of(open_or_start(root.url, asked)) == replace(asked, longrope=found)
    with pytest.raises(ConfigError, match="longrope is 'long' there, 'short' was asked for"):
        open_or_start(root.url, replace(long, longrope="short"))
    assert run_of(start_like(str(tmp_path / "like"), root, None)).longrope == "long"
    plain = tmp_path / "plain"
    make_tiny_model(str(plain), ["a", "b"])
    other = start_like(str(tmp_path / "other"), root, str(plain))
    assert "longrope" not in json.loads(other.read("run.json"))  # an older ludic can open it
