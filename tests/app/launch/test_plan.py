"""What a run is said to need, beside figures worked by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from ludic.app.cli.main import main
from ludic.app.launch.config import LaunchConfig
from ludic.app.launch.plan import Machine, Settings, plan
from ludic.base.results import size
from ludic.engines.config import EngineConfig
from ludic.run.config import RunConfig
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


SMALL = {"max_tokens_per_micro_batch": 1024, "logprob_chunk_tokens": 1024}


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
    own = 0.9 * H100  # a tenth is left free
    assert limits(settings_of(), Machine(gpus=2, gpu_bytes=H100)) == {"each rank": own, "each worker": own}
    # On one GPU, vLLM takes half of it, which two workers divide, and a tenth of the other half is left free.
    assert limits(settings_of(), Machine(gpus=1, gpu_bytes=H100)) == {"each rank": own / 2, "each worker": H100 / 2}
    two = limits(settings_of(num_workers=2), Machine(gpus=1, gpu_bytes=H100))
    assert two == {"each rank": own / 2, "each worker": H100 / 4}
    assert limits(settings_of(engine="server"), Machine(gpus=1, gpu_bytes=H100)) == {"each rank": own}
    # Workers share GPUs with each other before they take one of the trainer's.
    assert limits(settings_of(num_workers=2), Machine(gpus=2, gpu_bytes=H100)) == {
        "each rank": own,
        "each worker": own / 2,
    }


def test_the_evaluator_has_a_gpu_like_one_more_worker() -> None:
    settings = settings_of(ranks=4, num_workers=4)
    evaluated = replace(settings, processes=replace(settings.processes, eval_every=10))
    machine = Machine(gpus=8, gpu_bytes=H100)
    assert limits(evaluated, machine) == {"each rank": 0.9 * H100, "each worker": 0.45 * H100}
    found = plan(config_of(), evaluated, machine)
    given = "trainer: 0,1,2,3; worker 0: 4; worker 1: 5; worker 2: 6; worker 3: 7; evaluator: 4"
    assert {f"GPUs: {given}", "GPU 4 is shared by 2 workers"} <= set(found.remarks)
    before, after = (
        next(need.total for need in each.needs if need.process == "all processes")
        for each in (plan(config_of(), settings, machine), found)
    )
    assert after - before == 6 * 10**9
    assert "no process uses GPU 6, 7; raise num_workers or ranks" in (
        plan(config_of(), settings_of(ranks=4, num_workers=2), machine).remarks
    )


def test_vllm_holds_as_many_sequences_as_fit() -> None:
    machine = Machine(gpus=2, gpu_bytes=H100)
    found = plan(config_of(QWEN3_8B), settings_of(**SMALL), machine)
    worker = next(need for need in found.needs if need.process == "each worker" and need.place == "GPU")
    (cache,) = (part for part in worker.parts if part.startswith("key-value cache"))
    # A token has 2 x 8 heads x 128 x 36 layers x 2 bytes; a sequence 1,000 tokens after a prompt of 1,024.
    sequence = 2 * 8 * 128 * 36 * 2 * 2024
    number = (0.9 * H100 - (worker.total - worker.parts[cache])) // sequence
    assert cache == f"key-value cache of {number:.0f} sequences of 2,024 tokens"
    assert worker.parts[cache] == number * sequence
    assert not any("vLLM would not start" in remark for remark in found.remarks)
    # The whole context, 40,960 tokens, takes 6.04 GB.
    full = plan(config_of(QWEN3_8B), settings_of(**SMALL), Machine(gpus=2, gpu_bytes=27 * 10**9))
    (remark,) = (remark for remark in full.remarks if "vLLM would not start" in remark)
    assert "40,960 tokens, 6,039.8 MB, and has" in remark


def test_an_engine_of_transformers_takes_what_it_needs_beside_the_trainer() -> None:
    found = plan(config_of(), settings_of(engine="transformers"), Machine(gpus=1, gpu_bytes=H100))
    rank, worker = (need for need in found.needs if need.place == "GPU")
    assert (rank.limit, worker.limit) == (0.9 * H100 - worker.total, 0.9 * H100 - rank.total)


def test_disk_follows_from_the_weights() -> None:
    found = plan(config_of(), settings_of(dtype="bfloat16"), Machine(gpus=2, gpu_bytes=H100))
    num = found.sizes.num_weights
    assert found.disk == {
        "versions: 4 that are kept, 1 being written": 5 * 2 * num,
        "checkpoints: 3 that are kept, 1 being written": 4 * 12 * num,
        "rollouts of 100 steps, at most": 100 * 8 * 8 * 1000 * 7.2,  # 8 groups of 8 answers of 1,000 tokens
    }
    # Rank 0 writes a checkpoint and a version; a worker has two versions while it fetches the third.
    assert found.remarks[-1].startswith(
        f"TMPDIR for a root in a bucket: {size(14 * num)} of rank 0, {size(6 * num)} of"
    )
    few = settings_of(checkpoint_every=None, keep_policies=None)
    disk = plan(config_of(), few, Machine(gpus=0)).disk
    assert list(disk)[:2] == [
        "versions: 100 that are kept, 1 being written",
        "checkpoints: 1 that are kept, 1 being written",
    ]


def test_what_does_not_fit_is_a_sentence_each() -> None:
    machine = Machine(gpus=2, gpu_bytes=10**9, host_bytes=10**9, disk_bytes=10**5)
    found = plan(config_of(), settings_of(), machine)
    assert len(found.problems) == 4
    rank, worker, host, disk = found.problems
    assert rank.startswith("each rank needs ")
    assert " of its GPU, and has 900.0 MB; " in rank
    assert worker.startswith("each worker needs ")
    assert host.startswith("all processes needs ")
    assert disk.startswith("the disk has 100.0 kB free")
    assert plan(config_of(), settings_of(), Machine(gpus=2, gpu_bytes=H100)).problems == []


def test_all_processes_share_the_host() -> None:
    found = plan(config_of(), settings_of(ranks=2, num_workers=3), Machine(gpus=8, gpu_bytes=H100, host_bytes=10**12))
    host = {need.process: need.total for need in found.needs if need.place == "host"}
    assert list(found.needs[-1].parts) == ["rank 0", "other ranks", "each worker, 3 times"]
    assert host["all processes"] == host["rank 0"] + host["other ranks"] + 3 * host["each worker"]


@pytest.mark.slow
def test_an_8b_model_fits_on_eight_gpus_after_the_first_two_changes_that_are_advised() -> None:
    config, machine = config_of(QWEN3_8B), Machine(gpus=8, gpu_bytes=H100)
    as_it_is = plan(config, settings_of(ranks=4, num_workers=4, **ON_CPU), machine)
    assert as_it_is.advice.startswith("to need less, try in this order: --dtype bfloat16, --activation-checkpointing,")
    changes = {"dtype": "bfloat16", "activation_checkpointing": True}
    found = plan(config, settings_of(ranks=4, num_workers=4, **ON_CPU | changes), machine)
    assert (found.problems, found.advice) == ([], "")
    # 33 GB of states, 5 of layer inputs, 5 of logits and gradients, 4 of gathered layers, 2 of CUDA.
    rank = next(need for need in found.needs if need.place == "GPU")
    assert 45e9 < rank.total < 55e9


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
    assert (code, "--lora-rank" in found["advice"]) == (0, True)
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
