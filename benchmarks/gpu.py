"""Check and measure on one GPU what only a GPU shows, and write it to one Markdown file, each row as it comes.

    make gpu                             # python3 -m benchmarks.gpu, about eight minutes on an H100
    make gpu ARGS="--device cpu"         # the same at tiny sizes, to see that it runs; the figures mean nothing

Runs by the python3 that is there, without an installation of ludic: it needs PyTorch 2.11, transformers, safetensors
and pyarrow. Parts that need more, such as the store or vLLM, say what is missing.

- attention: logprobs and gradients of packed sequences in bfloat16, beside those of each sequence alone, both against
  float32 on the CPU. Packing is exact if it is no further off than the sequences alone.
- step: one gradient step in every way of running it, against the same step in float32 on the CPU.
- group: the process group of a trainer of one rank, and the one that waits without a limit.
- head: logprobs of a head in bfloat16, in float32 and in TF32, against float64.
- files: seconds of a publish and of a checkpoint.
- speed: the trainer's step at the sizes of Qwen3-0.6B, at most 16,384 tokens at once, and with layers of Qwen3-8B's
  size, as many as fit; model FLOPs do not count what is computed twice. Memory at the peak stands beside that of `ludic
  plan`, without what CUDA takes itself.
- choices: what a trainer chooses for this GPU by itself, with its peak; and one setting at a time: tokens of a
  micro-batch and of a chunk of logits, optimizers.
- run: whole runs with vLLM, and the share of their time that the trainer waits.
"""

import gc
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks.bare_machine import stand_ins

with stand_ins():
    from benchmarks.models import make_model
    from benchmarks.one_rank import shard_always
    from benchmarks.packing import skewed_sequences
    from ludic.base import init_distributed, shut_down, unlimited_group
    from ludic.errors import ModelError, one_line
    from ludic.models import NUM_TOKENS, logprobs_alone, shrink, spread, without_kernels
    from ludic.run import RunConfig, put_run
    from ludic.settings import run_script
    from ludic.training import (
        PACKED_ATTENTION,
        DeviceKind,
        Gpu,
        StepTimer,
        TrainConfig,
        activations,
        build_optimizer,
        by_sequence,
        check_trainable,
        compute_dtype,
        describe_computing,
        device_peak_flops,
        full_state_dict,
        kernels_keep_borders,
        linear_logprobs,
        model_cost,
        model_sizes,
        packed_logprobs,
        publish_dtype,
        rank_memory,
        run_at_once,
        save_weights,
        shard,
        step_flops,
        train_step,
        with_defaults,
    )
    from ludic.training.batches import MICRO_BATCH_TOKENS, MicroBatch, TrainingSequence, assign, pack

Cells = Sequence[str]
SECONDS = 480
"""All parts together; rows that would begin later are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a part runs on."""

    device: torch.device
    is_quick: bool
    """Whether sizes are tiny."""
    folder: Path
    """An empty folder for files."""


@dataclass(slots=True)
class Report:
    """The Markdown file, which is written while the parts run."""

    file: Path
    ends_at: float
    """By time.monotonic; rows after it are left out."""
    failures: int = 0

    def write(self, text: str) -> None:
        with self.file.open("a") as opened:
            opened.write(text)
        print(text, end="", flush=True)

    def table(self, title: str, columns: Cells, rows: Iterator[Cells]) -> None:
        """Write rows as they come; an error ends the table with a row that tells it."""
        started = time.perf_counter()
        self.write(f"\n## {title}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n")
        try:
            for row in rows:
                self.write(f"| {' | '.join(row)} |\n")
                if time.monotonic() > self.ends_at:
                    self.write(f"| the rest is left out: {SECONDS} seconds have passed |\n")
                    break
        except Exception as error:  # a GPU shows what was never tried, and the other parts shall still run
            self.failures += 1
            self.write(f"| failed: {type(error).__name__}: {one_line(error).replace('|', '/')[:400]} |\n")
        self.write(f"\n{time.perf_counter() - started:.0f} s.\n")


def main(
    device: Literal["cuda", "cpu"] = "cuda",
    file: str = "build/gpu.md",
    part: tuple[Literal["attention", "step", "group", "head", "files", "speed", "choices", "run"], ...] = (),
) -> None:
    """Write the file. The exit status is 1 if a part failed.

    Args:
        device: Where to run; cpu takes tiny sizes.
        file: The Markdown file; one that is there is replaced.
        part: Run only these parts.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu: PyTorch finds no CUDA device here; --device cpu shows that the parts run")
    report = Report(Path(file), ends_at=time.monotonic() + SECONDS)
    report.file.parent.mkdir(parents=True, exist_ok=True)
    report.file.write_text("# ludic on one GPU\n\n    make gpu\n")
    mesh = init_distributed(device)
    with tempfile.TemporaryDirectory() as folder:
        # Verdicts on families belong to this machine's run alone.
        os.environ["LUDIC_CACHE_DIR"] = f"{folder}/cache"
        setting = Setting(device=torch.device(mesh.device_type), is_quick=device == "cpu", folder=Path(folder))
        report.table("machine", ["", ""], machine(setting))
        for name, (title, columns, rows) in PARTS.items():
            if part and name not in part:
                continue
            if time.monotonic() > report.ends_at:
                report.write(f"\n## {title}\n\nLeft out: {SECONDS} seconds had passed.\n")
                continue
            report.table(title, columns, rows(setting))
            _free()
    shut_down()
    if report.failures:
        raise SystemExit(f"gpu: {report.failures} tables did not end; {report.file} says why")


def machine(setting: Setting) -> Iterator[Cells]:
    if setting.device.type == "cuda":
        about = torch.cuda.get_device_properties(setting.device)
        memory = f"{about.total_memory / 2**30:.0f} GiB"
        yield "device", f"{about.name}, {memory}, compute capability {about.major}.{about.minor}"
        yield "CUDA", str(torch.version.cuda)
    else:
        yield "device", f"CPU ({platform.machine()}), tiny sizes: the figures mean nothing"
    yield "Python", platform.python_version()
    yield "PyTorch, transformers", f"{torch.__version__}, {transformers.__version__}"
    missing = [name for name in ("msgspec", "duckdb", "polars", "vllm") if not importlib.util.find_spec(name)]
    yield "not installed", ", ".join(missing) or "none of what ludic needs"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- Attention -------------------------------------------------------------------------------------------


FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "olmo3", "glm4_moe", "deepseek_v3", "phi3"),
    *("gpt_oss", "qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2", "llama4_text"),
)
"""Families whose layers differ in what attention or experts compute, and those of the newest small models."""
_QUICK_FAMILIES = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text")
_LENGTHS = (5, 23, 1, 14, 130, 300)
"""Tokens of the sequences: around the windows of small models, one without neighbours, and over the kernel's tiles."""
_WORSE = 1.5
"""How much further off than a sequence alone the mean of packed logprobs may be."""


def attention(setting: Setting) -> Iterator[Cells]:
    for family in _QUICK_FAMILIES if setting.is_quick else FAMILIES:
        try:
            yield from _exactness(setting, family)
        except ModelError as error:
            yield family, f"refused: {one_line(error).rpartition('configuration, ')[2]}", "", "", ""
        _free()


def _exactness(setting: Setting, family: str) -> Iterator[Cells]:
    """Yield how far packed and single sequences are from float32 on the CPU.

    Layers with a state have a second row, of a whole pack at once, if their kernels keep borders.
    """
    config = AutoConfig.for_model(family)
    folder = setting.folder / family
    config.save_pretrained(folder)
    check_trainable(str(folder), family)
    small = shrink(config)
    torch.manual_seed(0)
    # A model changes the configuration that it is made from.
    plain = AutoModelForCausalLM.from_config(deepcopy(small), attn_implementation="eager").eval()
    with torch.no_grad():
        spread(plain)
    model = AutoModelForCausalLM.from_config(deepcopy(small), attn_implementation=PACKED_ATTENTION).eval()
    model.load_state_dict(plain.state_dict())
    model = model.to(setting.device, torch.bfloat16)
    numbers = np.random.default_rng(0)
    sequences = [numbers.integers(3, NUM_TOKENS, length + 1, dtype=np.int32) for length in _LENGTHS]

    def alone(of: PreTrainedModel) -> Tensor:
        return torch.cat([logprobs_alone(of, tokens) for tokens in sequences])

    with without_kernels():
        wanted = _logprobs_and_gradient(plain, lambda: alone(plain))
    ways = {family: _logprobs_and_gradient(model, lambda: packed_logprobs(model, sequences))}
    if by_sequence(model) and kernels_keep_borders(deepcopy(small), setting.device):
        run_at_once(model)
        ways[f"{family}, mixers at once"] = _logprobs_and_gradient(model, lambda: packed_logprobs(model, sequences))
    model.set_attn_implementation("eager")
    theirs = _logprobs_and_gradient(model, lambda: alone(model))

    def differences(of: tuple[Tensor, Tensor]) -> tuple[float, float]:
        return (of[0] - wanted[0]).abs().mean().item(), ((of[1] - wanted[1]).norm() / wanted[1].norm()).item()

    off_alone, slope_alone = differences(theirs)
    for name, ours in ways.items():
        off, slope = differences(ours)
        verdict = "exact" if off <= _WORSE * off_alone and slope <= _WORSE * slope_alone else "**further off**"
        if name == family and by_sequence(model):
            verdict += ", mixers by sequence" if len(ways) > 1 else ", mixers by sequence: no kernels that keep borders"
        yield name, verdict, f"{off:.2g}", f"{off_alone:.2g}", f"{slope:.2%}", f"{slope_alone:.2%}"


def _logprobs_and_gradient(model: PreTrainedModel, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return logprobs, and the gradient of a sum of them with fixed signs, as float32 on the CPU."""
    logprobs = run().float()
    signs = torch.where(torch.arange(len(logprobs), device=logprobs.device) % 3 == 0, -1.0, 1.0)
    model.zero_grad()
    (logprobs * signs).sum().backward()
    gradient = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return logprobs.detach().cpu(), gradient


# --- One step, in every way of running it ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of running the trainer's step."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the trainer."""
    always_sharded: bool = False
    """Whether FSDP2 shards the model over its one rank, as over several."""


WAYS = (
    Way(name="float32"),
    Way(name="float32, FSDP2 on one rank", always_sharded=True),
    Way(name="bfloat16", settings={"dtype": "bfloat16"}),
    Way(name="bfloat16, activation checkpointing", settings={"dtype": "bfloat16", "activation_checkpointing": True}),
    Way(name="bfloat16, compile", settings={"dtype": "bfloat16", "compile": True}),
    Way(
        name="bfloat16, activation checkpointing, compile",
        settings={"dtype": "bfloat16", "activation_checkpointing": True, "compile": True},
    ),
)
_TIMED = 2
"""Steps that are timed, after one that warms up."""


def step(setting: Setting) -> Iterator[Cells]:
    # Compiling takes a CPU many seconds a layer.
    width, layers = (64, 1) if setting.is_quick else (512, 4)
    sizes = {
        "vocab_size": 1024,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    sequences = skewed_sequences(8 if setting.is_quick else 32, 32 if setting.is_quick else 256, 1024)
    cpu = torch.device("cpu")
    wanted, gradient, _ = _one_step(cpu, sizes, sequences, Way(name="on the CPU"))
    yield "float32 on the CPU", f"{wanted['loss']:.5f}", f"{wanted['grad_norm']:.4f}", "", "", "", ""
    # One way of compiling shows that it runs.
    for way in (way for way in WAYS if not setting.is_quick or way.name != "bfloat16, compile"):
        metrics, ours, seconds = _one_step(setting.device, sizes, sequences, way)
        off = ((ours - gradient).norm() / gradient.norm()).item()
        yield (
            way.name,
            f"{metrics['loss']:.5f}",
            f"{metrics['grad_norm']:.4f}",
            f"{off:.2%}",
            f"{seconds.first:.2f}",
            f"{seconds.later:.3f}",
            f"{seconds.phases / seconds.later:.0%}",
        )
        _free()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Times of a step."""

    first: float
    """Of the first call, which compiles and warms up."""
    later: float
    """Mean of the calls after it."""
    phases: float
    """Mean of what the phases of the later calls took in all, by events of the device where it has them."""


def _one_step(
    device: torch.device, sizes: dict[str, Any], sequences: Sequence[TrainingSequence], way: Way
) -> tuple[dict[str, float], Tensor, Seconds]:
    """Return metrics, gradient and times of a step; the gradient is what one step of SGD with rate 1 changes."""
    config = TrainConfig.of(max_tokens_per_micro_batch=2048, max_grad_norm=None, **way.settings)
    model = _trainer_model(device, config, sizes, always_sharded=way.always_sharded)
    before = {name: tensor.clone() for name, tensor in full_state_dict(model).items()}
    batches, num_tokens = _packed(sequences, config)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)

    def once(rate: float) -> tuple[dict[str, float], float, StepTimer]:
        timer = StepTimer(device)
        started = time.perf_counter()
        metrics = train_step(
            model,
            sgd,
            batches,
            config=config,
            num_action_tokens=num_tokens,
            num_ranks=1,
            learning_rate=rate,
            timer=timer,
        )
        _wait(device)
        return metrics, time.perf_counter() - started, timer

    metrics, first, _ = once(1.0)
    after = full_state_dict(model)
    gradient = torch.cat([(before[name] - after[name]).flatten().float() for name in before])
    timed = [once(0.0) for _ in range(_TIMED)]
    later = sum(seconds for _, seconds, _ in timed) / _TIMED
    phases = sum(sum(timer.seconds().values()) for _, _, timer in timed) / _TIMED
    return metrics, gradient, Seconds(first=first, later=later, phases=phases)


def _trainer_model(
    device: torch.device,
    config: TrainConfig,
    sizes: dict[str, Any],
    *,
    made_on: str = "cpu",
    always_sharded: bool = False,
) -> PreTrainedModel:
    """Return a random model as the trainer runs it. made_on: where weights are drawn; a CPU is slow at it."""
    mesh = init_distributed(device.type)
    with torch.device(made_on):
        model = make_model(tie_word_embeddings=True, **sizes)
    if always_sharded:
        shard_always(model, mesh)
        return model
    shard(
        model,
        mesh,
        compute_dtype=compute_dtype(config),
        activation_checkpointing=bool(config.model.activation_checkpointing),
        compile_layers=bool(config.model.compile),
    )
    return model


def _packed(sequences: Sequence[TrainingSequence], config: TrainConfig) -> tuple[list[MicroBatch], int]:
    """Return micro-batches, and the number of tokens that they train on."""
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    plans = assign(lengths, 1, config.batch.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS)[0]
    return [pack([sequences[i] for i in plan]) for plan in plans], sum(each.num_action_tokens for each in sequences)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- Speed and memory at real sizes ----------------------------------------------------------------------


_SMALL = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
"""Qwen3-0.6B."""
_LARGE = _SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
}
"""Qwen3-8B, but for the number of layers, and tied embeddings."""
_TINY = _SMALL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_TOKENS = 16_384
_BYTES_A_WEIGHT = 18
"""float32 weight, gradient and two moments, and the bfloat16 copy."""
_SPARE = 0.35
"""Share of the memory for activations, logits and what the allocator loses."""
_PUBLISHED = "prime-rl 0.8, Qwen3-0.6B on one H100 at 16,384 tokens (its own figures)"


def speed(setting: Setting) -> Iterator[Cells]:
    small, tokens = (_TINY, 256) if setting.is_quick else (_SMALL, _TOKENS)
    if not setting.is_quick:
        yield _PUBLISHED, "11,896", "11.1%", "12.5", "", "", "", ""
    ways = [way for way in WAYS if way.name != "float32" and not way.always_sharded]
    for way in ways[:2] if setting.is_quick else ways:
        config = TrainConfig.of(max_tokens_per_micro_batch=tokens, **way.settings)
        name = "tiny" if setting.is_quick else "0.6B"
        yield f"{name}, {way.name}", *_speed(setting, small, config, _skewed(setting, small, tokens))
        _free()
    for way in () if setting.is_quick else ways:
        if way.settings.get("activation_checkpointing"):
            yield from _large(setting, way)


def _skewed(setting: Setting, sizes: dict[str, Any], tokens: int) -> list[TrainingSequence]:
    return skewed_sequences(8 if setting.is_quick else 64, tokens // 16, tokens, vocab_size=sizes["vocab_size"])


def _large(setting: Setting, way: Way) -> Iterator[Cells]:
    """Yield the row of 8B's layers; where too many were taken, with fewer."""
    h, kv = _LARGE["hidden_size"], _LARGE["num_key_value_heads"] * _LARGE["head_dim"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * _LARGE["intermediate_size"]
    weights = (1 - _SPARE) * torch.cuda.get_device_properties(setting.device).total_memory / _BYTES_A_WEIGHT
    layers = int((weights - h * _LARGE["vocab_size"]) // layer)
    while layers > 0:
        config = TrainConfig.of(max_tokens_per_micro_batch=_TOKENS, **way.settings)
        sizes = _LARGE | {"num_hidden_layers": layers}
        cells = _speed(setting, sizes, config, _skewed(setting, sizes, _TOKENS))
        yield f"8B, {layers} of 36 layers, {way.name}", *cells
        _free()
        if cells[0] != _NO_MEMORY:
            return
        layers -= 2


_NO_MEMORY = "out of memory"


def _speed(
    setting: Setting, sizes: dict[str, Any], config: TrainConfig, sequences: Sequence[TrainingSequence]
) -> Cells:
    """Return tokens a second, MFU, GiB at the peak and as planned, seconds of a step and of the first, and phases."""
    device = setting.device
    lengths = np.array([each.num_tokens for each in sequences])
    prompts = np.array([len(each.prompt_tokens) for each in sequences])
    planned = f"{_planned(setting, sizes, config, int(lengths.max())) / 2**30:.3g}"
    batches, num_tokens = _packed(sequences, config)
    seconds = []
    try:
        model = _trainer_model(device, config, sizes, made_on=device.type)
        cost = model_cost(model)
        optimizer = build_optimizer(model, config)
        for _ in range(1 + _TIMED):
            timer = StepTimer(device)
            started = time.perf_counter()
            train_step(
                model,
                optimizer,
                batches,
                config=config,
                num_action_tokens=num_tokens,
                num_ranks=1,
                learning_rate=1e-6,
                timer=timer,
            )
            _wait(device)
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return _NO_MEMORY, "", "", planned, "", "", ""
    later = sum(seconds[1:]) / _TIMED
    peak, flops = device_peak_flops(device, torch.bfloat16), step_flops(cost, prompts, lengths - prompts) if cost else 0
    phases = timer.seconds()
    shares = ", ".join(f"{name} {taken / later:.0%}" for name, taken in phases.items() if taken / later >= 0.005)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0
    return (
        f"{lengths.sum() / later:,.0f}",
        f"{flops / later / peak:.1%}" if peak else "",
        f"{memory:.1f}" if memory else "",
        planned,
        f"{later:.2f}",
        f"{seconds[0]:.1f}",
        shares,
    )


def _planned(setting: Setting, sizes: dict[str, Any], config: TrainConfig, length: int) -> int:
    """Return the bytes at the peak of a step, as `ludic plan` has them, without what CUDA takes itself."""
    model = _config(sizes)
    device: DeviceKind = "cpu" if setting.is_quick else "cuda"
    tokens = config.batch.max_tokens_per_micro_batch
    assert tokens is not None
    passes = activations(model, config.model, num_tokens=tokens, length=length, device=device)
    parts = rank_memory(model_sizes(model, config.model), passes, config, ranks=1, device=device)
    return sum(value for name, value in parts.items() if name != "CUDA and libraries")


def _config(sizes: dict[str, Any]) -> Qwen3Config:
    return Qwen3Config(tie_word_embeddings=True, **sizes)


# --- Settings, one by one --------------------------------------------------------------------------------


def choices(setting: Setting) -> Iterator[Cells]:
    sizes, tokens = (_TINY, 64) if setting.is_quick else (_SMALL, _TOKENS)
    free = torch.cuda.mem_get_info()[0] if setting.device.type == "cuda" else 4 * 10**9
    # On a CPU, layers take half a minute to compile.
    gpu = Gpu(free=free, has_triton=_is_installed("triton") and not setting.is_quick)
    run = RunConfig(model="none", env=("moar_cats",), max_sequence_tokens=tokens // 4)
    chosen = with_defaults(TrainConfig(), run, _config(sizes), gpu, ranks=1)
    yield f"chosen for {free / 2**30:.0f} GiB: {describe_computing(chosen.flat())}", *_choice(setting, sizes, chosen)
    _free()
    base = {
        "dtype": "bfloat16",
        "activation_checkpointing": True,
        "fused_adamw": True,
        "max_tokens_per_micro_batch": tokens,
        "logprob_chunk_tokens": 1024,
    }
    changes: dict[str, dict[str, Any]] = {
        f"micro-batches of {tokens:,} tokens, logits of 1,024, AdamW in one kernel": {},
        f"micro-batches of {tokens // 4:,} tokens": {"max_tokens_per_micro_batch": tokens // 4},
        f"micro-batches of {tokens // 2:,} tokens": {"max_tokens_per_micro_batch": tokens // 2},
        "logits of 256 tokens": {"logprob_chunk_tokens": 256},
        "logits of 8,192 tokens": {"logprob_chunk_tokens": 8192},
        "AdamW over lists of tensors (foreach)": {"fused_adamw": False},
        "AdamW with moments in 8 bits": {"optimizer": "adamw_8bit"},
    }
    for name, change in changes.items():
        if "optimizer" in change and not _is_installed("torchao"):
            yield name, "not measured: torchao is not installed", "", "", "", "", "", ""
            continue
        yield name, *_choice(setting, sizes, TrainConfig.of(**base | change))
        _free()


def _choice(setting: Setting, sizes: dict[str, Any], config: TrainConfig) -> Cells:
    """Return the cells of `_speed` for sequences of one length, which fill two micro-batches or more."""
    tokens, length = (64, 16) if setting.is_quick else (2 * _TOKENS, _TOKENS // 4)
    if not setting.is_quick:
        tokens = max(tokens, 2 * (config.batch.max_tokens_per_micro_batch or 0))
    numbers = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            rollout_id=str(index),
            prompt_tokens=numbers.integers(0, sizes["vocab_size"], 4, dtype=np.int32),
            response_tokens=numbers.integers(0, sizes["vocab_size"], length - 4, dtype=np.int32),
            columns={"response_logprobs": np.full(length - 4, -7.0, np.float32)},
            advantage=1.0,
        )
        for index in range(tokens // length)
    ]
    return _speed(setting, sizes, config, sequences)


# --- The head's logits -----------------------------------------------------------------------------------


def head(setting: Setting) -> Iterator[Cells]:
    """Yield rows for a head of random weights, whose inputs and weights are numbers of bfloat16."""
    vocabulary, width, tokens = (512, 64, 64) if setting.is_quick else (151_936, 1024, 4096)
    device = setting.device
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16) / width**0.5
    rest = torch.randint(vocabulary, (tokens,), device=device), torch.ones(tokens, device=device)
    with torch.no_grad():
        wanted = linear_logprobs(hidden.double(), weight.double(), None, *rest)[0]
    precision = torch.get_float32_matmul_precision()
    for name, dtype, matmul in (
        ("bfloat16", torch.bfloat16, "highest"),
        ("float32", torch.float32, "highest"),
        ("float32 in TF32", torch.float32, "high"),
    ):
        torch.set_float32_matmul_precision(matmul)
        seconds = []
        for _ in range(1 + _TIMED):
            parts = [each.detach().to(dtype).requires_grad_() for each in (hidden, weight)]
            _wait(device)
            started = time.perf_counter()
            logprobs = linear_logprobs(parts[0], parts[1], None, *rest)[0]
            logprobs.sum().backward()
            _wait(device)
            seconds.append(time.perf_counter() - started)
        off = (logprobs.detach() - wanted).abs()
        milliseconds = 1e3 * sum(seconds[1:]) / _TIMED
        yield name, f"{milliseconds:.1f}", f"{off.mean().item():.2g}", f"{off.max().item():.2g}"
    torch.set_float32_matmul_precision(precision)


# --- The process group -----------------------------------------------------------------------------------


def group(setting: Setting) -> Iterator[Cells]:
    default = dist.distributed_c10d._get_default_group()
    yield "device that the group is bound to", str(default.bound_device_id or "none")
    for name, its, device in (
        ("sum of a number on the device", None, setting.device),
        ("sum of a number in the group that waits without a limit", unlimited_group(), torch.device("cpu")),
    ):
        number = torch.ones(1, device=device)
        milliseconds = []
        for _ in range(1 + _TIMED):
            started = time.perf_counter()
            dist.all_reduce(number, group=its)
            _wait(device)
            milliseconds.append(1e3 * (time.perf_counter() - started))
        yield name, f"{milliseconds[0]:.2f} ms at first, then {milliseconds[-1]:.2f} ms"
        if its is not None:
            yield "its limit", str(its._get_backend(device).options._timeout)


# --- Publishes and checkpoints ---------------------------------------------------------------------------


def files(setting: Setting) -> Iterator[Cells]:
    config = TrainConfig.of(dtype="bfloat16")
    model = _trainer_model(setting.device, config, _TINY if setting.is_quick else _SMALL)
    num_weights = sum(p.numel() for p in model.parameters())
    started = time.perf_counter()
    weights = full_state_dict(model)
    gathered = time.perf_counter() - started
    folder = setting.folder / "publish"
    save_weights(model, weights, folder, dtype=publish_dtype(config))
    taken = time.perf_counter() - started
    size = sum(file.stat().st_size for file in folder.iterdir())
    yield "publish: gather", *_by_size(4 * num_weights, gathered)
    yield "publish: convert and write", *_by_size(size, taken - gathered)
    if not _is_installed("msgspec"):
        yield "checkpoint", "not measured: the store needs msgspec", "", ""
        return
    from ludic.run import RunConfig
    from ludic.training import take_snapshot, write_checkpoint

    optimizer = build_optimizer(model, config)
    batches, num_tokens = _packed(skewed_sequences(4, 64, 256, vocab_size=512), config)
    train_step(model, optimizer, batches, config=config, num_action_tokens=num_tokens, num_ranks=1, learning_rate=1e-6)
    _wait(setting.device)
    started = time.perf_counter()
    snapshot = take_snapshot(model, optimizer, attempt_id=0, step=1, policy_version=0, cursor={}, config={})
    taken = time.perf_counter() - started
    size = sum(each.nbytes for part in (snapshot.weights, snapshot.moments) for each in part.values())
    yield "checkpoint: copy to the host (ranks wait)", *_by_size(size, taken)
    root = put_run(str(setting.folder / "run"), RunConfig(model="none", env=("moar_cats",)))
    started = time.perf_counter()
    write_checkpoint(root, snapshot)
    taken = time.perf_counter() - started
    yield "checkpoint: write (beside the next steps)", *_by_size(size, taken)


def _by_size(size: float, seconds: float) -> Cells:
    return f"{size / 1e9:.2f}", f"{seconds:.2f}", f"{seconds / (1e-9 * size):.2f}"


def _is_installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


# --- Whole runs ------------------------------------------------------------------------------------------


def run(setting: Setting) -> Iterator[Cells]:
    """Yield the waiting shares of a run with each engine that is there."""
    for engine in ("transformers", "vllm"):
        needed = ("msgspec", "duckdb", "polars", *(["vllm"] if engine == "vllm" else []))
        missing = [name for name in needed if not _is_installed(name)]
        if missing:
            yield engine, f"not run: {', '.join(missing)} not installed", "", "", ""
            continue
        yield engine, *_run(setting, engine)


def _run(setting: Setting, engine: str) -> Cells:
    import ludic
    from ludic.environments import WORDS
    from ludic.models import make_tiny_model

    root, num_steps = str(setting.folder / engine), 3 if setting.is_quick else 100
    model = str(setting.folder / "model")
    if not Path(model).exists():
        make_tiny_model(model, WORDS)
    command = [sys.executable, "-m", "ludic", "run", root, "--model", model, "--env", "moar_cats", "--engine", engine]
    settings = {"num_steps": num_steps, "max_tokens": 32, "learning_rate": 3e-3, "device": setting.device.type}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    started = time.perf_counter()
    done = subprocess.run([*command, *flags, "--accept-incomplete"], capture_output=True, text=True, check=False)
    taken = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"ludic run ended with {done.returncode}: {done.stderr[-300:]}")
    (row,) = ludic.open(root).sql(_WAITING).iter_rows(named=True)
    shares = f"{row['waiting']:.0%}", f"{row['first_reward']:.2f} to {row['last_reward']:.2f}"
    return f"{num_steps}", f"{taken:.0f}", *shares


_WAITING = """
select sum(wait_s) / sum(wait_s + step_s) as waiting, arg_min(reward_mean, step) as first_reward,
    arg_max(reward_mean, step) as last_reward
from metrics where kind = 'train'
"""

_OF_A_STEP = ("", "tokens/s", "MFU", "GiB at the peak", "planned", "step, s", "first step, s", "of the step")

PARTS: dict[str, tuple[str, Cells, Callable[[Setting], Iterator[Cells]]]] = {
    "attention": (
        "attention: small random models in bfloat16, against float32 on the CPU",
        ("family", "packed", "logprobs off, nats (mean)", "each sequence alone", "gradient off", "each alone"),
        attention,
    ),
    "step": (
        "step: one gradient step, against float32 on the CPU",
        ("", "loss", "gradient norm", "gradient off", "first, s", "later, s", "of it in phases, by events"),
        step,
    ),
    "group": ("group: the process group of one rank", ("", ""), group),
    "head": (
        "head: logprobs of one batch of hidden states, against float64",
        ("logits in", "forward and backward, ms", "off, nats (mean)", "at most"),
        head,
    ),
    "files": ("files: seconds of a publish and a checkpoint", ("", "GB", "s", "s a GB"), files),
    "speed": ("speed: the trainer's step", _OF_A_STEP, speed),
    "choices": ("choices: the trainer's step by settings, bfloat16, activations recomputed", _OF_A_STEP, choices),
    "run": (
        "run: a whole run on this GPU, worker and trainer",
        ("engine", "steps", "s", "of the trainer's time waiting", "reward"),
        run,
    ),
}


if __name__ == "__main__":
    run_script(main, description=__doc__)
