"""`ludic report`: the file that it writes, and how it explains what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from ludic.root.root import Root


@pytest.mark.slow
def test_one_file_is_written(ludic: Any, trained: Root, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    result = ludic("report", trained.url, "--output", file)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{file}: ")
    assert file.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_file_is_replaced_only_if_asked(ludic: Any, started: Root, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("mine")
    result = ludic("report", started.url, "--output", file)
    assert (result.code, result.out) == (1, "")
    assert result.err == f"ludic: {file} exists; choose another output, or replace it with --overwrite\n"
    assert file.read_text() == "mine"
    assert ludic("report", started.url, "--output", file, "--overwrite").code == 0
    assert file.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--versions", "first"), 2, "versions has 'first', wanted a number, latest, or a range such as"),
        (("--versions", "7"), 1, "has no evaluation; `ludic eval "),
        (("--compare", "0"), 1, "there is nothing to compare 0 with; wanted two or more sides"),
        (("--compare", "0", "1"), 1, "has no evaluation; `ludic eval "),
        (("--output", "s3://bucket/report.html"), 1, "output is s3://bucket/report.html, a URL; wanted a path"),
    ],
)
def test_what_is_wrong_is_one_line(
    ludic: Any, started: Root, tmp_path: Path, flags: Any, code: int, message: str
) -> None:
    file = tmp_path / "report.html"
    result = ludic("report", started.url, "--output", file, *flags)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not file.exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("none/report.html", "can't be written: No such file or directory"),
        ("occupied/report.html", "can't be written: Not a directory"),
        (".", "is a folder, wanted a file such as"),
        ("occupied", "exists; choose another output"),
        ("s3://bucket/report.html", "a URL; wanted a path"),
    ],
)
def test_a_wrong_output_is_told_before_anything_is_computed(
    ludic: Any, started: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, message: str
) -> None:
    desk = tmp_path / "desk"
    desk.mkdir()
    monkeypatch.chdir(desk)
    Path("occupied").write_text("")
    result = ludic("report", started.url, "--output", output, "--versions", "7")  # which has no evaluation
    assert result.err == f"ludic: {result.err.removeprefix('ludic: ').strip()}\n"
    assert message in result.err
    assert [each.name for each in desk.iterdir()] == ["occupied"]
