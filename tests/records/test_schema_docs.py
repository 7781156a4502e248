"""docs/schemas.md, made by `python -m ludic.records`."""

import subprocess
import sys
from pathlib import Path

import pytest

from ludic.records.docs import render

PAGE = Path(__file__).parents[2] / "docs" / "schemas.md"


@pytest.mark.parametrize(
    "line",
    [
        "| `group_index` | `int32` |  | Index of the episode in its group, from 0. |",
        "| `error` | `string` | null | Error of the failed environment or tool; such rows are never trained on. |",
        "| `agent_steps` | `list<struct>` |  | One entry per completion. |",
        "| `agent_steps[].start` | `int32` |  | First token, in response_tokens. |",
        "| `messages[].tool_calls[].name` | `string` |  | The tool. |",
        "| `reward_components` | `map<string, double>` |  | Named parts of the reward. |",
    ],
)
def test_columns_and_nested_fields_have_a_line_each(line):
    assert line in render().splitlines()


def test_a_pipe_in_a_meaning_does_not_end_the_cell():
    assert "KL(sampler \\|\\| trainer)" in render()


def test_the_page_in_the_repository_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render()
    printed = subprocess.run([sys.executable, "-m", "ludic.records"], capture_output=True, text=True, check=True)
    assert printed.stdout == render()
