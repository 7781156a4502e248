"""What filters say about themselves; tests/root/sql/cases/filters/ has the rows that they drop and leave."""

import re
from pathlib import Path

import pytest

from ludic.base.by_name import read_packaged
from ludic.errors import QueryError
from ludic.records.validation import TRUNCATION_REASONS
from ludic.root.sql.planner import BatchRules, Planner

GUIDE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_drop_truncated_names_every_limit():
    text = read_packaged("filters", "drop_truncated")
    assert [reason for reason in TRUNCATION_REASONS if reason and reason not in text] == []


def test_the_filter_of_the_guide_drops_the_rows_for_which_it_is_true(arrive, tmp_path: Path):
    text = GUIDE.read_text(encoding="utf-8")
    (said, predicate) = re.findall(r"^- (A filter is a file.*?)```sql\n(.*?)```", text, re.MULTILINE | re.DOTALL)[0]
    assert "**Rows for which it is true are\n  dropped**" in said
    (tmp_path / "short.sql").write_text(predicate, encoding="utf-8")
    planner = Planner(BatchRules(groups_per_batch=1, filters=(str(tmp_path / "short.sql"),)))
    planner.add(arrive([[1.0, 0.0, 0.5, 0.25]], response_length=[7, 8, 12, 3]))
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0).to_pylist()
    assert {row["response_length"]: row["used"] for row in ledger} == {7: False, 8: True, 12: True, 3: False}


@pytest.mark.parametrize("text", ["select rollout_id, response_length < 60 as keep", "response_length"])
def test_the_error_for_a_wrong_filter_says_which_rows_are_dropped(tmp_path: Path, text: str):
    (tmp_path / "mine.sql").write_text(text, encoding="utf-8")
    with pytest.raises(QueryError, match="rows for which it is true are dropped, so that response_length < 8 drops"):
        Planner(BatchRules(groups_per_batch=1, filters=(str(tmp_path / "mine.sql"),)))
