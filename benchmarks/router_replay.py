"""Router replay: bytes a token of the column `experts` in several encodings, and the mismatch with and without replay.

    python -m benchmarks.router_replay

The first table draws experts at the sizes of three mixtures: a router's scores are a popularity of each expert, a topic
that lasts for 100 tokens, and noise of each token, all of standard deviation 1 or so. Parquet's encodings leave the
column's type as it is, and any reader decodes them. The others would need a type of their own.

The second table is of `ludic run` on moar_cats with a tiny mixture of large random weights, so that experts differ. The
sampler computes in float32, the trainer in bfloat16, as vLLM and a trainer differ by their kernels. Batches are
on-policy, so the mismatch is that of rounding.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

import ludic
from benchmarks.family_learning import FLAGS, make_model
from benchmarks.kept_tokens import parquet_sizes
from benchmarks.measure import print_table
from ludic.models import spread
from ludic.records import array_columns, to_arrow
from ludic.settings import run_script

_COLUMN = "experts.list.element.list.element.list.element"
LAST_REWARD = (
    "select avg(episode_reward) from rollouts where policy_version >= 0.9 * (select max(policy_version) from rollouts)"
)
MISMATCH = "select avg(sampler_kl), max(ratio_p99), avg(experts_changed) from metrics where kind = 'train'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Layers with experts, experts that a token is sent to, and experts of a layer."""

    name: str
    layers: int
    chosen: int
    experts: int


MIXTURES = (
    Mixture(name="gpt-oss-20b", layers=24, chosen=4, experts=32),
    Mixture(name="Qwen3-30B-A3B", layers=48, chosen=8, experts=128),
    Mixture(name="Qwen3-Next-80B-A3B", layers=48, chosen=10, experts=512),
)


def main(quick: bool = False) -> None:
    """Print both tables.

    Args:
        quick: Few tokens and two steps, to check that the benchmark works.
    """
    length, num_rollouts = (20, 4) if quick else (400, 16)
    sizes = [encoded_bytes(mixture, length, num_rollouts) for mixture in MIXTURES]
    header = ["encoding", *(f"{m.name} ({m.layers} x {m.chosen} of {m.experts})" for m in MIXTURES)]
    rows = [[name, *(f"{of_mixture[name]:.0f}" for of_mixture in sizes)] for name in sizes[0]]
    print_table("bytes a token", header, rows)
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder, "model"))
        make_model("qwen3_moe", model, num_experts=16, num_local_experts=16, num_experts_per_tok=4)
        large = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            spread(large)
        large.save_pretrained(model)
        found = [_run(model, Path(folder, f"run-{on}"), on, 2 if quick else 40) for on in (True, False)]
    columns = ["replay", "sampler_kl", "ratio_p99, largest", "experts changed", "reward, last tenth", "s"]
    columns += ["bytes a token"]
    print_table("qwen3_moe, 2 layers, 4 of 16 experts", columns, found)


def drawn_experts(mixture: Mixture, num_tokens: int) -> np.ndarray:
    """Return (num_tokens, layers, chosen) int16, ascending."""
    rng = np.random.default_rng(0)
    found = np.empty((num_tokens, mixture.layers, mixture.chosen), np.int16)
    for layer in range(mixture.layers):
        topics = rng.normal(0, 0.5, (num_tokens // 100 + 1, mixture.experts)).repeat(100, axis=0)[:num_tokens]
        scores = rng.normal(0, 1, mixture.experts) + topics + rng.gumbel(size=(num_tokens, mixture.experts))
        found[:, layer] = np.sort(np.argpartition(-scores, mixture.chosen, axis=1)[:, : mixture.chosen], axis=1)
    return found


def encoded_bytes(mixture: Mixture, length: int, num_rollouts: int) -> dict[str, float]:
    """Return the bytes a token of each encoding, of rollouts of `length` tokens in one row group."""
    experts = drawn_experts(mixture, length * num_rollouts)
    table = pa.table({"experts": to_arrow(array_columns()["experts"], np.split(experts, num_rollouts))})
    sizes = parquet_sizes(table, _COLUMN)
    codec = pa.Codec("zstd", compression_level=1)
    num_bits = int(np.ceil(np.log2(mixture.experts)))
    bits = np.unpackbits(experts.astype(">u2").view(np.uint8).reshape(len(experts), -1, 2), axis=-1)[..., -num_bits:]
    is_chosen = np.zeros((len(experts), mixture.layers, mixture.experts), bool)
    np.put_along_axis(is_chosen, experts.astype(np.int64), True, axis=2)
    others = {
        "a byte or two an expert": experts.astype(np.uint8 if mixture.experts <= 256 else np.uint16).tobytes(),
        "packed bits": np.packbits(bits).tobytes(),
        "bitmap of the experts": np.packbits(is_chosen, axis=-1).tobytes(),
    }
    sizes |= {f"{name}, zstd (another type)": len(codec.compress(data)) for name, data in others.items()}
    return {name: size / len(experts) for name, size in sizes.items()}


def _run(model: str, root: Path, replay: bool, num_steps: int) -> list[str]:
    """Return a row of the second table."""
    flags = [*FLAGS.split(), "--dtype", "bfloat16", "--num-steps", str(num_steps), "--keep-experts"]
    flags += ["--batches-ahead", "0"]
    command = [sys.executable, "-m", "ludic", "run", str(root), "--model", model, "--engine", "transformers", *flags]
    began = time.perf_counter()
    subprocess.run([*command, "--replay-experts", str(replay)], check=True, capture_output=True)
    seconds = time.perf_counter() - began
    run = ludic.open(str(root))
    kl, ratio, changed = run.sql(MISMATCH).row(0)
    reward = run.sql(LAST_REWARD).item()
    size = 0
    for file in Path(root, "rollouts").rglob("*.parquet"):
        metadata = pq.ParquetFile(file).metadata
        columns = [
            metadata.row_group(i).column(j) for i in range(metadata.num_row_groups) for j in range(metadata.num_columns)
        ]
        size += sum(column.total_compressed_size for column in columns if column.path_in_schema == _COLUMN)
    tokens = run.sql("select sum(prompt_length + response_length - 1) from rollouts").item()
    return [
        "on" if replay else "off",
        f"{kl:.1e}",
        f"{ratio:.2f}",
        "" if changed is None else f"{changed:.1%}",
        f"{reward:.2f}",
        f"{seconds:.0f}",
        f"{size / tokens:.1f}",
    ]


if __name__ == "__main__":
    run_script(main, description=__doc__)
