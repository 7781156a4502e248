from ludic.root.code import warn_of_other_code
from ludic.root.json_records import CodeRecord


def test_other_code_than_that_of_the_life_before_is_named_in_a_line(caplog):
    now = CodeRecord(role="advantage", name="rloo", sha256="b" * 64, package="ludic-rl 2")
    same = {"role": "filter", "name": "drop_errors", "sha256": "c" * 64, "imports": {}}
    before = {"role": "advantage", "name": "rloo", "sha256": "a" * 64, "package": "ludic-rl 1", "imports": {}}
    warn_of_other_code([same], [now, CodeRecord(role="filter", name="drop_errors", sha256="c" * 64)], where="attempt 1")
    assert caplog.messages == []
    warn_of_other_code([before], [now], where="attempt 1")
    assert caplog.messages == [
        "advantage 'rloo' is not what attempt 1 ran: sha256 aaaaaaaaaaaa then, bbbbbbbbbbbb now "
        "(ludic-rl 1 then, ludic-rl 2 now)"
    ]
