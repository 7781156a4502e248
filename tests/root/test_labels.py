"""labels/ on each filesystem: one file for each label, which SQL shows and `verify` knows; expiry leaves them."""

import pyarrow.parquet as pq
import pytest
from strategies import make_batch
from tiny_runs import create_root

import ludic
from ludic.app.show.lookup import UnknownIdError
from ludic.errors import ConfigError
from ludic.records.tables import check_schema
from ludic.root.catalogue import LABELS
from ludic.root.root import Root
from ludic.root.rows.tables import put_label
from ludic.root.rows.writer import RolloutWriter


def test_a_label_is_a_file_of_the_table_that_sql_shows(root):
    put_label(root, "r1", 0.5, "so so", author="ann")
    put_label(root, "r1", "good\ud800", None, name="style", author="bob")
    for name in root.list("labels"):
        assert LABELS.parse(name)
        with root.open_file(name) as source:
            check_schema(pq.ParquetFile(source).schema_arrow, "labels", name)
    found = ludic.Run(root).sql("select rollout_id, name, value, text, note, author from labels order by author")
    assert found.rows() == [
        ("r1", "label", 0.5, None, "so so", "ann"),
        ("r1", "style", None, "good?", None, "bob"),
    ]


@pytest.mark.slow
def test_the_newest_label_of_an_author_and_name_counts_and_an_empty_one_withdraws(root):
    put_label(root, "r1", 1, None, author="ann")
    put_label(root, "r1", 0, None, author="ann")
    put_label(root, "r1", 2, None, author="bob")
    put_label(root, "r1", 3, None, author="bob", name="style")
    put_label(root, "r1", None, None, author="bob")
    run = ludic.Run(root)
    assert run.sql("select author, name, value from labels order by all").rows() == [
        ("ann", "label", 0.0),
        ("bob", "style", 3.0),
    ]
    assert run.sql("select count(*) from all_labels").item() == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_label_that_is_no_finite_number_is_refused(root, value):
    with pytest.raises(ConfigError, match="wanted a finite number or a text"):
        put_label(root, "r1", value, None, author="ann")
    assert root.list("labels") == []


@pytest.fixture
def labelled(tmp_path) -> Root:
    root = create_root(str(tmp_path / "run"), "none")
    batch = make_batch(worker_id="w0-test")
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(batch)
    run = ludic.Run(root)
    run.label(batch.groups[0].rollouts[0].rollout_id[:13], 1, note="first", author="ann")
    return root


@pytest.mark.slow
def test_a_label_of_an_unknown_rollout_is_refused(labelled):
    with pytest.raises(UnknownIdError):
        ludic.Run(labelled).label("no-such-rollout", 1)


@pytest.mark.slow
def test_verify_knows_the_folder_and_finds_what_is_wrong_in_it(labelled):
    run = ludic.Run(labelled)
    assert not [finding for finding in run.verify().findings if "label" in f"{finding.check} {finding.where}"]
    (name,) = labelled.list("labels")
    labelled.put_if_absent("labels/mine.txt", b"a note")
    labelled.put_if_absent(name.replace("labels/0", "labels/1"), labelled.read(name)[:-9])
    put_label(labelled, "r1", 1, None, author="ann")
    found = {finding.where: finding.check for finding in run.verify().findings if finding.where.startswith("labels/")}
    assert found == {"labels/mine.txt": "misnamed", name.replace("labels/0", "labels/1"): "unreadable"}


@pytest.mark.slow
def test_labels_stay_when_their_rollouts_expire_or_are_compacted(labelled):
    run = ludic.Run(labelled)
    run.compact(all_versions=True)
    run.expire(where="true", break_resume=True, break_replay=True)
    assert run.sql("select count(*) from rollouts").item() == 0
    assert run.sql("select value, note from labels").rows() == [(1.0, "first")]
    assert "labels" in run.watch(once=True).totals.folders["folder"].to_list()
