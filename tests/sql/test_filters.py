"""What filters say about themselves; tests/sql/cases/filters/ has the rows that they drop and leave."""

from ludic.code.kinds import read_packaged
from ludic.schema.validation import TRUNCATION_REASONS


def test_drop_truncated_names_every_limit():
    text = read_packaged("filters", "drop_truncated")
    assert [reason for reason in TRUNCATION_REASONS if reason and reason not in text] == []
