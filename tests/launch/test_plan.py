"""What a run is said to need, beside figures worked by hand, and settings that are said to fit."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from ludic.cli.main import main
from ludic.engines.config import EngineConfig
from ludic.launch.config import LaunchConfig
from ludic.launch.plan import Machine, Settings, plan, settings_that_fit
from ludic.run_config import RunConfig
from ludic.training.config import ON_CPU, TrainConfig

H100 = 80 * 10**9
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}
TINY = {**QWEN3_8B, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


def config_of(sizes: dict[str, object] = TINY) -> Qwen3Config:
    return Qwen3Config(**sizes)


def settings_of(*, ranks: int = 1, num_workers: int = 1, engine: str = "vllm", **train: object) -> Settings:
    return Settings(
        run=RunConfig(model="m", env=("moar_cats",), num_workers=num_workers, max_tokens=1000),
        train=TrainConfig.of(num_steps=100, **train),
        processes=LaunchConfig(ranks=ranks),
        engine=EngineConfig(engine=engine),
    )


def limits(settings: Settings, machine: Machine) -> dict[str, int | None]:
    found = plan(config_of(), settings, machine)
    return {need.process: need.limit for need in found.needs if need.place == "GPU"}


def test_trainer_and_worker_have_their_gpus_or_share_one() -> None:
    assert limits(settings_of(), Machine(gpus=2, gpu_bytes=H100)) == {"each rank": H100, "each worker": 0.9 * H100}
    # On one GPU, vLLM takes half of it, which two workers divide.
    assert limits(settings_of(), Machine(gpus=1, gpu_bytes=H100)) == {"each rank": H100 / 2, "each worker": H100 / 2}
    two = limits(settings_of(num_workers=2), Machine(gpus=1, gpu_bytes=H100))
    assert two == {"each rank": H100 / 2, "each worker": H100 / 4}
    assert limits(settings_of(engine="server"), Machine(gpus=1, gpu_bytes=H100)) == {"each rank": H100}


def test_an_engine_of_transformers_takes_what_it_needs_beside_the_trainer() -> None:
    found = plan(config_of(), settings_of(engine="transformers"), Machine(gpus=1, gpu_bytes=H100))
    rank, worker = (need for need in found.needs if need.place == "GPU")
    assert (rank.limit, worker.limit) == (H100 - worker.total, H100 - rank.total)


def test_disk_and_seconds_follow_from_the_weights() -> None:
    found = plan(config_of(), settings_of(dtype="bfloat16"), Machine(gpus=2, gpu_bytes=H100, bandwidth=1e6))
    num = found.sizes.num_weights
    assert found.disk == {
        "5 published versions": 5 * 2 * num,  # four are kept, and one is written
        "4 checkpoints": 4 * 12 * num,
        "temporary folder of rank 0": 14 * num,
    }
    assert found.publish["a thread: to the root"] == pytest.approx(2 * num / 1e6)
    assert found.publish["a thread: conversion"] == pytest.approx(4 * num / 2.8e9)
    few = settings_of(checkpoint_every=None, keep_policies=None)
    disk = plan(config_of(), few, Machine(gpus=0)).disk
    assert list(disk)[:2] == ["101 published versions", "2 checkpoints"]


def test_what_does_not_fit_is_a_sentence_each() -> None:
    machine = Machine(gpus=2, gpu_bytes=10**9, host_bytes=10**9, disk_bytes=10**5)
    found = plan(config_of(), settings_of(), machine)
    assert len(found.problems) == 4
    rank, worker, host, disk = found.problems
    assert rank.startswith("each rank needs ")
    assert " of its GPU, and has 1,000.0 MB; " in rank
    assert worker.startswith("each worker needs ")
    assert host.startswith("all processes needs ")
    assert disk.startswith("the disk has 100.0 kB free")
    assert plan(config_of(), settings_of(), Machine(gpus=2, gpu_bytes=H100)).problems == []


def test_all_processes_share_the_host() -> None:
    found = plan(config_of(), settings_of(ranks=2, num_workers=3), Machine(gpus=8, gpu_bytes=H100, host_bytes=10**12))
    host = {need.process: need.total for need in found.needs if need.place == "host"}
    assert host["all processes"] == host["rank 0"] + host["other ranks"] + 3 * host["each worker"]


@pytest.mark.slow
def test_settings_that_are_said_to_fit_an_8b_model_on_eight_gpus_do() -> None:
    config, machine = config_of(QWEN3_8B), Machine(gpus=8, gpu_bytes=H100)
    as_it_is = settings_of(ranks=4, num_workers=4, **ON_CPU)
    assert plan(config, as_it_is, machine).problems
    changes = settings_that_fit(config, as_it_is, machine)
    assert changes == {"dtype": "bfloat16", "activation_checkpointing": True}
    found = plan(config, settings_of(ranks=4, num_workers=4, **ON_CPU | changes), machine)
    assert found.problems == []
    # 33 GB of states, 5 of layer inputs, 5 of logits and gradients, 4 of gathered layers, 2 of CUDA.
    rank = next(need for need in found.needs if need.place == "GPU")
    assert 45e9 < rank.total < 55e9


@pytest.mark.slow
def test_more_ranks_are_found_where_one_gpu_is_too_small_for_the_states() -> None:
    config = config_of(QWEN3_8B)
    changes = settings_that_fit(config, settings_of(dtype="bfloat16"), Machine(gpus=8, gpu_bytes=H100))
    assert changes is not None
    assert changes["ranks"] >= 2
    assert settings_that_fit(config, settings_of(), Machine(gpus=1, gpu_bytes=10**9)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "layers", "width", "heads", "ranks", "tokens", "published"),
    [(1024, 28, 3072, 16, 1, 16_384, 12.53), (2560, 36, 9728, 32, 8, 65_536, 36.10)],
)
def test_a_plan_is_near_peaks_that_were_published(
    hidden: int, layers: int, width: int, heads: int, ranks: int, tokens: int, published: float
) -> None:
    """Of prime-rl on H100s; reserved by PyTorch, so without CUDA's own memory."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": width}
    config = config_of({**QWEN3_8B, **sizes, "num_attention_heads": heads, "tie_word_embeddings": True})
    settings = settings_of(
        ranks=ranks,
        **ON_CPU | {"dtype": "bfloat16", "activation_checkpointing": True, "max_tokens_per_micro_batch": tokens},
    )
    found = plan(config, settings, Machine(gpus=16, gpu_bytes=H100))
    rank = next(need for need in found.needs if need.place == "GPU")
    assert (rank.total - rank.parts["CUDA and libraries"]) / 2**30 == pytest.approx(published, rel=0.1)


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model of which only the configuration is there."""
    monkeypatch.chdir(tmp_path)
    config_of().save_pretrained("model")
    assert [path.name for path in Path("model").iterdir()] == ["config.json"]
    return tmp_path


def test_the_command_takes_the_settings_of_a_run_and_reads_no_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text('model = "model"\nnum_workers = 1\nengine = "vllm"\nlora_rank = 4\ntrust_code = true\n')
    code, out, err = planned(capsys, "--config", "run.toml", "--gpus", "2", "--gpu", "H100")
    assert (code, err) == (0, "")
    assert out.startswith("model: 1,348,928 weights, of which 87,040 are trained\n")
    assert "rank 0" in out
    assert out.splitlines()[-1] == "all of it fits"
    code, out, _ = planned(capsys, "--config", "run.toml", "--gpus", "2", "--gpu-memory-gb", "1", "--json")
    found = json.loads(out)
    assert (code, found["settings_that_fit"]) == (0, None)
    wholes = [row for row in found["memory"] if row["part"] == "all" and row["place"] == "GPU"]
    assert [row["fits"] for row in wholes] == [False, False]
    assert found["num_trained"] < found["num_weights"]


def test_a_machine_that_can_not_be_planned_for_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, said in [
        (["--gpus", "2"], "gpus is 2, and this machine has none to look at; give gpu, such as H100, or gpu_memory_gb"),
        (["--gpu", "H10"], "GPU 'H10' is unknown"),
        (["--gpu", "H100", "--gpu-memory-gb", "80"], "gpu is H100 and gpu_memory_gb is 80; give one of them"),
        (["--gpus", "2", "--gpu", "H100", "--ranks", "3"], "ranks is 3, but the trainer has 2 GPUs"),
    ]:
        code, _, err = planned(capsys, "--model", "model", *args)
        assert (code, said in err) == (1, True), err
    assert planned(capsys)[0] == 2
