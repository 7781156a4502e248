"""Does vLLM on the CPU sample a family with the trainer's logprobs? The last column of the table in docs/families.md.

    python -m benchmarks.vllm_families --family FAMILY          # in the environment of vLLM

A small random model is sampled in float32 through ludic's engine, before and after its weights are replaced, and packed
sequences of its prompts and completions run through the trainer. Prints the largest difference of a logprob.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.families import INCOMPLETE
from ludic.base import Longrope
from ludic.engines import (
    Engine,
    EngineConfig,
    EngineSetup,
    GenerationRequest,
    SamplingParams,
    engine_maker,
    generate_all,
    set_variables,
)
from ludic.models import TOLERANCE, load_config, original_length, probe_sequences, repaired, shrink, spread
from ludic.settings import run_script
from ludic.training import full_state_dict, load_model, packed_logprobs, save_weights

SCALE = 2
"""Widths of the small models: heads have 32 numbers, experts 96."""
_DELTA_NET = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
AS_ON_THE_HUB: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 32},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "lfm2": {
        "conv_dim": 128,
        "block_dim": 128,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 32,
    },
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
    # Without experts, as Nemotron-H-8B.
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2},
}
"""Fields that vLLM reads, and that files on the Hub have, but transformers' defaults lack; and its kernels' sizes."""
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "qk_head_dim": 96,
    "v_head_dim": 32,
    "head_dim": 64,
}
"""The only sizes of compressed keys and values that vLLM's kernel for CPUs takes."""
_MAX_TOKENS = 24


def main(family: str) -> None:
    """Print a cell of the table.

    Args:
        family: Name as in config.json (model_type).
    """
    set_variables()
    from vllm.model_executor.models.registry import ModelRegistry

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] in ModelRegistry.get_supported_archs()
    with tempfile.TemporaryDirectory() as folder:
        try:
            folders = [save_small(family, f"{folder}/{seed}", seed) for seed in range(2)]
        except Exception:  # every configuration checks its values in its own way
            print("not tried")  # as engine transformers, if no small model can be made
            return
        first, second = largest_differences(folders)
    print(_verdict(first, second) + ("" if known else ", with transformers' code"))


def small_config(family: str) -> PreTrainedConfig:
    """Return a small configuration of sizes that vLLM for CPUs takes."""
    config = shrink(AutoConfig.for_model(family, **INCOMPLETE.get(family, {})), scale=SCALE)
    latent = _LATENT if getattr(config, "kv_lora_rank", None) else {}
    values = {**config.to_dict(), **latent, **AS_ON_THE_HUB.get(family, {})}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def save_small(family: str, folder: str, seed: int) -> str:
    """Write a small model whose every parameter matters; returns the folder."""
    torch.manual_seed(seed)
    with torch.no_grad():
        model = repaired(AutoModelForCausalLM.from_config(small_config(family), dtype=torch.float32)).eval()
        spread(model)
    save_weights(model, full_state_dict(model), folder)
    return folder


def _verdict(first: float, second: float) -> str:
    if not first <= TOLERANCE:  # NaN too
        return f"differs by {first:.2g} nats"
    if not second <= TOLERANCE:
        return f"differs by {second:.2g} nats once weights are replaced"
    return f"exact ({max(first, second):.0e})"


def largest_differences(folders: Sequence[str]) -> list[float]:
    """Return for each version of the weights the largest difference between sampler's and trainer's logprobs, in nats.

    folders: of the versions, from 0 on; the engine starts with the first.
    """
    config = EngineConfig(engine="vllm", max_batch=4, engine_options={"max_model_len": 128})
    engine = engine_maker(EngineSetup(config=config, device="cpu", longrope=_longrope(folders[0])))(folders[0], 0)
    differences = []
    for version, folder in enumerate(folders):
        if version:
            engine.load_weights(folder, version)
        differences.append(_difference(engine, folder))
    engine.close()  # type: ignore[attr-defined]
    return differences


def _longrope(folder: str) -> Longrope | None:
    """Return the factors of a longrope model for sequences as long as those that are sampled here."""
    return None if original_length(load_config(folder)) is None else "long"


def _difference(engine: Engine, folder: str) -> float:
    model = load_model(folder, longrope=_longrope(folder))
    params = SamplingParams(max_tokens=_MAX_TOKENS)
    requests = [
        GenerationRequest(prompt_tokens=prompt, params=params, seed=seed)
        for seed, prompt in enumerate(probe_sequences(model))
    ]
    completions = generate_all(engine, requests)
    sequences = [
        np.concatenate([request.prompt_tokens, completion.tokens])
        for request, completion in zip(requests, completions, strict=True)
    ]
    with torch.no_grad():
        logprobs = packed_logprobs(model, sequences).split([len(tokens) - 1 for tokens in sequences])
    differences = [
        np.abs(found.numpy()[-len(completion.logprobs) :] - completion.logprobs).max()
        for found, completion in zip(logprobs, completions, strict=True)
    ]
    return float(max(differences))


if __name__ == "__main__":
    run_script(main, description=__doc__)
