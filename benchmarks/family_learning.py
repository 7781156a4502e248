"""Train a tiny model of each of the newest families from random weights: does it learn, with which mismatch?

    python -m benchmarks.family_learning
    python -m benchmarks.family_learning --engine vllm          # in the environment of vLLM

Runs `ludic run` on moar_cats, one family after the other. A model has two layers of each kind of its family's default
configuration, made small. `first` and `last` are mean rewards of the first and the last tenth of the sampled versions.
`sampler_kl` is the mean over the steps of the KL from the sampler to the trainer, in nats a token: what sampler and
trainer compute differently. Most of it is from weights that are newer than the sampler's; without any, it is zero but
for rounding.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ludic
from benchmarks.families import INCOMPLETE
from benchmarks.measure import print_table
from benchmarks.vllm_families import small_config
from ludic.app import OTHER_WORDS
from ludic.environments import WORDS
from ludic.models import make_tiny_model, shrink
from ludic.settings import run_script

FAMILIES = ("gpt_oss", "qwen3_5_text", "qwen3_next", "nemotron_h", "lfm2", "deepseek_v3", "glm4_moe")
FLAGS = (
    "--env moar_cats --max-tokens 32 --accept-incomplete --group-size 16 --groups-per-batch 8 --num-workers 1 "
    "--batches-ahead 1 --learning-rate 4e-3 --is-ratio-cap 2 --device cpu"
)
_IN_BFLOAT16 = ["--engine-options", '{"dtype": "bfloat16"}']
_FLAGS_FOR_VLLM = {"qwen3_5_text": _IN_BFLOAT16, "qwen3_next": _IN_BFLOAT16}
"""vLLM's gated delta net for CPUs is in bfloat16 only; Qwen3.5 wants torchvision too."""


def main(families: Sequence[str] = (), engine: str = "transformers", num_steps: int = 40) -> None:
    """Print a row for each family.

    Args:
        families: Names as in config.json (model_type); the newest families if none is given.
        engine: Engine that samples.
        num_steps: Steps of each run.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = [[name, *_learn(name, engine, num_steps, Path(folder))] for name in families or FAMILIES]
    columns = ["family", "layers", "first", "last", "sampler_kl", "s"]
    print_table(f"family_learning: rewards of tiny models, sampled by {engine}", columns, rows)


def _learn(family: str, engine: str, num_steps: int, folder: Path) -> list[str]:
    model, root = folder / family, folder / f"{family}-run"
    num_layers = make_model(family, str(model), engine)
    command = [sys.executable, "-m", "ludic", "run", str(root), "--model", str(model), "--engine", engine]
    if engine == "vllm":
        command += _FLAGS_FOR_VLLM.get(family, [])
    began = time.perf_counter()
    done = subprocess.run(
        [*command, *FLAGS.split(), "--num-steps", str(num_steps)], capture_output=True, text=True, check=False
    )
    taken = time.perf_counter() - began
    if done.returncode:
        return [str(num_layers), "", "", f"ended with {done.returncode}: {done.stderr.strip()[-300:]}", f"{taken:.0f}"]
    run = ludic.open(str(root))
    rewards = run.sql("select avg(episode_reward) from rollouts group by policy_version order by policy_version")
    values = rewards.to_series().to_list()
    tenth = max(1, len(values) // 10)
    kl = run.sql("select avg(sampler_kl) from metrics where kind = 'train'").item()
    return [
        str(num_layers),
        f"{fmean(values[:tenth]):.2f}",
        f"{fmean(values[-tenth:]):.2f}",
        f"{kl:.1e}",
        f"{taken:.0f}",
    ]


def make_model(family: str, folder: str, engine: str = "transformers", **sizes: Any) -> int:
    """Write a small model of a family, with the tokenizer of the demo's words; returns the number of its layers.

    engine: vllm takes other widths than the others. sizes: other values of the configuration.
    """
    make_tiny_model(folder, [*WORDS, OTHER_WORDS])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    for file in (*Path(folder).glob("*.safetensors"), *Path(folder).glob("*config.json")):
        if file.name != "tokenizer_config.json":
            file.unlink()
    whole = AutoConfig.for_model(family, **INCOMPLETE.get(family, {}))
    config = small_config(family) if engine == "vllm" else shrink(whole)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, value in {"vocab_size": vocab_size, **ids, **sizes}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return config.num_hidden_layers


if __name__ == "__main__":
    run_script(main, description=__doc__)
