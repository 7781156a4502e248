"""What settings may name: each kind of part alike, by ludic's names, by users' files and by mistake."""

import ast
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.agents.parsers import make_parser
from ludic.base.installed import is_installed
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError, LudicError
from ludic.run.code_uses import sampling_uses
from ludic.run.config import RunConfig
from ludic.settings.consent import CodeUse
from ludic.settings.kinds import (
    AGENT,
    AGENT_COMMAND,
    ENVIRONMENT,
    KINDS,
    MEASURE,
    PARSER,
    ROLLOUT_SCORER,
    TOOL,
    Kind,
    check,
    find,
    find_own,
)
from ludic.settings.user_files import UserFile, file_of

PACKAGE = Path(inspect.getfile(ludic)).parent
EACH_KIND = pytest.mark.parametrize("kind", [*KINDS.values(), ROLLOUT_SCORER], ids=lambda kind: kind.role)
PYTHON_KINDS = [kind for kind in KINDS.values() if any(".py:" in form for form in kind.own)]
SQL_KINDS = [kind for kind in KINDS.values() if any(form.endswith(".sql") for form in kind.own)]


def of_ludic() -> Iterator[tuple[Kind, str]]:
    """Parts of ludic; json:FILE:TYPE names a type of a user's file."""
    return ((kind, name) for kind in KINDS.values() for name in kind.names() if ".py:" not in name)


@pytest.mark.parametrize(("kind", "name"), [*of_ludic()], ids=lambda each: getattr(each, "role", each))
def test_each_part_of_ludic_is_found(kind: Kind, name: str):
    if name == "vllm" and not is_installed("vllm"):
        pytest.skip("vLLM is not installed here")
    check(kind, name)
    found = find(kind, name)
    if kind.folder is not None:
        assert isinstance(found, str)
    elif kind.built_in[name] is None:
        assert found is None
    else:
        assert callable(found) if ":" in name else kind.fits(getattr(found, "function", found))


@EACH_KIND
def test_an_unknown_name_is_answered_with_what_there_is(kind: Kind):
    for look in (find, check):
        with pytest.raises(kind.error, match=f"^{kind.role} 'zzzzzz' is unknown; ") as caught:
            look(kind, "zzzzzz")
        assert all(form in str(caught.value) for form in kind.own)
        assert len(kind.names()) > 20 or all(name in str(caught.value) for name in kind.names())


@EACH_KIND
def test_a_misspelled_name_is_answered_with_the_one_that_is_meant(kind: Kind):
    for name in (name for of, name in of_ludic() if of is kind):
        head, colon, argument = name.partition(":")
        with pytest.raises(kind.error, match="did you mean") as caught:
            find(kind, f"{head}z{colon}{argument}")
        assert f"'{head}" in str(caught.value)


@pytest.mark.parametrize("kind", PYTHON_KINDS, ids=lambda kind: kind.role)
def test_what_a_users_file_lacks_or_does_is_told_with_its_place(kind: Kind, tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("import json\ndef own(rollouts): ...\nnumber = 3\n")
    assert find(kind, f"{mine}:own").__name__ == "own"
    check(kind, f"{mine}:own")
    for look in (find, check):
        with pytest.raises(kind.error, match=rf"^{kind.role} .*mine\.py has no {kind.noun} 'absent'; it has .*own"):
            look(kind, f"{mine}:absent")
        with pytest.raises(kind.error, match=rf"^{kind.role} .*there is no file .*gone\.py"):
            look(kind, f"{tmp_path}/gone.py:own")
    with pytest.raises(kind.error, match=f"has no {kind.noun} 'number'"):
        find(kind, f"{mine}:number")
    mine.write_text("1 / 0")
    with pytest.raises(kind.error, match=r"mine\.py, line 1, failed: ZeroDivisionError"):
        find(kind, f"{mine}:own")


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if kind not in PYTHON_KINDS], ids=lambda kind: kind.role
)
def test_python_is_not_run_where_sql_is_wanted(kind: Kind, tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('it ran')")
    for name in (f"{mine}:own", f"{mine}:own.sql"):
        with pytest.raises(kind.error, match="is unknown"):
            find(kind, name)


@pytest.mark.parametrize("kind", SQL_KINDS, ids=lambda kind: kind.role)
def test_sql_of_a_user_is_its_text(kind: Kind, tmp_path: Path):
    mine = tmp_path / "mine.sql"
    mine.write_text("select 1")
    assert find(kind, str(mine)) == "select 1"
    mine.write_bytes(b"\xff")
    with pytest.raises(kind.error, match=r"mine\.sql.*utf-8"):
        find(kind, str(mine))


def test_a_file_that_is_given_runs_instead_of_the_one_on_disk(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("raise SystemExit('the file on disk ran')")
    given = UserFile(path=path, source=b"def own(): return 7")
    own = find_own(PARSER, f"{path}:own", {str(path): given})
    assert (own.value(), own.file) == (7, given)


def test_checking_runs_nothing(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('it ran')\nif True:\n    def own(): ...\n")
    check(TOOL, f"{mine}:own")
    mine.write_text("from others import *\n")
    check(TOOL, f"{mine}:anything")
    mine.write_text("def (")
    with pytest.raises(ConfigError, match=r"tool .*invalid syntax"):
        check(TOOL, f"{mine}:own")


def test_a_part_with_an_argument_is_a_function_of_it():
    parsed = find(PARSER, "tag:answer")().parse("<answer>7</answer>")
    assert parsed.action == "7"
    with pytest.raises(LudicError, match="is unknown"):
        find(PARSER, "whole:1")


@pytest.mark.parametrize(
    ("kind", "setting", "is_users"),
    [
        (ENVIRONMENT, "moar_cats", False),
        (ENVIRONMENT, "reasoning_gym/leg_counting", False),
        (ENVIRONMENT, "qa/sums.jsonl", True),
        (ENVIRONMENT, "verifiers/anything", True),
        (ENVIRONMENT, "package.module:Class", True),
        (ENVIRONMENT, "gymnasium/module:Rooms-v0", True),
        (TOOL, "calculator", False),
        (TOOL, "python", True),
        (TOOL, "mcp:command", True),
        (AGENT, "codex", True),
        (AGENT_COMMAND, "command:python agent.py:run", True),
        (MEASURE, "mean_reward", False),
        (MEASURE, "mine.sql", True),
        *((kind, "mine.py:Own", True) for kind in KINDS.values()),
    ],
)
def test_code_that_is_not_part_of_ludic_needs_consent(kind: Kind, setting: str, is_users: bool):
    assert CodeUse(role=kind.role, setting=setting).is_users == is_users


ODD = (
    "{}:Own",
    "regex:{}:Own",
    "json:{}:Own",
    "json:regex:{}:Own",
    "tag:{}:Own",
    "window:{}:Own",
    "mcp:{}:Own",
    "qa/{}:Own",
)
ODD += (
    "{}:Own.sql",
    "{}:a:Own",
    "./{}:Own",
    "regex:ok/../{}:Own",
    " {}:Own",
    "python:{}:Own",
    "module:{}:Own",
    "whole|{}:Own",
)


@pytest.mark.parametrize("form", ODD)
@EACH_KIND
def test_no_file_runs_that_consent_does_not_ask_for(kind: Kind, form: str, tmp_path: Path, monkeypatch):
    """Whatever file a name makes ludic run is one that the setting's uses name; here every spelling of it exists."""
    monkeypatch.chdir(tmp_path)
    name = form.format("evil.py")
    path = tmp_path / name.rpartition(":")[0]
    for file in (tmp_path / "evil.py", path):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import pathlib\npathlib.Path('ran').write_text(__file__)\nclass Own: ...\n")
    with suppress(LudicError, TypeError):
        if kind is PARSER:
            make_parser(name)
        else:
            find(kind, name)
    uses = [CodeUse(role=kind.role, setting=name)]
    if kind is PARSER:
        uses = sampling_uses(RunConfig(model="m", env=("moar_cats",), parser=name))
    files = {str(Path(file).absolute()) for use in uses for file in [file_of(use.setting)] if file}
    assert not Path("ran").exists() or Path("ran").read_text() in files


@pytest.mark.parametrize(
    "scorer",
    [
        "trl:{}:Own",
        "verl:{}:Own",
        ["exact", "trl:{}:Own"],
        {"{}:Own": 1, "exact": 0},
        "trl:trl:{}:Own",
        "json:{}:Own",
        "trl: {}:Own",
        [["{}:Own"]],
    ],
    ids=str,
)
@pytest.mark.parametrize("option", ["scorer", "group_scorer"])
def test_no_scorer_runs_that_consent_does_not_ask_for(option: str, scorer: Any, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import pathlib\npathlib.Path('ran').write_text(__file__)\ndef Own(completions): ...\n"
    for name in ("evil.py", "trl:evil.py", "json:evil.py", " evil.py"):
        (tmp_path / name).write_text(code)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "prompt": "a", "answer": "b"}')
    spelled = json.loads(json.dumps(scorer).replace("{}", "evil.py"))
    options = {option: spelled, "answer": "answer", "heldout_share": 0}
    with suppress(LudicError):
        make_environment("qa/rows.jsonl", options)
    uses = sampling_uses(RunConfig(model="m", env=("qa/rows.jsonl",), env_options={"qa/rows.jsonl": options}))
    files = {str(Path(file).absolute()) for use in uses for file in [file_of(use.setting)] if file}
    assert not Path("ran").exists() or Path("ran").read_text() in files


@EACH_KIND
def test_a_check_refuses_each_name_that_is_not_found(kind: Kind):
    heads = {name.partition(":")[0] for name in kind.names()}
    for name in [*heads, *(f"{head}:2" for head in heads), "zzz:2", "", ":", "a:b:c"]:
        try:
            find(kind, name)
        except LudicError as error:
            with pytest.raises(type(error), match="is unknown"):
                check(kind, name)
        else:
            check(kind, name)


def test_a_regex_may_look_like_a_file(tmp_path: Path):
    parser = make_parser(r"regex:see \w+\.py:(\d+)")
    assert parser.parse("see words.py:12").action == "12"


def test_no_other_room_runs_a_file_or_guesses_a_name():
    """The homes of these facts: settings/user_code.py runs users' files, errors.py says which name may be meant."""
    runner = "settings/user_code.py"
    words = {"spec_from_file_location": runner, "exec_module": runner, "get_close_matches": "errors.py"}
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    for word, home in words.items():
        users = {
            name
            for name, text in texts.items()
            if word in text and name != home
            for node in ast.walk(ast.parse(text))
            if word in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
        }
        assert not users, word


def test_an_agent_and_the_commands_of_a_run_need_consent():
    run = RunConfig(model="m", env=("moar_cats",), agent_command="run a.sql", score_command="test a.py:b")
    uses = sampling_uses(run)[1:]
    assert [(use.role, use.setting, use.is_users) for use in uses] == [
        ("command", "command:run a.sql", True),
        ("command", "command:test a.py:b", True),
    ]
    assert [file_of(use.setting) for use in uses] == [None, None]  # words of a command are no files to copy
    (_, use) = sampling_uses(RunConfig(model="m", env=("moar_cats",), agent="mine.py:run"))
    assert (use.role, file_of(use.setting), use.is_users) == ("agent", "mine.py", True)
