"""A trainer that is really killed while it writes a checkpoint or a version, between its first byte and its last."""

import signal
from pathlib import Path

import pytest
from forks import Forked
from tiny_runs import fill, final_weights, ledger, query, train_here

from ludic.root.attempts import checkpoint_ids, complete_checkpoints
from ludic.root.weights.policies import latest_policy, policy_versions, stored_versions

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("killed_in_checkpoint.py")
POINTS = {
    # All files are in the scratch folder, and are being synced.
    "open:/random.safetensors": set(),
    # They are moved to their final names in order of their names.
    "os.rename:/model.safetensors": {"config.json", "digests.json", "generation_config.json"},
    "os.rename:/random.safetensors": {
        "config.json",
        "digests.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.safetensors",
    },
    # Only the marker is missing.
    "os.link:/checkpoint.json": {
        "config.json",
        "digests.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "random.safetensors",
    },
    # The checkpoint waits for the version that it names.
    "os.rename:/version=4/model.safetensors": set(),
}
"""Where a trainer dies, and the files that it leaves in the checkpoint's folder."""


def test_a_trainer_killed_anywhere_in_a_checkpoint_resumes_from_the_one_before(new_root, tmp_path):
    roots = {point: new_root(f"killed-{index}") for index, point in enumerate(POINTS)}
    straight = new_root("straight")
    for root in (straight, *roots.values()):
        fill(root, num_files=4)
    train_here(straight, num_steps=5)

    args = [part for point, root in roots.items() for part in (root.url, point)]
    out, errors = Forked([SCRIPT, *args], tmp_path / "log", out=tmp_path / "out").communicate(240)
    assert out.split() == [str(signal.SIGKILL.value)] * len(roots), errors[-3000:]

    for point, root in roots.items():
        left = {name.rpartition("/")[2] for name in root.list("checkpoints/attempt=1/step=4")}
        assert left == POINTS[point], point
        assert checkpoint_ids(root) == [(1, 2)], "a half checkpoint is visible"
        assert [info.step for info in complete_checkpoints(root)] == [2]
        assert latest_policy(root).version in stored_versions(root), "LATEST names half a version"
        if "version=4" in point:
            assert (latest_policy(root).version, stored_versions(root)) == (3, [0, 1, 2, 3])
            assert policy_versions(root)[-1] == 4
        assert train_here(root, num_steps=5) == 5
        assert query(root, "select parent_attempt, parent_step from attempts where attempt_id = 2") == [(1, 2)]
        assert ledger(root) == ledger(straight)
        weights, expected = final_weights(root), final_weights(straight)
        assert all((weights[name] == expected[name]).all() for name in expected)
