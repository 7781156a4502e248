"""The trainer on roots that hold rollouts already, and beside workers that sample them."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from tiny_runs import GROUP_SIZE, GROUPS_PER_BATCH, create_root, fill, ledger, query, train_config, train_here

from ludic.base.distributed import num_ranks
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.moar_cats import WORDS
from ludic.errors import FencedError, QueryError, StalledError
from ludic.models.tiny import make_tiny_model
from ludic.rollouts.worker import WorkerConfig, run_worker
from ludic.root.attempts import complete_checkpoints, folder_of, newest_attempt_id, start_attempt
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.tables import POPULATIONS
from ludic.root.weights.policies import latest_policy, policy_versions
from ludic.training.flops import model_cost, step_flops
from ludic.training.model import load_model
from ludic.training.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture
def local(new_root):
    """A root with 16 groups of 4, enough for 8 steps, and the groups by id."""
    root = new_root()
    return root, fill(root, num_files=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folder):
    """Such a root after five steps that kept the newest weights and checkpoints, and its groups; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("trained") / "run"), tiny_folder)
    groups = fill(root, num_files=4)
    assert train_here(root, num_steps=5, checkpoint_every=2, keep_checkpoints=2, keep_policies=2) == 5
    return root, groups


def test_every_step_trains_on_groups_that_no_other_step_sees(trained):
    root, groups = trained
    seen = [(row[0], row[3]) for row in ledger(root)]  # step, group_id: a row an episode
    assert Counter(seen) == dict.fromkeys(seen, GROUP_SIZE)
    assert Counter(step for step, _ in set(seen)) == dict.fromkeys(range(1, 6), GROUPS_PER_BATCH)
    assert len({group_id for _, group_id in seen}) == 5 * GROUPS_PER_BATCH
    assert {group_id for _, group_id in seen} <= set(groups)


def test_advantages_in_the_ledger_are_leave_one_out(trained):
    root, groups = trained
    expected = {
        rollout.rollout_id: advantage
        for group in groups.values()
        for rollout, advantage in zip(group.rollouts, group.rloo_advantages(), strict=True)
    }
    found = dict(query(root, "select rollout_id, advantage from batches where used"))
    assert len(found) == 5 * GROUPS_PER_BATCH * GROUP_SIZE
    assert found == pytest.approx({rollout_id: expected[rollout_id] for rollout_id in found}, abs=1e-12)


def test_what_filters_drop_is_in_the_ledger_with_the_reason_and_in_the_metrics(new_root):
    root = new_root()
    # A group without variance, one with an episode that failed, two plain ones, of which one is left for later.
    rewards = [[0.5] * 4, [0.1, 0.2, 0.3, None], [0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]]
    fill(root, num_files=1, rewards=rewards, num_groups=4)
    train_here(root, num_steps=1, filters=("drop_zero_variance_groups",))
    reasons = query(root, "select used, weight, reason, count(*) from batches group by all order by all")
    assert reasons == [
        (False, 0.0, "drop_errors", 1),
        (False, 0.0, "drop_zero_variance_groups", 4),
        (True, 1.0, None, 3 + 4),
    ]
    assert query(root, "select num_rollouts, num_groups, drops from metrics") == [
        (7, 2, {"drop_errors": 1, "drop_zero_variance_groups": 4})
    ]
    # The mean reward is of all that were considered and have one, the mean length of those that were used.
    lengths = query(root, "select response_length from batches where used")
    ((reward, length),) = query(root, "select reward_mean, response_length_mean from metrics")
    assert reward == pytest.approx((4 * 0.5 + 0.1 + 0.2 + 0.3 + 0.1 + 0.2 + 0.3 + 0.4) / 11)
    assert length == pytest.approx(sum(row[0] for row in lengths) / 7)
    assert (POPULATIONS["reward_mean"], POPULATIONS["response_length_mean"]) == (
        "considered rollouts, dropped ones too",
        "used rollouts",
    )


def test_a_trainer_that_learns_nothing_says_so(new_root, caplog):
    root = new_root()
    fill(root, num_files=3, rewards=[[0.5] * 4] * 4)
    train_here(root, num_steps=4)
    warnings = [record.getMessage() for record in caplog.records if "got no gradient" in record.getMessage()]
    assert warnings == [
        "since step 1: the last 3 steps got no gradient: all advantages or gradients are 0 (mean reward 0.5); look at "
        "the environment's score, and at answers that were cut at max_tokens or not parsed"
    ]


def test_the_metrics_have_a_row_a_step_with_nothing_missing(local):
    root, _ = local
    reported = {}
    train_here(root, num_steps=3, reference=root.record.model, report=lambda step, row: reported.update({step: row}))
    rows = query(
        root,
        """
        -- but for the columns of workers, of dpo, of mixtures of experts, of other trainers, and mfu, which a CPU has
        -- none of
        select * exclude (
            worker_id, env_name, num_truncated, num_parse_errors, num_errors,
            num_incomplete_completions, num_zero_variance_groups, first_error,
            preference_margin, preference_accuracy, router_balance_loss, router_z_loss, expert_imbalance,
            experts_changed, mfu, load_s, fetch_s, first_token_s,
            num_running, waited_for, other
        )
        from metrics
        where kind = 'train'
        order by step
        """,
    )
    assert [row.index(None) for row in rows if None in row] == []
    assert query(root, "select step from metrics order by step") == [(1,), (2,), (3,)]
    assert sorted(reported) == [1, 2, 3]
    # 2 groups of 4 episodes, of 8 prompt and 16 response tokens; versions 0, 1, 2 train on rollouts of version 0.
    numbers = query(
        root,
        "select num_rollouts, num_groups, num_tokens, off_policy_steps_mean, off_policy_steps_max from metrics "
        "order by step",
    )
    assert numbers == [(8, 2, 8 * 24, lag, lag) for lag in (0, 1, 2)]
    assert query(root, "select num_pending_groups from metrics order by step") == [(14,), (12,), (10,)]


def test_the_parts_of_a_step_are_measured_and_make_up_no_more_than_the_step(local):
    root, _ = local
    train_here(root, num_steps=2, reference=root.record.model, checkpoint_every=1)
    rows = query(
        root,
        """
        with steps as (
            select *, [reference_s, forward_s, backward_s, collectives_s, optimizer_s] as parts from metrics
        )
        select list_min(parts || [read_s, pack_s, checkpoint_s]) > 0, list_sum(parts) between step_s / 2 and step_s
        from steps
        """,
    )
    assert rows == [(True, True)] * 2


def test_the_operations_of_a_step_are_those_of_its_sequences_cut_to_their_limit(new_root):
    root = new_root()
    fill(root, num_files=1)
    train_here(root, num_steps=1, max_seq_len=10)
    cost = model_cost(load_model(root.record.model))
    # 2 groups of 4 sequences of 8 prompt tokens and 16 sampled ones, of which 2 are left.
    expected = step_flops(cost, np.full(8, 8), np.full(8, 2))
    assert query(root, "select model_flops, mfu, num_seq_len_truncated from metrics") == [(expected, None, 8)]


def test_a_version_is_published_when_it_is_due_and_at_the_end(new_root):
    root = new_root(steps_per_version=2)
    fill(root, num_files=4)
    train_here(root, num_steps=5)
    published = query(root, "select version, step, parent_version from policies order by version")
    assert published == [(0, 0, None), (1, 2, 0), (2, 4, 1), (3, 5, 2)]
    # A step starts from what was published before it: steps 1 and 2 from version 0, 3 and 4 from 1, 5 from 2.
    versions = query(root, "select distinct step, trainer_version from batches order by step")
    assert versions == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    assert latest_policy(root).version == 3


def test_only_the_newest_policies_keep_their_weights(trained):
    root, _ = trained
    assert policy_versions(root) == [0, 1, 2, 3, 4, 5]
    with_weights = [version for version in range(6) if root.exists(f"policies/version={version}/config.json")]
    assert with_weights == [4, 5]


def test_checkpoints_are_written_when_due_and_at_the_end_and_pruned(trained):
    root, _ = trained
    assert [info.step for info in complete_checkpoints(root)] == [4, 5]


def test_a_run_whose_weights_are_in_shards_publishes_checkpoints_and_resumes_them(local):
    root, _ = local
    train_here(root, num_steps=2, max_shard_size="20KB")
    for folder in ("policies/version=2", "checkpoints/attempt=1/step=2"):
        files = {name.rpartition("/")[2] for name in root.list(folder)}
        assert "model.safetensors.index.json" in files
        assert "model.safetensors" not in files
    assert train_here(root, num_steps=3, max_shard_size="20KB") == 3
    assert query(root, "select parent_step from attempts where attempt_id = 2") == [(2,)]
    assert check_root(root).findings == []


def test_weights_move_and_what_is_published_is_what_was_trained(local):
    from safetensors.numpy import load

    root, _ = local
    train_here(root, num_steps=2)
    first, last = (load(root.read(f"policies/version={version}/model.safetensors")) for version in (0, 2))
    trained = load(root.read(f"{folder_of(complete_checkpoints(root)[-1])}/model.safetensors"))
    assert any((first[name] != last[name]).any() for name in first)
    assert all((trained[name] == last[name]).all() for name in last)


def test_a_stop_ends_the_run_with_a_checkpoint_of_its_last_step(local):
    root, _ = local
    stop = threading.Event()
    step = train(root, train_config(num_steps=8), stop, lambda step, row: stop.set() if step == 2 else None)
    assert step in (2, 3)  # a batch that was ready is trained on
    assert [info.step for info in complete_checkpoints(root)] == [step]
    assert query(root, "select max(step) from metrics") == [(step,)]


def test_a_stop_before_the_first_rollout_leaves_no_checkpoint(new_root):
    root, stop = new_root(), threading.Event()
    stop.set()
    assert train(root, train_config(num_steps=8), stop) == 0
    assert complete_checkpoints(root) == []
    assert latest_policy(root).version == 0


def test_a_stall_checkpoints_what_was_trained_and_names_the_filter(new_root):
    root = new_root()
    fill(root, num_files=1, groups_per_file=2)

    def send_useless_groups(step, row):
        fill(root, num_files=1, rewards=[[0.5] * 4, [1.0] * 4], num_groups=2, worker_id="w1-test", seed=1)

    with pytest.raises(StalledError, match=r"step 2 waited .* drop 8 of 8 rollouts, drop_zero_variance_groups most"):
        train_here(
            root,
            num_steps=4,
            filters=("drop_zero_variance_groups",),
            rollout_timeout_s=1.0,
            report=send_useless_groups,
        )
    assert [info.step for info in complete_checkpoints(root)] == [1]


def test_a_trainer_that_was_replaced_stops_and_writes_nothing_more(local):
    root, _ = local
    files = []

    def replace(step, row):
        if step == 2:
            # The plan of the next step was begun before; a look at the claims may be behind it already.
            while "batches/attempt=1/step=3.parquet" not in written(root):
                time.sleep(0.01)
            start_attempt(root)
            files.extend(written(root))

    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        train_here(root, num_steps=6, report=replace)
    assert written(root) - set(files) == set()


def written(root: Root) -> set[str]:
    """All files but the metrics, which flush what was seen before."""
    return {name for folder in ("batches", "policies", "checkpoints", "attempts") for name in root.list(folder)}


def test_a_filter_that_cannot_run_fences_nobody(local):
    root, _ = local
    start_attempt(root)
    with pytest.raises(QueryError, match="no_such_filter"):
        train_here(root, num_steps=1, filters=("no_such_filter",))
    assert newest_attempt_id(root) == 1


@contextmanager
def collecting(root: Root) -> Iterator[None]:
    """A worker beside us, until we are done; what it raises is raised here."""
    stop = threading.Event()

    def make_engine(folder: str, version: int) -> TransformersEngine:
        return TransformersEngine(folder, device="cpu", version=version)

    with ThreadPoolExecutor(1) as thread:
        worker = thread.submit(run_worker, root, WorkerConfig(slot=0), make_engine, stop)
        try:
            yield
        finally:
            stop.set()
        assert worker.result() >= GROUPS_PER_BATCH


@pytest.fixture(scope="session")
def cats_folder(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("cats") / "model")
    make_tiny_model(folder, WORDS)
    return folder


@pytest.mark.parametrize("root_url", ["s3"], indirect=True)
def test_collecting_and_training_share_nothing_but_the_root(root_url, cats_folder):
    root = create_root(root_url, cats_folder, max_tokens=8)
    with collecting(root):
        assert train_here(root, num_steps=3, max_off_policy_steps=4, rollout_timeout_s=60.0) == 3
    assert query(root, "select step, count(distinct group_id) from batches where used group by step order by step") == [
        (step, GROUPS_PER_BATCH) for step in range(1, 4)
    ]
    assert query(root, "select count(*), count(distinct rollout_id) from batches") == [(24, 24)]
    # The trainer computes the probabilities that the sampler sampled with; what moved them is at most some steps.
    (on_policy,) = query(root, "select sampler_kl, ratio_max from metrics where kind = 'train' and step = 1")
    assert on_policy == pytest.approx((0.0, 1.0), abs=1e-3)
    assert query(root, "select min(off_policy_steps) >= 0, max(off_policy_steps) <= 4 from batches") == [(True, True)]


def test_a_process_group_that_the_caller_had_joined_stays(mesh, local):
    root, _ = local
    assert train_here(root, num_steps=1) == 1
    assert mesh.size() == num_ranks() == 1


@pytest.mark.parametrize("advantage", ["token_returns", "turn_returns"])
def test_advantages_by_token_train(new_root, advantage):
    root = new_root()
    fill(root, num_files=2, num_turns=2)
    assert train_here(root, num_steps=2, advantage=advantage, sql_params={"discount": 0.5}) == 2
    lengths = query(root, "select distinct len(token_advantages), response_length, used from batches")
    assert lengths == [(16, 16, True)]
    (means,) = query(root, "select bool_and(isfinite(advantage_mean)), bool_and(isfinite(loss)) from metrics")
    assert means == (True, True)
