"""docs/walks.md: each step names a file of the package, and functions that are in it."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs/walks.md").read_text(encoding="utf-8")


def test_each_step_of_a_walk_is_where_the_page_says() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    rows = [line.split(" | ")[1] for line in lines]
    assert len(rows) > 30
    for row in rows:
        text = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith((".py", ".sql")):
                paths = [*(REPOSITORY / "ludic").glob(name)]
                assert paths, name
                text = "".join(path.read_text(encoding="utf-8") for path in paths)
            elif not name.endswith("/"):
                assert re.search(rf"\b{name.rpartition('.')[2]}\b", text), f"{name} in {row}"


def test_each_file_that_a_page_for_developers_names_is_there() -> None:
    folders = ("ludic", "tests", "pipelines", "benchmarks", "docs", "schemas", ".ci")
    files = [path.as_posix() for folder in folders for path in (REPOSITORY / folder).rglob("*.*")]
    made_up = re.compile(r"NAME|PACKAGE|^(mine|rewards|file)[.]")
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/walks.md", "docs/guarantees.md"):
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        names = [name for name in re.findall(r"`([\w/.-]+\.(?:py|sql))`", text) if not made_up.search(name)]
        assert len(names) > 5, page
        assert [name for name in names if not any(file.endswith(f"/{name}") for file in files)] == [], page
