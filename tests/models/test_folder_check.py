"""A model's folder may come with another user's root: no file of it has others opened, or code of the Hub run."""

import ast
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model, publish
from transformers import PretrainedConfig

import ludic
from ludic.adapters.exports.weights import export_weights
from ludic.base.model_folders import check_model_folder
from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import ModelError
from ludic.models.chat import load_tokenizer, read_tokenizer
from ludic.models.lora import base_of_adapter, merge_adapter
from ludic.models.weight_files import load_config, load_pretrained, make_config, open_weights
from ludic.rollouts.sample import Question, sample_run
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.training.model import load_model, load_sharded

PACKAGE = Path(ludic.__file__).parent
LOADERS = ("from_pretrained", "from_config", "_from_config", "for_model", "get_config_dict", "load_adapter")
CHECKS = ("check_model_folder", "_check_files", "check_values", "check_adapter", "_read_config")
OURS = {"attn_implementation", "experts_implementation", "trust_remote_code"}
PLACES: dict[tuple[str, str, str], set[str]] = {
    ("weight_files.py", "load_pretrained", "kind.from_pretrained"): OURS | {"config"},
    ("weight_files.py", "make_model", "AutoModelForCausalLM.from_config"): OURS,
    ("weight_files.py", "make_config", "AutoConfig.for_model"): set(),
    ("weight_files.py", "_read_config", "AutoConfig.from_pretrained"): {"trust_remote_code"},
    ("weight_files.py", "_check_files", "PretrainedConfig.get_config_dict"): set(),
    ("weight_files.py", "load_generation_config", "StoredGenerationConfig.from_pretrained"): set(),
    ("chat.py", "load_tokenizer", "AutoTokenizer.from_pretrained"): {"trust_remote_code"},
    ("lora.py", "load_adapter", "LoraConfig.from_pretrained"): set(),
    ("lora.py", "merge_adapter", "PeftModel.from_pretrained"): set(),
}
"""Where transformers or peft reads a folder, or makes a model, and the arguments that are given there."""
UNCHECKED = {
    "make_model": "gives its own implementations, and reads no file",
    "load_generation_config": "the file names no other, and no code without trust_remote_code",
}


def loads(path: Path) -> Iterator[tuple[tuple[str, str, str], ast.FunctionDef, ast.Call | None]]:
    """Yield each mention of a loader in a module: its place, the function that it is in, and the call."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        calls = {call.func: call for call in ast.walk(function) if isinstance(call, ast.Call)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in LOADERS:
                yield (path.name, function.name, ast.unparse(node)), function, calls.get(node)


def test_each_load_is_at_a_checked_place_and_says_what_is_run() -> None:
    paths = (path for path in PACKAGE.rglob("*.py") if any(name in path.read_text() for name in LOADERS))
    found = {place: (function, call) for path in paths for place, function, call in loads(path)}
    assert set(found) == set(PLACES)
    for place, (function, call) in found.items():
        assert call is not None, place
        assert PLACES[place] <= {keyword.arg for keyword in call.keywords}, place
        called = {ast.unparse(each.func) for each in ast.walk(function) if isinstance(each, ast.Call)}
        assert called.intersection(CHECKS) or place[1] in UNCHECKED, place


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_model(tmp_path_factory.mktemp("sound"), seed=0))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if anything looks for the package `kernels`, which downloads code of the Hub."""
    asked: list[str] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name.split(".")[0] == "kernels":
                asked.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    yield
    assert asked == []


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


EVERY_LOAD: dict[str, Callable[[str], object]] = {
    "configuration": load_config,
    "tokenizer": load_tokenizer,
    "tokenizer without transformers": read_tokenizer,
    "weights": lambda folder: load_pretrained(folder, dtype=None),
    "engine": TransformersEngine,
    "trainer": load_model,
    "trainer without weights": lambda folder: load_sharded(folder, None, with_weights=False),  # type: ignore[arg-type]
}
"""The ways in which ludic has a folder read; vLLM gets no folder whose configuration was not loaded before."""
CODE = [
    {"_attn_implementation": "evil/kernel"},
    {"attn_implementation": "evil/kernel"},
    {"_attn_implementation_internal": "evil/kernel"},
    {"attn_implementation": "paged|evil/kernel@main:f"},
    {"attn_implementation": {"": "sdpa", "text_config": "evil/kernel"}},
    {"experts_implementation": "evil/kernel"},
    {"_experts_implementation": "evil/kernel"},
    {"_experts_implementation_internal": "evil/kernel"},
    {"text_config": {"attn_implementation": "evil/kernel"}},
    {"vision_config": {"deeper": [{"_experts_implementation": ["evil/kernel"]}]}},
]


@pytest.mark.parametrize("load", EVERY_LOAD.values(), ids=EVERY_LOAD)
@pytest.mark.usefixtures("no_kernels", "mesh")
def test_code_of_the_hub_in_a_configuration_is_refused_by_every_load(
    folder: Path, load: Callable[[str], object]
) -> None:
    text = (folder / "config.json").read_text()
    for values in CODE:
        (folder / "config.json").write_text(text)
        change(folder / "config.json", **values)
        with pytest.raises(ModelError) as caught:
            load(str(folder))
        assert str(caught.value).startswith(f"{folder}/config.json: "), values
        assert "_implementation" in str(caught.value)
        assert "evil/kernel" in str(caught.value)
        assert "names code of the Hub" in str(caught.value)


@pytest.mark.usefixtures("no_kernels")
def test_another_configuration_that_config_json_names_is_checked_too(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    change(folder / "config.json", configuration_files=["config.4.0.0.json"])
    (folder / "config.4.0.0.json").write_text(text)
    change(folder / "config.4.0.0.json", attn_implementation="evil/kernel")
    with pytest.raises(ModelError, match=r"config\.4\.0\.0\.json: attn_implementation is 'evil/kernel'"):
        load_config(str(folder))


@pytest.mark.parametrize("load", [load_config, lambda name: load_pretrained(name, dtype=None)])
def test_the_configuration_of_a_model_of_the_hub_is_checked_before_it_is_used(
    load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"model_type": "qwen3", "attn_implementation": "evil/kernel"}
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda name, **_: (values, {}))
    with pytest.raises(ModelError, match="evil/model: attn_implementation is 'evil/kernel'"):
        load("evil/model")


def test_values_of_another_rank_are_checked_too(folder: Path) -> None:
    with pytest.raises(ModelError, match="qwen3: attn_implementation is 'evil/kernel'"):
        make_config({"model_type": "qwen3", "attn_implementation": "evil/kernel"})


@pytest.mark.usefixtures("no_kernels")
def test_ludic_chooses_the_implementations_itself(folder: Path) -> None:
    """transformers has kernels of its own for these names, which it fetches from the Hub."""
    values = {"_attn_implementation": "flash_attention_2", "experts_implementation": "sonicmoe"}
    change(folder / "config.json", **values, attn_implementation="flash_attention_3")
    model: Any = load_pretrained(str(folder), dtype=None)
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation in ("grouped_mm", "eager")
    assert load_pretrained(str(folder), dtype=None, attn_implementation="eager").config._attn_implementation == "eager"


# --- Files that files of the folder name ---------------------------------------------------------------------------


def split_weights(folder: Path, name: str) -> None:
    """Replace model.safetensors by an index that names another file for each tensor."""
    with open_weights(str(folder)) as stored:
        weight_map = dict.fromkeys(stored, name)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def hostile(folder: Path, tmp_path: Path) -> Path:
    """A folder whose index names the weights of a private model beside it."""
    private = tmp_path / "private"
    private.mkdir()
    shutil.copy(folder / "model.safetensors", private)
    split_weights(folder, "../private/model.safetensors")
    return folder


OUTSIDE = r"index\.json: weight_map has '{}', wanted a path below its folder"


@pytest.mark.parametrize("load", EVERY_LOAD.values(), ids=EVERY_LOAD)
@pytest.mark.usefixtures("mesh")
def test_no_load_reads_weights_outside_of_the_folder(hostile: Path, load: Callable[[str], object]) -> None:
    with pytest.raises(ModelError, match=OUTSIDE.format(r"\.\./private/model\.safetensors")):
        load(str(hostile))


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("found", ["/etc/x", "a/../../x", "", "a//x", "a\\x", "C:/x", "a\0"])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / name).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": found}}))
    with pytest.raises(ModelError) as caught:
        check_model_folder(tmp_path)
    assert f"{tmp_path}/{name}: weight_map has {found!r}, wanted" in str(caught.value)


def test_an_engine_in_use_reads_no_weights_outside_of_the_folder(sound: Path, hostile: Path) -> None:
    engine = TransformersEngine(str(sound))
    with pytest.raises(ModelError, match="weight_map has"):
        engine.load_weights(str(hostile), 1)
    with pytest.raises(ModelError, match="weight_map has"), open_weights(str(hostile)):
        pass


def test_sample_and_export_read_no_weights_outside_of_the_root(sound: Path, hostile: Path, tmp_path: Path) -> None:
    root = put_run(str(tmp_path / "run"), RunConfig(model=str(sound), env=("moar_cats",)))
    version = publish(root, str(hostile), budget=1)
    (tmp_path / "run" / "policies" / "private").mkdir()
    shutil.copy(tmp_path / "private" / "model.safetensors", tmp_path / "run" / "policies" / "private")
    with pytest.raises(ModelError, match=rf"{root.url}/policies/version={version}/.*weight_map has"):
        sample_run(root, Question(prompt="what is the sum"), version)
    with pytest.raises(ModelError, match="weight_map has"):
        export_weights(root, str(tmp_path / "exported"), version=version)
    assert not (tmp_path / "exported").exists()


def test_shards_of_the_hubs_cache_which_are_links_are_loaded(folder: Path, tmp_path: Path) -> None:
    wanted = load_pretrained(str(folder), dtype=None).state_dict()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    shutil.copy(folder / "model-00001-of-00001.safetensors", folder / "model.safetensors")
    split_weights(folder, "model-00001-of-00001.safetensors")
    snapshot = tmp_path / "snapshots" / "a0"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    found = load_pretrained(str(snapshot), dtype=None).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("file", "values", "found"),
    [
        ("config.json", {"transformers_weights": "../private/model.safetensors"}, "../private/model.safetensors"),
        ("config.json", {"configuration_files": ["config.4.0/../../x.json"]}, "config.4.0/../../x.json"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]}, "../tokenizer.4.0.0.json"),
    ],
)
def test_other_files_are_named_below_the_folder_only(folder: Path, file: str, values: dict, found: str) -> None:
    change(folder / file, **values)
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(ModelError) as caught:
            load(str(folder))
        assert f"{folder}/{file}: {next(iter(values))} has {found!r}, wanted a path" in str(caught.value)


def test_an_index_in_a_folder_below_is_checked_too(folder: Path) -> None:
    change(folder / "config.json", transformers_weights="below/w.safetensors.index.json")
    (folder / "below").mkdir()
    (folder / "below" / "w.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "/etc/x"}}))
    with pytest.raises(ModelError, match=r"below/w\.safetensors\.index\.json: weight_map has '/etc/x'"):
        load_pretrained(str(folder), dtype=None)


def test_names_that_another_machine_left_in_a_tokenizers_configuration_are_not_opened(folder: Path) -> None:
    wanted = load_tokenizer(str(folder))("the sum of two")["input_ids"]
    names = ("vocab_file", "tokenizer_file", "special_tokens_map_file", "gguf_file", "merges_file")
    change(folder / "tokenizer_config.json", **dict.fromkeys(names, "/root/.cache/there/file"))
    assert load_tokenizer(str(folder))("the sum of two")["input_ids"] == wanted


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"peft_type": "SHADOW", "shadow_model": "evil/model"}, "peft_type is 'SHADOW'"),
        ({"peft_type": "LORA", "megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config is {'a': 1}"),
    ],
)
def test_an_adapter_of_another_method_is_refused(folder: Path, values: dict, found: str) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "m", **values}))
    base = load_pretrained
    for load in (base_of_adapter, load_config, lambda name: merge_adapter(base, name)):  # type: ignore[arg-type]
        with pytest.raises(ModelError) as caught:
            load(str(folder))
        assert f"{folder}/adapter_config.json: {found}" in str(caught.value)


def test_what_is_no_json_is_left_to_its_reader(tmp_path: Path) -> None:
    for name, text in (("config.json", "{"), ("config_of_mine.json", "[" * 100_000), ("tokenizer_config.json", "3")):
        (tmp_path / name).write_text(text)
    check_model_folder(tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json that transformers can use"):
        load_config(str(tmp_path))
