"""bisect: the first step at which a predicate turns true, and the steps that it looked at."""

from contextlib import closing

import pytest
from strategies import make_batch
from tiny_runs import create_root, fill, make_model, train_here

from ludic.errors import ConfigError, QueryError
from ludic.eval.what_if.bisect import bisect
from ludic.records.tables import arrow_schema
from ludic.root.attempts import start_attempt
from ludic.root.root import Root
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.tables import MetricsLog
from ludic.root.rows.tombstones import expire, stored_files
from ludic.root.rows.writer import RolloutWriter

STEPS = 200


def planted(root: Root, *, fault_at: int, steps: int = STEPS) -> Root:
    """A run of metrics alone, in which `clip_share` rises at the step of a fault."""
    attempt = start_attempt(root)
    with closing(MetricsLog(root, "train", "1")) as log:
        for step in range(1, steps + 1):
            write_ledger(root, attempt, step, arrow_schema("batches").empty_table())
            log.write(
                attempt_id=1, step=step, policy_version=step, reward_mean=10.0 if step >= fault_at else float(step % 3)
            )
    return root


@pytest.fixture
def root(tmp_path):
    return create_root(str(tmp_path / "run"), "model")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    return planted(create_root(str(tmp_path_factory.mktemp("long") / "run"), "model"), fault_at=137)


@pytest.mark.slow
@pytest.mark.parametrize("fault_at", [1, 2, 3, 64, 99, 100, 101, 128, 150, 198, 199, 200])
def test_a_predicate_that_turns_true_anywhere_in_200_steps_is_found_in_9_looks(long_run, fault_at):
    found = bisect(long_run, f"step >= {fault_at}")
    assert (found.found, found.before) == (fault_at, fault_at - 1 or None)
    assert len(found.probes) <= 9


@pytest.mark.slow
def test_a_fault_planted_in_the_metrics_of_200_steps_is_found(long_run):
    found = bisect(long_run, "reward_mean > 5")
    assert (found.found, found.before, found.steps) == (137, 136, (1, STEPS))
    assert [look.step for look in found.probes][:3] == [200, 100, 150]
    assert len(found.probes) <= 9


def test_a_predicate_that_is_never_true_takes_one_look(root):
    found = bisect(planted(root, fault_at=4, steps=4), "reward_mean > 50")
    assert found.found is None
    assert [look.step for look in found.probes] == [4]


def test_a_predicate_that_is_true_from_the_start_has_no_step_before(root):
    found = bisect(planted(root, fault_at=4, steps=4), "reward_mean >= 0")
    assert (found.found, found.before) == (1, None)


def test_null_counts_as_not_true(root):
    found = bisect(planted(root, fault_at=2, steps=4), "case when step > 2 then true end")
    assert found.found == 3
    assert {look.step: look.is_true for look in found.probes}[2] is None


def test_steps_without_metrics_at_the_end_are_passed_over(root):
    planted(root, fault_at=3, steps=4)
    attempt = start_attempt(root, parent_attempt=1, parent_step=4)
    write_ledger(root, attempt, 5, arrow_schema("batches").empty_table())
    found = bisect(root, "reward_mean > 5")
    assert found.found == 3
    assert (found.probes[0].step, found.probes[0].num_rows) == (5, 0)


def test_a_run_without_metrics_is_refused(root):
    attempt = start_attempt(root)
    for step in range(1, 9):
        write_ledger(root, attempt, step, arrow_schema("batches").empty_table())
    with pytest.raises(ConfigError, match="steps 5 to 8 have no rows of metrics"):
        bisect(root, "reward_mean > 5")


@pytest.mark.parametrize(
    ("predicate", "message"),
    [
        ("no_such > 1", "no_such"),
        ("lag_mean > 1", "SQL calls lag_mean off_policy_steps_mean"),
        ("reward_mean", "DOUBLE|double"),
        ("reward_mean >", "syntax error"),
        ("true; drop table metrics", "holds|syntax error|parser"),
        ("reward_mean > $x", r"takes \$x"),
        ("(select count(*) from read_csv('/etc/passwd')) > 0", "disabled"),
        ("", "."),
    ],
)
def test_a_wrong_predicate_is_refused_in_one_line(root, predicate, message):
    with pytest.raises(QueryError, match=message) as error:
        bisect(planted(root, fault_at=2, steps=2), predicate)
    assert len(str(error.value)) < 400


def test_a_root_without_steps_is_refused(root):
    with pytest.raises(ConfigError, match="no step has been planned"):
        bisect(root, "true")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bisect")
    root = create_root(str(folder / "run"), make_model(folder / "model"))
    fill(root, num_files=2)
    train_here(root, num_steps=4)
    for version in (0, 1, 4):
        with RolloutWriter(root, f"e{version}-test", folder="evals") as writer:
            batch = make_batch(worker_id=f"e{version}-test", num_groups=1, purpose="eval", policy_version=version)
            writer.append(batch)
    return root


@pytest.mark.slow
def test_aggregates_run_over_the_rollouts_and_the_ledger_rows_of_a_step(trained):
    # Each step trains on 2 groups of 4 rollouts.
    for table in ("rollouts", "batches"):
        assert bisect(trained, "count(*) = 8", table).found == 1
        assert bisect(trained, "count(*) = 9", table).found is None
    assert bisect(trained, "min(step) >= 3", "batches").found == 3


def test_evaluations_are_searched_by_the_step_of_their_version(trained):
    found = bisect(trained, "max(policy_version) >= 1", "evals")
    assert (found.found, found.before, found.steps) == (1, 0, (0, 4))


def test_a_root_without_evaluations_is_refused(root):
    with pytest.raises(ConfigError, match="has no evaluations; `ludic eval"):
        bisect(root, "true", "evals")


def test_expired_rollouts_are_named(tmp_path):
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    train_here(root, num_steps=2)
    (file,) = stored_files(root)
    expire(root, [file], rule="all")
    with pytest.raises(
        ConfigError, match=r"step 2 needs rollouts/.*\.parquet, which is gone: its rollouts have expired"
    ):
        bisect(root, "avg(episode_reward) > 0", "rollouts")


def test_columns_of_another_table_are_refused(trained):
    with pytest.raises(QueryError, match="reward_mean"):
        bisect(trained, "reward_mean > 5", "batches")
