"""The lines of `ludic view --text` about code: all scorers of a rollout are named."""

from typing import Any

from ludic.app.show.transcript import _code_lines


def test_every_scorer_is_listed_and_not_the_last_alone() -> None:
    def record(name: str, attempt_id: int | None = None) -> dict[str, Any]:
        sha256, place = "ab" * 32, {"life": 1, "slot": 0}
        return {"name": name, "sha256": sha256, "path": "rewards.py", "attempt_id": attempt_id, **place}

    found = _code_lines([record("accuracy"), record("brevity"), record("mine", 3)])
    first, second = found["scored by"].split("; ")
    assert first.startswith("accuracy, sha256 abab")
    assert second.startswith("brevity, sha256 abab")
    assert second.endswith("(life 1 of slot 0)")
    assert found["advantage of attempt 3"].startswith("mine, ")
