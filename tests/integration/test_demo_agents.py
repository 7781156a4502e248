"""`ludic demo --agents` with a short warm start and few steps: one root holds demonstrations, SFT, RL and evals."""

from pathlib import Path

import forks
import pytest

import ludic
from ludic.app.demos.calculator import NUM_EPOCHS, NUM_HELDOUT, PER_PROBLEM, open_demo, version_before_rl, warm_start

NUM_PROBLEMS, NUM_STEPS = 48, 1
# 48 groups a pass, 16 groups a batch.
NUM_WARM_STEPS = NUM_PROBLEMS * NUM_EPOCHS // 16


@pytest.mark.slow
def test_the_agents_demo_warm_starts_once_and_then_improves_with_tools(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    root = open_demo(url)
    warm_start(root, num_problems=NUM_PROBLEMS, num_heldout=16)
    before = version_before_rl(root)
    assert before is not None
    assert ludic.open(url).eval(stored=True).samples.select("policy_version", "num_examples").rows() == [(before, 16)]

    demo = forks.ludic("demo", "--agents", "--root", url, "--num-steps", str(NUM_STEPS), folder=tmp_path)
    assert demo.returncode == 0, demo.stderr
    assert "before RL" in demo.stdout
    assert "after RL" in demo.stdout
    assert "Did RL help?" in demo.stdout
    assert "p = " in " ".join(demo.stdout.split())
    assert (tmp_path / "run" / "reward.png").read_bytes().startswith(b"\x89PNG")

    run = ludic.open(url)
    # The command found the warm start, which is not repeated, and evaluated the first model and the last version, too.
    assert run.sql("select count(*) as n from attempts")["n"].to_list() == [2]
    last = max(run.sql("from policies")["version"])
    evaluated = run.eval(stored=True).samples.select("policy_version", "num_examples", "num_samples").rows()
    assert evaluated == [(version, NUM_HELDOUT, NUM_HELDOUT) for version in (0, before, last)]
    assert run.compare(before, last).differences["test"].to_list() == ["mcnemar"]
    used = run.sql("""
        select step, count(*) as rollouts, bool_and(rollouts.worker_id like 'import-%') as demonstrations
        from batches join rollouts using (rollout_id) where used group by step order by step
    """).rows()
    warm = [(step, 16 * PER_PROBLEM, True) for step in range(1, NUM_WARM_STEPS + 1)]
    assert used[:NUM_WARM_STEPS] == warm
    # 16 groups of 8 episodes, which the workers sampled; the demonstrations were left out, as texts.
    assert used[NUM_WARM_STEPS:] == [(NUM_WARM_STEPS + NUM_STEPS, 128, False)]
    left_out = run.sql(f"select distinct reason from batches where step > {NUM_WARM_STEPS} and not used")  # noqa: S608
    assert "text_capture" in left_out["reason"].to_list()
    prompt = run.sql("select messages[1].content as said from evals where not messages[1].content like '%boxed%'")
    assert prompt.is_empty()  # each episode began with a word problem
    assert run.verify().findings == []
