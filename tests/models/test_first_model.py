"""The model that a run began with: found wherever it is, never another one, and needed only where it must be."""

import json
import shutil
import threading
import uuid
from pathlib import Path

import fsspec
import huggingface_hub.constants as hub
import pytest
from tiny_runs import create_root, fill, final_weights, other_model, query, train_config, train_here

from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import ModelError
from ludic.root.catalogue import IDENTITY
from ludic.root.root import Root
from ludic.root.weights.model_location import first_model, local_folder, remember_model, same_model
from ludic.root.weights.weight_folders import identify, read_identity
from ludic.training import trainer
from ludic.training.trainer import FirstModel

LORA = {"lora_rank": 2, "lora_targets": ("q_proj",)}


@pytest.fixture
def model(tmp_path: Path, tiny_folder: str) -> Path:
    """A model that a test may move."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "models" / "mine"))


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Root:
    """A run of it with rollouts."""
    root = create_root(str(tmp_path / "run"), str(model))
    fill(root, num_files=2)
    return root


def train(root: Root, **settings) -> int:
    return train_here(root, checkpoint_every=1, **settings)


def train_with(root: Root, model: str, **settings) -> int:
    return trainer.train(root, train_config(checkpoint_every=1, **settings), threading.Event(), model=model)


@pytest.mark.slow
def test_a_run_goes_on_without_its_models_folder(root: Root, model: Path, tmp_path: Path) -> None:
    whole = create_root(str(tmp_path / "whole"), str(model))
    fill(whole, num_files=2)
    assert train(whole, num_steps=2) == train(root, num_steps=1) + 1
    shutil.rmtree(model)
    assert train(root, num_steps=2) == 2
    expected, found = final_weights(whole), final_weights(root)
    assert all((tensor == expected[name]).all() for name, tensor in found.items())
    # What is published is complete: the configurations and the tokenizer are those of the model.
    last, first = (Path(root.at(f"policies/version={version}")) for version in (2, 0))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (last / name).read_bytes() == (first / name).read_bytes()


def test_a_model_named_from_another_working_directory_is_found(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = create_root(str(tmp_path / "run"), "models/mine")
    remember_model(root)
    (tmp_path / "elsewhere" / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    other_model(tmp_path / "elsewhere" / "models" / "mine")  # of the same name, from here
    with first_model(root) as folder:
        assert folder == model


@pytest.mark.slow
def test_first_weights_that_are_nowhere_are_said_to_be_needed(root: Root, model: Path, tmp_path: Path) -> None:
    remember_model(root)
    moved = model.rename(tmp_path / "moved")
    where = rf"{model}: there is no such folder.*--model PATH"
    with pytest.raises(
        ModelError, match=rf"began with {model}, whose first weights are needed and are nowhere: {where}"
    ):
        train(root, num_steps=1)
    assert train_with(root, str(moved), num_steps=1) == 1
    # The new path is not kept: the checkpoint is enough from now on.
    assert root.record.model == str(model)
    assert train(root, num_steps=2) == 2


@pytest.mark.slow
def test_adapters_need_the_first_weights_at_each_start(root: Root, model: Path, tmp_path: Path) -> None:
    assert train(root, num_steps=1, publish_lora="adapter", **LORA) == 1
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="first weights are needed and are nowhere"):
        train(root, num_steps=2, publish_lora="adapter", **LORA)
    assert train_with(root, str(moved), num_steps=2, publish_lora="adapter", **LORA) == 2
    adapter = json.loads(root.read("policies/version=3/adapter_config.json"))
    assert adapter["base_model_name_or_path"] == str(moved)
    # A worker is told as well where the base of older adapters is, which name the old path.
    with pytest.raises(ModelError, match="the weights could not be loaded"):
        TransformersEngine(root.at("policies/version=1"), device="cpu")
    TransformersEngine(root.at("policies/version=1"), device="cpu", base=lambda: str(moved))


def test_another_model_is_refused_by_what_differs(root: Root, tmp_path: Path) -> None:
    train(root, num_steps=1)
    other = other_model(tmp_path / "other")
    with pytest.raises(
        ModelError, match=r"other is not the model that .*run began with .*: weights differ \(model.safe"
    ):
        train_with(root, other, num_steps=2)
    file = tmp_path / "other" / "tokenizer_config.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ModelError, match=r"tokenizer differs \(tokenizer_config.json\); weights differ"):
        train_with(root, other, num_steps=2)
    assert query(root, "select count(*) from attempts") == [(1,)]


def test_weights_that_changed_where_the_model_was_are_refused(root: Root, model: Path, tmp_path: Path) -> None:
    remember_model(root)
    shutil.copy(Path(other_model(tmp_path / "other")) / "model.safetensors", model)
    with pytest.raises(
        ModelError, match=rf"nowhere: {model}: weights differ \(model.safetensors\); give its location with --model"
    ):
        train(root, num_steps=1)


@pytest.mark.slow
def test_the_policy_of_step_0_is_the_first_model(root: Root, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(root, num_steps=1)
    root.delete("checkpoints")
    before = {name: root.read(f"policies/version=0/{name}") for name in ("config.json", "model.safetensors")}
    shutil.rmtree(model)
    assert train(root, num_steps=1) == 1
    assert "the first weights are those of policies/version=0" in caplog.text
    assert root.read("policies/version=2/model.safetensors") == before["model.safetensors"]


@pytest.mark.slow
def test_the_reference_that_is_the_first_model_moves_with_it(root: Root, model: Path, tmp_path: Path) -> None:
    settings = {"reference": str(model), "kl_weight": 0.1}
    train(root, num_steps=1, **settings)
    root.delete("policies/version=0")
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="first weights are needed"):
        train(root, num_steps=2, **settings)
    assert train_with(root, str(moved), num_steps=2, **settings) == 2
    assert FirstModel(root=root, given=str(moved)).is_named(str(moved))


@pytest.mark.slow
def test_an_old_root_gets_its_model_at_the_next_start_that_finds_it(root: Root, model: Path, tmp_path: Path) -> None:
    train(root, num_steps=1)
    root.delete("model")
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"does not say which model it began with, so that .*moved can't be compared"):
        train_with(root, str(moved), num_steps=2)
    with pytest.raises(ModelError, match="there is no such folder"):
        train(root, num_steps=2)
    moved.rename(model)
    train(root, num_steps=2)
    assert read_identity(root) == identify(model, str(model), at=str(model))


def test_a_url_is_fetched_and_is_no_path(
    root_url: str, tmp_path: Path, tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "://" not in root_url:
        root_url = f"file://{root_url}"
    fs, path = fsspec.core.url_to_fs(f"{root_url}/weights", use_listings_cache=False)
    fs.put(tiny_folder, path, recursive=True)
    monkeypatch.chdir(tmp_path)
    root = create_root(str(tmp_path / "mine"), f"{root_url}/weights")
    fill(root, num_files=1)
    before = sorted(tmp_path.iterdir())
    assert train(root, num_steps=1) == 1
    assert sorted(tmp_path.iterdir()) == before
    identity = read_identity(root)
    assert identity is not None
    assert identity.differences(identify(Path(tiny_folder), "")) == ""
    with pytest.raises(ModelError, match=r"none: holds no config.json"), local_folder(f"{root_url}/none"):
        pass


def test_a_model_of_the_hub_is_the_revision_that_the_run_began_with(
    tmp_path: Path, tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--name"
    shutil.copytree(tiny_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    root = create_root(str(tmp_path / "run"), "org/name")
    remember_model(root)
    identity = read_identity(root)
    assert identity is not None
    assert (identity.source, identity.revision, identity.folder) == ("org/name", commit, None)
    # The branch moves on; the run does not.
    later = "f" * 40
    shutil.copytree(tiny_folder, repository / "snapshots" / later)
    (repository / "refs" / "main").write_text(later)
    with first_model(root) as folder:
        assert folder == repository / "snapshots" / commit
    remember_model(root, tiny_folder)  # the same files in a folder


def test_models_are_compared_by_fingerprint_where_both_roots_have_one(root: Root, model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    same, other = (
        create_root(str(tmp_path / "a"), str(copy)),
        create_root(str(tmp_path / "b"), other_model(tmp_path / "o")),
    )
    assert same_model(root, same) == f"model is {str(copy)!r} there and {str(model)!r} here"
    for each in (root, same, other):
        remember_model(each)
    assert same_model(root, same) == ""
    assert same_model(root, other) == "weights differ (model.safetensors)"


def test_a_root_elsewhere_keeps_its_model_too(root_url: str, tiny_folder: str) -> None:
    root = create_root(f"{root_url}-{uuid.uuid4()}", tiny_folder)
    remember_model(root)
    assert root.exists(IDENTITY.template)
    with first_model(root) as folder:
        assert folder == Path(tiny_folder)
