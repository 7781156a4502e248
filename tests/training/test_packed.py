import inspect

import numpy as np
import pytest
import torch
from model_families import small_model_of
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import TransformersKwargs

from ludic.models.families import logprobs_alone
from ludic.training import packed as kernel
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.logprobs import token_logprobs
from ludic.training.model import shard
from ludic.training.packed import PACKED_ATTENTION, flash_arguments, packed_arguments

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
# Windows of 4 tokens, shorter than the sequences below.
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
}
LENGTHS = [1, 7, 13, 5]


def model_of(config: PreTrainedConfig, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def packed_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {
        "input_ids": torch.randint(64, position_ids.shape),
        "position_ids": position_ids,
        **packed_arguments(LENGTHS, torch.device("cpu")),
    }


def test_arguments_of_a_micro_batch_are_made_on_the_cpu():
    assert packed_inputs().keys() == {"input_ids", "position_ids", "attention_mask"}
    assert packed_inputs()["attention_mask"].tolist() == [[[LENGTHS]]]
    of_flash = flash_arguments(LENGTHS, torch.device("cpu"))
    assert of_flash.keys() == TransformersKwargs.__annotations__.keys() & of_flash.keys()
    assert of_flash["cu_seq_lens_q"].tolist() == of_flash["cu_seq_lens_k"].tolist() == [0, 1, 8, 21, 26]
    assert of_flash["cu_seq_lens_q"].dtype == torch.int32
    assert of_flash["max_length_q"] == of_flash["max_length_k"] == 13


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_sequences_give_what_each_gives_alone(config):
    inputs = packed_inputs()
    found = model_of(config, PACKED_ATTENTION)(**inputs, use_cache=False).logits[0].split(LENGTHS)
    alone = model_of(config, "sdpa")
    for tokens, logits in zip(inputs["input_ids"][0].split(LENGTHS), found, strict=True):
        expected = alone(input_ids=tokens[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_gradients_are_those_of_the_dense_mask(config):
    gradients = []
    for attention in (PACKED_ATTENTION, "sdpa"):
        inputs, model = packed_inputs(), model_of(config, attention)
        if attention == "sdpa":
            inputs["attention_mask"] = None  # transformers then makes a mask from the positions
        model(**inputs, use_cache=False).logits.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_sequence_sees_another(config):
    """Exactly: other tokens in the second sequence change no bit of the others."""
    model, inputs = model_of(config, PACKED_ATTENTION), packed_inputs()
    before = model(**inputs, use_cache=False).logits[0].split(LENGTHS)
    inputs["input_ids"][0, 1:8] = (inputs["input_ids"][0, 1:8] + 1) % 64
    after = model(**inputs, use_cache=False).logits[0].split(LENGTHS)
    assert not torch.equal(before[1], after[1])
    for position in (0, 2, 3):
        assert torch.equal(before[position], after[position])


def varlen_by_mask(query, key, value, *bounds, **options):
    """What the documentation of `varlen_attn` says that it computes, by a dense mask of all tokens by all tokens."""
    call = inspect.signature(varlen_attn).bind(query, key, value, *bounds, **options)
    call.apply_defaults()
    starts, longest, (before, after) = (call.arguments[name] for name in ("cu_seq_q", "max_q", "window_size"))
    assert torch.equal(starts, call.arguments["cu_seq_k"])
    assert longest == call.arguments["max_k"] == starts.diff().max()
    number, position = torch.arange(len(starts) - 1).repeat_interleave(starts.diff()), torch.arange(len(query))
    distance = position[:, None] - position
    mask = (number[:, None] == number) & (distance >= -after) & ((distance <= before) | (before == -1))
    output = scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        attn_mask=mask,
        scale=call.arguments["scale"],
        enable_gqa=call.arguments["enable_gqa"],
    )
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_kernel_for_cuda_is_asked_for_what_the_loop_computes(config, monkeypatch):
    """The kernel runs on CUDA only; here another implementation of its documentation stands in."""
    calls, gradients, logits = [], [], []
    monkeypatch.setattr(kernel, "varlen_attn", lambda *a, **k: calls.append(1) or varlen_by_mask(*a, **k))
    for has_kernel in (False, True):
        monkeypatch.setattr(kernel, "_has_kernel", lambda query, value, has=has_kernel: has)
        model, inputs = model_of(config, PACKED_ATTENTION).double(), packed_inputs()
        logits.append(model(**inputs, **flash_arguments(LENGTHS, torch.device("cpu")), use_cache=False).logits)
        logits[-1].square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert len(calls) == config.num_hidden_layers
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-12)
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-6, atol=1e-9 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "capability", "is_kernel"),
    [
        (torch.bfloat16, (8, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), False),
        (torch.bfloat16, (7, 5), False),
    ],
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_kernel_takes_the_tensors_of_a_model_where_it_can(config, dtype, capability, is_kernel, monkeypatch):
    """On the meta device, PyTorch's real operator checks shapes and dtypes, forward and backward, without numbers."""
    calls = []
    monkeypatch.setattr(kernel, "varlen_attn", lambda *a, **k: calls.append(1) or varlen_attn(*a, **k))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    meta = torch.device("meta")
    model, inputs = model_of(config, PACKED_ATTENTION).to(meta, dtype), packed_inputs()
    inputs |= {name: inputs[name].to(meta) for name in ("input_ids", "position_ids")}
    logits = model(**inputs, **flash_arguments(LENGTHS, meta), use_cache=False).logits
    logits.sum().backward()
    assert len(calls) == (config.num_hidden_layers if is_kernel else 0)
    assert (logits.shape, logits.dtype) == ((1, sum(LENGTHS), 64), dtype)
    assert all(p.grad.shape == p.shape for p in model.parameters())


# --- Sinks, chunks and layers with a state -----------------------------------------------------------------------


OTHERS: dict[str, dict[str, object]] = {
    "gpt_oss": {},
    "granite_swa": {"layer_types": ["full_attention", "sliding_attention"] * 12},
    "llama4_text": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "nemotron_h": {},
    "falcon_h1": {},
    "granitemoehybrid": {},
    "kimi_linear": {},
    "olmo_hybrid": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "minimax": {},
    "falcon_mamba": {},
}


def rows_of_tokens() -> list[TrainingSequence]:
    """Longer than windows, chunks and convolutions, also next to each other, and of one token."""
    numbers = np.random.default_rng(0)
    return [
        TrainingSequence(
            rollout_id=str(length),
            prompt_tokens=(tokens := numbers.integers(3, 100, length + 1, dtype=np.int32))[:1],
            response_tokens=tokens[1:],
            columns={"response_logprobs": np.zeros(length, np.float32)},
            advantage=0.0,
        )
        for length in (5, 23, 1, 14)
    ]


def gradients(model: torch.nn.Module, logprobs: torch.Tensor) -> torch.Tensor:
    signs = torch.where(torch.arange(len(logprobs)) % 3 == 0, -1.0, 1.0)
    (logprobs * signs).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", OTHERS)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(family: str) -> None:
    """By the family's own eager attention, which does all that its authors wrote."""
    rows = rows_of_tokens()
    alone = small_model_of(family, attention="eager", **OTHERS[family])
    tokens = [np.concatenate([row.prompt_tokens, row.response_tokens]) for row in rows]
    expected = torch.cat([logprobs_alone(alone, each) for each in tokens])
    wanted = gradients(alone, expected)
    model = small_model_of(family, **OTHERS[family])
    found, _ = token_logprobs(model, pack(rows))
    assert (found - expected).abs().max() < 1e-4
    assert (gradients(model, found) - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("family", ["qwen3_5_text", "gpt_oss"])
def test_a_layer_that_is_computed_again_sees_the_same_sequences(family: str, mesh: DeviceMesh) -> None:
    found = []
    for activation_checkpointing in (False, True):
        model = small_model_of(family)
        shard(model, mesh, activation_checkpointing=activation_checkpointing)
        found.append(gradients(model, token_logprobs(model, pack(rows_of_tokens()))[0]))
    torch.testing.assert_close(*found)


def scores_of(query, key, value, starts, scale, before):
    """By a dense mask: scores (H, T, T), their log-sum-exp (H, T), and the values for each query head (H, T, D)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1).transpose(0, 1) for tensor in (key, value))
    number, position = torch.arange(len(starts) - 1).repeat_interleave(starts.diff()), torch.arange(len(query))
    distance = position[:, None] - position
    mask = (number[:, None] == number) & (distance >= 0) & ((distance <= before) | (before == -1))
    scores = (query.transpose(0, 1) @ key.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    normalizer = scores.logsumexp(-1)
    return scores, normalizer, value


@pytest.mark.parametrize("before", [-1, 3])
def test_the_kernel_with_sinks_gives_their_outputs_and_gradients(before: int, monkeypatch) -> None:
    """The kernel's two passes, as PyTorch's own formulas say; `make gpu` tries the kernel itself."""
    torch.manual_seed(0)
    starts = torch.tensor([0, 1, 8, 21], dtype=torch.int32)
    query = torch.randn(21, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(21, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def forward(query, key, value, starts, longest, scale, window, *, return_aux):
        scores, normalizer, value = scores_of(query, key, value, starts, scale, window[0])
        return (scores.softmax(-1) @ value).transpose(0, 1), normalizer

    def backward(grad, query, key, value, output, normalizer, starts, *_, scale, window_size_left, **rest):
        scores, _, values = scores_of(query, key, value, starts, scale, window_size_left)
        probabilities = (scores - normalizer[:, :, None]).exp()
        grad, output = grad.transpose(0, 1), output.transpose(0, 1)
        slopes = probabilities * (grad @ values.transpose(1, 2) - (grad * output).sum(-1, keepdim=True)) * scale
        keys = key.repeat_interleave(2, dim=1).transpose(0, 1)
        of_keys, of_values = slopes.transpose(1, 2) @ query.transpose(0, 1), probabilities.transpose(1, 2) @ grad
        return (slopes @ keys).transpose(0, 1), *(
            each.transpose(0, 1).unflatten(1, (2, 2)).sum(2) for each in (of_keys, of_values)
        )

    monkeypatch.setattr(kernel, "_kernel", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    found = kernel._KernelWithSinks.apply(query, key, value, sinks, starts, 13, 0.3, (before, 0))
    scores, _, values = scores_of(query, key, value, starts, 0.3, before)
    all_scores = torch.cat([scores, sinks[:, None, None].expand(4, 21, 1)], dim=-1)
    expected = (all_scores.softmax(-1)[..., :-1] @ values).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(found)
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value, sinks))
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (query, key, value, sinks)), wanted, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
