"""Publishing by the owner of a root, and by one that no longer owns it."""

import pytest

from ludic.errors import FencedError
from ludic.store import LatestPolicy, latest_policy, point_latest, start_attempt
from ludic.store.policies import LATEST, policy_versions
from ludic.training.publisher import Publisher


@pytest.fixture
def publisher(new_root):
    """Of a run that asks its worker for 2 batches of 2 groups; version 0 is published."""
    root = new_root()
    publisher = Publisher(root, start_attempt(root), keep=None)
    publisher.publish(lambda folder: None, step=0, num_ready_groups=0)
    return root, publisher


def test_what_a_zombie_points_at_is_pointed_back(publisher):
    root, publisher = publisher
    publisher.publish(lambda folder: None, step=1, num_ready_groups=1)
    expected = LatestPolicy(version=1, groups_per_worker=3)
    assert latest_policy(root) == expected
    point_latest(root, LatestPolicy(version=0, groups_per_worker=99))
    publisher.mend_latest()
    assert latest_policy(root) == expected


def test_a_latest_that_is_broken_is_mended(publisher):
    root, publisher = publisher
    root.put(LATEST, b"{")
    publisher.mend_latest()
    assert latest_policy(root) == LatestPolicy(version=0, groups_per_worker=4)


def test_a_latest_that_is_right_is_not_written_again(publisher):
    root, publisher = publisher
    before = root.fs.info(root.at(LATEST))
    publisher.mend_latest()
    assert root.fs.info(root.at(LATEST)) == before


def test_nothing_is_mended_before_the_first_publication(new_root):
    root = new_root()
    Publisher(root, start_attempt(root), keep=None).mend_latest()
    assert latest_policy(root) is None


def test_a_trainer_that_is_fenced_while_it_writes_weights_leaves_latest_alone(publisher):
    root, publisher = publisher
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        publisher.publish(lambda folder: start_attempt(root), step=1, num_ready_groups=0)
    assert latest_policy(root).version == 0
    assert policy_versions(root) == [0, 1]
    # The next one passes over the version that was claimed and never named.
    successor = Publisher(root, start_attempt(root), keep=None)
    assert successor.publish(lambda folder: None, step=0, num_ready_groups=0) == 2
    assert latest_policy(root).version == 2
