"""Which GPU each process gets: cases worked out by hand, and one child that looks at its own environment."""

import os
from pathlib import Path

import pytest

from ludic.app.launch.config import LaunchConfig
from ludic.app.launch.gpus import assign_gpus
from ludic.app.launch.local import limit_memory, plan_gpus
from ludic.app.launch.supervisor import ChildProcess, supervise
from ludic.base.devices import VARIABLE, parse_gpus, visible_gpus
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError
from ludic.training.config import TrainConfig

# Writes what it sees; the trainer ends once both have, which ends the worker.
LOOK = """
import os, sys, time
from pathlib import Path
seen = Path(sys.argv[1])
partial = seen.with_suffix(".partial")
partial.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
partial.rename(seen)
while seen.name == "worker" or not (seen.parent / "worker").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("visible", "ranks", "num_workers", "trainer", "workers"),
    [
        # One GPU is shared by all.
        ("0", 1, 2, "0", ["0", "0"]),
        # Two GPUs: the trainer takes the first, the workers share the second.
        ("0,1", 1, 1, "0", ["1"]),
        ("0,1", 1, 3, "0", ["1", "1", "1"]),
        # The ranks take all: the workers share with them, in turn.
        ("0,1", 2, 1, "0,1", ["0,1"]),
        ("0,1", 2, 3, "0,1", ["0", "1", "0"]),
        # Eight GPUs: what the ranks leave is divided in order, as equally as possible.
        ("0,1,2,3,4,5,6,7", 4, 4, "0,1,2,3", ["4", "5", "6", "7"]),
        ("0,1,2,3,4,5,6,7", 4, 2, "0,1,2,3", ["4,5", "6,7"]),
        ("0,1,2,3,4,5,6,7", 1, 2, "0", ["1,2,3", "4,5,6,7"]),
        # A trainer on the CPU leaves all to the workers.
        ("0,1", 0, 2, "", ["0", "1"]),
        # No workers here: they run elsewhere.
        ("0,1", 1, 0, "0", []),
        # Names as CUDA_VISIBLE_DEVICES has them.
        ("3,GPU-8932f937", 1, 1, "3", ["GPU-8932f937"]),
    ],
)
def test_the_trainer_takes_the_first_gpus_and_the_workers_divide_the_rest(
    visible: str, ranks: int, num_workers: int, trainer: str, workers: list[str]
) -> None:
    plan = assign_gpus(visible.split(","), ranks=ranks, num_workers=num_workers)
    assert plan is not None
    assert (",".join(plan.trainer), [",".join(gpus) for gpus in plan.workers]) == (trainer, workers)


@pytest.mark.parametrize(
    ("trainer", "workers", "expected"),
    [
        ("2,3", None, "trainer: 2,3; worker 0: 0; worker 1: 1"),
        (None, "0", "trainer: 1; worker 0: 0; worker 1: 0"),
        ("0,1", "2,3", "trainer: 0,1; worker 0: 2; worker 1: 3"),
        ("1", "1", "trainer: 1; worker 0: 1; worker 1: 1"),
        # All are given to the workers, so the trainer shares.
        (None, "0,1,2,3", "trainer: 0; worker 0: 0,1; worker 1: 2,3"),
        (None, "", "trainer: 0; worker 0: ; worker 1: "),
    ],
)
def test_the_users_choice_comes_first(trainer: str | None, workers: str | None, expected: str) -> None:
    chosen = {"trainer": parse_gpus(trainer), "workers": parse_gpus(workers)}
    plan = assign_gpus(("0", "1", "2", "3"), ranks=1, num_workers=2, **chosen)
    assert plan is not None
    assert plan.describe() == expected


@pytest.mark.parametrize(
    ("visible", "ranks", "trainer", "message"),
    [
        (("0", "1"), 4, None, "ranks is 4, but the trainer has 2 GPUs; wanted one for each rank"),
        (("0", "1"), 2, ("1",), "ranks is 2, but the trainer has 1 GPUs"),
        (("4", "5"), 1, ("0",), "trainer_gpus names GPU 0; the GPUs that ludic may use here are: 4, 5"),
        ((), 1, ("0",), "trainer_gpus names GPU 0; the GPUs that ludic may use here are: none"),
    ],
)
def test_what_cannot_be_is_refused(visible, ranks: int, trainer, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_gpus(visible, ranks=ranks, num_workers=1, trainer=trainer)


@pytest.mark.parametrize(
    ("visible", "ranks", "num_workers", "per_worker", "expected"),
    [
        # vLLM takes one GPU each by default; what is left over stays free.
        ("0,1,2,3", 1, 2, 1, "trainer: 0; worker 0: 1; worker 1: 2"),
        ("0,1", 1, 2, 1, "trainer: 0; worker 0: 1; worker 1: 1"),
        # Tensor parallel: whole blocks, in order.
        ("0,1,2,3,4,5,6,7", 2, 3, 2, "trainer: 0,1; worker 0: 2,3; worker 1: 4,5; worker 2: 6,7"),
        ("0,1,2,3,4", 1, 1, 2, "trainer: 0; worker 0: 1,2"),
        # The ranks take all, so the workers share with them.
        ("0,1,2,3", 4, 2, 2, "trainer: 0,1,2,3; worker 0: 0,1; worker 1: 2,3"),
    ],
)
def test_a_worker_gets_as_many_gpus_as_its_engine_spreads_the_model_over(
    visible: str, ranks: int, num_workers: int, per_worker: int, expected: str
) -> None:
    plan = assign_gpus(visible.split(","), ranks=ranks, num_workers=num_workers, gpus_per_worker=per_worker)
    assert plan is not None
    assert plan.describe() == expected


@pytest.mark.parametrize(
    ("visible", "chosen", "found"),
    [
        (("0", "1", "2", "3"), None, r"2 workers need 4 GPUs, but the workers have 3 \(1, 2, 3\)"),
        (("0", "1", "2", "3"), ("2",), r"2 workers need 4 GPUs, but the workers have 1 \(2\)"),
        (("0", "1", "2", "3"), (), r"2 workers need 4 GPUs, but the workers have 0 \(none\)"),
        (("0",), None, r"2 workers need 4 GPUs, but the workers have 1 \(0\)"),
    ],
)
def test_too_few_gpus_for_a_model_are_refused(visible, chosen, found: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel is 2, so {found}; start fewer workers"):
        assign_gpus(visible, ranks=1, num_workers=2, workers=chosen, gpus_per_worker=2)


@pytest.mark.parametrize(
    ("visible", "ranks", "num_workers", "shares", "shared"),
    [
        # One GPU: half is the trainer's, the workers divide the other half.
        ("0", 1, 1, [0.5], ["GPU 0 is shared by the trainer and 1 worker"]),
        ("0", 1, 3, [0.5 / 3] * 3, ["GPU 0 is shared by the trainer and 3 workers"]),
        # Workers among themselves divide 0.9 of GPU 1.
        ("0,1", 1, 2, [0.45, 0.45], ["GPU 1 is shared by 2 workers"]),
        # A GPU to itself: the engine's own default.
        ("0,1", 1, 1, [None], []),
        # A trainer on the CPU takes nothing.
        ("0", 0, 1, [None], []),
    ],
)
def test_processes_on_one_gpu_divide_its_memory(visible: str, ranks: int, num_workers: int, shares, shared) -> None:
    plan = assign_gpus(visible.split(","), ranks=ranks, num_workers=num_workers, gpus_per_worker=1)
    assert plan is not None
    assert [plan.memory_share(worker) for worker in range(num_workers)] == pytest.approx(shares)
    assert plan.describe_shared() == shared


def test_vllm_beside_the_trainer_is_limited_unless_the_user_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    processes, config = LaunchConfig(), TrainConfig.of(device="cuda")
    vllm, chosen = EngineConfig(engine="vllm"), EngineConfig(engine="vllm", gpu_memory=0.3)
    plan = plan_gpus(config, processes, vllm, 1)
    assert limit_memory(vllm, plan, 0).gpu_memory == 0.5
    assert limit_memory(chosen, plan, 0).gpu_memory == 0.3
    assert limit_memory(EngineConfig(), plan, 0).gpu_memory is None  # transformers takes what it needs
    monkeypatch.setenv(VARIABLE, "")
    assert limit_memory(vllm, plan_gpus(config, processes, vllm, 1), 0).gpu_memory is None


def test_without_gpus_nothing_is_assigned() -> None:
    assert assign_gpus((), ranks=4, num_workers=2) is None


@pytest.mark.parametrize(
    ("value", "gpus"),
    [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("1,-1,0", ("1",)), (" 0 , GPU-1 ", ("0", "GPU-1"))],
)
def test_cuda_visible_devices_limits_what_is_assigned(value: str, gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert visible_gpus() == gpus


def test_a_child_sees_its_own_gpus_and_not_those_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "4,5,6")
    plan = assign_gpus(visible_gpus(), ranks=1, num_workers=1)
    assert plan is not None
    (tmp_path / "look.py").write_text(LOOK)

    def child(name: str, gpus: tuple[str, ...]) -> ChildProcess:
        args = ["look", str(tmp_path / name)]
        log = tmp_path / f"{name}.log"
        return ChildProcess(name=name, args=lambda: args, log=log, environment={VARIABLE: ",".join(gpus)})

    trainer, worker = child("trainer", plan.trainer), child("worker", plan.workers[0])
    supervise(trainer, [worker], environment={"PYTHONPATH": str(tmp_path)}, tick=lambda: None)
    seen = [(tmp_path / name).read_text() for name in ("trainer", "worker")]
    assert (seen, os.environ[VARIABLE]) == (["4", "5,6"], "4,5,6")
