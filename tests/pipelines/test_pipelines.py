"""Each script is run as its user would, in its own process, with warnings as errors; its root is then asked in SQL."""

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import fmean

import pytest
from forks import Forked

import ludic
from ludic.environments.moar_cats import WORDS
from ludic.models.tiny import make_tiny_model

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("models") / "tiny")
    make_tiny_model(folder, WORDS)
    return folder


@pytest.fixture(scope="module")
def run_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a script with options; returns what it printed. Its own errors and warnings are shown when it fails."""
    folder, numbers = tmp_path_factory.mktemp("logs"), count()

    def run(name: str, **options: object) -> str:
        flags = [
            part for option, value in options.items() for part in (f"--{option.replace('_', '-')}", *str(value).split())
        ]
        log = folder / f"{name}-{next(numbers)}.log"
        out = log.with_suffix(".out")
        process = Forked([REPOSITORY / "pipelines" / name, *flags], log, out=out, warnings="error")
        assert process.wait(timeout=200) == 0, process.printed()
        return out.read_text()

    return run


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, run_pipeline: Callable[..., str], model: str) -> Path:
    """A root with 8 groups, of which a batch takes 2; tests only read it."""
    root = tmp_path_factory.mktemp("collected") / "run"
    run_pipeline("collect.py", root=root, model=model, num_groups=8, max_tokens=32, groups_per_batch=2)
    return root


def ask(root: Path, query: str) -> list[tuple]:
    return ludic.connect(str(root)).execute(query).fetchall()


@pytest.fixture(scope="module")
def minimal(tmp_path_factory: pytest.TempPathFactory, run_pipeline: Callable[..., str]) -> tuple[Path, str]:
    """The folder in which minimal.py made a model and took 15 steps, and what it printed; tests only read it."""
    folder = tmp_path_factory.mktemp("minimal")
    return folder, run_pipeline("minimal.py", root=folder / "run", model=folder / "model", num_steps=15)


def test_minimal_learns_moar_cats(minimal: tuple[Path, str]):
    folder, printed = minimal
    rewards = [
        reward
        for _, reward in ask(folder / "run", "select step, avg(episode_reward) from batches group by all order by all")
    ]
    assert len(rewards) == len(printed.splitlines()) == 15
    assert fmean(rewards[-3:]) >= 5 * fmean(rewards[:3])


def test_minimal_starts_over_on_its_own_root_as_a_new_attempt(
    run_pipeline: Callable[..., str], tmp_path: Path, minimal: tuple[Path, str]
):
    folder, root = minimal[0], tmp_path / "run"
    shutil.copytree(folder / "run", root)
    run_pipeline("minimal.py", root=root, model=folder / "model", num_steps=2)
    # Versions: 0 to 15 by the first attempt, 16 to 18 by the second; step 1 starts from the first of each.
    assert ask(root, "select distinct attempt_id, step, trainer_version from all_batches order by all") == [
        *((1, step, step - 1) for step in range(1, 16)),
        (2, 1, 16),
        (2, 2, 17),
    ]
    assert ask(root, "select distinct attempt_id from batches") == [(2,)]


def test_minimal_needs_no_folder(run_pipeline: Callable[..., str], tmp_path: Path, model: str):
    printed = run_pipeline("minimal.py", root="memory://minimal", model=model, num_steps=1)
    assert [line.split()[:3:2] for line in printed.splitlines()] == [["step", "reward"]]


def test_what_collect_samples_train_uses_once(run_pipeline: Callable[..., str], tmp_path: Path, model: str):
    root = tmp_path / "run"
    collect = {"root": root, "model": model, "env": "moar_cats addition", "group_size": 2, "groups_per_batch": 3}
    for num_groups in (4, 5):
        run_pipeline("collect.py", **collect, num_groups=num_groups, max_tokens=8)
    # Groups 0 to 8 of the schedule take turns, beginning with moar_cats.
    assert ask(
        root,
        "select env_name, count(*), min(policy_version), max(policy_version) from groups group by all order by all",
    ) == [
        ("addition", 4, 0, 0),
        ("moar_cats", 5, 0, 0),
    ]
    assert ask(root, "select list(request_index order by request_index) from rollouts") == [(list(range(18)),)]

    run_pipeline("train.py", root=root)
    # 9 groups are enough for 3 steps of 3 groups of 2 episodes.
    assert ask(
        root,
        "select step, count(distinct rollout_id), max(off_policy_steps) "
        "from batches where used group by all order by all",
    ) == [
        (1, 6, 0),
        (2, 6, 1),
        (3, 6, 2),
    ]
    assert ask(root, "select count(distinct rollout_id) from batches") == [(18,)]


def test_async_rloo_trains_on_what_two_workers_sample(run_pipeline: Callable[..., str], tmp_path: Path, model: str):
    printed = run_pipeline("async_rloo.py", root=tmp_path / "run", model=model, num_steps=2)
    assert printed.startswith("trained to step 2; mean reward ")
    # Slot 0 and slot 1, as their ids begin.
    query = "select distinct worker_id[:3] from rollouts order by all"
    assert ask(tmp_path / "run", query) == [("w0-",), ("w1-",)]
    assert ask(tmp_path / "run", "select step, count(*) from batches where used group by all order by all") == [
        (1, 64),
        (2, 64),
    ]


def test_offline_replay_trains_on_what_was_collected_and_repeats_it(
    run_pipeline: Callable[..., str], tmp_path: Path, collected: Path
):
    offline, again = (tmp_path / name for name in ("offline", "again"))
    printed = run_pipeline("offline_replay.py", root=offline, sources=collected, epochs=2)
    assert printed.splitlines()[-1].startswith("trained to step 8; ")
    run_pipeline("offline_replay.py", root=again, replay=offline)
    assert ask(again, "select loss from metrics order by step") == ask(
        offline, "select loss from metrics order by step"
    )


def test_own_trainer_goes_on_after_the_last_batch_that_it_saved(
    run_pipeline: Callable[..., str], tmp_path: Path, collected: Path
):
    output = tmp_path / "own"
    (num_groups,) = ask(collected, "select count(*) from groups where reward_std > 0")[0]
    num_batches = -(-num_groups // 2)
    batches = [[f"epoch {epoch}  batch {n} of {num_batches}" for n in range(1, num_batches + 1)] for epoch in (1, 2)]
    assert num_batches > 1
    assert run_pipeline("own_trainer.py", root=collected, output=output).splitlines() == batches[0]
    assert run_pipeline("own_trainer.py", root=collected, output=output, epochs=2).splitlines() == batches[1]


def test_delegation_warms_up_and_trains_once(run_pipeline: Callable[..., str], tmp_path: Path):
    root = tmp_path / "run"
    steps = "select count(distinct step) from batches join rollouts using (rollout_id) where used and worker_id"
    for _ in range(2):
        printed = run_pipeline("delegation.py", root=root, num_steps=1, num_demonstrations=10)
        assert "tasks_per_episode" in printed
        assert ask(root, f"{steps} not like 'import-%'") == [(1,)]
    assert ask(root, f"{steps} like 'import-%'") > [(0,)]
