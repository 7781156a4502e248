"""docs/environments.md: its files are read, its options exist, and its lists are complete."""

import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludic.environments.qa import QuestionOptions
from ludic.environments.registry import make_environment
from ludic.settings.kinds import ENVIRONMENT, SCORER

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = (DOCS / "environments.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def first_cells(heading: str) -> list[str]:
    """Return the names in the first column of the first table below a heading."""
    table = GUIDE.partition(f"{heading}\n")[2].partition("|\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the guide's questions, each of them ten times, and its scorer."""
    rows = [json.loads(line) for line in blocks("json")[0].splitlines()]
    texts = [json.dumps({**row, "question": f"{row['question']} ({number})"}) for number in range(10) for row in rows]
    (tmp_path / "sums.jsonl").write_text("\n".join(texts))
    (tmp_path / "score.py").write_text(blocks("python")[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_questions_are_scored_with_the_options_of_the_guide(folder: Path) -> None:
    short, whole = (tomllib.loads(block)["env_options"]["qa/sums.jsonl"] for block in blocks("toml"))
    assert short == {"scorer": "numeric"}
    assert json.loads(re.search(r"--env-options '(.*)'", GUIDE)[1]) == {"qa/sums.jsonl": short}
    environment = make_environment("qa/sums.jsonl", whole)()
    example = next(
        each for each in map(environment.example, range(20), ["train"] * 20) if "Tom" in each.data["question"]
    )
    assert [message.role for message in environment.reset(example)] == ["system", "user"]
    assert environment.step("He has 7.").reward == 1


def test_the_scorer_of_the_guide_scores(folder: Path) -> None:
    options = {"scorer": "score.py:short", "answer_pattern": "#### (.+)"}
    environment = make_environment("qa/sums.jsonl", options)()
    example = environment.example(0, "train")
    environment.reset(example)
    step = environment.step(f"{example.data['answer']}!")
    assert step.reward == pytest.approx(1 - 0.02)
    assert step.reward_components == {"right": 1}


def test_the_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[0], "environments.md", "exec"), {})
    question, reward = capsys.readouterr().out.splitlines()
    assert question
    assert reward in ("0.0", "1.0")


def test_the_tables_list_every_option_scorer_and_prefix() -> None:
    options = set(inspect.signature(QuestionOptions).parameters) - {"seed"}
    assert set(first_cells("## Questions and answers")) == options
    assert set(first_cells("### Scorers")) == set(SCORER.names())
    named = first_cells("# Environments")
    assert {"qa/", *ENVIRONMENT.packages} == {f"{name.partition('/')[0]}/" for name in named if "/" in name} - {"path/"}
    assert {name for name in named if "/" not in name} - {"--env", "..."} <= set(ENVIRONMENT.names())


def test_the_links_lead_to_pages() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", GUIDE, re.M)
    }
    for target in re.findall(r"\]\((?!http)([^)]+)\)", GUIDE):
        page, _, anchor = target.partition("#")
        assert not page or (DOCS / page).is_file(), target
        assert page or anchor in headings, target
