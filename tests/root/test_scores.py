"""scores/ on each filesystem: rows that are appended are read once, and names become no paths."""

from datetime import UTC, datetime

import pyarrow.parquet as pq
import pytest

from ludic.errors import ConfigError
from ludic.records.tables import check_schema
from ludic.root.catalogue import SCORES
from ludic.root.rows.tables import PLAN_COLUMNS, ScoreLog, ScoreReader, check_scorer_name

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def row(rollout_id, value=0.5):
    return {"rollout_id": rollout_id, "name": "score", "value": value, "scorer_version": "aa", "created_at": NOW}


def test_each_row_is_read_once_as_it_appears(root):
    reader = ScoreReader(root, ["judge", "style"])
    assert reader.poll() is None
    with ScoreLog(root, "judge") as first, ScoreLog(root, "judge") as second, ScoreLog(root, "other") as other:
        first.append(row("a"))
        second.append(row("a", 0.75))
        other.append(row("a", 9.0))
    found = reader.poll()
    assert found.column_names == list(PLAN_COLUMNS)
    assert sorted(found["value"].to_pylist()) == [0.5, 0.75]
    with ScoreLog(root, "style") as log:
        log.append(row("b", 1.0))
    assert reader.poll().select(["rollout_id", "scorer", "value", "error", "created_at"]).to_pylist() == [
        {"rollout_id": "b", "scorer": "style", "value": 1.0, "error": None, "created_at": NOW}
    ]
    assert reader.poll() is None


def test_a_file_is_of_the_table_and_named_by_its_scorer(root):
    with ScoreLog(root, "a/b %ü") as log:
        log.append(row("a"))
    (name,) = root.list("scores")
    assert name.startswith(f"{SCORES.below(scorer='a/b %ü')}/")
    assert SCORES.below(scorer="a/b %ü") == "scores/scorer=a%2Fb%20%25%C3%BC"
    assert SCORES.parse(name)
    with root.open_file(name) as source:
        check_schema(pq.ParquetFile(source).schema_arrow, "scores", name)


def test_rows_of_another_scorer_and_broken_files_are_left_out(root, caplog):
    with ScoreLog(root, "other") as log:
        log.append(row("a"))
    (name,) = root.list("scores")
    root.put_if_absent(name.replace("scorer=other", "scorer=judge"), root.read(name))
    root.put_if_absent("scores/scorer=judge/00000000-0000-7000-8000-000000000000-0.parquet", b"PAR1")
    root.put_if_absent("scores/scorer=judge/notes.txt", b"mine")
    reader = ScoreReader(root, ["judge"])
    assert reader.poll() is None
    assert caplog.text.count("left out scores that can't be read") == 1
    assert reader.poll() is None


@pytest.mark.parametrize("name", ["", "a@b", "a:b", "a,b", "a\nb", "ü" * 34, "__HIVE_DEFAULT_PARTITION__"])
def test_a_name_that_no_folder_or_setting_can_have_is_refused(name):
    with pytest.raises(ConfigError, match="can't be used"):
        check_scorer_name(name)


@pytest.mark.parametrize("name", ["j", "a/b", "ü" * 33])
def test_the_shortest_and_the_longest_name_can_be_used(name):
    assert check_scorer_name(name) == name


def test_a_log_without_rows_writes_no_file(root):
    ScoreLog(root, "judge").close()
    assert root.list("scores") == []
