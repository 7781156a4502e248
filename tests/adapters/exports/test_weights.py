"""`ludic export --format hf`: weights of any step or version as transformers loads them."""

import json
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from filesystems import CRASHES, FaultyFileSystem, ProcessDied, SharedStorage
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load
from tiny_runs import create_root, fill, make_model, query, train_here, train_until_killed
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.adapters.exports import weights
from ludic.adapters.exports.weights import export_weights
from ludic.errors import ConfigError, ModelError, SchemaError
from ludic.root.attempts import start_attempt
from ludic.root.root import Root
from ludic.root.weights.policies import fetch_policy


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Three steps, each published and checkpointed, in files of at most 20 kB; not to be changed."""
    folder = tmp_path_factory.mktemp("weights")
    root = create_root(str(folder / "run"), make_model(folder / "model"))
    fill(root, num_files=2)
    train_here(root, num_steps=3, checkpoint_every=1, max_shard_size="20KB")
    return root


def stored(root: Root, folder: str) -> dict[str, torch.Tensor]:
    """Tensors of all the safetensors files of a folder of weights."""
    files = [name for name in root.list(folder) if "/model" in name and name.endswith(".safetensors")]
    assert len(files) > 1, "not in shards"
    return {name: tensor for file in files for name, tensor in load(root.read(file)).items()}


def assert_loads(folder: str | Path, expected: dict[str, torch.Tensor]) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(folder).decode([5])


@pytest.mark.parametrize(
    ("choice", "source"),
    [
        ({"step": 2}, "checkpoints/attempt=1/step=2"),
        ({"version": 1}, "policies/version=1"),
        ({}, "policies/version=3"),  # the newest
    ],
)
def test_transformers_loads_what_the_run_holds(trained: Root, tmp_path: Path, choice: dict, source: str) -> None:
    out = tmp_path / "models" / "exported"
    report = export_weights(trained, str(out), **choice)
    assert (report.location, report.source) == (str(out), source)
    assert_loads(out, stored(trained, source))
    files = [file for file in out.rglob("*") if file.is_file()]
    assert (report.num_files, report.size_bytes) == (len(files), sum(file.stat().st_size for file in files))
    # Nothing of the trainer's state, and nothing half-made beside it.
    assert not {"optimizer.safetensors", "random.safetensors", "checkpoint.json", "policy.json"} & set(map(str, files))
    assert [file.name for file in out.parent.iterdir()] == ["exported"]


def test_weights_go_from_any_filesystem_to_any_other(root_url: str, trained: Root, tmp_path: Path) -> None:
    url = f"{root_url}/exported"
    export_weights(trained, url, version=2)
    fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    fs.get(path, str(tmp_path / "copy"), recursive=True)
    assert_loads(tmp_path / "copy", stored(trained, "policies/version=2"))


@pytest.mark.parametrize("choice", [{"step": 7}, {"version": 7}])
def test_what_is_not_there_is_refused_with_what_is(trained: Root, tmp_path: Path, choice: dict) -> None:
    message = {"step": "no checkpoint of step 7; there are steps 1, 2, 3$"}
    message["version"] = "no weights of version 7; there are versions 0, 1, 2, 3$"
    with pytest.raises(ConfigError, match=message[next(iter(choice))]):
        export_weights(trained, str(tmp_path / "out"), **choice)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_weights_says_so(new_root, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no weights of any version; there are no versions"):
        export_weights(new_root, str(tmp_path / "out"))


@pytest.fixture
def new_root(tmp_path: Path) -> Root:
    return create_root(str(tmp_path / "new"), "no-model")


def test_nothing_is_overwritten(trained: Root, root_url: str) -> None:
    url = f"{root_url}/exported"
    export_weights(trained, url, version=1)
    with pytest.raises(ConfigError, match=r"exported exists; choose another target, or delete it"):
        export_weights(trained, url, version=2)


@pytest.mark.slow
def test_of_two_attempts_at_a_step_the_one_that_the_run_stands_on_is_exported(tmp_path: Path) -> None:
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=3)
    train_until_killed(root, at_step=3, num_steps=4, checkpoint_every=1)
    start_attempt(root, parent_attempt=1, parent_step=1)  # somebody goes back
    train_here(root, num_steps=3, checkpoint_every=1, keep_checkpoints=None, learning_rate=1e-2)
    assert query(root, "select attempt_id, parent_attempt, parent_step from attempts order by all")[-1] == (3, 1, 1)
    assert export_weights(root, str(tmp_path / "two"), step=2).source == "checkpoints/attempt=3/step=2"
    assert export_weights(root, str(tmp_path / "one"), step=1).source == "checkpoints/attempt=1/step=1"


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("num_calls", range(1, 9, 2))
def test_an_export_that_is_cut_short_does_not_load_and_is_finished_by_the_same_call(
    trained: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int, crash
) -> None:
    shared, url = SharedStorage(MemoryFileSystem()), f"memory://{uuid.uuid4()}"
    connect = weights.Storage.connect
    faulty = FaultyFileSystem(shared)
    faulty.faults.extend([None] * num_calls + [crash])
    monkeypatch.setattr(weights.Storage, "connect", lambda target: connect(target, faulty))
    with pytest.raises(ProcessDied):
        export_weights(trained, url, version=1)
    names = {name.rpartition("/")[2] for name in shared.inner.find(url)}
    assert "config.json" not in names
    if shared.torn:  # no object store leaves half a file; what did is named, and not taken for whole
        return
    monkeypatch.setattr(weights.Storage, "connect", lambda target: connect(target, FaultyFileSystem(shared)))
    export_weights(trained, url, version=1)
    shared.inner.get(url, str(tmp_path / "copy"), recursive=True)
    assert_loads(tmp_path / "copy", stored(trained, "policies/version=1"))


def test_weights_that_a_trainer_prunes_meanwhile_are_not_half_exported(tmp_path: Path) -> None:
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    train_here(root, num_steps=1)

    class Pruned(type(root.fs)):
        """Loses the folder's config.json, as a trainer deletes it first, while the weights are copied."""

        cachable = False

        def get_file(self, rpath, lpath, **options):
            super().get_file(rpath, lpath, **options)
            Path(root.path, "policies/version=1/config.json").unlink(missing_ok=True)

    with pytest.raises(ConfigError, match="policies/version=1 was deleted while it was copied; export a newer one"):
        export_weights(Root.open(root.url, fs=Pruned()), str(tmp_path / "out"), version=1)
    assert not (tmp_path / "out").exists()


def test_a_published_version_is_the_folder_that_a_worker_loads(trained: Root, tmp_path: Path) -> None:
    export_weights(trained, str(tmp_path / "out"), version=3)
    config = json.loads(Path(fetch_policy(trained, 3, tmp_path), "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


@pytest.mark.slow
@pytest.mark.parametrize("publish_lora", ["merged", "adapter"])
def test_adapters_are_exported_as_the_model_that_they_make(tmp_path: Path, publish_lora: str) -> None:
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    train_here(root, num_steps=2, lora_rank=4, learning_rate=1e-2, publish_lora=publish_lora, checkpoint_every=1)
    for name, choice in {"step": {"step": 2}, "version": {"version": 2}}.items():
        export_weights(root, str(tmp_path / name), **choice)
    by_step, by_version = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("step", "version"))
    first = AutoModelForCausalLM.from_pretrained(root.record.model).state_dict()
    assert not list(tmp_path.glob("*/adapter*"))
    for name, weight in by_step.state_dict().items():
        assert torch.allclose(weight, by_version.state_dict()[name], rtol=0, atol=1e-6), name
        assert torch.equal(weight, first[name]) != name.endswith("_proj.weight"), name


def test_an_adapter_that_does_not_fit_its_model_is_refused(tmp_path: Path) -> None:
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    train_here(root, num_steps=1, lora_rank=4)
    checkpoint = tmp_path / "run/checkpoints/attempt=1/step=1"
    (checkpoint / "adapter_model.safetensors").write_bytes(b"half a file")
    with pytest.raises(SchemaError, match=r"/step=1/adapter_model.safetensors does not match its digest"):
        export_weights(root, str(tmp_path / "out"), step=1)
    (checkpoint / "digests.json").unlink()  # as of a ludic that wrote none
    with pytest.raises(ModelError, match=r"/run/checkpoints/attempt=1/step=1: the LoRA adapter could not be "):
        export_weights(root, str(tmp_path / "out"), step=1)
    assert not (tmp_path / "out").exists()
