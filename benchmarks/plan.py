"""Compare what `ludic plan` says of memory with peaks: measured here on the CPU, and published for GPUs.

    python -m benchmarks.plan

Each measured size is a process of its own with one rank and one thread, in float32. A peak is Linux's VmHWM minus what
the process held after its imports. `step` is a gradient step when gradients and AdamW's moments are there, as from the
second micro-batch of the second step on. `files` is a publish and a checkpoint of the same step, both in memory, while
threads write them. Published peaks are those of prime-rl's benchmarks/baselines (January 2026, reserved by PyTorch's
allocator, so without what CUDA itself takes), for full fine-tuning in bfloat16 that computes activations again.
"""

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Qwen3Config

from benchmarks.logprobs_memory import even_batch
from benchmarks.measure import in_a_process, peak_bytes, print_table, start_peak
from benchmarks.models import make_model
from ludic.base import init_distributed, shut_down
from ludic.run import RunConfig, put_run
from ludic.settings import run_script
from ludic.training import (
    PROCESS,
    ModelConfig,
    TrainConfig,
    activations,
    build_optimizer,
    detached,
    full_state_dict,
    host_memory,
    model_sizes,
    rank_memory,
    save_weights,
    shard,
    take_snapshot,
    train_step,
    write_checkpoint,
)

SIZES: Mapping[str, tuple[int, int, int]] = {
    "100 M": (640, 14, 32_000),
    "200 M": (896, 16, 32_000),
    "400 M": (1_152, 20, 64_000),
}
"""Hidden size, layers and vocabulary."""
CASES = ("step", "step, activation checkpointing", "files")
PUBLISHED = (
    ("Qwen3-0.6B, 1 H100, 16,384 tokens", (1024, 28, 3072, 16), 1, 16_384, 12.53),
    ("Qwen3-0.6B, 1 H100, 65,536 tokens", (1024, 28, 3072, 16), 1, 65_536, 19.56),
    ("Qwen3-4B, 8 H100, 16,384 tokens", (2560, 36, 9728, 32), 8, 16_384, 17.10),
    ("Qwen3-4B, 8 H100, 65,536 tokens", (2560, 36, 9728, 32), 8, 65_536, 36.10),
)
"""Name; hidden size, layers, width of the MLP, heads; ranks, tokens of a micro-batch, GiB at the peak."""


def main(quick: bool = False) -> None:
    """Print a table of measured peaks and one of published ones.

    Args:
        quick: Use a tiny model, to check that the benchmark works; the figures mean nothing.
    """
    sizes = {"tiny": (64, 2, 1_000)} if quick else SIZES
    num_tokens = 64 if quick else 1_024
    rows = []
    for name, size in sizes.items():
        for case in CASES if name == next(iter(sizes)) else ("step", "files"):
            settings = ModelConfig(activation_checkpointing="checkpointing" in case)
            measured = in_a_process(measure, case, size, num_tokens, settings)
            rows.append([f"{name}, {case}", *_beside(planned(case, size, num_tokens, settings), measured / 1e9, "GB")])
    columns = ["", "ludic plan", "peak", "plan of peak"]
    print_table(
        f"plan: memory of one rank in float32 on the CPU, micro-batches of {num_tokens:,} tokens", columns, rows
    )
    rows = [
        [name, *_beside(_planned_gpu(size, ranks, tokens), peak, "GiB")]
        for name, size, ranks, tokens, peak in PUBLISHED[: 1 if quick else None]
    ]
    print_table("plan: memory of a GPU beside peaks that prime-rl published", columns, rows)


def _beside(plan: float, peak: float, unit: str) -> list[str]:
    return [f"{plan:.2f} {unit}", f"{peak:.2f} {unit}", f"{plan / peak:.2f}x"]


def planned(case: str, size: tuple[int, int, int], num_tokens: int, settings: ModelConfig) -> float:
    """Return what the plan says, in GB, beside what a process holds after its imports."""
    config = _config(*size)
    sizes = model_sizes(config, settings)
    passes = activations(config, settings, num_tokens=num_tokens, length=min(512, num_tokens), device="cpu")
    train = TrainConfig(model=settings)
    on_device = rank_memory(sizes, passes, train, ranks=1, device="cpu")
    if case != "files":
        return sum(on_device.values()) / 1e9
    between_steps = on_device["weights"] + on_device["AdamW's moments"]
    return (
        between_steps + sum(host_memory(sizes, train, ranks=1, rank=0, device="cpu").values()) - PROCESS["cpu"]
    ) / 1e9


def _planned_gpu(size: tuple[int, int, int, int], ranks: int, num_tokens: int) -> float:
    """Return what the plan says of a GPU, in GiB, without CUDA's own memory."""
    hidden, layers, width, heads = size
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    settings = ModelConfig(dtype="bfloat16", activation_checkpointing=True)
    passes = activations(config, settings, num_tokens=num_tokens, length=num_tokens, device="cuda")
    train = TrainConfig(model=settings)
    parts = rank_memory(model_sizes(config, settings), passes, train, ranks=ranks, device="cuda")
    return (sum(parts.values()) - parts["CUDA and libraries"]) / 2**30


def measure(case: str, size: tuple[int, int, int], num_tokens: int, settings: ModelConfig) -> int:
    """Return the peak of a process's memory minus what it held before the model was there, in bytes."""
    torch.set_num_threads(1)
    mesh = init_distributed("cpu")
    before = start_peak()
    model = make_model(**_config(*size).to_diff_dict())
    shard(model, mesh, activation_checkpointing=bool(settings.activation_checkpointing))
    config = TrainConfig.of(learning_rate=1e-4)
    optimizer = build_optimizer(model, config)

    def step(*of_tokens: int) -> None:
        batches = [even_batch(num_tokens, size[2]) for num_tokens in of_tokens]
        num_action_tokens = sum(int(batch.action_mask.sum()) for batch in batches)
        train_step(
            model,
            optimizer,
            batches,
            config=config,
            num_action_tokens=num_action_tokens,
            num_ranks=1,
            learning_rate=1e-4,
        )

    step(8)  # makes the moments
    if case == "files":
        start_peak()
        _publish_and_checkpoint(model, optimizer)
    else:
        step(8, num_tokens)
    peak = peak_bytes()
    shut_down()
    return peak - before


def _publish_and_checkpoint(model: Any, optimizer: Any) -> None:
    """Copy the weights as the trainer does to publish, then the state of a checkpoint, and write both."""
    with tempfile.TemporaryDirectory() as folder:
        root = put_run(f"{folder}/run", RunConfig(model="none", env=("moar_cats",)))
        weights = detached(full_state_dict(model), model.device)
        snapshot = take_snapshot(
            model, optimizer, attempt_id=1, step=2, policy_version=0, cursor={}, config=TrainConfig().flat()
        )
        save_weights(model, weights, folder)
        write_checkpoint(root, snapshot)


def _config(hidden: int, layers: int, vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64 // 2 or 1,
        head_dim=64,
        tie_word_embeddings=True,
    )


if __name__ == "__main__":
    run_script(main, description=__doc__)
