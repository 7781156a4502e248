"""The main job, as `make demo` runs it, for 40 steps: processes that share a folder of Parquet teach a tiny model."""

from pathlib import Path
from statistics import fmean

import pytest
from forks import ludic as ludic_command

import ludic
from ludic.app.demos.words import heldout_answers
from ludic.root.root import Root
from ludic.root.weights.policies import fetch_policy, latest_policy


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a demo that ran to its end."""
    folder = tmp_path_factory.mktemp("demo")
    done = ludic_command("demo", "--root", folder / "run", "--num-steps", "40", folder=folder, timeout_s=850)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def mean_reward(root: Root, versions: range) -> float:
    query = "select avg(episode_reward) from rollouts where policy_version between ? and ?"
    (reward,) = ludic.connect(root).execute(query, [versions[0], versions[-1]]).fetchone()
    return reward


@pytest.mark.timeout(900)  # a minute on two free cores
def test_full_integration_moar_cats(demo: Path, tmp_path: Path) -> None:
    assert (demo / "reward.png").read_bytes().startswith(b"\x89PNG")

    root = Root.open(str(demo))
    latest = latest_policy(root)
    assert latest.version == 40
    # A worker that is slower than the trainer passes over versions.
    assert mean_reward(root, range(35, 41)) >= 20 * mean_reward(root, range(1))

    before = heldout_answers(root, root.record.model, temperature=0.8)
    after = heldout_answers(root, fetch_policy(root, latest.version, tmp_path), temperature=0.8)
    trained_on = ludic.connect(root).execute("select distinct env_example_id from rollouts").fetchall()
    assert {rollout.env_example_id for rollout in after}.isdisjoint(example for (example,) in trained_on)
    assert fmean(r.episode_reward for r in after) >= 20 * fmean(r.episode_reward for r in before)
    # Some runs find "love cats" within these steps, all find cats; the model samples, so an answer may lack them.
    assert fmean("cats" in rollout.messages[-1].content for rollout in after) >= 0.8


@pytest.mark.timeout(900)  # of the run, if no other test began it
def test_every_step_trained_on_eight_groups_whose_advantages_follow_from_their_rewards(demo: Path) -> None:
    con = ludic.connect(str(demo))
    steps = con.execute("select step, count(distinct group_id) from batches where used group by step order by step")
    assert steps.fetchall() == [(step, 8) for step in range(1, 41)]
    # Leave-one-out by hand: r - (sum - r) / 7 for groups of eight.
    off = con.execute("""
        select max(abs(advantage - (r.episode_reward - (g.total - r.episode_reward) / 7)))
        from batches
        join rollouts r using (rollout_id)
        join (select group_id, sum(episode_reward) as total from rollouts group by group_id) g
            on g.group_id = r.group_id
        where used
    """).fetchone()
    assert off[0] < 1e-9
