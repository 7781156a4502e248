"""Settings that follow the device: on the CPU, on a GPU by its memory, after a resume, and in what a run shows."""

from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tiny_runs import fill, train_here
from transformers import Qwen3Config

from ludic.app.show.stats import describe_trainer
from ludic.base.devices import MEMORY_VARIABLE
from ludic.models.sizes import attention_tokens
from ludic.root.attempts import read_attempt, start_attempt
from ludic.run.config import RunConfig
from ludic.training.config import ON_CPU, TrainConfig
from ludic.training.device_defaults import Gpu, follow_device, with_defaults
from ludic.training.inherited_settings import next_config
from ludic.training.memory import activations, model_sizes, rank_memory

GB = 10**9
QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
ON_GPU = {"dtype": "bfloat16", "activation_checkpointing": True}
CUDA = SimpleNamespace(device_type="cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """gpu(free): a GPU of 80 GB that has bfloat16 and so much free memory, as torch tells of it."""

    def make(free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GB))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)

    return make


def chosen(config: TrainConfig) -> dict:
    return {name: value for name, value in config.flat().items() if name in ON_CPU}


RUN = RunConfig(model="m", env=("moar_cats",))


def no_model() -> Qwen3Config:
    raise AssertionError("the CPU's settings need no model")


def tiny() -> Qwen3Config:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16)


def test_on_the_cpu_nothing_changes(mesh):
    assert chosen(follow_device(TrainConfig(), RUN, no_model, mesh)) == {
        "dtype": "float32",
        "tf32": False,
        "activation_checkpointing": False,
        "compile": False,
        "fused_adamw": False,
        "balance_by": "tokens",
        "max_tokens_per_micro_batch": 16_384,
        "logprob_chunk_tokens": 1024,
    }
    assert follow_device(TrainConfig.of(dtype="bfloat16"), RUN, no_model, mesh).model.dtype == "bfloat16"


def test_a_gpu_gets_its_own_settings_and_given_ones_stay(mesh, gpu, monkeypatch):
    gpu(70 * GB)
    config = follow_device(TrainConfig.of(compile=False, logprob_chunk_tokens=512), RUN, tiny, CUDA)
    assert chosen(config) == {
        "dtype": "bfloat16",
        "tf32": True,
        "activation_checkpointing": True,
        "compile": False,
        "fused_adamw": True,
        "balance_by": "cost",
        "max_tokens_per_micro_batch": 65_536,  # a tiny model: as many as are of use
        "logprob_chunk_tokens": 512,
    }
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert follow_device(TrainConfig(), RUN, tiny, CUDA).model.dtype == "float32"


def test_workers_on_the_same_gpu_leave_the_trainer_its_share(mesh, gpu, monkeypatch, caplog):
    gpu(80 * GB)
    monkeypatch.setenv(MEMORY_VARIABLE, "0.00001")  # 800 kB
    config = follow_device(TrainConfig(), RUN, tiny, CUDA)
    assert config.batch.max_tokens_per_micro_batch == 1024  # the least
    assert "0.0 GB of a GPU are free, and training takes about 2.0 GB" in caplog.text  # CUDA's own


def test_states_that_do_not_fit_get_the_least_also_where_adamws_step_is_the_peak():
    config = with_defaults(TrainConfig.of(fused_adamw=False), RUN, tiny(), Gpu(free=GB), ranks=1)
    assert (config.model.logprob_chunk_tokens, config.batch.max_tokens_per_micro_batch) == (1024, 1024)


def test_attention_takes_as_much_as_the_weights_at_some_length():
    # A layer: 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 12288 weights.
    assert attention_tokens(QWEN3_8B) == 192_937_984 // 4096


def test_a_mixture_computes_with_the_chosen_experts():
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, **experts)
    assert attention_tokens(config) == (4 * 64 * 64 + 3 * 64 * (2 * 32)) // 64


def bytes_of(config: TrainConfig, model: Qwen3Config, ranks: int) -> int:
    tokens, chunk = config.batch.max_tokens_per_micro_batch, config.model.logprob_chunk_tokens
    assert (tokens % 1024, chunk % 1024) == (0, 0)
    passes = activations(model, config.model, num_tokens=tokens, length=2000, device="cuda")
    parts = rank_memory(model_sizes(model, config.model), passes, config, ranks=ranks, device="cuda")
    return sum(parts.values())


@pytest.mark.slow
def test_qwen3_8b_on_four_gpus_gets_what_fits():
    config = with_defaults(TrainConfig(), RUN, QWEN3_8B, Gpu(free=78 * GB), ranks=4)
    # 70.2 GB can be used. 16 bytes a weight over 4 ranks take 32.8, gathered layers 4.4, CUDA 2. Of the 31 GB beside
    # them an eighth, 3.9 GB, is for logits of 12 bytes: 2,120 tokens, so 2,048.
    assert config.model.logprob_chunk_tokens == 2048
    # Each token takes a layer's input in 36 layers and some hidden states, 0.33 MB, and one layer that is computed
    # again, 0.25 MB, which is more than the logits: 31 GB hold 53,700 tokens.
    tokens = config.batch.max_tokens_per_micro_batch
    assert tokens == pytest.approx(53_700, abs=1024)
    assert bytes_of(config, QWEN3_8B, 4) <= 0.9 * 78 * GB
    assert bytes_of(config.replace(max_tokens_per_micro_batch=tokens + 1024), QWEN3_8B, 4) > 0.9 * 78 * GB


WIDE = Qwen3Config(
    vocab_size=30_000,
    hidden_size=512,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def on_6_gb(**settings: object) -> TrainConfig:
    return with_defaults(TrainConfig.of(**settings), RUN, WIDE, Gpu(free=6 * GB), ranks=1)


@pytest.mark.slow
def test_a_plan_for_a_gpu_and_the_trainer_on_it_choose_the_same(mesh, gpu, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Triton
    gpu(6 * GB)
    here = follow_device(TrainConfig(), RUN, lambda: WIDE, CUDA)
    assert here == on_6_gb()
    tokens = here.batch.max_tokens_per_micro_batch
    assert 1024 < tokens < 65_536
    assert bytes_of(here, WIDE, 1) <= 0.9 * 6 * GB
    assert bytes_of(here.replace(max_tokens_per_micro_batch=tokens + 1024), WIDE, 1) > 0.9 * 6 * GB


@pytest.mark.slow
def test_other_optimizers_and_adapters_leave_room_for_more_tokens():
    plain, eight_bit, adapter = (
        on_6_gb(**settings).batch.max_tokens_per_micro_batch
        for settings in ({}, {"optimizer": "adamw_8bit"}, {"lora_rank": 8})
    )
    assert plain < min(eight_bit, adapter)


def test_an_attempt_records_what_was_chosen_and_a_resume_keeps_it(new_root, mesh):
    root = new_root()
    fill(root, num_files=4)
    train_here(root, num_steps=1)
    assert {name: read_attempt(root, 1).config[name] for name in ON_CPU} == dict(ON_CPU)
    assert chosen(next_config(root.url, {})) == dict(ON_CPU)
    assert next_config(root.url, {"dtype": "bfloat16"}).model.dtype == "bfloat16"


def test_a_run_of_an_older_ludic_goes_on_as_it_was_and_a_new_one_follows_the_device(new_root):
    root = new_root()
    assert set(chosen(next_config(root.url, {})).values()) == {None}
    start_attempt(root, config={"learning_rate": 1e-4, "dtype": "bfloat16"})  # it knew no balance_by, no tf32
    config = next_config(root.url, {})
    assert chosen(config) == {**ON_CPU, "dtype": "bfloat16"}
    assert config.optimizer.learning_rate == 1e-4


def test_the_reports_head_says_what_was_chosen():
    settings = TrainConfig.of(**{**ON_CPU, **ON_GPU, "tf32": True, "compile": True}).flat()
    found = describe_trainer(settings, 0)["computes in"]
    assert found == (
        "bfloat16, TF32, compiled, activations recomputed; adamw; micro-batches of up to 16,384 tokens, balanced by "
        "tokens; logits of 1,024 tokens at a time"
    )
    old = {name: value for name, value in settings.items() if name not in ON_CPU and name != "optimizer"}
    assert "computes in" not in describe_trainer(old, 0)


def test_the_panel_says_what_was_chosen(new_root, mesh):
    from ludic.app.show.watch import Watcher

    root = new_root()
    fill(root, num_files=4)
    train_here(root, num_steps=1)
    console = Console(width=80, record=True, file=StringIO())
    Watcher(root.url).poll().print_to(console)
    text = " ".join(console.export_text().replace("│", " ").split())
    assert "float32; adamw; micro-batches of up to 16,384 tokens, balanced by tokens" in text
