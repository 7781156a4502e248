"""Say for every family of causal language models of the installed transformers what ludic does with it.

    python -m benchmarks.families --write                  # training and engine transformers
    .venv-vllm/bin/python -m benchmarks.families --write   # engine vllm, on the CPU

Each family is judged as `ludic run` judges it at a start, by the default configuration of its class. docs/families.md
holds the table. A configuration with other layers may be judged otherwise, such as LFM2 with and without convolutions.
Where vLLM is installed, only its column is judged (benchmarks/vllm_families.py), half a minute a family; elsewhere only
the others. A column that is not judged stays as docs/families.md has it.
"""

import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ludic.base import is_installed
from ludic.engines import exact_attention
from ludic.errors import ModelError, one_line
from ludic.models import shrink
from ludic.settings import run_script
from ludic.training import by_sequence, check_trainable


def _longrope(num_factors: int, **values: float) -> dict[str, Any]:
    """Return rotary parameters as in the files of Phi-3-128k. num_factors: half of a head's numbers."""
    factors = [1 + number / num_factors for number in range(num_factors)]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": [factor**4 for factor in factors],
        "original_max_position_embeddings": 4096,
        **values,
    }


INCOMPLETE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {"max_position_embeddings": 131072, "rope_parameters": _longrope(48)},
    "phi4_multimodal": {"rope_parameters": _longrope(48)},
    "phimoe": {"rope_parameters": _longrope(64, short_mscale=1.2, long_mscale=1.3)},
}
"""Settings of families whose defaults give no model, or one without the layers or positions that its models have."""
_NOTES = {
    "apertus": "vLLM keeps the parameters of xIELU in bfloat16",
    "cohere2": "vLLM's window is one token longer than transformers'",
    "cohere2_moe": "vLLM's window is one token longer than transformers'",
    "ernie4_5_moe": "vLLM's router for CPUs ignores the bias of experts",
    "hrm_text": "vLLM sees prompts in both directions",
    "nemotron_h": "judged without experts, for which vLLM has no kernel there",
    "qwen3_5_text": "it runs with torchvision in bfloat16",
    "qwen3_next": "it runs in bfloat16",
}
"""What is known of vLLM's verdict."""
_QUICK = ("llama", "gpt_oss")
_MOST_CHARACTERS = 110
_LIMIT_S = 240
_DOCS = Path(__file__).parents[1] / "docs/families.md"
_HEAD = "| family | trained | engine transformers | engine vllm, on the CPU |\n| --- | --- | --- | --- |"
_ERROR = re.compile(r"(?:\(.*?\) )?(?:ERROR \S+ \S+ \[.*?\] )?(?:[a-z]\w*\.)*([A-Z]\w*(?:Error|Exception)(?:: .+)?)$")
"""An error in the log of vLLM's processes."""
_FOLLOWING = re.compile(
    r"validation errors? for \w+$|EngineDeadError|^RuntimeError: (Engine core|Error raised in)|CalledProcess"
)


def main(quick: bool = False, families: Sequence[str] = (), write: bool = False) -> None:
    """Print the table, in Markdown.

    Args:
        quick: Judge two families only.
        families: Names as in config.json (model_type); all if none is given.
        write: Put each row into the table of docs/families.md.
    """
    logging.disable(logging.WARNING)
    table = _Table()
    print(_HEAD)
    for family in families or names(quick):
        *before, vllm = table.rows.get(family, [family, "", "", ""])
        if is_installed("vllm"):
            row = [*before, "; ".join(filter(None, [_sampled_with_vllm(family, before[1]), _NOTES.get(family)]))]
        else:
            row = [*judge(family), vllm]
        table.rows[family] = row
        print(_line(row), flush=True)
        if write:
            table.write()


class _Table:
    """The table of docs/families.md: its rows by family, and the text before it."""

    def __init__(self) -> None:
        self._before, _, rows = _DOCS.read_text().partition(_HEAD)
        cells = [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in rows.strip().splitlines()]
        self.rows = {row[0]: row for row in cells}

    def write(self) -> None:
        rows = "\n".join(_line(self.rows[family]) for family in names() if family in self.rows)
        _DOCS.write_text(f"{self._before}{_HEAD}\n{rows}\n")


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def names(quick: bool = False) -> list[str]:
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not quick or name in _QUICK]


def judge(family: str) -> list[str]:
    """Return a row of the table without vLLM's cell."""
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


def _sampled_with_vllm(family: str, trained: str) -> str:
    """Return vLLM's cell. Each family has a process of its own: some end it, and some never answer."""
    if not trained.startswith(("exact", "judged")):
        return "not trained"
    command = [sys.executable, "-m", "benchmarks.vllm_families", "--family", family]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"fails: no answer within {_LIMIT_S} s"
    if "ludic does not know how to run" in done.stderr:  # a family that is judged by its weights
        return "not trained"
    return f"fails: {_reason(done.stderr)}" if done.returncode else done.stdout.strip().splitlines()[-1]


def _reason(log: str) -> str:
    """Return the first error of a log, which is that of vLLM's own process; later ones follow from it."""
    errors = [match[1] for line in log.splitlines() if (match := _ERROR.match(line))]
    first = next((error for error in errors if not _FOLLOWING.search(error)), log.strip()[-200:])
    text = re.sub(r".*\d validation errors? for \w+ (Value error, |Assertion failed, )?| \[type=.*", "", first)
    return text.replace("|", "/").replace("\n", " ").rstrip(".")[:_MOST_CHARACTERS]


def _short(problem: str) -> str:
    reason = re.sub(r"^: ludic does not know how to run .*?: ", "", problem)
    reason = reason.removeprefix("in a small random model of this configuration, ")
    reason = re.sub(r" from those of each sequence alone.*| \(neither a linear.*", "", reason)
    return "refused: " + reason.replace("|", "/")[:_MOST_CHARACTERS]


if __name__ == "__main__":
    run_script(main)
