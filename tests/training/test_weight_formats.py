"""Weights in every form in which Hugging Face models come, and what is wrong with those that do not fit."""

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ludic.errors import ModelError
from ludic.training.model import full_state_dict, load_model, save_weights, shard

LAYER = "model.layers.1.mlp.up_proj.weight"


def write(folder: Path, weights: Mapping[str, Tensor], kind: str) -> None:
    """Put weights into a folder in one form; those in shards have two."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    form, _, suffix = kind.partition(".")
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    if form == "whole":
        write_file(folder / f"{stem}.{suffix}", weights)
        return
    names = sorted(weights)
    shards = {f"{stem}-0000{number + 1}-of-00002.{suffix}": names[number::2] for number in range(2)}
    for file, held in shards.items():
        write_file(folder / file, {name: weights[name] for name in held})
    file_of = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": file_of}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def write_file(path: Path, weights: Mapping[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        save_file(dict(weights), path, metadata={"format": "pt"})
    else:
        torch.save(dict(weights), path)


@pytest.fixture(params=["whole.safetensors", "shards.safetensors", "whole.bin", "shards.bin", "whole.pt", "shards.pt"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def weights(model_folder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_model(str(model_folder)).state_dict().items()}


def saved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the head, which is tied."""
    return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}


def test_every_form_is_read(model_folder, weights, kind):
    changed = {name: tensor + 1 for name, tensor in saved(weights).items()}
    write(model_folder, changed, kind)
    loaded = load_model(str(model_folder), strict=True).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in changed.items())
    assert torch.equal(loaded["lm_head.weight"], changed["model.embed_tokens.weight"])


def test_a_tensor_that_is_missing_is_named(model_folder, weights, kind):
    write(model_folder, {name: tensor for name, tensor in saved(weights).items() if name != LAYER}, kind)
    with pytest.raises(ModelError, match=rf"{model_folder}: the weights lack {LAYER}; the folder is incomplete"):
        load_model(str(model_folder))


def test_a_tensor_of_another_shape_is_named_with_both(model_folder, weights, kind):
    write(model_folder, saved(weights) | {LAYER: torch.zeros(3, 5)}, kind)
    with pytest.raises(ModelError, match=rf"hold {LAYER} \(3, 5\), the model's is \(128, 64\)"):
        load_model(str(model_folder))


def test_a_tensor_too_many_is_named_when_strict(model_folder, weights, kind):
    write(model_folder, saved(weights) | {"extra.weight": torch.zeros(3)}, kind)
    load_model(str(model_folder))
    with pytest.raises(ModelError, match=r"the weights hold extra\.weight, which the model does not use"):
        load_model(str(model_folder), strict=True)


@pytest.mark.parametrize("kind", ["shards.safetensors", "shards.bin", "shards.pt"])
def test_a_shard_that_is_missing_is_an_error(model_folder, weights, kind):
    write(model_folder, saved(weights), kind)
    (shard_file,) = model_folder.glob("*-00002-of-00002.*")
    shard_file.unlink()
    with pytest.raises(ModelError, match="the weights could not be loaded"):
        load_model(str(model_folder))


class MakesFolder:
    """Unpickled, it makes a folder: as an attacker's would run what it likes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.pt"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_would_run_something_is_refused_and_does_not(tmp_path, model_folder, weights, file, is_zip):
    harm = tmp_path / "harm"
    path = model_folder / file
    write(model_folder, saved(weights), "whole.bin")
    content = saved(weights) | {LAYER: MakesFolder(harm)}
    (model_folder / "pytorch_model.bin").unlink()
    if is_zip:
        torch.save(content, path)
        assert zipfile.is_zipfile(path)
    else:
        path.write_bytes(pickle.dumps({LAYER: MakesFolder(harm)}))
    with pytest.raises(ModelError, match="the weights could not be loaded"):
        load_model(str(model_folder))
    assert not harm.exists()


def test_weights_that_are_larger_than_a_file_may_be_are_saved_in_shards_that_load(tmp_path, mesh, tiny_model):
    model = tiny_model()
    shard(model, mesh)
    weights = full_state_dict(model)
    # 98,944 weights of 4 bytes, none of more than 65,536 bytes.
    save_weights(model, weights, tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) >= 4
    assert all(file.stat().st_size < 110_000 for file in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert set(index["weight_map"].values()) == {file.name for file in shards}
    loaded = load_model(str(tmp_path), strict=True).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
