"""docs/agents.md, section Tools: its examples run, and its limits and formats are those of the code."""

import asyncio
import re
from pathlib import Path

import pytest

from ludic.agents.tools.formats import make_tool_format
from ludic.agents.tools.interpreter import PythonInterpreter
from ludic.agents.tools.toolbox import Toolbox
from ludic.records.rollout import ToolCall
from ludic.settings.kinds import TOOL
from ludic.settings.user_files import MCP

GUIDE = (Path(__file__).parents[3] / "docs/agents.md").read_text(encoding="utf-8")
TOOLS = GUIDE[GUIDE.index("## Tools") :]


def test_the_examples_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use, function = re.findall(r"```python\n(.*?)```", TOOLS, re.DOTALL)
    (tmp_path / "tools.py").write_text(function.rstrip() + "\n    return [query] * limit\n")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Toolbox] = {}
    exec(use, names)
    call = ToolCall(id="1", name="find", arguments='{"query": "cats", "limit": 2}')
    assert asyncio.run(names["toolbox"].run(call)).result == '["cats", "cats"]'


def test_every_built_in_tool_and_default_is_in_the_guide() -> None:
    assert all(f"| `{name}` |" in TOOLS for name in TOOL.names() if not name.startswith(MCP))
    toolbox, interpreter = Toolbox([]), PythonInterpreter()
    assert f"`time_limit_s` seconds ({toolbox.time_limit_s:g})" in TOOLS
    assert f"`output_limit` characters ({toolbox.output_limit:,})" in TOOLS
    assert f"| time | {interpreter.time_limit_s:g} s |" in TOOLS
    assert f"| {interpreter.memory_limit_bytes >> 30} GiB |" in TOOLS
    assert f"| output | {interpreter.output_limit_bytes:,} bytes |" in TOOLS
    assert f"| {interpreter.file_limit_bytes // 10**6} MB |" in TOOLS


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama", "mistral"])
def test_the_calls_in_the_guide_are_found(name: str) -> None:
    (cell,) = re.findall(rf"^\| `{name}` \| (.*) \| .* \|$", TOOLS, re.MULTILINE)
    for example in re.findall(r"`([^`]*cats[^`]*)`", cell):
        parsed = make_tool_format(name).parse(example)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("find", '{"query": "cats"}')]
