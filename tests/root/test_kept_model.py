"""What a root keeps of its model: fingerprints that tell another model, files that several starts put at once."""

import hashlib
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ludic.errors import ModelError, SchemaError
from ludic.root.catalogue import IDENTITY
from ludic.root.maintenance.verify.other_files import check_model
from ludic.root.root import Root
from ludic.root.weights.weight_folders import copy_snapshot, identify, keep_model, read_identity, read_snapshot
from ludic.run.run_json import put_run, run_of

FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"the same, pickled",
    "README.md": b"about",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "source"


def test_every_file_that_counts_has_its_fingerprint(folder: Path) -> None:
    identity = identify(folder, "org/name")
    assert set(identity.config) == {"config.json", "generation_config.json"}
    assert set(identity.tokenizer) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "additional_chat_templates/tools.jinja",
    }
    # pickled weights are not loaded where there are safetensors
    assert set(identity.weights) == {name for name in FILES if name.startswith("model")}
    assert identity.weights["model-00002-of-00002.safetensors"] == hashlib.sha256(b"second").hexdigest()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("config.json", "config"), ("tokenizer.json", "tokenizer"), ("model-00001-of-00002.safetensors", "weights")],
)
def test_a_changed_file_is_named_with_its_kind(folder: Path, name: str, kind: str) -> None:
    before = identify(folder, "here")
    (folder / name).write_bytes(b"changed")
    assert before.differences(identify(folder, "there")) == f"{kind} differ{'' if kind == 'weights' else 's'} ({name})"
    (folder / name).write_bytes(FILES[name])
    (folder / "README.md").write_bytes(b"changed")
    assert before.differences(identify(folder, "there")) == ""


def test_a_folder_without_weights_or_configuration_is_no_model(folder: Path) -> None:
    for file in (*folder.glob("model*"), *folder.glob("pytorch*")):
        file.unlink()
    with pytest.raises(ModelError, match=r"here: .*source holds no weights \(model.safetensors\)"):
        identify(folder, "here")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"here: .*source holds no config.json"):
        identify(folder, "here")


def test_the_root_keeps_all_but_the_weights_and_two_starts_agree(root: Root, folder: Path) -> None:
    assert read_identity(root) is None
    identity = identify(folder, "here", at=str(folder))
    keep_model(root, folder, identity)
    keep_model(root, folder, replace(identity, folder="/elsewhere"))
    assert read_identity(root) == identity
    small = {*identity.config, *identity.tokenizer}
    assert root.list("model") == sorted([IDENTITY.template, *(f"model/{name}" for name in small)])
    assert read_snapshot(root, identity.tokenizer) == {name: FILES[name] for name in identity.tokenizer}
    assert len(set(root.list(""))) == len(small) + 2


def test_another_model_is_never_put_over_the_one_that_is_there(root: Root, folder: Path) -> None:
    keep_model(root, folder, identify(folder, "here"))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"other weights")
    with pytest.raises(
        ModelError, match=r"there is not the model that .* began with \(here\): weights differ \(model-"
    ):
        keep_model(root, folder, identify(folder, "there"))
    (folder / "config.json").write_bytes(b"{}")
    with pytest.raises(ModelError, match=r"model holds another config.json than there"):
        keep_model(root, folder, identify(folder, "there"))


def test_a_run_of_the_same_model_gets_the_same_files_weights_included(root: Root, folder: Path, tmp_path: Path) -> None:
    with root.scratch_folder() as scratch:
        for name in FILES:
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_bytes(FILES[name])
        keep_model(root, scratch, identify(scratch, "made"), with_weights=True)
    other = put_run(str(tmp_path / "other"), run_of(root))
    copy_snapshot(root, other)
    assert read_identity(other) == read_identity(root)
    assert {name: other.read(name) for name in other.list("model")} == {n: root.read(n) for n in root.list("model")}
    assert other.read("model/model-00001-of-00002.safetensors") == b"first"


def test_a_damaged_file_is_named(root: Root, folder: Path) -> None:
    identity = identify(folder, "here")
    keep_model(root, folder, identity)
    root.put("model/tokenizer.json", b"{!")
    with pytest.raises(ModelError, match=r"model/tokenizer.json is damaged; delete model/identity.json and that file"):
        read_snapshot(root, identity.tokenizer)
    root.delete("model/tokenizer.json")
    with pytest.raises(ModelError, match=r"model/tokenizer.json is missing"):
        read_snapshot(root, identity.tokenizer)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"source": 1}', b'{"source": "a", "config": 1, "tokenizer": {}, "weights": {}}']
)
def test_an_identity_that_is_none_is_named(root: Root, data: bytes) -> None:
    root.put(IDENTITY.template, data)
    with pytest.raises(
        SchemaError, match=r"identity.json is no identity of a model that ludic can read: .*; delete it"
    ):
        read_identity(root)


def test_every_flipped_bit_of_what_is_kept_is_named(root: Root, folder: Path) -> None:
    with root.scratch_folder() as scratch:
        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        keep_model(root, scratch, identify(scratch, "made"), with_weights=True)
    assert list(check_model(root)) == []
    for name in root.list("model"):
        data = bytearray(root.read(name))
        bit = random.Random(name).randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        sound = root.read(name)
        root.put(name, bytes(data))
        assert [finding.where for finding in check_model(root)] == [name]
        root.put(name, sound)
    root.delete("model/tokenizer.json")
    assert [(f.where, f.problem.partition(";")[0]) for f in check_model(root)] == [
        ("model/tokenizer.json", "is missing")
    ]


def test_what_a_newer_ludic_adds_to_an_identity_is_left_out(root: Root) -> None:
    root.put(IDENTITY.template, b'{"source": "a", "config": {}, "tokenizer": {}, "weights": {}, "licence": "MIT"}')
    identity = read_identity(root)
    assert identity is not None
    assert (identity.source, identity.folder) == ("a", None)


def test_a_name_in_an_identity_leads_nowhere(root: Root) -> None:
    with pytest.raises(ModelError, match=r"\.\./run.json is missing"):
        read_snapshot(root, {"../run.json": "0" * 64})


def test_the_hubs_own_digest_of_a_large_file_spares_reading_it(folder: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"gigabytes")
    for name in ("model-00001-of-00002.safetensors", "tokenizer.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(blob if name.startswith("model") else folder / "config.json")
    identity = identify(folder, "org/name")
    assert identity.weights["model-00001-of-00002.safetensors"] == "ab" * 32
    assert identity.tokenizer["tokenizer.json"] == hashlib.sha256(FILES["config.json"]).hexdigest()
