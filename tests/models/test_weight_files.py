"""A new version of the weights is read into the model in use; see also what test_engine.py says of load_weights."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from model_families import FAMILIES, VOCAB_SIZE, random_model_of
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ludic.engines import transformers_engine
from ludic.engines.engine import GenerationRequest, SamplingParams, generate_all
from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import ModelError
from ludic.models.weight_files import check_folder, load_config, load_pretrained, read_into

REQUEST = GenerationRequest(
    prompt_tokens=np.arange(3, 9, dtype=np.int32), params=SamplingParams(max_tokens=4, temperature=0.0), seed=0
)
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def save_two(make: Callable[[], PreTrainedModel], folder: Path, **options: str) -> tuple[Path, Path]:
    """Save a model and, in another folder, the same architecture with other weights."""
    first, second = folder / "first", folder / "second"
    model = make()
    model.save_pretrained(first, **options)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(second, **options)
    return first, second


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two versions of a model with an output layer of its own."""
    return save_two(lambda: random_model_of("qwen3", attention="sdpa"), tmp_path)


@pytest.fixture
def tied_folders(tmp_path: Path) -> tuple[Path, Path]:
    return save_two(lambda: random_model_of("qwen2", attention="sdpa"), tmp_path)


@pytest.fixture
def no_second_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to refuse models that are built from then on."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a second model was built")

    return lambda: monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


def an_engine(folder: Path, **options: torch.dtype) -> TransformersEngine:
    return TransformersEngine(str(folder), device="cpu", **options)


def weights_of(engine: TransformersEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_is_read_into_the_model_in_use_without_a_second_one(family, tmp_path, no_second_model):
    first, second = save_two(lambda: random_model_of(family, attention="sdpa"), tmp_path)
    engine, wanted = an_engine(first), weights_of(an_engine(second))
    assert any(not torch.equal(tensor, wanted[name]) for name, tensor in weights_of(engine).items())
    no_second_model()
    engine.load_weights(str(second), 4)
    assert_same(weights_of(engine), wanted)
    assert engine.policy_version == 4


def test_shards_are_read_into_the_model_in_use(tmp_path, no_second_model):
    first, second = save_two(lambda: random_model_of("qwen2", attention="sdpa"), tmp_path, max_shard_size="20kB")
    assert len(list(second.glob("model-*.safetensors"))) > 2
    engine, wanted = an_engine(first), weights_of(an_engine(second))
    no_second_model()
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_weights_are_converted_to_the_dtype_of_the_engine(stored, computed, folders, no_second_model):
    first, second = folders
    edit(second, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    engine, wanted = an_engine(first, dtype=computed), weights_of(an_engine(second, dtype=computed))
    no_second_model()
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)


def test_a_tensor_larger_than_the_buffer_is_read_whole(tmp_path, monkeypatch, no_second_model):
    # A buffer of 1,000 bytes takes 250 numbers at a time; the embedding has 256 x 32.
    monkeypatch.setattr("ludic.models.weight_files._BUFFER_BYTES", 1000)
    first, second = save_two(lambda: random_model_of("qwen2", attention="sdpa"), tmp_path)
    engine, wanted = an_engine(first), weights_of(an_engine(second))
    no_second_model()
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)


def under_the_other_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def under_both_names(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@pytest.mark.parametrize("change", [under_the_other_name, under_both_names])
def test_a_tied_weight_may_be_stored_under_any_of_its_names(change, tied_folders):
    first, second = tied_folders
    wanted = weights_of(an_engine(second))
    edit(second, change)
    engine = an_engine(first)
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)
    assert engine._model.lm_head.weight is engine._model.model.embed_tokens.weight


def test_names_that_transformers_translates_are_loaded(folders):
    """Here those of a checkpoint without the output layer's prefix for the others."""
    first, second = folders
    wanted = weights_of(an_engine(second))
    edit(second, lambda tensors: [tensors.update({n.removeprefix("model."): tensors.pop(n)}) for n in list(tensors)])
    engine = an_engine(first)
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)


def test_a_model_that_transformers_stores_in_other_pieces_is_loaded(tmp_path):
    """Files have a tensor for each expert, the model one for all."""
    settings = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    tokens = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1}
    config = Qwen3MoeConfig(**settings, **heads, **tokens)
    first, second = save_two(lambda: Qwen3MoeForCausalLM(config).eval(), tmp_path)
    stored = load_file(second / "model.safetensors")
    engine, wanted = an_engine(first), weights_of(an_engine(second))
    assert stored.keys() != wanted.keys()
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.update({UP_PROJ: tensors[UP_PROJ].T.contiguous()}),
            rf"mismatched_keys, the first: {UP_PROJ} is \(32, 64\), the model's is \(64, 32\)",
        ),
        (
            lambda tensors: tensors.update({UP_PROJ: tensors[UP_PROJ].to(torch.int32)}),
            rf"{UP_PROJ} is I32, which does not convert to the model's float32",
        ),
        (lambda tensors: tensors.pop(UP_PROJ), rf"missing_keys, the first of 1: {UP_PROJ}"),
        (
            lambda tensors: tensors.update({"model.extra.b": torch.zeros(2), "model.extra.a": torch.zeros(2)}),
            r"unexpected_keys, the first of 2: model\.extra\.a",
        ),
    ],
    ids=["shape", "dtype", "missing", "unexpected"],
)
def test_a_difference_is_refused_with_its_file_before_any_weight_changes(change, message, folders):
    first, second = folders
    engine = an_engine(first)
    before = weights_of(engine)
    edit(second, change)
    with pytest.raises(ModelError, match=f"^{second}/model.safetensors: .*{message}"):
        engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), before)
    assert engine.policy_version == 0
    generate_all(engine, [REQUEST])


def test_a_difference_in_the_last_shard_is_refused_before_any_weight_changes(tmp_path):
    first, second = save_two(lambda: random_model_of("qwen3", attention="sdpa"), tmp_path, max_shard_size="20kB")
    engine = an_engine(first)
    before = weights_of(engine)
    shard = sorted(second.glob("model-*.safetensors"))[-1]
    tensors = load_file(shard)
    name = min(tensors)
    save_file(tensors | {name: torch.zeros(3)}, shard, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"^{shard}: .*mismatched_keys, the first: {name} is \(3,\)"):
        engine.load_weights(str(second), 1)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match=f"^{shard}: the weights could not be loaded"):
        engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), before)


def just_before_copying(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something once the headers are checked and the weights are to be copied."""

    def read(*args: object) -> None:
        action()
        read_into(*args)

    monkeypatch.setattr(transformers_engine, "read_into", read)


def test_a_file_that_fails_half_way_leaves_the_engine_unusable_until_a_load_succeeds(folders, monkeypatch):
    first, second = folders
    engine = an_engine(first)
    wanted, file = weights_of(an_engine(second)), second / "model.safetensors"
    whole = file.read_bytes()
    just_before_copying(monkeypatch, lambda: os.truncate(file, len(whole) - 1000))
    with pytest.raises(ModelError, match=f"^{second}/model.safetensors: .* failed half-way .*ends early"):
        engine.load_weights(str(second), 1)
    monkeypatch.undo()
    assert engine.policy_version == 0
    with pytest.raises(ModelError, match=f"^{second}: .* half loaded"):
        generate_all(engine, [REQUEST])
    file.write_bytes(whole)
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)
    generate_all(engine, [REQUEST])
    assert engine.policy_version == 1


def test_a_folder_deleted_while_it_is_read_is_loaded_whole(folders, monkeypatch):
    """A trainer deletes versions that are no longer needed."""
    first, second = folders
    engine, wanted = an_engine(first), weights_of(an_engine(second))
    just_before_copying(monkeypatch, (second / "model.safetensors").unlink)
    engine.load_weights(str(second), 1)
    assert_same(weights_of(engine), wanted)


def test_a_folder_is_checked_while_another_thread_loads_models(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=1)
    config = load_config(folder)
    assert config.tie_word_embeddings
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load_pretrained, folder, dtype=torch.float32) for _ in range(8)]
        while not all(load.done() for load in loads):
            check_folder(folder, config)
    for load in loads:
        model = load.result()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    check_folder(folder, config)  # no thread has left transformers as it is while another one loads
