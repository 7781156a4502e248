"""Lines of the pages that install ludic: they name a clone, a wheel or an address, since no index has ludic."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "notebooks").glob("*.ipynb")),
]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LUDIC = re.compile(
    r"""(?:[^\s'"`]*/)?(?:\.|ludic|ludic[-_]rl(?:-[\d.]+-py3-none-any\.whl)?)(?:\[([\w,]+)\])?(?: @ [^'"]*)?"""
)
"""Matches ludic as pip takes it: a clone, a wheel, or its name, which alone would be looked for in an index."""
_INSTALL = re.compile(r"pip install ([^`#\n]*)")
_WORD = re.compile(r"'([^']*)'|\"([^\"]*)\"|(\S+)")


def requirements(text: str) -> list[str]:
    """What the lines of a page install, without flags and their values."""
    found = []
    for line in _INSTALL.findall(text):
        words = [next(filter(None, match.groups()), "") for match in _WORD.finditer(line)]
        found += [word for word in words if not word.startswith("-") and not word.endswith("constraints.txt")]
    return found


def of_ludic(text: str) -> list[str]:
    return [each for each in requirements(text) if LUDIC.fullmatch(each)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_ludic_from_an_index_or_an_extra_that_it_lacks(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for each in of_ludic(text):
        assert not each.startswith("ludic-rl") or " @ https://" in each, each
        assert {*filter(None, (LUDIC.fullmatch(each)[1] or "").split(","))} <= {*PROJECT["optional-dependencies"]}, each  # type: ignore[index]
    assert not re.findall(r"ludic-rl\[[\w,]*\](?! @ )", text)
    extras = re.findall(r"\bextras? `(\w+)`", text)
    assert {*extras} <= {*PROJECT["optional-dependencies"]}


def test_the_first_line_of_the_readme_s_installation_installs_what_trains() -> None:
    before, _, installation = PAGES[0].read_text(encoding="utf-8").partition("## Run it")
    assert of_ludic(installation)[0] == ".[train]"
    assert of_ludic(before) == ["/path/to/ludic"]  # beside another trainer


def test_the_rule_sees_the_lines_that_it_is_about() -> None:
    assert of_ludic("pip install 'ludic-rl[view]'` and `pip install torch --editable '.[s3]'") == [
        "ludic-rl[view]",
        ".[s3]",
    ]
    assert sum(len(of_ludic(page.read_text(encoding="utf-8"))) for page in PAGES) > 10


@pytest.mark.slow
def test_pip_takes_the_forms_of_the_guide_without_an_index(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    own = ["--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *own, "--no-deps", "--wheel-dir", str(tmp_path), str(REPOSITORY)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    guide = (REPOSITORY / "docs" / "guide.md").read_text(encoding="utf-8")
    assert of_ludic(guide) == [".[train,view,s3]", "/path/to/ludic", f"/path/to/{wheel.name}[train]"]
    # The packages of the extras are installed here. The name alone is what an error tells: ludic is installed then.
    for target in (f"{REPOSITORY}[train,view,s3]", f"{wheel}[train]", "ludic-rl[train]"):
        done = subprocess.run([*pip, "install", "--dry-run", *own, target], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "does not provide the extra" not in done.stderr
