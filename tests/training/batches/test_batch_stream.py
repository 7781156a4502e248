"""BatchStream alone: an epoch an iteration, resumed exactly, and split over ranks that never talk to each other."""

import json

import numpy as np
import pytest
import torch
from tiny_runs import create_root, fill, query

from ludic.errors import ConfigError, MissingRootError
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.stream import BatchStream


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_folder):
    """Five groups of four, in batches of two; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("stored") / "run"), tiny_folder)
    fill(root, num_files=1, groups_per_file=5)
    return root


@pytest.fixture(scope="module")
def stream(root):
    """A stream of that root whose two epochs are over."""
    return BatchStream(root)


@pytest.fixture(scope="module")
def epochs(stream):
    """The groups of each batch of two epochs."""
    return [[groups(batch) for batch in stream] for _ in range(2)]


def groups(batch):
    return list(dict.fromkeys(batch.plan.rows.filter(batch.plan.rows["used"])["group_id"].to_pylist()))


@pytest.mark.slow
def test_an_iteration_is_an_epoch(root, stream, epochs):
    used = [[group for batch in epoch for group in batch] for epoch in epochs]
    stored = sorted(group for (group,) in query(root, "select distinct group_id from rollouts"))
    assert [sorted(epoch) for epoch in used] == [stored, stored]
    assert used[0] != used[1]
    assert (len(stream), stream.epoch) == (3, 3)


def test_a_batch_is_packed_tokens_with_advantages(root):
    batch = next(iter(BatchStream(root, config=BatchConfig(advantage="rloo"))))
    rows = batch.plan.rows.filter(batch.plan.rows["used"])
    (packed,) = batch.micro_batches
    # Prompts of 8 and responses of 16 tokens; a response's last token is a target only
    assert packed.input_ids.shape == (1, 8 * (8 + 16 - 1))
    assert packed.targets.shape == packed.advantages.shape == (8 * 16,)
    of_rows = np.sort(np.repeat(rows["advantage"].to_numpy(), 16)).astype(np.float32)
    assert np.array_equal(np.sort(packed.advantages.numpy()), of_rows)


@pytest.mark.slow
@pytest.mark.parametrize("num_batches", [0, 4])
def test_it_goes_on_from_its_state_in_another_process(root, epochs, num_batches):
    first, second, found = BatchStream(root), BatchStream(root), []
    while len(found) < num_batches:
        for batch in first:
            found.append(groups(batch))
            if len(found) == num_batches:
                break
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    while second.epoch <= 2:
        found += [groups(batch) for batch in second]
    assert found == epochs[0] + epochs[1]


@pytest.mark.slow
def test_ranks_share_each_batch(root):
    alone = list(BatchStream(root))
    shares = list(zip(*(BatchStream(root, rank=rank, num_ranks=2) for rank in range(2)), strict=True))
    for batch, of_ranks in zip(alone, shares, strict=True):
        assert len({share.plan.rows["rollout_id"].combine_chunks().to_pylist().__str__() for share in of_ranks}) == 1
        assert sum(share.num_action_tokens for share in of_ranks) == batch.num_action_tokens
        assert len({len(share.micro_batches) for share in of_ranks}) == 1
        found, wanted = (
            torch.cat([packed.targets for share in parts for packed in share.micro_batches]).sort().values
            for parts in (of_ranks, [batch])
        )
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_several_roots_a_choice_and_a_seed(root, new_root, epochs):
    other = new_root("other")
    fill(other, num_files=1, worker_id="w0-other", seed=5)
    stream = BatchStream(
        root.url, other.url, config=BatchConfig(where="episode_reward is not null"), groups_per_batch=4
    )
    assert [len(groups(batch)) for batch in stream] == [4, 4, 1]
    assert epochs[0] != [groups(batch) for batch in BatchStream(root, seed=1)]


def test_nothing_is_written(root):
    before = root.list("")
    list(BatchStream(root))
    assert root.list("") == before


def test_wrong_use_is_explained(root, new_root, tmp_path):
    with pytest.raises(ConfigError, match="rank is 2 of 2"):
        BatchStream(root, rank=2, num_ranks=2)
    with pytest.raises(ConfigError, match="given no root"):
        BatchStream()
    with pytest.raises(MissingRootError, match="holds no run"):
        BatchStream(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no rollouts"):
        BatchStream(new_root("empty"))
