"""A trainer that begins with the weights of the newest version publishes none: rollouts of them stay on-policy."""

import pytest
from tiny_runs import fill, query, train_here, train_until_killed

from ludic.app.launch.sample import publish_first
from ludic.root.attempts import start_attempt
from ludic.root.json_records import LatestPolicy
from ludic.root.weights.policies import claim_policy, latest_policy, policy_versions, read_policy
from ludic.training.publisher import Publisher


def steps_of_versions(root) -> list[int]:
    return [read_policy(root, version).step for version in policy_versions(root)]


@pytest.mark.slow
def test_a_first_step_trains_on_rollouts_of_the_first_version(new_root):
    root = new_root()
    publish_first(root)
    fill(root, num_files=1)
    assert train_here(root, num_steps=1, max_off_policy_steps=0) == 1
    assert steps_of_versions(root) == [0, 1]
    assert query(root, "select distinct trainer_version, off_policy_steps, used from batches") == [(0, 0, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"full_version_every": 3, "publish_dtype": "bfloat16"},
        {"lora_rank": 2},
        {"lora_rank": 2, "publish_lora": "adapter"},
    ],
    ids=str,
)
def test_a_trainer_that_goes_on_publishes_only_its_steps(new_root, settings):
    root = new_root()
    fill(root, num_files=2)
    train_here(root, num_steps=2, **settings)
    assert train_here(root, num_steps=4, **settings) == 4
    assert steps_of_versions(root) == [0, 1, 2, 3, 4]
    assert query(root, "select trainer_version from batches where step = 3 limit 1") == [(2,)]
    assert latest_policy(root).version == 4


@pytest.mark.slow
def test_a_trainer_that_goes_back_publishes_what_it_begins_with(new_root):
    root = new_root()
    fill(root, num_files=3)
    train_until_killed(root, at_step=5, num_steps=6)  # its checkpoint is of step 3
    train_here(root, num_steps=6)
    assert steps_of_versions(root)[:4] == [0, 1, 2, 3]
    assert steps_of_versions(root)[-4:] == [3, 4, 5, 6]


@pytest.mark.slow
def test_weights_of_another_dtype_are_published(new_root):
    root = new_root()
    fill(root, num_files=2)
    train_here(root, num_steps=2)
    train_here(root, num_steps=3, publish_dtype="bfloat16")
    assert steps_of_versions(root) == [0, 1, 2, 2, 3]


def begin(root, *, num_ready_groups: int, text: str = "{}") -> Publisher:
    """A trainer begins at step 0 with weights that are one file, with this text."""
    publisher = Publisher(root, start_attempt(root), keep=None)
    publisher.begin(
        lambda folder: (folder / "config.json").write_text(text) and None, step=0, num_ready_groups=num_ready_groups
    )
    return publisher


def test_latest_says_how_many_groups_may_be_open_and_how_many_are_ready(new_root):
    root = new_root()
    begin(root, num_ready_groups=0)
    # two batches of two groups
    assert latest_policy(root) == LatestPolicy(version=0, budget=4, attempt_id=1)
    # an earlier trainer left three
    begin(root, num_ready_groups=3)
    assert latest_policy(root) == LatestPolicy(version=0, budget=4, num_ready=3, attempt_id=2)


def test_a_trainer_lets_more_groups_start_under_a_version_that_an_earlier_one_published(new_root):
    root = new_root()
    begin(root, num_ready_groups=0)
    publisher = begin(root, num_ready_groups=4)
    publisher.note_wait(2, 2, 0.0, version=0)  # filters dropped two of the four
    assert latest_policy(root).num_allowed(0) == 2


def test_other_files_are_published(new_root):
    root = new_root()
    begin(root, num_ready_groups=0)
    assert begin(root, num_ready_groups=0, text='{"other": 1}').version == 1


def test_a_version_above_one_that_a_fenced_trainer_claimed_is_published(new_root):
    """That trainer may be about to point LATEST at its own, and what the new one names must be above it."""
    root = new_root()
    begin(root, num_ready_groups=0)
    claim_policy(root, step=1, attempt_id=1, parent_version=0)
    assert begin(root, num_ready_groups=0).version == 2
