"""Memory that is planned: counted by hand, and beside the tensors of a model that really runs."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from ludic.errors import ModelError
from ludic.run.config import RunConfig
from ludic.training import memory
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.config import ModelConfig, TrainConfig
from ludic.training.logprobs import PACKED_ATTENTION, token_logprobs
from ludic.training.memory import (
    CUDA,
    Activations,
    ModelSizes,
    activations,
    checkpoint_bytes,
    host_memory,
    longest_sequence,
    model_sizes,
    rank_memory,
    reference_place,
    sampler_memory,
    version_bytes,
)

SIZES = ModelSizes(
    num_weights=1000,
    num_trained=1000,
    layer_weights=100,
    root_weights=200,
    largest_weight=150,
    vocab_size=50,
    cached=64,
    cached_in_window=32,
    window=10,
)
PASSES = Activations(kept=5000, more=700)


def small(**changes: object) -> Qwen3Config:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    return Qwen3Config(**{**sizes, **heads, **changes})


def test_weights_are_those_of_the_model_and_tied_ones_count_once() -> None:
    for is_tied in (True, False):
        config = small(tie_word_embeddings=is_tied)
        found = model_sizes(config, ModelConfig())
        model = AutoModelForCausalLM.from_config(config)
        assert found.num_weights == found.num_trained == sum(weight.numel() for weight in model.parameters())
        # 300 x 32 embeddings, once or twice, and the last norm.
        assert found.root_weights == 300 * 32 * (1 if is_tied else 2) + 32
        assert found.num_weights == found.root_weights + 3 * found.layer_weights
        assert found.largest_weight == 300 * 32


def test_only_adapters_are_trained() -> None:
    found = model_sizes(small(), ModelConfig(lora_rank=2, lora_targets=("q_proj",)))
    assert found.num_trained == 3 * 2 * (32 + 32)  # in 3 layers, 2 columns from 32 numbers and 2 to 4 heads of 8
    assert found.num_weights == model_sizes(small(), ModelConfig()).num_weights


def test_a_rank_holds_its_share_of_16_bytes_a_weight() -> None:
    parts = rank_memory(SIZES, PASSES, TrainConfig.of(), ranks=1, device="cpu")
    states = {"weights": 4000, "gradients": 4000, "AdamW's moments": 8000}
    assert parts == {**states, "activations": 5000, "logits, gradients on their way": 700}
    parts = rank_memory(SIZES, PASSES, TrainConfig.of(dtype="bfloat16"), ranks=4, device="cuda", reference="device")
    # In bfloat16: embeddings, head and two layers gathered, 400 numbers; gradients of a layer in both dtypes.
    assert parts == {
        **{name: value // 4 for name, value in states.items()},
        "reference model": 500,
        "activations": 5000,
        "logits, gradients on their way": 700,
        "layers gathered by FSDP2": 2 * 400 + 6 * 100,
        "CUDA and libraries": CUDA,
    }


def test_adamws_step_is_the_peak_where_activations_are_few() -> None:
    few = Activations(kept=10, more=10)
    parts = rank_memory(SIZES, few, TrainConfig.of(), ranks=1, device="cuda")
    assert (parts["AdamW's temporaries"], "activations" in parts) == (4000, False)
    assert rank_memory(SIZES, few, TrainConfig.of(), ranks=1, device="cpu")["AdamW's temporaries"] == 2 * 4 * 150


def test_frozen_weights_of_adapters_have_no_gradients() -> None:
    sizes = ModelSizes(**{**{name: getattr(SIZES, name) for name in SIZES.__slots__}, "num_trained": 10})
    train = TrainConfig.of(lora_rank=1, dtype="bfloat16")
    parts = rank_memory(sizes, PASSES, train, ranks=1, device="cpu")
    assert (parts["weights"], parts["gradients"], parts["AdamW's moments"]) == (40 + 2000, 40, 80)
    assert (version_bytes(sizes, train.model), checkpoint_bytes(sizes, train.optimizer)) == (2000, 120)
    assert version_bytes(sizes, ModelConfig(lora_rank=1, publish_lora="adapter")) == 40


def test_moments_in_8_bits_take_2_bytes_a_weight_and_a_fused_step_no_temporaries() -> None:
    train = TrainConfig.of(optimizer="adamw_8bit")
    moments = 2 * 1000 + 2 * 4 * 4  # two moments; four blocks of 256, each with a float32
    parts = rank_memory(SIZES, PASSES, train, ranks=1, device="cuda")
    assert (parts["weights"], parts["gradients"], parts["AdamW's moments"]) == (4000, 4000, moments)
    assert checkpoint_bytes(SIZES, train.optimizer) == 4000 + moments
    few = Activations(kept=10, more=10)
    assert rank_memory(SIZES, few, train, ranks=1, device="cuda")["AdamW's temporaries"] == 2 * 4 * 150
    fused = rank_memory(SIZES, few, TrainConfig.of(fused_adamw=True), ranks=1, device="cuda")
    assert "AdamW's temporaries" not in fused


def test_a_reference_is_counted_unless_it_is_what_adapters_are_on() -> None:
    run = RunConfig(model="m", env=("moar_cats",))
    places = {
        place: [reference_place(run, TrainConfig.of(reference=name, **more)) for name, more in settings]
        for place, settings in {
            "none": [(None, {}), ("m", {"lora_rank": 1})],
            "device": [("m", {}), ("other", {"lora_rank": 1})],
            "host": [("m", {"reference_offload": True})],
        }.items()
    }
    assert all({place} == set(found) for place, found in places.items())


def test_the_longest_sequence_is_what_settings_tell() -> None:
    config, run = small(max_position_embeddings=5000), RunConfig(model="m", env=("moar_cats",), max_tokens=100)
    assert longest_sequence(config, run, TrainConfig()) == 1024 + 100
    assert longest_sequence(config, run, TrainConfig.of(max_seq_len=700)) == 700
    long = RunConfig(model="m", env=("moar_cats",), max_sequence_tokens=9000)
    assert longest_sequence(config, long, TrainConfig.of(max_seq_len=700)) == 5000


def test_a_head_in_float32_takes_a_copy_of_its_weights() -> None:
    config = small(vocab_size=50_000, hidden_size=64)
    more = [
        activations(
            config, ModelConfig(dtype="bfloat16"), num_tokens=64, length=64, device="cuda", float32_head=is_on
        ).more
        for is_on in (False, True)
    ]
    # In the backward pass: the copy and its gradient, both in float32, instead of a gradient in bfloat16.
    assert more[1] - more[0] == pytest.approx(50_000 * 64 * (4 + 4 - 2), rel=0.35)


def test_rank_0_gathers_what_is_published_and_kept() -> None:
    parts = host_memory(SIZES, TrainConfig.of(dtype="bfloat16"), ranks=2, rank=0, device="cuda")
    assert list(parts.values())[1:] == [4000, 2000, 12_000]  # float32, bfloat16, weights and moments
    assert list(host_memory(SIZES, TrainConfig.of(), ranks=2, rank=1, device="cuda")) == ["Python and libraries"]
    assert (
        host_memory(SIZES, TrainConfig.of(), ranks=2, rank=1, device="cuda", reference="host")["reference model"]
        == 2000
    )


def test_a_cache_grows_with_the_sequence_but_not_beyond_a_layers_window() -> None:
    assert SIZES.cache_bytes(4, "float32") == 4 * (64 + 32) * 4
    assert SIZES.cache_bytes(100, "bfloat16") == 2 * (64 * 100 + 32 * 10)
    found = model_sizes(small(), ModelConfig())
    assert (found.cached, found.cached_in_window) == (3 * 2 * 2 * 8, 0)  # layers, keys and values, heads, their size
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    found = model_sizes(small(layer_types=kinds, sliding_window=7, use_sliding_window=True), ModelConfig())
    assert (found.cached, found.cached_in_window, found.window) == (2 * 2 * 8, 2 * 2 * 2 * 8, 7)


def kept_by(config: Qwen3Config, num_tokens: int, length: int) -> int:
    """Bytes that the decoder of a real model keeps for its backward pass, beside weights."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).eval()
    weights = {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def sequence(name: int) -> TrainingSequence:
        values = torch.ones(length)
        return TrainingSequence(
            rollout_id=str(name),
            prompt_tokens=values[:1].int().numpy(),
            response_tokens=values.int().numpy(),
            columns={"response_logprobs": values.numpy()},
            advantage=1.0,
        )

    batch = pack([sequence(name) for name in range(num_tokens // length)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = token_logprobs(model, batch)
    del held
    return sum(kept.values())


def test_activations_are_those_that_a_real_model_keeps() -> None:
    config = small(hidden_size=64, num_hidden_layers=4)
    found = activations(config, ModelConfig(), num_tokens=512, length=128, device="cpu")
    assert found.is_exact
    assert found.kept == pytest.approx(kept_by(config, 512, 128), rel=0.1)


def test_activation_checkpointing_keeps_a_layers_input_only() -> None:
    all_, few = (
        activations(small(), ModelConfig(activation_checkpointing=is_on), num_tokens=1000, length=500, device="cpu")
        for is_on in (False, True)
    )
    inputs = 3 * 1000 * 32 * 4
    assert inputs <= few.kept < 2.5 * inputs  # with rotary tables and the last norm, which all layers share
    assert few.kept < all_.kept / 3
    assert few.more > all_.more - 1  # a layer is computed again


def test_logits_take_their_chunk_not_the_micro_batch() -> None:
    config = small(vocab_size=20_000)
    more = [
        activations(config, ModelConfig(logprob_chunk_tokens=chunk), num_tokens=2000, length=500, device="cpu").more
        for chunk in (100, 200, 4000)
    ]
    one_chunk = 4 * 100 * 20_000
    assert 2 * one_chunk < more[1] - more[0] < 3.1 * one_chunk  # logits, probabilities, their product
    assert more[2] > 8 * more[1]


def test_float32_on_cuda_keeps_the_scores_of_each_pair_of_tokens() -> None:
    """It has no fused kernel there for heads that share keys."""
    here, cuda = (
        activations(small(), ModelConfig(), num_tokens=1000, length=500, device=device) for device in ("cpu", "cuda")
    )
    assert cuda.kept - here.kept == 3 * 4 * 1000 * 500 * 4  # layers, heads, tokens, tokens of a sequence
    bfloat16 = activations(small(), ModelConfig(dtype="bfloat16"), num_tokens=1000, length=500, device="cuda")
    assert bfloat16.kept < here.kept


def test_mixtures_of_experts_run_without_memory_too() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=300,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
    )
    found = [
        activations(
            type(config)(**{**config.to_dict(), "num_experts_per_tok": experts}),
            ModelConfig(dtype="bfloat16"),
            num_tokens=1000,
            length=1000,
            device="cpu",
        )
        for experts in (1, 4)
    ]
    assert all(each.is_exact for each in found)
    in_float32 = activations(config, ModelConfig(), num_tokens=1000, length=1000, device="cpu")
    assert (in_float32.is_exact, in_float32.kept > found[0].kept) == (False, True)
    assert found[1].kept > found[0].kept + 2 * 3 * 1000 * 16 * 2  # three more experts a token


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"lora_rank": 2}),
        ("gemma2", {"activation_checkpointing": True}),
        ("deepseek_v3", {"lora_rank": 2}),
        ("gemma3n_text", {"activation_checkpointing": True}),
    ],
)
def test_layers_that_repeat_others_count_as_if_they_ran(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one kind, of two kinds in turns, and with other ones first; and a family that wants all of its own."""
    of_family = {"num_kv_shared_layers": 4} if family == "gemma3n_text" else {}
    of_whole = 14 if family == "deepseek_v3" else 10  # its first three are of another kind
    config, num_layers = AutoConfig.for_model(family, num_hidden_layers=of_whole, **of_family), 0
    decode = memory._decode

    def counted(model: Any, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_layers
        num_layers += len(memory.decoder_layers(model))
        return decode(model, *args, **options)

    monkeypatch.setattr(memory, "_decode", counted)
    monkeypatch.setattr(memory, "_known", {})

    def found() -> list[Any]:
        size = {"num_tokens": 300, "length": 100, "device": "cuda"}
        passes = activations(config, ModelConfig(dtype="bfloat16", **settings), **size)
        return [passes, sampler_memory(config, SIZES, "bfloat16", max_batch=1, tensor_parallel=1, device="cpu")]

    few, num_layers_of_few, num_layers = found(), num_layers, 0
    monkeypatch.setattr(memory, "_repetition", lambda kinds: (len(kinds), 0))
    monkeypatch.setattr(memory, "_known", {})
    assert few == found()
    assert few[0].is_exact
    assert (num_layers_of_few < 0.7 * num_layers) == (family != "gemma3n_text")


def test_a_family_that_does_not_run_without_memory_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_for_a_value(self: object, *_: object, **__: object) -> None:
        torch.zeros((), device="meta").item()

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward", asks_for_a_value)
    monkeypatch.setattr(memory, "_known", {})
    found = activations(small(), ModelConfig(), num_tokens=100, length=100, device="cpu")
    # 34 bytes at 2 bytes a number, twice for float32 and twice for gated and mixed MLPs.
    assert (found.is_exact, found.kept) == (False, 3 * 100 * 32 * 34 * 2 * 2)
    assert sampler_memory(small(), SIZES, "float32", max_batch=1, tensor_parallel=1, device="cpu")


def test_an_engine_divides_its_weights_over_its_gpus() -> None:
    parts = sampler_memory(small(), SIZES, "bfloat16", max_batch=10, tensor_parallel=4, device="cpu")
    assert (parts["weights"], parts["logits"]) == (500, 3 * 4 * 10 * 50)
    assert parts["one forward pass"] > 0


def test_a_configuration_that_makes_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^bert: transformers can't make the model|^whisper"):
        model_sizes(AutoConfig.for_model("whisper", d_model=10, decoder_attention_heads=3), ModelConfig())


@pytest.mark.slow
def test_it_needs_no_store() -> None:
    code = "import sys, ludic.training.memory; sys.exit('ludic.root' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=200).returncode == 0
