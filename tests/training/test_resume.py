"""A trainer that was killed goes on as if nothing had happened: no group twice, none skipped, the same weights."""

import threading
import time
from itertools import pairwise

import pytest
from forks import Forked
from tiny_runs import (
    copied,
    create_root,
    cursor_of_ledger,
    fill,
    final_weights,
    groups_left,
    ledger,
    query,
    train_config,
    train_here,
    train_until_killed,
)

import ludic
from ludic.errors import FencedError, NameTakenError, OwnedError
from ludic.root import attempts
from ludic.root.attempts import (
    checkpoint_ids,
    checkpoint_to_resume,
    complete_checkpoints,
    newest_attempt,
    newest_attempt_id,
    start_attempt,
)
from ludic.root.claims import claim, read_lease
from ludic.root.root import Root
from ludic.root.sql.library import run_checks
from ludic.root.weights.policies import latest_policy
from ludic.training import ownership
from ludic.training.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny_folder):
    """A root that was trained for six steps without a pause; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("straight") / "run"), tiny_folder)
    fill(root, num_files=4)
    train_here(root, num_steps=6)
    return root


@pytest.fixture
def finished(straight, tmp_path):
    """A copy of it that a test may train further."""
    return copied(straight, tmp_path / "finished")


@pytest.fixture(scope="module")
def killed_at_4(tmp_path_factory, tiny_folder):
    """A root whose trainer was killed at step 4 of 6, with a checkpoint of step 3; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("killed-at-4") / "run"), tiny_folder)
    fill(root, num_files=4)
    train_until_killed(root, at_step=4, num_steps=6)
    return root


@pytest.fixture(scope="module")
def killed_at_3(tmp_path_factory, tiny_folder):
    """A root whose trainer was killed at step 3 of 6, with a checkpoint of every step; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("killed-at-3") / "run"), tiny_folder)
    fill(root, num_files=4)
    train_until_killed(root, at_step=3, num_steps=6, checkpoint_every=1, async_checkpoint=False)
    return root


def assert_same_run(root, expected):
    assert ledger(root) == ledger(expected)
    weights = final_weights(expected)
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(root).items())


@pytest.mark.parametrize("root_url", ["s3"], indirect=True)
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(root_url, tiny_folder, straight):
    root = create_root(root_url, tiny_folder)
    fill(root, num_files=4)
    train_until_killed(root, at_step=5, num_steps=6)
    assert [info.step for info in complete_checkpoints(root)] == [3]
    assert train_here(root, num_steps=6) == 6
    assert query(root, "select attempt_id, parent_attempt, parent_step from attempts order by all") == [
        (1, None, None),
        (2, 1, 3),
    ]
    assert_same_run(root, straight)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoint_that_fails_stops_the_trainer_before_it_writes_another(new_root, in_background):
    root = new_root()
    fill(root, num_files=4)
    root.put("checkpoints/attempt=1/step=1/checkpoint.json", b"{}")  # as a second trainer of this attempt would
    with pytest.raises(NameTakenError, match="step=1 exists with other content"):
        train_here(root, num_steps=3, checkpoint_every=1, async_checkpoint=in_background)
    assert not root.list("checkpoints/attempt=1/step=2")


@pytest.mark.parametrize("in_background", [True, False])
def test_what_a_step_writes_is_stored_before_the_marker_of_its_checkpoint(new_root, monkeypatch, in_background):
    """A trainer killed at any time after the marker leaves no step without its metrics, which nobody writes later."""
    root = new_root()
    fill(root, num_files=4)
    steps: dict[int, tuple[list[int], list[int]]] = {}
    put = Root.put_if_absent

    def note(self, name, data):
        if name.endswith(f"/{attempts.MARKER}"):
            step, con = int(name.split("step=")[1].split("/")[0]), ludic.connect(root)
            steps[step] = tuple(
                [found for (found,) in con.execute(sql).fetchall()]
                for sql in ("select step from metrics", "select distinct step from token_stats")
            )
        return put(self, name, data)

    monkeypatch.setattr(Root, "put_if_absent", note)
    settings = {"async_checkpoint": in_background, "keep_token_stats": True, "keep_policies": None}
    train_here(root, num_steps=3, checkpoint_every=1, **settings)
    assert sorted(steps) == [1, 2, 3]
    for step, (of_metrics, of_token_stats) in steps.items():
        assert set(range(1, step + 1)) <= set(of_metrics)
        assert set(range(1, step + 1)) <= set(of_token_stats)


def test_a_trainer_that_fails_before_the_metrics_of_a_step_leaves_no_checkpoint_of_it(new_root, monkeypatch):
    root = new_root()
    fill(root, num_files=4)
    write = ownership.StepLog.write

    def fail_at_2(self, step, row):
        if step == 2:
            raise OSError("no metrics today")
        write(self, step, row)

    with monkeypatch.context() as patched:
        patched.setattr(ownership.StepLog, "write", fail_at_2)
        with pytest.raises(OSError, match="no metrics today"):
            train_here(root, num_steps=3, checkpoint_every=1)
    assert [info.step for info in complete_checkpoints(root)] == [1]
    assert train_here(root, num_steps=3, checkpoint_every=1) == 3
    assert query(root, "select distinct step from metrics where kind = 'train' order by 1") == [(1,), (2,), (3,)]


def test_a_run_killed_again_and_again_uses_each_group_once(new_root, straight):
    root = new_root()
    fill(root, num_files=4)
    for at_step in (1, 4, 5):  # before the first checkpoint, in a step of one, and after that
        train_until_killed(root, at_step=at_step, num_steps=6, checkpoint_every=2)
    train_here(root, num_steps=6, checkpoint_every=2)
    assert_same_run(root, straight)


def test_a_clean_stop_and_a_longer_run_are_one_run(new_root, straight):
    root, stop = new_root(), threading.Event()
    fill(root, num_files=4)
    train(root, train_config(num_steps=6), stop, lambda step, row: stop.set())
    assert train_here(root, num_steps=4) == 4
    assert train_here(root, num_steps=6) == 6
    assert_same_run(root, straight)


def test_steps_that_were_not_checkpointed_are_superseded_and_their_groups_are_free(killed_at_4, tmp_path):
    root = copied(killed_at_4, tmp_path / "run")
    # Step 4 was trained and step 5 perhaps planned; the next attempt begins from step 3.
    start_attempt(root, parent_attempt=1, parent_step=3)
    assert query(root, "select distinct step from batches order by step") == [(1,), (2,), (3,)]
    superseded = query(root, "select distinct group_id from all_batches where superseded")
    free = groups_left(root, complete_checkpoints(root)[-1].cursor, None)
    assert {group_id for (group_id,) in superseded} <= free


def test_the_cursor_of_a_checkpoint_is_what_the_ledger_holds(new_root):
    root = new_root()
    groups = fill(root, num_files=4, groups_per_file=3)  # 12 groups; 5 steps take 10, and end within a file
    train_until_killed(root, at_step=3, num_steps=5, checkpoint_every=2)
    train_here(root, num_steps=5, checkpoint_every=2)
    cursor = complete_checkpoints(root)[-1].cursor
    assert {name: list(map(list, pairs)) for name, pairs in cursor_of_ledger(root)["files"].items()} == cursor["files"]
    assert cursor_of_ledger(root)["groups"] == cursor["groups"]
    used = {group_id for (group_id,) in query(root, "select distinct group_id from batches")}
    assert groups_left(root, cursor, None) == set(groups) - used
    assert len(used) == 10


def test_a_resumed_trainer_publishes_its_weights_at_once_as_a_version_never_used_before(killed_at_4, tmp_path):
    root = copied(killed_at_4, tmp_path / "run")
    version = latest_policy(root).version
    train_here(root, num_steps=6)
    published = query(root, "select version, step, attempt_id, parent_version from policies order by version")
    assert next(row for row in published if row[0] > version) == (version + 1, 3, 2, version)
    assert all(after[0] == before[0] + 1 for before, after in pairwise(published))


def test_a_finished_run_is_left_as_it_is(finished):
    before = finished.list("")
    assert train_here(finished, num_steps=6) == 6
    assert finished.list("") == before


def test_weights_of_a_finished_run_are_not_read(finished, monkeypatch):
    def refuse(root, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(attempts, "check_folder", refuse)
    assert train_here(finished, num_steps=6) == 6


def test_a_finished_run_can_be_trained_further(finished):
    assert train_here(finished, num_steps=8) == 8
    assert query(finished, "select distinct step from batches order by step") == [(step,) for step in range(1, 9)]
    assert query(finished, "select count(distinct group_id) from batches") == [(16,)]


def test_a_checkpoint_of_a_replaced_trainer_is_not_resumed(finished):
    start_attempt(finished)  # somebody begins anew
    assert checkpoint_to_resume(finished, newest_attempt(finished)) is None
    start_attempt(finished, parent_attempt=1, parent_step=3)
    assert checkpoint_to_resume(finished, newest_attempt(finished)).step == 3
    assert newest_attempt_id(finished) == 3


@pytest.mark.parametrize(
    ("steps_gone", "goes_on_from"), [({3}, "checkpoints/attempt=1/step=2"), ({1, 2, 3}, "the first weights")]
)
def test_a_run_whose_last_checkpoint_is_gone_goes_on_from_what_is_left(
    killed_at_3, tmp_path, straight, caplog, steps_gone, goes_on_from
):
    root = copied(killed_at_3, tmp_path / "run")
    start_attempt(root, parent_attempt=1, parent_step=3)
    for step in steps_gone:
        root.delete(f"checkpoints/attempt=1/step={step}")
    assert train_here(root, num_steps=6) == 6
    message = f"attempt 2 began from checkpoints/attempt=1/step=3, which was deleted; resuming from {goes_on_from}"
    assert caplog.text.count(message) == 1
    assert_same_run(root, straight)


def test_a_second_trainer_is_refused_while_the_first_one_lives_and_writes_nothing(new_root):
    root = new_root()
    fill(root, num_files=4)

    def start_another(step, row):
        if step == 2:
            while latest_policy(root).version < 2:  # the first one writes it in the background
                time.sleep(0.01)
            before = [root.list(folder) for folder in ("attempts", "policies", "checkpoints")]
            with pytest.raises(OwnedError, match=r"attempt 1 of .* trains here since .* start with --take-over"):
                train_here(root, num_steps=6)
            assert [root.list(folder) for folder in ("attempts", "policies", "checkpoints")] == before

    assert train_here(root, num_steps=3, lease_s=3.0, report=start_another) == 3
    assert newest_attempt_id(root) == 1


def test_a_trainer_that_is_taken_over_stops_and_the_run_is_as_if_it_had_not_been(new_root, straight):
    root = new_root()
    fill(root, num_files=4)

    def take_over(step, row):
        """Sleep, while another trainer takes the root and trains it to the end."""
        if step == 4:
            while (1, 3) not in checkpoint_ids(root):  # a thread writes it
                time.sleep(0.01)
            assert train(root, train_config(num_steps=6), threading.Event(), replaces=1) == 6

    stop = threading.Event()
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        train(root, train_config(num_steps=9, lease_s=0.5), stop, take_over)
    assert query(root, "select attempt_id, parent_attempt, parent_step from attempts order by all") == [
        (1, None, None),
        (2, 1, 3),
    ]
    assert latest_policy(root).version == query(root, "select max(version) from policies where attempt_id = 2")[0][0]
    assert_same_run(root, straight)


def test_a_lease_is_renewed_while_the_checkpoint_is_chosen(new_root, monkeypatch):
    root = new_root()
    fill(root, num_files=1)
    num_renewals = []

    def choose_slowly(root, *args):
        deadline = time.monotonic() + 5
        while (lease := read_lease(root, 1)) and not lease.num_renewals and time.monotonic() < deadline:
            time.sleep(0.05)
        num_renewals.append(lease and lease.num_renewals)
        return checkpoint_to_resume(root, *args)

    monkeypatch.setattr(ownership, "checkpoint_to_resume", choose_slowly)
    train_here(root, num_steps=1, lease_s=0.5)
    # Before the claim there is no lease.
    assert num_renewals[0] is None
    assert num_renewals[1] >= 1


def test_a_damaged_checkpoint_is_read_once(killed_at_3, tmp_path, caplog):
    root = copied(killed_at_3, tmp_path / "run")
    root.put("checkpoints/attempt=1/step=3/optimizer.safetensors", b"damaged")
    train_here(root, num_steps=4)
    assert caplog.text.count("this checkpoint is skipped") == 1
    assert query(root, "select parent_step from attempts where attempt_id = 2") == [(2,)]


def test_a_fenced_trainer_does_not_wait_for_rollouts_any_longer(new_root):
    root = new_root()
    fill(root, num_files=1)  # 2 steps, and then nothing comes

    def replace_us(step, row):
        if step == 2:
            claim(root, 1)

    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        train_here(root, num_steps=6, lease_s=0.5, rollout_timeout_s=None, checkpoint_every=1, report=replace_us)


def test_a_watch_that_is_stopped_writes_nothing_but_what_the_model_is(new_root):
    root, stop = new_root(), threading.Event()
    claim(root, 0, lease_s=60.0)
    before = root.list("")
    stop.set()
    assert train(root, train_config(num_steps=6), stop) == 0
    # model/ is the same whoever puts it, and a model that is another one is refused before the wait.
    assert [name for name in root.list("") if not name.startswith("model/")] == before


def test_a_trainer_that_is_killed_holds_nobody_up(new_root, straight, tmp_path):
    root = new_root()
    fill(root, num_files=4)
    script = tmp_path / "die.py"
    script.write_text(
        "import os, sys, tiny_runs; from ludic.root import Root\n"
        "tiny_runs.train_here(Root.open(sys.argv[1]), num_steps=6, lease_s=600, report=lambda s, r: os._exit(9))\n"
    )
    assert Forked([script, root.url], tmp_path / "log").wait(240) == 9
    assert not read_lease(root, 1).released
    assert train_here(root, num_steps=6) == 6
    assert_same_run(root, straight)


def test_a_killed_run_uses_each_group_as_often_as_one_that_was_not(new_root):
    settings = {"num_steps": 7, "selection": "uniform", "max_uses": 2, "checkpoint_every": 2}
    straight, root = new_root("straight"), new_root()
    for each in (straight, root):
        fill(each, num_files=2)  # 8 groups, used twice: 8 steps of 2
    train_here(straight, **settings)
    train_until_killed(root, at_step=5, **settings)  # some groups are used twice by then
    train_here(root, **settings)
    assert_same_run(root, straight)
    assert query(root, "select max(num_uses), count(distinct (step, group_id)) from batches") == [(2, 14)]
    checks = run_checks(ludic.connect(root))
    assert checks["planned_twice"].num_rows == 0


def test_a_run_that_gives_up_its_window_trains_on_what_came_too_late_and_on_nothing_twice(new_root):
    root = new_root()
    for version in range(4):
        fill(root, num_files=1, groups_per_file=2, worker_id=f"w{version}-a", policy_version=version, seed=version)
    train_here(root, num_steps=4, checkpoint_every=2, max_off_policy_steps=1)
    cursor = complete_checkpoints(root)[-1].cursor
    assert cursor["first_version"] == 2
    assert cursor["files"] == {}
    late = fill(root, num_files=1, groups_per_file=2, worker_id="w0-late", seed=9)
    assert train_here(root, num_steps=5, checkpoint_every=2, max_off_policy_steps=None) == 5
    used = query(root, "select step, group_id from batches where used group by all")
    assert {group_id for step, group_id in used if step == 5} == set(late)
    assert len(used) == len({group_id for _, group_id in used}) == 10
