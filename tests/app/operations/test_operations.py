"""Operations: one function is a method, a command with flags and help, and a line of docs."""

import inspect
import io
import json
import keyword
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pytest
from forks import Forked
from tiny_runs import create_root, make_model

import ludic
from ludic.app import operations
from ludic.app.cli import docs, main
from ludic.app.cli.commands import COMMANDS, GONE
from ludic.app.cli.completion import completion
from ludic.app.cli.settings import settings_of_command
from ludic.app.operations.operation import Methods, operation
from ludic.base.defaults import Track, untracked
from ludic.base.results import FORMATS, Frame, Part, Result
from ludic.base.row_files import to_plain
from ludic.errors import ConfigError, LudicError, ModelError
from ludic.settings.table import Range, is_operation

if TYPE_CHECKING:
    from ludic.app.operations.run import Run


@dataclass(frozen=True, kw_only=True)
class Bed:
    """Where it is slept."""

    hardness: Annotated[int, Range(1, 5)] = 2
    """From soft to hard."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Slept(Result):
    root: str
    hours: float
    bed: Bed
    dreams: list[dict[str, Any]]

    def parts(self) -> Iterator[Part]:
        yield Frame("dreams", self.dreams, ("title", "size_bytes"))
        yield f"slept {self.hours:g} hours in {self.root}"


@pytest.fixture
def nap() -> Iterator[Callable[..., Any]]:
    """One decorated function: all that a new operation is."""

    @operation(group="Keep", bed=Bed)
    def nap(
        run: "Run", hours: Annotated[float, Range(0, 12)] = 1.0, *, track: Track = untracked, **settings: Any
    ) -> "Slept":
        """Let a run sleep. It is not stored.

        Args:
            hours: How long.
        """
        dreams = [{"title": title, "size_bytes": 12_345} for title in track(["sheep"], 1, "dreams")]
        return Slept(root=run.url, hours=hours, bed=Bed(**settings), dreams=dreams)

    yield nap
    del COMMANDS["nap"]
    delattr(Methods, "nap")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return create_root(str(tmp_path / "run"), make_model(tmp_path / "model")).url


def ludic_command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.main(list(args))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_one_function_is_a_method_a_command_and_a_line_of_docs(
    nap: Callable[..., Any], root: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slept = ludic.open(root).nap(2, hardness=3)  # type: ignore[attr-defined]
    assert (slept.hours, slept.bed.hardness) == (2, 3)
    title, _, row, sentence = repr(slept).splitlines()
    assert (title.split(), row.split()) == (["title", "size"], ["sheep", "12.3", "kB"])
    assert sentence == f"slept 2 hours in {root}"
    assert slept.frame("dreams").to_dicts() == [{"title": "sheep", "size_bytes": 12_345}]
    with pytest.raises(ConfigError, match=r"^hours is 13, wanted at most 12$"):
        ludic.open(root).nap(13)  # type: ignore[attr-defined]

    assert ludic_command(capsys, "nap", root, "--hours", "2")[:2] == (0, f"{slept!r}\n")
    code, out, _ = ludic_command(capsys, "nap", root, "--hardness", "3", "--json")
    bed, dreams = {"hardness": 3}, [{"title": "sheep", "size_bytes": 12_345}]
    assert (code, json.loads(out)) == (0, {"root": root, "hours": 1.0, "bed": bed, "dreams": dreams})
    (tmp_path / "nap.toml").write_text("hours = 13")
    for args, said in [(["--hours", "13"], "--hours is 13"), (["--config", str(tmp_path / "nap.toml")], "hours is 13")]:
        code, _, err = ludic_command(capsys, "nap", root, *args)
        assert (code, f"{said}, wanted at most 12" in err) == (2 if args[0] == "--hours" else 1, True)
    text = " ".join(ludic_command(capsys, "nap", "--help")[1].split())
    assert "usage: ludic nap ROOT [OPTIONS] Let a run sleep. It is not stored." in text
    assert "--hours FLOAT How long. (default: 1.0)" in text
    assert "--hardness INT (default: 2)" in text  # `make format` collects the texts of fields
    assert "nap Let a run sleep. It is not stored" in " ".join(ludic_command(capsys, "--help")[1].split())

    assert "| `nap(hours, ...)` | Let a run sleep. It is not stored | `ludic nap` |" in docs.methods_table()
    pages = docs.settings_pages()
    page, bed = pages["settings/commands.md"], pages["settings/bed.md"]
    assert "## ludic nap\n\nLet a run sleep. It is not stored." in page
    assert "| `hours` | a number, 0 to 12 | 1.0 | How long. |" in page
    assert "| `hardness` | a whole number, 1 to 5 | 2 |  |" in bed
    assert re.search(r"class NapSettings\(BedValues, total=False\):", docs.typed_stub())
    assert "    nap = test_operations.nap\n" in docs.methods_stub()
    assert "nap" in completion("bash")


def test_command_and_method_are_one_word_and_one_function() -> None:
    methods = {name: inspect.unwrap(each) for name, each in vars(Methods).items() if is_operation(each)}
    for name, command in COMMANDS.items():
        assert is_operation(command.operation), name
        assert len(command.about) > 10, name
        word = name.replace("-", "_")
        method = methods.get(f"{word}_" if keyword.iskeyword(word) else word)
        assert method is (inspect.unwrap(command.operation) if takes_a_run(command.operation) else None), name
    # Those without a command: plots and their numbers, a mark on a rollout, the workers on a Ray cluster.
    commands = {inspect.unwrap(command.operation) for command in COMMANDS.values()}
    assert sorted(name for name, each in methods.items() if each not in commands) == ["frame", "label", "plot", "scale"]


def takes_a_run(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "run"


def test_all_modules_with_commands_or_methods_are_imported() -> None:
    folder = Path(str(operations.__file__)).parent
    found = {
        path.stem for path in folder.glob("*.py") if re.search(r"^ *group=|\(group=", path.read_text(), re.MULTILINE)
    }
    assert found - {"operation"} | {"plots"} == {*operations.MODULES}  # plots has methods only


@pytest.mark.parametrize("name", GONE)
def test_a_command_of_older_versions_names_its_successor(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ludic_command(capsys, *name.split(), "root") == (2, "", f"ludic: ludic {name}: this is now `{GONE[name]}`\n")
    words = GONE[name].split()
    known = [each.flag for each in settings_of_command(COMMANDS[words[1]].operation)]
    assert [word for word in words if word.startswith("--") and word not in known] == []


def test_a_method_of_older_versions_names_its_successor(root: str) -> None:
    run = ludic.open(root)
    for name, said in {"launch": "Run.run", "work": "Run.worker", "stats": r"Run.watch\(once=True\).totals"}.items():
        with pytest.raises(AttributeError, match=f"^'Run' has no attribute '{name}'; it is now {said}$"):
            getattr(run, name)
    with pytest.raises(AttributeError, match=r"^'Run' has no attribute 'wrk'$"):
        run.wrk  # type: ignore[attr-defined] # noqa: B018


WRONG = """
import ludic
run = ludic.open("x")
run.expire(keep_version=3)
run.train(learnin_rate=1e-3)
run.eval(0, num_examples="x")
run.launch()
"""


@pytest.mark.slow
def test_a_type_checker_finds_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    # With the settings of `make check`, whose cache then serves.
    mypy = [sys.executable, "-m", "mypy", str(tmp_path / "wrong.py")]
    said = subprocess.run(mypy, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]).stdout
    assert 'Unexpected keyword argument "keep_version"; did you mean "keep_versions"?' in said
    assert 'Unexpected keyword argument "learnin_rate"; did you mean "learning_rate"?' in said
    assert 'Argument "num_examples" has incompatible type "str"; expected "int"' in said
    assert '"Run" has no attribute "launch"' in said
    assert "Found 4 errors" in said


def test_wrong_arguments_are_named_as_python_does_and_switches_are_checked(root: str) -> None:
    run = ludic.open(root)
    with pytest.raises(TypeError, match=r"verify\(\) got an unexpected keyword argument 'bogus'"):
        run.verify(bogus=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="repair is 'yes', wanted true or false"):
        run.verify(repair="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="frame 'x' is unknown; there are folders"):
        run.watch(once=True).totals.frame("x")


def test_numbers_of_numpy_become_whole_numbers(root: str, nap: Callable[..., Any]) -> None:
    assert type(nap(ludic.open(root), np.float32(2)).hours) is float


def test_a_failure_is_one_on_every_rank(root: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """A job manager may set RANK for any process."""
    monkeypatch.setenv("RANK", "1")
    (Path(root) / "attempts").mkdir(exist_ok=True)
    (Path(root) / "attempts" / "1.json").write_text("{")
    code, out, _ = ludic_command(capsys, "verify", root)
    assert code == 1
    assert "attempts/1.json" in out


def test_a_command_that_serves_ends_well_when_it_is_told_to_stop(root: str, tmp_path: Path) -> None:
    """As service managers and pods stop it; the server is replaced by one that only waits."""
    script = tmp_path / "serve.py"
    script.write_text(
        "import ludic.app.launch.serve as module\n"
        "def serve(root, config, stop):\n"
        "    print('ready', flush=True)\n"
        "    assert stop.wait(60)\n"
        "module.serve = serve\n"
        "from ludic.app.cli.main import main\n"
        f"main(['serve', {root!r}])\n"
    )
    process = Forked([script], tmp_path / "log")
    while not process.log.exists() or "ready" not in process.printed():
        assert process.poll() is None, process.printed()
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 0, process.printed()


def test_figures_of_a_state_are_plain_and_name_no_filesystem(root: str) -> None:
    figures = ludic.open(root).watch(once=True).to_dict()
    assert json.loads(json.dumps(to_plain(figures)))["root"] == root


def test_rows_need_a_file_where_stdout_takes_no_bytes(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # as in a notebook
    with pytest.raises(ConfigError, match="format jsonl needs out"):
        ludic.open(root).export("jsonl")


def test_a_text_in_a_column_of_numbers_gets_no_escape_code_through() -> None:
    for name in ("version", "num_rows", "share", "size_bytes", "interval"):
        assert "\x1b" not in FORMATS[name].text("a\x1b[31mX").plain


def _kinds_of_errors(kind: type[LudicError] = LudicError) -> list[type[LudicError]]:
    return [kind, *(each for inner in kind.__subclasses__() for each in _kinds_of_errors(inner))]


@pytest.mark.parametrize("kind", _kinds_of_errors(), ids=lambda kind: kind.__name__)
def test_every_error_is_told_without_frames_of_ludic_and_causes(kind: type[LudicError]) -> None:
    @operation()
    def fetch(name: str) -> None:
        try:
            try:
                raise OSError(f"no route to {name}")
            except OSError as error:
                raise ConnectionError(f"{name} does not answer") from error
        except ConnectionError as error:
            raise kind(f"{name}: there is no such folder") from error

    with pytest.raises(kind) as caught:
        fetch("model")
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    # The line of this file, as Python shows it in three lines, then that of the wrapper, and the message.
    assert [line for line in lines if "no route" in line or "does not answer" in line or "During" in line] == []
    assert 'fetch("model")' in "".join(lines)
    assert (len(lines) < 10, lines[-1].startswith(kind.__qualname__) or kind.__name__ in lines[-1]) == (True, True)


@pytest.mark.parametrize("call", ["grpo", "sft", "dpo"])
def test_a_model_that_is_not_there_is_a_few_lines_in_python(tmp_path: Path, call: str) -> None:
    rows: dict[str, list[dict[str, str]]] = {
        "grpo": [{"question": str(number), "answer": "1"} for number in range(8)],
        "sft": [{"prompt": "how many", "completion": "9"}],
        "dpo": [{"prompt": "how many", "chosen": "9", "rejected": "8"}],
    }
    options = {"reward": "exact"} if call == "grpo" else {}
    root = tmp_path / "run"
    with pytest.raises(ModelError) as caught:
        getattr(ludic, call)(model="nobody/nothing", root=root, dataset=rows[call], **options)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert "nobody/nothing: there is no such folder" in lines[-1]
    assert len(lines) < 20
    assert not root.exists()
