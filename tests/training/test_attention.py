import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ludic.training.attention import PACKED_ATTENTION, sequence_lengths

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
        "attention_mask": sequence_lengths(position_ids),
    }


def test_lengths_are_read_from_where_positions_restart():
    assert packed_inputs()["attention_mask"].tolist() == [[[LENGTHS]]]


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
    for place in (0, 2, 3):
        assert torch.equal(before[place], after[place])
