"""A run that goes on at another number of ranks, from checkpoint to checkpoint, is the run that never stopped."""

from pathlib import Path

import numpy as np
import pytest
from forks import run_ranks
from safetensors.numpy import load
from tiny_runs import create_root, fill, ledger, make_model, query, train_config

from ludic.app.launch.train import train_args
from ludic.root.attempts import complete_checkpoints, folder_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train_on(root, num_ranks, num_steps):
    """Two steps more, of two groups each."""
    config = train_config(num_steps=num_steps, checkpoint_every=2, keep_checkpoints=None, keep_policies=None)
    words = train_args(root.url, config, 1)
    run_ranks(num_ranks, words, Path(f"{root.path}-logs"))
    assert complete_checkpoints(root)[-1].num_ranks == num_ranks


def losses(root):
    return query(root, "select step, loss, grad_norm from metrics where kind = 'train' order by step")


def state(root, step, file):
    (info,) = (info for info in complete_checkpoints(root) if info.step == step)
    return load(root.read(f"{folder_of(info)}/{file}.safetensors"))


def assert_same_state(root, expected, step, **tolerance):
    for file in ("model", "optimizer"):
        found, wanted = state(root, step, file), state(expected, step, file)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            np.testing.assert_allclose(found[name], tensor, **tolerance, err_msg=f"step {step} {name}")


@pytest.fixture
def new_root(tmp_path):
    model = make_model(tmp_path / "model")

    def create(name):
        root = create_root(str(tmp_path / name), model)
        fill(root, num_files=4)  # 16 groups: 8 steps
        return root

    return create


def test_a_run_that_moves_from_2_ranks_to_1_to_4_to_1_is_the_run_that_never_stopped(new_root):
    straight, moved = new_root("straight"), new_root("moved")
    train_on(straight, 1, 8)
    for num_steps, num_ranks in ((2, 2), (4, 1), (6, 4), (8, 1)):
        train_on(moved, num_ranks, num_steps)

    assert ledger(moved) == ledger(straight)
    assert query(moved, "select step, count(distinct group_id) from batches group by step order by step") == [
        (step, 2) for step in range(1, 9)
    ]
    assert query(moved, "select count(distinct group_id) from batches") == [(16,)]
    np.testing.assert_allclose(losses(moved), losses(straight), rtol=1e-4, atol=1e-6)
    for step in (2, 4, 6, 8):
        assert_same_state(moved, straight, step, rtol=0, atol=2e-5)
    # What a resumed trainer publishes at once is what it loaded.
    for version, step in query(moved, "select max(version), step from policies where step < 8 group by step"):
        if step % 2 == 0 and step > 0:
            published = load(moved.read(f"policies/version={version}/model.safetensors"))
            saved = state(moved, step, "model")
            assert all((published[name] == tensor).all() for name, tensor in saved.items())


def test_a_run_that_goes_on_at_two_ranks_is_bit_for_bit_the_one_that_never_stopped(new_root):
    straight, resumed = new_root("straight"), new_root("resumed")
    train_on(straight, 2, 4)
    train_on(resumed, 2, 2)
    train_on(resumed, 2, 4)
    assert ledger(resumed) == ledger(straight)
    assert losses(resumed) == losses(straight)
    assert_same_state(resumed, straight, 4, rtol=0, atol=0)
    assert state(resumed, 4, "random").keys() >= {"cpu.0", "cpu.1"}
