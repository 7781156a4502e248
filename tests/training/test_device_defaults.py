"""Settings that follow the device: on the CPU, on a GPU by its memory, after a resume, and in what a run shows."""

from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tiny_runs import fill, train_here
from transformers import Qwen3Config

from ludic.devices import MEMORY_VARIABLE
from ludic.models.sizes import LayerSizes
from ludic.show.stats import describe_trainer
from ludic.store import read_attempt
from ludic.store.attempts import start_attempt
from ludic.training.config import ON_CPU, TrainConfig
from ludic.training.device_defaults import Need, follow_device
from ludic.training.inherited_settings import next_config

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


def test_on_the_cpu_nothing_changes(new_root, mesh):
    config = follow_device(new_root(), TrainConfig(), mesh)
    assert chosen(config) == {
        "dtype": "float32",
        "tf32": False,
        "activation_checkpointing": False,
        "compile": False,
        "fused_adamw": False,
        "balance_by": "tokens",
        "max_tokens_per_micro_batch": 16_384,
        "logprob_chunk_tokens": 1024,
    }
    assert follow_device(new_root("other"), TrainConfig.of(dtype="bfloat16"), mesh).model.dtype == "bfloat16"


def test_a_gpu_gets_its_own_settings_and_given_ones_stay(new_root, mesh, gpu, monkeypatch):
    gpu(70 * GB)
    config = follow_device(new_root(), TrainConfig.of(compile=False, logprob_chunk_tokens=512), CUDA)
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
    assert follow_device(new_root("old"), TrainConfig(), CUDA).model.dtype == "float32"


def test_workers_on_the_same_gpu_leave_the_trainer_its_share(new_root, mesh, gpu, monkeypatch, caplog):
    gpu(80 * GB)
    monkeypatch.setenv(MEMORY_VARIABLE, "0.00001")  # 800 kB
    config = follow_device(new_root(), TrainConfig(), CUDA)
    assert config.batch.max_tokens_per_micro_batch == 1024  # the least
    assert "0.0 GB of a GPU are free, and training takes about" in caplog.text


def test_the_sizes_of_qwen3_8b():
    sizes = LayerSizes.of(QWEN3_8B)
    # 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 12288
    assert sizes.layer_weights == 192_937_984
    assert sizes.num_weights == pytest.approx(8.19e9, rel=0.001)
    # 231 KiB were measured in bfloat16.
    assert 2 * sizes.layer_activations / 1024 == pytest.approx(231, rel=0.03)
    assert sizes.attention_tokens == 192_937_984 // 4096


def test_a_mixture_computes_with_the_chosen_experts_and_keeps_all():
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, **experts)
    sizes = LayerSizes.of(config)
    assert (sizes.mlp, sizes.all_mlp) == (64, 256)
    assert sizes.layer_weights == 4 * 64 * 64 + 3 * 64 * 256
    assert sizes.attention_tokens == (4 * 64 * 64 + 3 * 64 * 64) // 64


def test_the_memory_of_qwen3_8b_on_four_gpus():
    need = Need.of(LayerSizes.of(QWEN3_8B), TrainConfig.of(**ON_GPU), 4)
    # 16 bytes a weight over 4 ranks: 32.8 GB. Gathered in bfloat16: embedding and head 2.5 GB, two layers 0.8 GB; their
    # gradient in bfloat16 and float32 7.5 GB.
    assert need.state == pytest.approx(32.8 * GB + 2.5 * GB + 0.8 * GB + 7.5 * GB, rel=0.01)
    # A layer's input in 36 layers, 0.29 MB, one layer that is computed again, 0.24 MB, and 0.03 MB at the end.
    assert need.token == 2 * (36 * 4096 + 120_832 + 4 * 4096)
    assert need.logits == 16 * 151_936
    chunk, tokens = need.fitting(78 * GB)
    # 70.2 GB can be used; of the 26.6 beside the state an eighth, 3.3 GB, is for logits: 1,368 tokens, so 1,024. The
    # other 24.1 GB hold 42,000 tokens.
    assert chunk == 1024
    assert tokens == pytest.approx(42_000, abs=1024)
    assert tokens % 1024 == 0


@pytest.mark.parametrize(
    ("settings", "less"),
    [({"optimizer": "adamw_8bit"}, 6 * 8.19 * GB), ({"lora_rank": 8}, 16 * 8.17 * GB - 2 * 8.19 * GB)],
)
def test_other_optimizers_and_adapters_take_less(settings, less):
    sizes = LayerSizes.of(QWEN3_8B)
    plain, other = (Need.of(sizes, TrainConfig.of(**ON_GPU, **each), 1) for each in ({}, settings))
    assert plain.state - other.state == pytest.approx(less, rel=0.01)


def test_without_checkpointing_a_token_takes_all_layers():
    plain = Need.of(LayerSizes.of(QWEN3_8B), TrainConfig.of(dtype="bfloat16", activation_checkpointing=False), 4)
    assert plain.token == pytest.approx(8.9e6, rel=0.02)  # 8.5 MB were measured, for 36 layers


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
        "bfloat16, TF32, compiled, activations recomputed; micro-batches of 16,384 tokens, even in tokens; logits of "
        "1,024 tokens at a time; adamw"
    )
    old = {name: value for name, value in settings.items() if name not in ON_CPU and name != "optimizer"}
    assert "computes in" not in describe_trainer(old, 0)


def test_the_panel_says_what_was_chosen(new_root, mesh):
    from ludic.show.watch import Watcher

    root = new_root()
    fill(root, num_files=4)
    train_here(root, num_steps=1)
    console = Console(width=80, record=True, file=StringIO())
    Watcher(root.url).look().print_to(console)
    text = " ".join(console.export_text().replace("│", " ").split())
    assert "float32; micro-batches of 16,384 tokens, even in tokens" in text
