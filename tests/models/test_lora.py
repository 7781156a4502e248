"""Adapters: what they compute, what trains, what is written, and what a run with them leaves behind."""

import json
import math
from functools import partial

import pytest
import torch
from model_families import random_model_of, small_model_of
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import whole
from tiny_runs import fill, query, save_checkpoint, train_here, train_until_killed
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import ConfigError, ModelError
from ludic.models.lora import adapters_off, add_adapters, is_adapter_weight, merge_adapter, merged_weights, save_adapter
from ludic.root.attempts import complete_checkpoints, folder_of
from ludic.root.maintenance.verify import check_root
from ludic.training import trainer
from ludic.training.batches.packing import pack
from ludic.training.checkpoint import load_checkpoint
from ludic.training.config import TrainConfig
from ludic.training.logprobs import token_logprobs
from ludic.training.model import full_state_dict, load_model, load_sharded, save_weights, shard
from ludic.training.packed import PACKED_ATTENTION
from ludic.training.reference import base_reference, fingerprint, model_reference
from ludic.training.step import build_optimizer, train_step

ALPHA, RANK = 8, 2


def adapted(model, *, source="base", **options):
    add_adapters(model, source=source, **({"rank": RANK, "alpha": ALPHA} | options))
    return model


def randomize(model):
    """As after training, when B is no longer zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def adapter_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_an_adapted_layer_adds_alpha_over_rank_times_b_a_x(tiny_model):
    model = adapted(tiny_model(), targets=["q_proj"], rank=1, alpha=3)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.base_layer.bias.zero_()
        layer.lora_A["default"].weight.copy_(torch.arange(64.0)[None])
        layer.lora_B["default"].weight.copy_(torch.ones(64, 1))
    x = torch.zeros(64)
    x[5] = 2
    assert layer(x).tolist() == [30.0] * 64  # 3 / 1 x 1 x (5 x 2)
    weights = merged_weights(model, model.state_dict())
    merged = weights["model.layers.0.self_attn.q_proj.weight"]
    assert merged.tolist() == [[3.0 * column for column in range(64)]] * 64
    assert weights.keys() == tiny_model().state_dict().keys()


def test_nothing_changes_at_first_and_only_adapters_train(tiny_model, sequences):
    model, batch = tiny_model(), pack(sequences(4, 1))
    before = token_logprobs(model, batch)[0]
    add_adapters(model, source="base", rank=RANK, alpha=ALPHA)
    assert torch.equal(token_logprobs(model, batch)[0], before)
    assert all(".lora_A." in name or ".lora_B." in name for name in adapter_names(model))
    # 7 linear layers in each of 2 decoder layers, and two matrices each
    assert len(adapter_names(model)) == 2 * 7 * 2
    assert not any("lm_head" in name or "embed" in name for name in adapter_names(model))


def test_targets_are_the_layers_that_are_named(tiny_model):
    names = adapter_names(adapted(tiny_model(), targets=["q_proj", "layers.1.mlp.up_proj"]))
    assert {name.partition(".lora_")[0] for name in names} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_the_seed_makes_the_adapters_and_leaves_the_random_state(tiny_model):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, same, other = (adapted(tiny_model(), seed=seed).state_dict() for seed in (1, 1, 2))
    torch.manual_seed(7)
    adapted(model := tiny_model())
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), expected)
    name = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert model.state_dict()[name].abs().max() > 0


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_head"], r"base: lora_targets has 'lm_head', which is the head or the embeddings"),
        (["q_proj", "embed_tokens"], r"lora_targets has 'embed_tokens', which is the head or the embeddings"),
        (["q_proj", "k_porj"], "lora_targets has 'k_porj', but no layer's name ends with it"),
        (["proj"], "lora_targets has 'proj', but no layer's name ends with it"),
        (["input_layernorm"], r"base: can't be adapted: .*name linear layers in lora_targets"),
    ],
)
def test_layers_that_cannot_be_adapted_are_named(tiny_model, targets, message):
    with pytest.raises(ModelError, match=message):
        adapted(tiny_model(), targets=targets)


def test_settings_of_adapters_without_adapters_are_refused():
    with pytest.raises(ConfigError, match=r"lora_targets is .* but there are no adapters; set lora_rank"):
        TrainConfig.of(lora_targets=("q_proj",))
    with pytest.raises(ConfigError, match="publish_lora is adapter but there are no adapters"):
        TrainConfig.of(publish_lora="adapter")
    with pytest.raises(ConfigError, match="lora_rank is 0, wanted at least 1"):
        TrainConfig.of(lora_rank=0)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_merged_weights_compute_what_the_adapted_model_does(mesh, tmp_path, family, sequences):
    model = adapted(random_model_of(family))
    randomize(model)
    batch = pack(sequences(4, 1))
    shard(model, mesh)
    expected = token_logprobs(model, batch)[0]
    save_weights(model, full_state_dict(model), tmp_path)
    merged = load_model(str(tmp_path), strict=True)
    assert torch.allclose(token_logprobs(merged, batch)[0], expected, rtol=0, atol=1e-5)
    with adapters_off(model):
        assert not torch.allclose(token_logprobs(model, batch)[0], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text"])
def test_adapters_of_a_mixture_leave_its_experts_alone(tmp_path, family):
    model = adapted(small_model_of(family), source=str(tmp_path / "base"))
    assert not [name for name in adapter_names(model) if ".experts." in name]
    randomize(model)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        plain = small_model_of(family)
        plain.save_pretrained(tmp_path / "base")
        plain.load_state_dict(merged_weights(model, model.state_dict()))
        assert torch.allclose(plain(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=1e-3)
        # As workers and peft read it.
        save_adapter(model, {name: p for name, p in model.state_dict().items() if is_adapter_weight(name)}, tmp_path)
        options = {"dtype": torch.float64, "experts_implementation": "eager", "attn_implementation": PACKED_ATTENTION}
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options)
        read = merge_adapter(base, str(tmp_path))
        assert torch.allclose(read(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=1e-3)


def test_experts_of_a_mixture_can_not_be_adapted():
    named = "lora_targets has 'gate_proj', which peft takes for the experts of this mixture; name other layers: k"
    with pytest.raises(ModelError, match=named):
        adapted(small_model_of("glm4_moe"), targets=["gate_proj"])


def test_layers_that_keep_their_weight_transposed_are_merged_so():
    config = GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=1)
    model = adapted(GPT2LMHeadModel(config).eval())
    randomize(model)
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits
    plain = GPT2LMHeadModel(config).eval()
    plain.load_state_dict(merged_weights(model, model.state_dict()))
    assert torch.allclose(plain(tokens).logits, expected, rtol=0, atol=1e-6)


def test_what_is_written_is_what_peft_loads(mesh, tmp_path, model_folder, sequences):
    model = adapted(load_model(str(model_folder)), source=str(model_folder))
    randomize(model)
    ids = torch.arange(20)[None]
    expected = model(input_ids=ids).logits
    shard(model, mesh)
    save_weights(model, full_state_dict(model, adapters_only=True), tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    for found in (
        PeftModel.from_pretrained(base, tmp_path / "adapter"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
    ):
        assert torch.allclose(found(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (RANK, ALPHA, str(model_folder))


def test_the_engine_samples_as_if_the_adapter_were_merged(mesh, tmp_path, tiny_folder):
    model = adapted(load_model(tiny_folder), source=tiny_folder)
    randomize(model)
    shard(model, mesh)
    whole = full_state_dict(model)
    save_weights(model, whole, tmp_path / "merged")
    save_weights(model, full_state_dict(model, adapters_only=True), tmp_path / "adapter")
    merged = TransformersEngine(str(tmp_path / "merged"), device="cpu")
    engine = TransformersEngine(tiny_folder, device="cpu")
    engine.load_weights(str(tmp_path / "adapter"), 3)
    found, wanted = (dict(each._model.state_dict()) for each in (engine, merged))
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-6) for name in wanted)
    assert engine.policy_version == 3


def test_the_engine_refuses_an_adapter_that_is_not_whole(mesh, tmp_path, tiny_folder):
    model = adapted(load_model(tiny_folder), source=tiny_folder)
    save_weights(model, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, tmp_path)
    engine = TransformersEngine(tiny_folder, device="cpu", version=1)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = tensors.popitem()[0]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"does not fit its config; differing: .*{gone}"):
        engine.load_weights(str(tmp_path), 2)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="the LoRA adapter could not be loaded"):
        engine.load_weights(str(tmp_path), 2)
    assert engine.policy_version == 1


def test_a_checkpoint_of_adapters_is_small_and_comes_back_bit_for_bit(mesh, run_root, model_folder):
    def build(seed):
        model = adapted(load_model(str(model_folder)), source=str(model_folder), seed=seed)
        shard(model, mesh)
        return model, build_optimizer(model, TrainConfig.of(learning_rate=1e-2))

    model, optimizer = build(seed=1)
    for _ in range(2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach() + 0.1
        optimizer.step()
    facts = {"policy_version": 0, "cursor": {}, "config": {}}
    info = save_checkpoint(run_root, model, optimizer, attempt_id=1, step=1, **facts)
    sizes = run_root.sizes(folder_of(info))
    assert f"{folder_of(info)}/model.safetensors" not in sizes
    other, other_optimizer = build(seed=2)
    load_checkpoint(run_root, info, other, other_optimizer)
    expected, found = full_state_dict(model), full_state_dict(other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for one, same in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert torch.equal(whole(one["exp_avg"]), whole(same["exp_avg"]))


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        ({}, None, "holds an adapter, lora_rank needs whole weights; continue with the lora_rank of its first attempt"),
        (None, {}, "holds whole weights, lora_rank needs an adapter"),
        ({"rank": 2}, {"rank": 4, "alpha": 16}, r"lora_A\.default\.weight is \(2, .*\), the model's is \(4, .*\)"),
        ({"alpha": 8}, {"alpha": 16}, "lora_alpha 8 and lora_rank 2, the settings say 16 and 2"),
        ({}, {"targets": ["q_proj"]}, r"adapter_model.safetensors: .* the model's is missing"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(mesh, run_root, model_folder, written, read, message):
    def build(options):
        model = load_model(str(model_folder))
        if options is not None:
            adapted(model, source=str(model_folder), **options)
        shard(model, mesh)
        return model, build_optimizer(model, TrainConfig())

    facts = {"policy_version": 0, "cursor": {}, "config": {}}
    info = save_checkpoint(run_root, *build(written), attempt_id=1, step=1, **facts)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(run_root, info, *build(read))


def test_a_step_moves_the_adapters_and_nothing_else(mesh, tiny_model, sequences):
    model, some = adapted(tiny_model()), sequences(4, 1)
    shard(model, mesh)
    before = {name: tensor.clone() for name, tensor in full_state_dict(model).items()}
    optimizer = build_optimizer(model, TrainConfig())
    settings = {"config": TrainConfig(), "num_action_tokens": sum(s.num_action_tokens for s in some), "num_ranks": 1}
    for _ in range(2):  # A gets a gradient once B is no longer zero
        train_step(model, optimizer, [pack(some)], learning_rate=1e-2, **settings)
    after = full_state_dict(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name}


def test_the_reference_with_adapters_off_is_the_base_model(mesh, tiny_model, sequences):
    model, batches, device = adapted(tiny_model()), [pack(sequences(4, seed)) for seed in (1, 2)], torch.device("cpu")
    shard(model, mesh)
    # Before the first forward pass, when FSDP2 makes up its mind about gradients, and after training.
    found = base_reference(model, device)(batches)
    expected = model_reference(tiny_model(), device)(batches)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True))
    before = token_logprobs(model, batches[0])[0]
    before.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    randomize_sharded(model)
    found = base_reference(model, device)(batches)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True))
    assert not torch.allclose(token_logprobs(model, batches[0])[0], before, atol=1e-3)


def randomize_sharded(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)


LORA = {"lora_rank": 4, "lora_alpha": 16}


@pytest.mark.slow
def test_adapters_stay_float32_where_the_rest_computes_in_bfloat16(new_root):
    root = new_root()
    fill(root, num_files=1)
    train_here(root, num_steps=2, dtype="bfloat16", activation_checkpointing=True, **LORA)
    kept = load_file(f"{root.path}/{folder_of(complete_checkpoints(root)[-1])}/adapter_model.safetensors")
    published = load_file(f"{root.path}/policies/version=2/model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert any(tensor.any() for name, tensor in kept.items() if "lora_B" in name)


def test_a_base_in_bfloat16_computes_as_float32_weights_do_in_it(mesh, model_folder, sequences):
    batch, adapt = pack(sequences(4, 1)), partial(add_adapters, source="base", rank=RANK, alpha=ALPHA)
    found, dtypes, prints = [], [], set()
    for dtype in (torch.float32, torch.bfloat16):
        model = load_sharded(str(model_folder), mesh, dtype=dtype, prepare=adapt, compute_dtype=torch.bfloat16)
        found.append(token_logprobs(model, batch)[0])
        found[-1].sum().backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        dtypes += [{p.dtype for p in model.parameters() if p.requires_grad == trains} for trains in (True, False)]
        prints.add(fingerprint(model, torch.bfloat16))
    assert torch.allclose(*found, rtol=0, atol=1e-2)  # rotations of positions apart, they are the same numbers
    assert dtypes == [{torch.float32}, {torch.float32}, {torch.float32}, {torch.bfloat16}]
    assert len(prints) == 1


@pytest.mark.slow
@pytest.mark.parametrize("publish_lora", ["merged", "adapter"])
def test_a_run_publishes_and_resumes_adapters(new_root, tiny_folder, publish_lora):
    root = new_root()
    fill(root, num_files=4)
    settings = LORA | {"publish_lora": publish_lora, "learning_rate": 1e-2, "keep_policies": None}
    train_here(root, num_steps=3, **settings)
    assert train_here(root, num_steps=5, **settings) == 5
    assert query(root, "select attempt_id, parent_step from attempts order by all") == [(1, None), (2, 3)]
    engines = [TransformersEngine(root.at(f"policies/version={v}"), device="cpu") for v in (0, 5)]
    first, last = (engine._model.state_dict() for engine in engines)
    base = TransformersEngine(tiny_folder, device="cpu")._model.state_dict()
    assert all(torch.equal(first[name], base[name]) for name in base)
    moved = {name for name in base if not torch.equal(last[name], base[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}
    names = {name.rpartition("/")[2] for name in root.list("policies/version=5")}
    assert ("model.safetensors" in names, "adapter_model.safetensors" in names) == (
        publish_lora == "merged",
        publish_lora == "adapter",
    )
    assert "adapter_model.safetensors" in {
        n.rpartition("/")[2] for n in root.list(folder_of(complete_checkpoints(root)[-1]))
    }
    assert list(check_root(root).findings) == []


@pytest.mark.slow
def test_a_run_killed_with_adapters_ends_as_one_that_was_not(new_root):
    straight, root = new_root("straight"), new_root("killed")
    for each in (straight, root):
        fill(each, num_files=4)
    train_here(straight, num_steps=5, **LORA)
    train_until_killed(root, at_step=4, num_steps=5, **LORA)
    train_here(root, num_steps=5, **LORA)
    found, expected = (
        load_file(f"{r.path}/{folder_of(complete_checkpoints(r)[-1])}/adapter_model.safetensors")
        for r in (root, straight)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_run_s_own_model_is_the_reference_without_a_copy(new_root, monkeypatch, tiny_folder):
    shared, separate = new_root("shared"), new_root("separate")
    copy = str(shared.path) + "-model"
    load_model(tiny_folder).save_pretrained(copy)
    for root in (shared, separate):
        fill(root, num_files=4)
    sources = []
    load_sharded = trainer.load_sharded
    monkeypatch.setattr(
        trainer, "load_sharded", lambda source, *a, **k: sources.append(source) or load_sharded(source, *a, **k)
    )
    for root, reference in ((shared, tiny_folder), (separate, copy)):
        train_here(root, num_steps=3, reference=reference, kl_weight=0.1, **(LORA | {"learning_rate": 1e-2}))
    assert sources == [tiny_folder, tiny_folder, copy]
    numbers = [query(root, "select reference_kl, loss from metrics order by step") for root in (shared, separate)]
    assert [tuple(map(float, row)) for row in numbers[0]] == [pytest.approx(row, abs=1e-6) for row in numbers[1]]
    assert numbers[0][0][0] == 0
    assert numbers[0][2][0] > 1e-9
    assert math.isfinite(numbers[0][2][1])
