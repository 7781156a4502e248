"""Rows of another run: those that a worker left in a root that was made again, and those that a root may hold."""

from pathlib import Path

import pytest
from strategies import make_batch
from tiny_runs import create_root, fill, make_model, query, train_here

from ludic.adapters.imports.importing import import_files
from ludic.errors import ConfigError
from ludic.eval.what_if.cut import cut
from ludic.records.conversion import to_table
from ludic.rollouts.group_schedule import read_earlier_lives
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile
from ludic.root.rows.parquet import encode

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path):
    return create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))


def leave(root: Root, *, num_groups: int = 4, seed: int = 0, run_id: str = "another-run") -> str:
    """A worker of another run commits a file, of the requests that `fill` samples with this seed; its name."""
    batch = make_batch(worker_id="w0-old", num_groups=num_groups, seed=seed, seed_of_ids=99)
    file = RolloutFile(0, "moar_cats", "w0-old", 0)
    assert root.put_if_absent(file.name, encode(to_table(batch, run_id=run_id, sequence=0)))
    return file.name


def test_rows_of_another_run_are_dropped_by_name_and_take_no_request(root, caplog):
    name = leave(root)  # before the root's own worker samples the same requests
    fill(root, num_files=2, worker_id="w0-test")
    assert train_here(root, num_steps=4) == 4
    of_run = (
        "select run_id, used, reason, count(*) from batches join rollouts using (rollout_id) group by all order by 2"
    )
    assert query(root, of_run) == [("another-run", False, "other_run", 16), (root.run_id, True, None, 32)]
    assert "16 rollouts of w0-old are of another run, another-run, and are not trained on" in caplog.text
    found = [(each.where, each.problem) for each in check_root(root).findings if each.check == "misnamed"]
    assert found == [(name, "holds rows that belong in another run (another-run)")]


def test_a_worker_samples_the_requests_that_another_run_left(root):
    leave(root)
    assert not read_earlier_lives(root, 0).positions.pairs
    fill(root, num_files=1, worker_id="w0-test")
    assert read_earlier_lives(root, 0).positions.pairs == [(0, 4)]


def test_epochs_over_the_root_itself_leave_them_out(root):
    leave(root, seed=7)
    with pytest.raises(ConfigError, match=r"nothing to train on; .*other_run most \(16\)"):
        train_here(root, offline=True, epochs=1)


def test_a_source_and_a_cut_may_hold_rows_of_any_run(root, tmp_path):
    source = create_root(str(tmp_path / "source"), root.record.model)
    leave(source)
    assert train_here(root, offline=True, sources=(source.url,), epochs=1) == 2
    assert query(root, "select distinct used, reason from batches") == [(True, None)]
    cut(root, 2, str(tmp_path / "cut"))
    part = Root.open(str(tmp_path / "cut"))
    assert part.run_id == root.run_id
    assert query(part, "select distinct run_id from rollouts") == [("another-run",)]
    assert check_root(part).findings == []
    assert train_here(part, offline=True, num_steps=3) == 3


def test_imported_rows_are_of_the_run_that_they_were_imported_into(root, tmp_path):
    file = Path(tmp_path / "theirs.jsonl")
    file.write_text('{"prompt": "a", "completion": "b", "reward": 1.0}\n')
    import_files(root, [str(file)], "jsonl", env="moar_cats", tokenizer=root.record.model)
    assert query(root, "select distinct run_id from rollouts") == [(root.run_id,)]
