"""`ludic train --ranks 2` on a root that holds its rollouts already: the same run as on one rank."""

from pathlib import Path

import forks
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_runs import create_root, fill, final_weights, ledger, make_model, query, train_config

from ludic.app.launch.train import train_args
from ludic.root.attempts import complete_checkpoints
from ludic.root.root import Root

pytestmark = pytest.mark.slow

# Rollouts of tokens drawn at random and a learning rate at which weights move by some 4e-3 in four steps.
CONFIG = train_config(num_steps=4, max_tokens_per_micro_batch=100, max_seq_len=30, keep_token_stats=True)


def run(root: Root, *args: str) -> None:
    done = forks.ludic(*args, folder=Path(root.path).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"trained to step 4 of 4 in {root.url}\n"


@pytest.fixture
def roots(tmp_path) -> list[Root]:
    """Two runs with the same rollouts, of 9 to 40 tokens, some of them masked, and one that failed."""
    model = make_model(tmp_path / "model")
    found = [create_root(str(tmp_path / name), model, groups_per_batch=3) for name in ("one", "two")]
    for root in found:
        fill(root, num_files=1, seed=9, worker_id="first", rewards=[[0.5, None, 1.0, 0.0]], num_groups=1)
        for seed, (length, num_turns) in enumerate([(1, 1), (32, 3), (20, 2), (7, 1)]):
            fill(root, num_files=1, seed=seed, worker_id=f"w{seed}-test", response_length=length, num_turns=num_turns)
    return found


def test_two_ranks_write_the_ledger_losses_and_weights_of_one(roots):
    one, two = roots
    _, *command = train_args(one.url, CONFIG, ranks=1)
    run(one, *command)
    # As a user types it: one process, which starts the ranks.
    _, *command = train_args(two.url, CONFIG, ranks=1)
    several = [*command, "--ranks", "2"]
    run(two, *several)
    assert complete_checkpoints(two)[-1].num_ranks == 2
    assert ledger(two) == ledger(one)
    # 4 steps of 3 groups of 4, one of which failed
    assert query(two, "select used, count(*) from batches group by used order by used") == [(False, 1), (True, 47)]

    columns = "step, num_tokens, num_seq_len_truncated, loss, entropy, sampler_kl, grad_norm"
    of_one, of_two = (query(root, f"select {columns} from metrics order by step") for root in roots)  # noqa: S608
    assert [row[:3] for row in of_two] == [row[:3] for row in of_one]
    np.testing.assert_allclose([row[3:] for row in of_two], [row[3:] for row in of_one], rtol=1e-4, atol=1e-7)

    lists = "trainer_logprobs, entropy, clipped::float[], weight"
    stats = [query(root, f"select step, rollout_id, {lists} from token_stats order by all") for root in roots]  # noqa: S608
    assert [row[:2] for row in stats[1]] == [row[:2] for row in stats[0]]
    for of_one, of_two in zip(*stats, strict=True):
        np.testing.assert_allclose(of_two[2:], of_one[2:], rtol=2e-3, atol=1e-5)
    assert {name.rpartition("-")[2] for name in two.list("token_stats")} == {"rank=0.parquet", "rank=1.parquet"}

    before, expected = load_file(f"{one.record.model}/model.safetensors"), final_weights(one)
    for name, tensor in final_weights(two).items():
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=1e-5, err_msg=name)
    assert max(np.abs(expected[name] - before[name]).max() for name in expected) > 1e-3
