"""Tools by name."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ludic.agents.tools.registry import check_tools, make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.errors import ConfigError
from ludic.records.rollout import ToolCall
from ludic.settings.user_files import read_user_file

FILE = '''
from pathlib import Path
from ludic.agents.tools.interpreter import PythonInterpreter
import words

Path(__file__).with_name("ran").touch()

patient = PythonInterpreter(time_limit_s=60)
number = 7


def greet(name: str) -> str:
    """Greet somebody.

    Args:
        name: Who it is.
    """
    return f"{words.HELLO} {name}"


def undocumented(name):
    return name
'''


@pytest.fixture
def file(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "words.py").write_text('HELLO = "Grüß dich,"')
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    yield str(path)
    sys.modules.pop("words", None)


def test_built_in_tools_are_made_by_name(run: Callable[..., ToolCall]) -> None:
    toolbox = Toolbox(make_tools(["calculator", "python"]))
    assert run(toolbox, "calculator", expression="2 ** 5").result == "32"
    assert run(toolbox, "python", code="print(2 ** 5)").result == "32\n"
    assert "division by zero" in (run(toolbox, "calculator", expression="1 / 0").error or "")


def test_a_function_and_a_tool_of_a_file_are_made(file: str, run: Callable[..., ToolCall]) -> None:
    toolbox = Toolbox(make_tools([f"{file}:greet", f"{file}:patient"]))
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["greet", "python"]
    assert run(toolbox, "greet", name="Ada").result == "Grüß dich, Ada"


def test_a_file_may_be_replaced_by_the_text_that_a_root_holds(file: str, run: Callable[..., ToolCall]) -> None:
    stored = read_user_file(Path(file))
    Path(file).unlink()
    names, files = ["mine.py:greet"], {"mine.py": stored}
    check_tools(names, files)
    assert run(Toolbox(make_tools(names, files)), "greet", name="Ada").result == "Grüß dich, Ada"


def test_checking_runs_nothing(file: str, tmp_path: Path) -> None:
    names = ["calculator", f"{file}:greet", f"{file}:patient"]
    check_tools(names)
    assert not (tmp_path / "ran").exists()
    make_tools(names)
    assert (tmp_path / "ran").exists()


def test_checking_needs_no_slow_imports() -> None:
    code = (
        "import sys\nfrom ludic.agents.tools.registry import check_tools\ncheck_tools(['python', 'calculator'])\n"
        "print([name for name in ('torch', 'transformers', 'mcp', 'jsonschema') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "calculater",
            r"tool 'calculater' is unknown; did you mean 'calculator'\? There are calculator, python, mcp:COMMAND",
        ),
        ("xyz", "tool 'xyz' is unknown; there are calculator, python, mcp:COMMAND, .*; your own is path/to/"),
        ("there/is/none.py:greet", "there is no file"),
        (
            "{file}:great",
            "has no function or Tool 'great'; it has Path, PythonInterpreter, words, patient, number, greet, undoc",
        ),
        ("{file}:", "has no function or Tool ''"),
        ("{broken}:greet", r"tool .*broken.py:greet: invalid syntax \(broken.py, line 1\)"),
    ],
)
def test_a_name_that_cant_be_a_tool_is_refused(name: str, error: str, file: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def greet(:")
    with pytest.raises(ConfigError, match=error):
        check_tools([name.format(file=file, broken=broken)])


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match="tool python is given twice; give each once"):
        check_tools(["python", "calculator", "python"])


@pytest.mark.parametrize(
    ("name", "error"),
    [("number", "has no function or Tool 'number'"), ("undocumented", "tool undocumented: no schema")],
)
def test_what_is_no_tool_is_refused_when_it_is_made(name: str, error: str, file: str) -> None:
    check_tools([f"{file}:{name}"])
    with pytest.raises(ConfigError, match=error):
        make_tools([f"{file}:{name}"])


def test_a_server_needs_the_package_mcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"the package mcp is not installed; pip install 'ludic-rl\[agents\]'"):
        check_tools(["mcp:https://example.com/mcp"])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mcp:", "no command is given; wanted mcp:COMMAND"),
        ("mcp:there-is-no-such-program --port 7", "there is no program 'there-is-no-such-program'"),
        ("mcp:python 'unclosed", "its address or command line can't be read: No closing quotation"),
    ],
)
def test_a_server_that_cant_be_started_is_refused(name: str, error: str) -> None:
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=error):
        check_tools([name])


def test_schemas_can_be_written_as_json(file: str) -> None:
    assert json.loads(json.dumps(Toolbox(make_tools(["python", f"{file}:greet"])).schemas))[0]["type"] == "function"
