"""Each script is run as its user would, in its own process, with warnings as errors; its root is then asked in SQL."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

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


def run_pipeline(name: str, **options: object) -> str:
    """What it printed; its own errors and warnings are shown when it fails."""
    flags = [
        part for option, value in options.items() for part in (f"--{option.replace('_', '-')}", *str(value).split())
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", REPOSITORY / "pipelines" / name, *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(root: Path, query: str) -> list[tuple]:
    return ludic.connect(str(root)).execute(query).fetchall()


def test_minimal_learns_moar_cats(tmp_path: Path):
    printed = run_pipeline("minimal.py", root=tmp_path / "run", model=tmp_path / "model", num_steps=30)
    rewards = [
        reward
        for _, reward in ask(
            tmp_path / "run", "select step, avg(episode_reward) from batches group by all order by all"
        )
    ]
    assert len(rewards) == len(printed.splitlines()) == 30
    assert fmean(rewards[-3:]) >= 5 * fmean(rewards[:3])


def test_minimal_starts_over_on_its_own_root_as_a_new_attempt(tmp_path: Path, model: str):
    for _ in range(2):
        run_pipeline("minimal.py", root=tmp_path / "run", model=model, num_steps=2)
    # Versions: 0 to 2 by the first attempt, 3 to 5 by the second; step 1 starts from the first of each.
    assert ask(tmp_path / "run", "select distinct attempt_id, step, trainer_version from all_batches order by all") == [
        (1, 1, 0),
        (1, 2, 1),
        (2, 1, 3),
        (2, 2, 4),
    ]
    assert ask(tmp_path / "run", "select distinct attempt_id from batches") == [(2,)]


def test_minimal_needs_no_folder(tmp_path: Path, model: str):
    printed = run_pipeline("minimal.py", root="memory://minimal", model=model, num_steps=2)
    assert [line.split()[:3:2] for line in printed.splitlines()] == [["step", "reward"]] * 2


def test_what_collect_samples_train_uses_once(tmp_path: Path, model: str):
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
        root, "select step, count(distinct rollout_id), max(lag) from batches where used group by all order by all"
    ) == [
        (1, 6, 0),
        (2, 6, 1),
        (3, 6, 2),
    ]
    assert ask(root, "select count(distinct rollout_id) from batches") == [(18,)]


def test_async_rloo_trains_on_what_two_workers_sample(tmp_path: Path, model: str):
    printed = run_pipeline("async_rloo.py", root=tmp_path / "run", model=model, num_steps=3)
    assert printed.startswith("trained to step 3; mean reward ")
    # Slot 0 and slot 1, as their ids begin.
    query = "select distinct worker_id[:3] from rollouts order by all"
    assert ask(tmp_path / "run", query) == [("w0-",), ("w1-",)]
    assert ask(tmp_path / "run", "select step, count(*) from batches where used group by all order by all") == [
        (1, 64),
        (2, 64),
        (3, 64),
    ]


def test_offline_replay_trains_on_what_was_collected_and_repeats_it(tmp_path: Path, model: str):
    collected, offline, again = (tmp_path / name for name in ("collected", "offline", "again"))
    run_pipeline("collect.py", root=collected, model=model, num_groups=8, max_tokens=8, groups_per_batch=4)
    printed = run_pipeline("offline_replay.py", root=offline, sources=collected, epochs=2)
    assert printed.splitlines()[-1].startswith("trained to step 4; ")
    run_pipeline("offline_replay.py", root=again, replay=offline)
    assert ask(again, "select loss from metrics order by step") == ask(
        offline, "select loss from metrics order by step"
    )


def test_own_trainer_goes_on_after_the_last_batch_that_it_saved(tmp_path: Path, model: str):
    collected, output = tmp_path / "collected", tmp_path / "own"
    run_pipeline("collect.py", root=collected, model=model, num_groups=8, max_tokens=32, groups_per_batch=1)
    (num_groups,) = ask(collected, "select count(*) from groups where reward_std > 0")[0]
    batches = [[f"epoch {epoch}  batch {n} of {num_groups}" for n in range(1, num_groups + 1)] for epoch in (1, 2)]
    assert num_groups > 1
    assert run_pipeline("own_trainer.py", root=collected, output=output).splitlines() == batches[0]
    assert run_pipeline("own_trainer.py", root=collected, output=output, epochs=2).splitlines() == batches[1]


def test_delegation_warms_up_and_trains_once(tmp_path: Path):
    root = tmp_path / "run"
    steps = "select count(distinct step) from batches join rollouts using (rollout_id) where used and worker_id"
    for _ in range(2):
        printed = run_pipeline("delegation.py", root=root, num_steps=2, num_demonstrations=30)
        assert "tasks_per_episode" in printed
        assert ask(root, f"{steps} not like 'import-%'") == [(2,)]
    assert ask(root, f"{steps} like 'import-%'") > [(0,)]
