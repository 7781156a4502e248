"""docs/environments.md says of every built-in environment how a tiny model learns it, as the benchmark runs it."""

from pathlib import Path

import pytest

from ludic.settings.kinds import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]


def test_the_guide_says_how_each_built_in_environment_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)  # the benchmarks are no part of the package
    from benchmarks.learning import COMMON, FLAGS

    guide = (REPOSITORY / "docs/environments.md").read_text(encoding="utf-8")
    section = guide.partition("## Which built-in tasks")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    for name in ENVIRONMENT.names():
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        assert FLAGS.get(name, "warm start" if "warm start" in row else "pipelines/") in row
    assert COMMON in " ".join(section.replace("\\\n", " ").split())
