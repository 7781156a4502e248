"""`ludic train` in this process, as a user starts it."""

from pathlib import Path

from strategies import make_batch

from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter

USERS_FILE = """
def scaled(rollouts, *, by=1.0):
    return rollouts.select(["rollout_id"]).append_column("advantage", rollouts["episode_rewrad"])
"""


def test_an_error_in_a_users_function_is_one_line_with_its_path(ludic, started: Root, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    with RolloutWriter(started, "w0-test") as writer:
        writer.append(make_batch(worker_id="w0-test"))
    result = ludic("train", started.url, "--advantage", f"{path}:scaled", "--num-steps", "1", "--device", "cpu")
    line = result.err.splitlines()[-1]
    assert (result.code, result.err.count("Traceback")) == (1, 0)
    assert line.startswith(f"ludic: {path}:scaled: {path}, line 3, failed: KeyError: ")
    assert "episode_rewrad" in line


def test_a_pair_advantage_is_what_dpo_wants(ludic, started: Root) -> None:
    flags = ["--algorithm", "dpo", "--reference", started.record.model, "--advantage", "rloo", "--num-steps", "1"]
    result = ludic("train", started.url, *flags, "--device", "cpu")
    assert result.code == 1
    assert "rloo.sql: returns no pair_id, which objectives of pairs (dpo, ipo, orpo) need" in result.err
