"""Say for every family of causal language models of the installed transformers what ludic does with it.

Each family is judged as `ludic run` judges it at a start, by the default configuration of its class. docs/models.md
holds the table. A configuration with other layers may be judged otherwise, such as LFM2 with and without convolutions.
"""

import logging
import re
import tempfile
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ludic.engines.transformers_engine import exact_attention
from ludic.errors import ModelError, one_line
from ludic.flags import run_script
from ludic.models.families import shrink
from ludic.training.model import check_trainable
from ludic.training.packed import by_sequence

INCOMPLETE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
}
"""Settings of families whose defaults give no model, or one without the layers that its models have."""
_QUICK = ("llama", "gpt_oss")
_MOST_CHARACTERS = 110


def main(quick: bool = False) -> None:
    """Print the table, in Markdown.

    Args:
        quick: Judge two families only.
    """
    logging.disable(logging.WARNING)
    print("| family | trained | engine transformers |\n| --- | --- | --- |")
    for family in names(quick):
        print(f"| {' | '.join(judge(family))} |", flush=True)


def names(quick: bool) -> list[str]:
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not quick or name in _QUICK]


def judge(family: str) -> list[str]:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            AutoConfig.for_model(family, **INCOMPLETE.get(family, {})).save_pretrained(folder)
        except Exception as error:  # defaults that its own class refuses
            return [family, *[f"no default configuration: {_short(one_line(error))}"] * 2]
        return [family, _trained(folder), _sampled_from(folder)]


def _trained(folder: str) -> str:
    try:
        return f"exact{_path(folder)}" if check_trainable(folder, "") else "judged by its weights"
    except ModelError as error:
        return _short(str(error))


def _path(folder: str) -> str:
    """Return which layers do not run on all packed sequences at once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shrink(AutoConfig.from_pretrained(folder)))
    names = sorted({type(module).__name__ for module in by_sequence(model)})
    return f"; {', '.join(names)} by sequence" if names else ""


def _sampled_from(folder: str) -> str:
    try:
        attention, is_tried = exact_attention(folder, "")
    except ModelError as error:
        return _short(str(error))
    if not is_tried:
        return "not tried"
    return "exact" if attention is None else f"exact, with {attention} attention"


def _short(problem: str) -> str:
    reason = re.sub(r"^: ludic does not know how to run .*?: ", "", problem)
    reason = reason.removeprefix("in a small random model of this configuration, ")
    reason = re.sub(r" from those of each sequence alone.*| \(neither a linear.*", "", reason)
    return "refused: " + reason.replace("|", "/")[:_MOST_CHARACTERS]


if __name__ == "__main__":
    run_script(main)
