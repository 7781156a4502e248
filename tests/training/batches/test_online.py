"""The online source: which delivered rollouts it plans, how a wait for them ends, and what it asks of workers."""

import errno
import itertools
import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pytest
from strategies import make_batch
from tiny_runs import create_root, cursor_of_ledger, fill, groups_left, query, train_config

from ludic.errors import AllDroppedError, AllFailedError, ConfigError, StalledError
from ludic.root.attempts import read_attempt, start_attempt
from ludic.root.json_records import CheckpointInfo
from ludic.root.maintenance.compaction import compact
from ludic.root.rows.ledger import recall_sources, write_ledger
from ludic.root.rows.reader import Cursor
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.planner import Planner
from ludic.root.storage import local
from ludic.root.weights.policies import latest_policy
from ludic.run.run_json import run_of
from ludic.training.batches.online import OnlineSource
from ludic.training.batches.source import batch_rules
from ludic.training.publisher import Publisher


@pytest.fixture
def open_source():
    """open_source(root, filters=(...)): a source of a new attempt, and its publisher with version 0 published."""
    sources = []

    def open_(root, *, stop=None, **settings):
        publisher = Publisher(root, start_attempt(root), keep=None)
        source = OnlineSource(root, train_config(**settings).batch, stop or threading.Event())
        source.resume(None, publisher)
        publisher.publish(lambda folder: None, step=0)
        sources.append(source)
        return source, publisher

    yield open_
    for source in sources:
        source.close()


def next_plan(source, step, trainer_version=0):
    return source.plan(step, attempt_id=1, trainer_version=trainer_version)


def plan_and_record(root, source, step):
    """The next plan, whose rows are in the ledger."""
    plan = next_plan(source, step)
    write_ledger(root, read_attempt(root, 1), step, plan.rows)
    return plan


@pytest.fixture
def begin_plan():
    """begin_plan(source, step): a future of the plan, which another thread makes."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda source, step: thread.submit(next_plan, source, step)


def groups_of(plan):
    return set(plan.rows.column("group_id").to_pylist())


@pytest.mark.slow
def test_the_cursor_of_a_plan_is_what_the_ledger_holds(new_root, open_source):
    root = new_root()
    fill(root, num_files=2, groups_per_file=3)
    source, _ = open_source(root)
    for step in (1, 2, 3):  # 2, 4 and 6 of 6 groups: inside the first file, inside the second, at the end
        plan = plan_and_record(root, source, step)
        assert Cursor.from_dict(plan.cursor).to_dict() == cursor_of_ledger(root)


@pytest.mark.slow
def test_an_average_over_batches_goes_on_after_a_restart(new_root, open_source):
    root = new_root("run")
    fill(root, num_files=2)
    source, publisher = open_source(root, advantage="rae")
    plans = [plan_and_record(root, source, step) for step in (1, 2, 3, 4)]
    checkpoint = CheckpointInfo(attempt_id=1, step=2, policy_version=0, cursor=plans[1].cursor, config={}, num_ranks=1)
    again = OnlineSource(root, train_config(advantage="rae").batch, threading.Event())
    again.resume(checkpoint, publisher)
    for plan in plans[2:]:
        assert next_plan(again, plan.step).rows.equals(plan.rows)
    # an average that began again at the third step would leave the first reward as it is
    first = plans[2].rows.slice(0, 1).to_pylist()[0]
    assert first["advantage"] != first["episode_reward"]


def test_rollouts_that_got_too_old_are_dropped_with_that_reason(new_root, open_source):
    root = new_root()
    fill(root, num_files=1, groups_per_file=3)
    source, _ = open_source(root, max_off_policy_steps=2)
    plan = next_plan(source, 1, trainer_version=2)
    assert set(plan.rows["lag"].to_pylist()) == {2}
    assert plan.num_pending_groups == 1
    fill(root, num_files=1, groups_per_file=2, worker_id="w0-new", policy_version=3, seed=7)
    plan = next_plan(source, 2, trainer_version=3)
    reasons = {(row["lag"], row["used"], row["reason"]) for row in plan.rows.to_pylist()}
    assert reasons == {(0, True, None), (3, False, "max_off_policy_steps")}
    assert plan.num_pending_groups == 0


def test_versions_behind_the_window_are_not_even_listed(tiny_folder, open_source, monkeypatch):
    root = create_root(f"memory://{uuid.uuid4()}", tiny_folder)
    fill(root, num_files=1, worker_id="w0-old")
    fill(root, num_files=1, worker_id="w0-new", policy_version=9, seed=1)
    listed = []
    find = root.fs.find
    monkeypatch.setattr(root.fs, "find", lambda path, **options: listed.append(path) or find(path, **options))
    source, _ = open_source(root, max_off_policy_steps=2)
    plan = next_plan(source, 1, trainer_version=9)
    assert set(plan.rows["policy_version"].to_pylist()) == {9}
    # Workers may have version 10 already, while the trainer still plans for 9.
    rollouts = {path.removeprefix(root.at("rollouts/")) for path in listed if "/rollouts" in path}
    assert rollouts == {"version=7", "version=8", "version=9", "version=10"}


@pytest.mark.slow
@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_larger_window_gets_what_was_not_consumed_of_versions_that_the_cursor_forgot(
    new_root, open_source, is_compacted
):
    root = new_root()
    source, _ = open_source(root, max_off_policy_steps=1)
    for version in range(6):
        fill(root, num_files=1, groups_per_file=2, worker_id=f"w{version}-a", policy_version=version, seed=version)
        plan = next_plan(source, version + 1, trainer_version=version)
        write_ledger(root, read_attempt(root, 1), version + 1, plan.rows)
    checkpoint = 1, 6
    late = {
        version: set(
            fill(
                root,
                num_files=1,
                groups_per_file=2,
                worker_id=f"w{version}-z",
                policy_version=version,
                seed=version + 50,
            )
        )
        for version in (1, 3, 5)
    }
    if is_compacted:
        compact(root, before_version=4)

    def cursor() -> Cursor:
        return Cursor.from_dict(json.loads(json.dumps(plan.cursor)))

    def left(recalled: Cursor, versions: range | None) -> set[str]:
        return groups_left(root, recalled.to_dict(), versions)

    assert cursor().first_version == 4
    # Until it is recalled, what was forgotten is not delivered: it could come twice.
    assert left(cursor(), None) == late[5]
    for first_version, forgets in [(4, True), (3, True), (2, False), (0, True), (0, False)]:
        recalled = cursor()
        recall_sources(root, recalled, first_version, checkpoint, forgets=forgets)
        assert recalled.first_version == first_version
        wanted = set().union(*(groups for version, groups in late.items() if version >= first_version))
        assert left(recalled, range(first_version, 8)) == wanted
        assert left(recalled, None) == wanted
        recalled.forget_before(5)
        assert left(recalled, None) == late[5]


def test_a_broken_file_is_quarantined_and_counted(new_root, open_source):
    root = new_root()
    groups = fill(root, num_files=1, groups_per_file=2)
    root.put("rollouts/version=0/env=moar_cats/w1-broken-0.parquet", b"PAR1 and then the disk was full")
    source, _ = open_source(root)
    plan = next_plan(source, 1)
    assert groups_of(plan) == set(groups)
    assert plan.num_unreadable_files == 1


def fail_to_list(root, name):
    raise OSError(errno.EIO, "the disk fails", f"{root}/{name}")


def test_a_store_that_fails_for_a_while_is_asked_again(new_root, open_source, begin_plan, caplog, monkeypatch):
    root = new_root()
    source, _ = open_source(root, rollout_timeout_s=60)
    monkeypatch.setattr(local, "walk", fail_to_list)
    plan = begin_plan(source, 1)
    while not caplog.records:
        time.sleep(0.01)
    assert "no new rollouts, polling again: " in caplog.text
    monkeypatch.undo()
    groups = fill(root, num_files=1, groups_per_file=2)
    assert groups_of(plan.result()) == set(groups)
    assert len(caplog.records) == 1


def test_a_store_that_fails_for_longer_than_the_stall_limit_ends_the_wait_with_its_error(
    new_root, open_source, monkeypatch
):
    root = new_root()
    source, _ = open_source(root, rollout_timeout_s=0.2)
    monkeypatch.setattr(local, "walk", fail_to_list)
    with pytest.raises(StalledError, match=r"step 1 waited 0 s .* store fails: .*/rollouts.*: .*the disk fails"):
        next_plan(source, 1)


def test_closing_ends_the_wait_and_leaves_the_callers_event_alone(new_root, open_source, begin_plan):
    root, stop = new_root(), threading.Event()
    source, _ = open_source(root, stop=stop, rollout_timeout_s=None)
    plan = begin_plan(source, 1)
    source.close()
    assert plan.result() is None
    assert not stop.is_set()


def test_a_wait_over_the_stall_limit_names_the_filter_that_drops_most(new_root, open_source):
    root = new_root()
    # Two groups without variance (8 rollouts), one with an episode that failed.
    fill(root, num_files=1, rewards=[[1.0] * 4, [0.5] * 4, [0.1, 0.2, 0.3, None]], num_groups=3)
    source, _ = open_source(root, filters=("drop_zero_variance_groups",), rollout_timeout_s=0.2)
    with pytest.raises(
        StalledError, match=r"1 of 2 groups are ready; filters drop 9 of 12 .* drop_zero_variance_groups"
    ):
        next_plan(source, 1)


@pytest.fixture
def keep_filling():
    """keep_filling(root, every_s, rewards=...): another thread appends a file again and again, until the test ends."""
    stop = threading.Event()

    def fill_again(root, every_s, **options):
        for number in itertools.count():
            fill(root, num_files=1, seed=number, worker_id=f"w0-{number}", **options)
            if stop.wait(every_s):
                return

    with ThreadPoolExecutor(1) as thread:
        filling = []
        yield lambda root, every_s, **options: filling.append(thread.submit(fill_again, root, every_s, **options))
        stop.set()
    assert [each.result() for each in filling] == [None]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"filters": ("drop_zero_variance_groups",)}, "filters drop .*, drop_zero_variance_groups most"),
        ({"filters": ("own.sql",)}, "filters drop .*, own most"),
        ({"where": "response_length < 0"}, r"where \(response_length < 0\) takes only groups"),
        ({"max_age_s": 1.0}, "filters drop .*, max_age most"),  # the rows of make_batch are of 2026-01
    ],
)
def test_a_run_whose_every_group_is_dropped_ends_with_the_filters_name(
    new_root, open_source, keep_filling, tmp_path, monkeypatch, settings, name
):
    monkeypatch.chdir(tmp_path)
    Path("own.sql").write_text("response_length > 0")
    root = new_root()
    source, _ = open_source(root, rollout_timeout_s=0.6, **settings)
    keep_filling(root, 0.1, rewards=[[1.0] * 4])
    message = rf"step 1 waited 1 s; groups came, but no step can use them: 0 of 2 .*; {name}.*; change the filter, or"
    with pytest.raises(AllDroppedError, match=message):
        next_plan(source, 1)


def test_groups_that_a_batch_can_use_let_a_wait_go_on(new_root, open_source, keep_filling):
    root = new_root(groups_per_batch=5)
    source, _ = open_source(root, rollout_timeout_s=2)
    keep_filling(root, 0.3, rewards=[[0.1, 0.2, 0.3, 0.4]])
    assert len(groups_of(next_plan(source, 1))) == 5  # after about 1.5 s: the wait begins again with each


def test_workers_may_start_others_for_the_groups_that_filters_drop(new_root, open_source):
    # groups_per_batch 2, and 4 groups may be open at first; filters leave 1 of the 4.
    root = new_root()
    rewards = [[1.0] * 4, [0.5] * 4, [0.0] * 4, [0.1, 0.2, 0.3, 0.4]]
    source, _ = open_source(root, filters=("drop_zero_variance_groups",), rollout_timeout_s=0.3)
    assert latest_policy(root).num_allowed(0) == 4
    fill(root, num_files=1, rewards=rewards, num_groups=4)
    with pytest.raises(StalledError):
        next_plan(source, 1)
    assert latest_policy(root).num_allowed(0) == 3


@pytest.mark.slow
def test_workers_are_told_nothing_by_the_version_that_is_about_to_be_replaced(new_root, open_source):
    # 4 groups are open and delivered, 2 steps planned: the third waits for version 1, which says what is open then.
    root = new_root()
    source, publisher = open_source(root, rollout_timeout_s=0.3)
    fill(root, num_files=1, groups_per_file=4)
    next_plan(source, 1), next_plan(source, 2)
    with pytest.raises(StalledError):
        next_plan(source, 3, trainer_version=1)
    assert latest_policy(root).num_allowed(0) == 4
    publisher.publish(lambda folder: None, step=1)
    # The groups of step 2 are open until its weights are out.
    assert (latest_policy(root).version, latest_policy(root).num_allowed(0)) == (1, 2)


@pytest.mark.slow
def test_what_an_earlier_trainer_left_counts_as_ready(new_root, open_source):
    root = new_root()
    fill(root, num_files=1, groups_per_file=3)
    source, _ = open_source(root)
    assert source.count_ready_groups(None) == 0  # a run without a policy has no rollouts to look for
    assert source.count_ready_groups(0) == 3
    next_plan(source, 1)
    assert source.count_ready_groups(0) == 1
    with pytest.raises(StalledError):
        next_plan(source, 2)
    assert source.count_ready_groups(0) == 1


def test_a_file_that_arrives_while_a_plan_waits_completes_it(new_root, open_source, begin_plan):
    root = new_root()
    source, _ = open_source(root, rollout_timeout_s=60)
    plan = begin_plan(source, 1)
    groups = fill(root, num_files=2, groups_per_file=1)
    assert groups_of(plan.result()) == set(groups)


def test_rows_are_judged_only_when_a_batch_of_them_may_be_there(new_root, open_source, begin_plan, monkeypatch):
    # groups_per_batch 2. Judging takes as long as some steps, and the last group may come meanwhile.
    root = new_root()
    source, _ = open_source(root, rollout_timeout_s=60)
    judged, judge = [], Planner._judge

    def count(planner, values):
        judged.append(values["step"])
        judge(planner, values)

    monkeypatch.setattr(Planner, "_judge", count)
    looks, poll = [], source._poll
    monkeypatch.setattr(source, "_poll", lambda version: looks.append(version) or poll(version))
    plan = begin_plan(source, 1)
    while len(looks) < 3:
        time.sleep(0.001)
    assert judged == []  # nothing is pending
    fill(root, num_files=1, groups_per_file=2)
    plan.result()
    assert judged == [1]


def test_the_budget_grows_only_if_the_trainer_has_looked_for_groups_in_vain(new_root, open_source):
    # 2 groups a batch, and 4 groups may be open at first.
    root = new_root()
    source, publisher = open_source(root, rollout_timeout_s=0.1)
    fill(root, num_files=1, groups_per_file=2)
    next_plan(source, 1)
    publisher.publish(lambda folder: None, step=1)
    assert latest_policy(root).budget == 4  # step 2 is not planned, since nobody has tried
    with pytest.raises(StalledError):
        next_plan(source, 2, trainer_version=2)  # it starts from a version that is not published yet
    publisher.publish(lambda folder: None, step=1)
    assert latest_policy(root).budget == 8


@pytest.mark.slow
def test_a_plan_that_waits_lists_a_slow_store_at_most_a_fifth_of_the_time(tiny_folder, open_source, monkeypatch):
    root = create_root(f"memory://{uuid.uuid4()}", tiny_folder)
    source, _ = open_source(root, max_off_policy_steps=0, rollout_timeout_s=1.0)
    listed, find = [], root.fs.find

    def slow_find(path, **options):
        listed.append(path)
        time.sleep(0.06)
        return find(path, **options)

    monkeypatch.setattr(root.fs, "find", slow_find)
    with pytest.raises(StalledError):
        next_plan(source, 1)
    # A poll lists versions 0 and 1 at once, in 0.06 s or more, and then pauses 0.24 s or more: 4 polls in 1 s.
    assert len(listed) <= 2 * 5


@pytest.mark.slow
def test_rollouts_that_were_written_too_long_ago_are_dropped_with_that_reason(new_root, open_source):
    root = new_root()
    fill(root, num_files=1, groups_per_file=2, worker_id="w0-old")
    (old,) = query(root, "select max(epoch(created_at))::bigint from rollouts")[0]
    # make_batch dates a batch so many seconds later than that of seed 0
    fill(root, num_files=1, groups_per_file=2, worker_id="w0-new", seed=int(time.time()) - old)
    source, _ = open_source(root, max_age_s=3600.0)
    plan = next_plan(source, 1)
    reasons = {(row["file"].split("/")[-1], row["reason"]) for row in plan.rows.to_pylist()}
    assert reasons == {("w0-old-0.parquet", "max_age"), ("w0-new-0.parquet", None)}


def test_a_limit_that_is_a_setting_is_no_sql_param():
    config = train_config(max_age_s=60.0, sql_params={"max_age_s": 30.0})
    with pytest.raises(ConfigError, match="sql_params has 'max_age_s', which is a setting of its own"):
        batch_rules(config.batch, 1)
    # where the setting is off, there is no filter that would take it either
    config = train_config(sql_params={"max_age_s": 30.0})
    with pytest.raises(ConfigError, match="parameter 'max_age_s' is unknown"):
        Planner(batch_rules(config.batch, 1))


@pytest.mark.slow
def test_of_two_groups_of_one_request_the_later_is_dropped_and_said_to_be(new_root, open_source):
    root = new_root()
    first = fill(root, num_files=1, worker_id="w0-first")
    source, _ = open_source(root)
    plan = plan_and_record(root, source, 1)
    assert (len(groups_of(plan)), plan.num_pending_groups) == (2, 2)
    # The other life of slot 0 sampled the same four requests, and commits them now.
    second = fill(root, num_files=1, worker_id="w0-second", seed_of_ids=1)
    plan = plan_and_record(root, source, 2)
    used = plan.rows.filter(plan.rows["used"])
    dropped = plan.rows.filter(pc.invert(plan.rows["used"]))
    assert set(used["group_id"].to_pylist()) <= first.keys()
    assert set(dropped["group_id"].to_pylist()) == second.keys()
    assert dropped["reason"].unique().to_pylist() == ["duplicate_request"]
    assert Cursor.from_dict(plan.cursor).to_dict() == cursor_of_ledger(root)
    assert plan.num_pending_groups == 0


@pytest.mark.slow
def test_duplicates_are_no_groups_that_wait_and_no_arrivals(new_root, open_source):
    root = new_root()
    fill(root, num_files=1, groups_per_file=1, worker_id="w0-first")
    fill(root, num_files=1, groups_per_file=1, worker_id="w0-second", seed_of_ids=1)
    source, publisher = open_source(root)
    assert source.count_ready_groups(publisher.version) == 1
    with pytest.raises(StalledError, match="1 of 2 groups are ready; filters drop 4 of 8 rollouts, duplicate_request"):
        next_plan(source, 1)


# --- Runs of which everything fails ------------------------------------------------------------------------

FAILED = {
    "error": "KeyError: 'x' (own.py:3, in score)",
    "traceback": "Traceback\n  own.py",
    "episode_reward": None,
    "reward_components": {},
    "terminated": False,
}


def fill_failed(root, num_groups, *, worker_id="w0-bad", seed=50, also_good=False):
    """Append groups whose rollouts all failed; with `also_good`, all but the first rollout of the first group."""
    batch = make_batch(worker_id=worker_id, num_groups=num_groups, group_size=run_of(root).group_size, seed=seed)
    rollouts = [[replace(rollout, **FAILED) for rollout in group.rollouts] for group in batch.groups]
    if also_good:
        rollouts[0][0] = batch.groups[0].rollouts[0]
    groups = [replace(group, rollouts=tuple(of_group)) for group, of_group in zip(batch.groups, rollouts, strict=True)]
    with RolloutWriter(root, worker_id) as writer:
        writer.append(replace(batch, groups=tuple(groups)))


def test_a_run_of_which_everything_fails_ends_after_two_batches_with_the_traceback(new_root, open_source, begin_plan):
    root = new_root()  # a batch is 2 groups of 4
    source, _ = open_source(root, rollout_timeout_s=60)
    plan = begin_plan(source, 1)
    fill_failed(root, 3)
    time.sleep(0.2)
    assert not plan.done()
    fill_failed(root, 1, worker_id="w1-bad", seed=70)
    with pytest.raises(
        AllFailedError,
        match=r"^KeyError: 'x' \(own.py:3.*; by this, or alike, each of the 16 rollouts of the newest 4 groups",
    ) as caught:
        plan.result(timeout=60)
    assert caught.value.detail == FAILED["traceback"]


def test_one_good_rollout_lets_a_run_go_on(new_root, open_source):
    root = new_root()
    source, _ = open_source(root)
    source.count_ready_groups(0)
    fill_failed(root, 8, also_good=True)
    with pytest.raises(StalledError, match="without new rollouts"):
        next_plan(source, 1)


def test_what_had_failed_before_a_restart_does_not_count(new_root, open_source):
    root = new_root()
    fill_failed(root, 8)
    source, _ = open_source(root)
    assert source.count_ready_groups(0) == 8
    good = fill(root, num_files=1, groups_per_file=2, seed=3)
    assert groups_of(next_plan(source, 1)) >= set(good)
