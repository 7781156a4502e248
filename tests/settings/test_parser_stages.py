"""A parser's setting names the same code to those who ask for consent and to those who run it."""

import pytest

from ludic.settings.kinds import PARSER, own_code_of, parser_stages


@pytest.mark.parametrize(
    ("spec", "stages", "own"),
    [
        ("whole", ["whole"], []),
        ("think | tag:answer", ["think", "tag:answer"], []),
        ("think|a.py:Own|json:b.py:Move", ["think", "a.py:Own", "json:b.py:Move"], ["a.py:Own", "b.py:Move"]),
        ("a.py:Own|regex:c.py:x|d.py:Own", ["a.py:Own", "regex:c.py:x|d.py:Own"], ["a.py:Own"]),
        ("", [""], []),
    ],
)
def test_stages_and_the_users_code_in_them(spec: str, stages: list[str], own: list[str]) -> None:
    assert parser_stages(spec) == stages
    assert [name for name in (own_code_of(PARSER, stage) for stage in stages) if name is not None] == own
