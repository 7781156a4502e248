import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import whole
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ludic.errors import ModelError
from ludic.models.weight_files import decoder_layers
from ludic.training.batches.packing import pack
from ludic.training.logprobs import register_token_logprobs, token_logprobs
from ludic.training.model import copy_tokenizer, full_state_dict, load_model, save_weights, shard


def logprobs(model, batch):
    return token_logprobs(model, batch)[0]


def gradients(model, batch):
    model.zero_grad()
    logprobs(model, batch).sum().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_packed_sequences_do_not_see_each_other(model_folder, sequences):
    model, some = load_model(str(model_folder)), sequences(6, 1)
    together = logprobs(model, pack(some))
    alone = torch.cat([logprobs(model, pack([s])) for s in some])
    assert torch.allclose(together, alone, rtol=0, atol=1e-5)


def test_a_changed_neighbour_leaves_logprobs_bit_equal(model_folder, sequences):
    model, some = load_model(str(model_folder)), sequences(3, 1)
    before = pack(some)
    some[1].prompt_tokens[:] = 7
    some[1].response_tokens[:] = 9
    after = pack(some)
    same = before.sequence_ids != 1
    assert torch.equal(logprobs(model, before)[same], logprobs(model, after)[same])
    assert not torch.equal(logprobs(model, before)[~same], logprobs(model, after)[~same])


def test_logprobs_are_by_the_logits_of_the_token_before(model_folder, sequences):
    model, one = load_model(str(model_folder)), sequences(1, 1)
    batch = pack(one)
    whole = model(input_ids=batch.input_ids, use_cache=False).logits[0].log_softmax(-1)
    length = len(one[0].prompt_tokens)
    expected = whole[torch.arange(length - 1, len(whole)), batch.targets]
    assert torch.allclose(logprobs(model, batch), expected, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_whole_weights_are_those_that_torch_would_gather(tiny_model, tied):
    model = tiny_model(tied=tied)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    found = full_state_dict(model)
    assert found.keys() == gathered.keys() - model.all_tied_weights_keys.keys()
    assert all(torch.equal(found[name], gathered[name]) for name in found)


@pytest.mark.parametrize("tied", [True, False])
def test_sharding_changes_neither_logits_nor_the_saved_weights(mesh, tmp_path, tiny_model, sequences, tied):
    model, batch = tiny_model(tied=tied), pack(sequences(3, 1))
    before, expected = model.state_dict(), logprobs(model, batch)
    before = {name: tensor.clone() for name, tensor in before.items()}
    shard(model, mesh)
    assert torch.equal(logprobs(model, batch), expected)
    save_weights(model, full_state_dict(model), tmp_path / "saved")
    after = load_model(str(tmp_path / "saved"), strict=True).state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_single_rank_is_sharded_only_to_convert_or_to_off_load(mesh, tiny_model):
    half = torch.bfloat16
    for is_sharded, dtype, options in (
        (False, torch.float32, {}),
        (True, torch.float32, {"compute_dtype": half}),
        (False, half, {"compute_dtype": half}),
        (True, torch.float32, {"offload": True}),
    ):
        model = tiny_model().to(dtype)
        shard(model, mesh, **options)
        assert isinstance(model, FSDPModule) == is_sharded
        assert all(isinstance(parameter, DTensor) == is_sharded for parameter in model.parameters())


def test_a_whole_model_has_the_gradients_of_a_sharded_one_bit_for_bit(mesh, tiny_model, sequences):
    model, sharded, batch = tiny_model(), tiny_model(), pack(sequences(4, 1))
    shard(model, mesh)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    register_token_logprobs(sharded)
    expected, found = gradients(sharded, batch), gradients(model, batch)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_tied_embeddings_are_one_parameter_and_saved_once(mesh, tmp_path, tiny_model, sequences):
    model = tiny_model(tied=True)
    shard(model, mesh)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    gradients(model, pack(sequences(2, 1)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_weights(model, full_state_dict(model), tmp_path)
    assert "model.embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_activation_checkpointing_leaves_the_gradients_as_they_are(mesh, tiny_model, sequences):
    kept, recomputed, batch = tiny_model(), tiny_model(), pack(sequences(4, 1))
    shard(kept, mesh)
    shard(recomputed, mesh, activation_checkpointing=True)
    calls = []
    recomputed.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    expected, found = gradients(kept, batch), gradients(recomputed, batch)
    assert len(calls) == 2  # forward, and once more in the backward pass
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_bfloat16_computes_in_it_and_keeps_float32_weights(mesh, tiny_model, sequences):
    model, batch = tiny_model(), pack(sequences(4, 1))
    exact = logprobs(model, batch)
    shard(model, mesh, compute_dtype=torch.bfloat16)
    dtypes = []
    model.model.register_forward_hook(lambda module, inputs, output: dtypes.append(output.last_hidden_state.dtype))
    assert torch.allclose(logprobs(model, batch), exact, atol=0.05)
    assert dtypes == [torch.bfloat16]
    assert {g.dtype for g in gradients(model, batch).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_can_be_saved_in_another_dtype(mesh, tmp_path, tiny_model):
    model = tiny_model()
    shard(model, mesh)
    save_weights(model, full_state_dict(model), tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_no_dropout_stands_between_trainer_and_sampler(model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model = load_model(str(model_folder))
    ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_missing_folder_is_named():
    with pytest.raises(ModelError, match=r"\./no/such/model: there is no such folder"):
        load_model("./no/such/model")


def test_a_missing_weight_is_named(model_folder):
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(model_folder))


def test_a_weight_of_another_shape_is_refused(model_folder):
    weights = load_file(model_folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights hold model\.norm\.weight \(3,\), the model's is \(64,\)"):
        load_model(str(model_folder))


def test_an_extra_weight_is_refused_only_when_strict(model_folder):
    weights = load_file(model_folder / "model.safetensors")
    save_file(weights | {"extra.weight": torch.zeros(3)}, model_folder / "model.safetensors", metadata={"format": "pt"})
    load_model(str(model_folder))
    with pytest.raises(ModelError, match=r"extra\.weight, which the model does not use"):
        load_model(str(model_folder), strict=True)


def test_a_truncated_file_is_refused(model_folder):
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="the weights could not be loaded"):
        load_model(str(model_folder))


def test_pytorch_files_are_read_too(model_folder):
    weights = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    torch.save(weights, model_folder / "pytorch_model.bin")
    loaded = load_model(str(model_folder)).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_decoder_layers_that_are_not_found_are_an_error(tiny_model):
    model = tiny_model()
    assert decoder_layers(model) is model.model.layers
    model.config.num_hidden_layers = 5
    with pytest.raises(ModelError, match="no ModuleList of 5 decoder layers"):
        decoder_layers(model)


def test_the_tokenizer_is_copied_byte_for_byte_and_the_weights_are_not(tmp_path, model_folder):
    files = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}", "vocab.json": b"{ }"}
    for name, content in files.items():
        (model_folder / name).write_bytes(content)
    target = tmp_path / "copy"
    target.mkdir()
    copy_tokenizer(str(model_folder), target)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == files


def test_a_tokenizer_that_is_nowhere_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"runs/demo/model: there is no such folder, seen from .*as an absolute path"):
        copy_tokenizer("runs/demo/model", tmp_path)
