"""The contract of PlanSource, on each source: when a plan is in the ledger, how plans end, and what a crash leaves."""

import threading
import time

import pytest
from tiny_runs import copied, create_root, fill, final_weights, ledger, train_config, train_here, train_until_killed

from ludic.errors import FencedError, StalledError, StoreError
from ludic.root.attempts import complete_checkpoints, start_attempt
from ludic.root.rows.ledger import ledger_steps, read_ledger
from ludic.root.rows.reader import Cursor
from ludic.training.batches.source import BatchPlan
from ludic.training.inherited_settings import replay_settings
from ludic.training.ownership import open_source

NUM_STEPS = 6
"""Steps of each run, in batches of 2 groups."""
SETTINGS = {"num_steps": NUM_STEPS, "schedule": "linear", "advantage": "grpo"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folder):
    """An online run of NUM_STEPS; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("trained") / "run"), tiny_folder)
    fill(root, num_files=3)
    train_here(root, **SETTINGS)
    return root


def online(new_root, request):
    """12 groups, each used once."""

    def make(name):
        root = new_root(name)
        fill(root, num_files=3)
        return root

    return make, SETTINGS


def offline(new_root, request):
    """6 groups of another root, each used twice."""
    source = new_root("source")
    fill(source, num_files=2, groups_per_file=3)
    return new_root, SETTINGS | {"offline": True, "sources": (source.url,), "epochs": 2}


def replay(new_root, request):
    """The batches of another run."""
    url = copied(request.getfixturevalue("trained"), request.getfixturevalue("tmp_path") / "trained").url
    return new_root, replay_settings(url) | {"replay_batches": url}


@pytest.fixture(params=[online, offline, replay], ids=lambda kind: kind.__name__)
def runs(request, mesh, new_root):
    """A function that makes a root by its name, and the settings to train it for NUM_STEPS."""
    return request.param(new_root, request)


def groups_of(plan):
    return list(dict.fromkeys(plan.rows.filter(plan.rows["used"])["group_id"].to_pylist()))


def all_plans(stream):
    plans = []
    while (batch := stream.next_batch()) is not None:
        plans.append(batch.plan)
        if batch.plan.step == NUM_STEPS:
            break
        stream.start_plan(batch.plan.step + 1, 0)
    return plans


def test_a_plan_is_in_the_ledger_before_its_batch_is_taken_and_not_before_it_is_begun(runs, open_stream):
    make, settings = runs
    root = make("root")
    stream = open_stream(root, **settings)
    for step in (1, 2):
        while not ledger_steps(root, 1)[step - 1 :]:
            time.sleep(0.01)
        plan = stream.next_batch().plan
        assert ledger_steps(root, 1)[-1] == step
        assert read_ledger(root, 1, step).equals(plan.rows.replace_schema_metadata(None))
        assert set(plan.rows["attempt_id"].to_pylist()) == {1}
        stream.start_plan(step + 1, 0)


@pytest.mark.slow
def test_every_group_is_used_as_often_as_it_should_be(runs, open_stream):
    make, settings = runs
    plans = all_plans(open_stream(make("root"), **settings))
    uses = [group for plan in plans for group in groups_of(plan)]
    assert [plan.step for plan in plans] == list(range(1, NUM_STEPS + 1))
    assert len(uses) == 2 * NUM_STEPS
    times = {uses.count(group) for group in uses}
    assert times == ({2} if settings.get("offline") else {1})


def test_a_plan_reaches_other_ranks_whole(runs, open_stream):
    make, settings = runs
    plan = open_stream(make("root"), **settings).next_batch().plan
    received = BatchPlan.from_bytes(plan.to_bytes())
    assert received.rows.equals(plan.rows)
    assert (received.step, received.num_pending_groups, received.num_unreadable_files) == (
        1,
        plan.num_pending_groups,
        0,
    )
    assert received.cursor == plan.cursor
    Cursor.from_dict(dict(received.cursor))


@pytest.mark.slow
def test_a_source_that_is_opened_writes_nothing(runs):
    make, settings = runs
    root = make("root")
    before = root.list("")
    source = open_source(root, train_config(**settings), threading.Event())
    assert source.count_steps(None) in (None, NUM_STEPS)
    source.close()
    assert root.list("") == before


def test_no_plan_is_made_after_a_stop(runs, open_stream):
    make, settings = runs
    root, stop = make("root"), threading.Event()
    stop.set()
    assert open_stream(root, stop=stop, **settings).next_batch() is None
    assert ledger_steps(root, 1) == []


@pytest.mark.slow
def test_a_replaced_attempt_plans_nothing_and_says_so_when_the_batch_is_taken(runs, open_stream):
    make, settings = runs
    root = make("root")
    stream = open_stream(root, **settings)
    stream.next_batch()
    start_attempt(root)
    stream.start_plan(2, 0)
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        stream.next_batch()
    assert ledger_steps(root, 1) == [1]


def test_a_rollout_that_is_gone_is_named_when_the_batch_is_taken(runs, open_stream):
    make, settings = runs
    root = make("root")
    stream = open_stream(root, **settings)
    holder = stream.next_batch().plan.rows["root"][0].as_py()
    for rollouts in {root.path, (holder or root.path).removeprefix("file://")}:
        for file in sorted(root.fs.find(f"{rollouts}/rollouts")):
            root.fs.rm(file)
    stream.start_plan(2, 0)
    with pytest.raises(StoreError, match=r"\.parquet was planned for a step and is missing"):
        stream.next_batch()


@pytest.mark.slow
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(runs):
    make, settings = runs
    whole, root = make("whole"), make("killed")
    assert train_here(whole, **settings) == NUM_STEPS
    for at_step in (2, 5):  # before the first checkpoint, and after that of step 3
        train_until_killed(root, at_step=at_step, **settings)
    assert train_here(root, **settings) == NUM_STEPS
    assert ledger(root) == ledger(whole)
    weights = final_weights(whole)
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(root).items())
    assert complete_checkpoints(root)[-1].cursor == complete_checkpoints(whole)[-1].cursor


# --- Waiting, which only the online source does -----------------------------------------------------------


@pytest.mark.slow
def test_a_plan_that_fails_in_the_background_is_raised_when_the_batch_is_asked_for(new_root, open_stream):
    root = new_root()
    stream = open_stream(root, rollout_timeout_s=0.1)
    threading.Event().wait(0.5)  # the plan has failed by now
    with pytest.raises(StalledError):
        stream.next_batch()
    assert ledger(root) == []


def test_a_stop_ends_the_wait_for_a_batch(new_root, open_stream):
    stop = threading.Event()
    stream = open_stream(new_root(), stop=stop, rollout_timeout_s=None)
    stop.set()
    assert stream.next_batch() is None


def test_a_stream_that_is_closed_gives_up_the_batch_in_the_making(new_root, open_stream):
    stream = open_stream(new_root(), rollout_timeout_s=None)
    stream.close()  # would else wait for rollouts for ever
    assert "ludic-batch" not in [thread.name for thread in threading.enumerate()]
