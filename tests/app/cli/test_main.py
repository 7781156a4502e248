"""The `ludic` command: help, wrong usage, explained failures, and what goes where."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ludic.app.cli.main import COMMANDS, fail
from ludic.root.root import Root

READ_ONLY = {"sql": ["select 1"], "watch": ["--totals"], "view": ["x", "--text"], "verify": []}

# Runs commands one after the other, and prints of each the slow packages that are imported by then, as JSON in the
# last line of stderr.
SLOW_PROBE = """
import json
import sys
from ludic.app.cli.main import main
found = []
for args in json.loads(sys.argv[1]):
    try:
        main(args)
    except SystemExit as ended:
        slow = ["duckdb", "fsspec", "msgspec", "rich", "numpy", "pyarrow", "torch", "transformers"]
        found.append((args, [name for name in slow if name in sys.modules]))
print(json.dumps(found), file=sys.stderr)
"""


def test_help_lists_every_command(ludic) -> None:
    result = ludic("--help")
    assert result.code == 0
    assert result.err == ""
    for name in COMMANDS:
        assert f"  {name} " in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(ludic, command: str) -> None:
    result = ludic(command, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: ludic {command}")


def test_a_misspelt_command_is_wrong_usage_and_gets_a_hint(ludic) -> None:
    result = ludic("wach", "somewhere")
    assert (result.code, result.out) == (2, "")
    assert result.err == "ludic: there is no command 'wach'; did you mean `ludic watch`?\n"


def test_a_command_like_no_other_points_to_the_help(ludic) -> None:
    assert ludic("xyzzy").err == "ludic: there is no command 'xyzzy'; `ludic --help` lists them\n"


@pytest.mark.parametrize("command", READ_ONLY)
def test_a_wrong_flag_is_wrong_usage(ludic, trained: Root, command: str) -> None:
    result = ludic(command, trained.url, *READ_ONLY[command], "--no-such-flag")
    assert (result.code, result.out) == (2, "")
    assert result.err == (f"ludic: there is no option --no-such-flag; `ludic {command} --help` lists the options\n")


@pytest.mark.parametrize("flag", ["--lerning-rate", "--lerning_rate", "--lerning-rate=3"])
def test_a_misspelt_flag_gets_a_hint_in_one_line(ludic, trained: Root, flag: str) -> None:
    result = ludic("run", trained.url, flag, "0.1")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"ludic: there is no option {flag.partition('=')[0]}; did you mean --learning-rate?\n"


def test_the_version_is_that_of_the_package(ludic) -> None:
    assert ludic("--version").out == f"ludic {version('ludic-rl')}\n"


def test_a_value_out_of_range_is_wrong_usage(ludic, trained: Root) -> None:
    result = ludic("sql", trained.url, "select 1", "--max-rows", "0")
    assert result.code == 2
    assert "--max-rows is 0, wanted at least 1" in result.err


@pytest.mark.parametrize("command", READ_ONLY)
def test_a_missing_root_is_explained_in_one_line(ludic, tmp_path: Path, command: str) -> None:
    result = ludic(command, tmp_path, *READ_ONLY[command])
    assert (result.code, result.out) == (1, "")
    missing = ", and neither do the folders below it" if command in ("watch", "view") else ": run.json is missing"
    assert result.err == f"ludic: {tmp_path} holds no run{missing}; `ludic run` or `ludic.record` starts one\n"


@pytest.mark.parametrize("command", ["train", "run"])
def test_a_root_that_an_option_swallows_is_said_to_come_first(ludic, trained: Root, command: str) -> None:
    result = ludic(command, "--filters", "drop_errors", trained.url)
    assert (result.code, result.out) == (2, "")
    assert "missing: ROOT" in result.err
    assert result.err.endswith(f"; ROOT comes first: ludic {command} ROOT [OPTIONS]\n")


@pytest.mark.parametrize(("command", "arguments"), [("train", "ROOT"), ("run", "ROOT")])
def test_usage_shows_the_root_before_the_options(ludic, command: str, arguments: str) -> None:
    assert ludic(command, "--help").out.splitlines()[0] == f"usage: ludic {command} {arguments} [OPTIONS]"


@pytest.mark.parametrize("url", ["", "  "])
def test_an_empty_root_is_not_the_working_directory(ludic, tmp_path: Path, monkeypatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    for args in (
        ["run", "--create-only", url, "--model", "model", "--env", "moar_cats"],
        ["train", url],
        ["watch", url, "--totals"],
    ):
        result = ludic(*args)
        assert (result.code, result.err) == (1, "ludic: ROOT is empty; name a folder or a URL\n")
    assert list(tmp_path.iterdir()) == []


def test_a_root_on_no_filesystem_is_explained_in_one_line(ludic) -> None:
    assert ludic("watch", "nowhere://run", "--totals").err == "ludic: nowhere://run: Protocol not known: nowhere\n"


def test_a_run_of_another_format_is_explained_in_one_line(ludic, breakable: Path) -> None:
    (breakable / "run.json").write_text("{")
    result = ludic("watch", breakable, "--totals")
    assert result.code == 1
    assert result.err.startswith(f"ludic: {breakable}/run.json is not a run.json that ludic can read")
    assert result.err.count("\n") == 1


def test_of_a_long_message_the_first_lines_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail("6 bad rows:\n" + "\n".join(f"  row {number}" for number in range(6)))
    assert ended.value.code == 1
    assert capsys.readouterr().err == "ludic: 6 bad rows: row 0 row 1 row 2 (and 3 more)\n"


def test_of_several_ranks_only_the_first_explains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        fail("all ranks fail alike")
    assert ended.value.code == 1
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_what_only_looks_does_not_wait_for_torch(trained: Root) -> None:
    commands = [[name, trained.url, *words] for name, words in READ_ONLY.items()]
    assert [words for words, slow in slow_imports(commands) if "torch" in slow] == []


def slow_imports(commands: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    """Each of these commands of ludic, and the slow packages that one process has imported after it."""
    command = [sys.executable, "-c", SLOW_PROBE, json.dumps(commands)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(result.stderr.splitlines()[-1])
    assert [words for words, _ in found] == commands
    return found


@pytest.mark.slow
def test_help_imports_no_slow_package() -> None:
    commands = [["--help"], ["--version"], ["xyzzy"], *([name, "--help"] for name in COMMANDS)]
    assert slow_imports(commands) == [[words, []] for words in commands]


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(trained: Root) -> None:
    query = "select * from range(1000000)"
    ludic = subprocess.Popen(
        [sys.executable, "-m", "ludic", "sql", trained.url, query, "--format", "csv"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ludic.stdout is not None
    assert ludic.stderr is not None
    assert [ludic.stdout.readline() for _ in range(2)] == ["range\n", "0\n"]
    ludic.stdout.close()
    assert ludic.stderr.read() == ""
    assert ludic.wait(60) == 1
    ludic.stderr.close()
