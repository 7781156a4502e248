"""Suites: what a TOML file may hold, what is refused and how, and that a killed suite ends as an unbroken one."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.errors import ConfigError, LudicError
from ludic.eval.config import EvalConfig
from ludic.eval.suite import Entry, read_suite
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

SUMS = [{"question": f"what is {letter} and two", "answer": letter} for letter in "abcd"]
SCORER = "def short(example, answer):\n    return len(answer) < 20\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with questions and a scorer in a folder for suites."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in SUMS))
    (tmp_path / "suites/score.py").write_text(SCORER)
    return tmp_path


def write(folder: Path, text: str | bytes) -> str:
    file = folder / "suites/suite.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return "suites/suite.toml"


def read(folder: Path, text: str | bytes) -> list[Entry]:
    return read_suite(write(folder, text), EvalConfig(versions="0"))


def test_an_entry_takes_what_it_does_not_say_from_the_top(folder: Path) -> None:
    one, two = read(
        folder,
        """
        n = 4
        temperature = 0
        measures = ["mean_reward"]
        [[entries]]
        name = "one"
        env = "addition"
        [[entries]]
        name = "two"
        env = "guess_number"
        n = 2
        tools = ["calculator"]
        max_steps = 3
        measures = ["pass_at_k"]
        params = {k = 2}
        """,
    )
    assert (one.config.n, one.config.run, one.measure.measures) == (4, {"temperature": 0.0}, ("mean_reward",))
    assert type(one.config.run["temperature"]) is float  # 0 and 0.0 must not be two evaluations
    assert (two.config.n, two.config.run) == (2, {"temperature": 0.0, "tools": ("calculator",), "max_steps": 3})
    assert (two.measure.measures, two.measure.params) == (("pass_at_k",), {"k": 2})


@pytest.mark.parametrize(
    ("scorer", "read_as"),
    [
        ('"trl:score.py:short"', "trl:suites/score.py:short"),
        ('["exact", "score.py:short"]', ["exact", "suites/score.py:short"]),
        ('{exact = 1, "score.py:short" = 0.5}', {"exact": 1, "suites/score.py:short": 0.5}),
    ],
)
def test_each_scorer_of_a_suite_is_beside_it(folder: Path, scorer: str, read_as: Any) -> None:
    (entry,) = read(folder, f'[[entries]]\nname = "q"\nquestions = "sums.jsonl"\noptions = {{scorer = {scorer}}}')
    assert entry.config.env_options["qa/suites/sums.jsonl"]["scorer"] == read_as


def test_paths_are_relative_to_the_suite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[[entries]]\nname = "q"\nquestions = "sums.jsonl"\noptions = {scorer = "score.py:short"}'
    (entry,) = read(folder, text)
    env = "qa/suites/sums.jsonl"
    assert entry.config.env == (env,)
    assert entry.config.env_options == {env: {"scorer": "suites/score.py:short", "heldout_share": 1}}
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (again,) = read_suite("../suites/suite.toml", EvalConfig())
    assert again.config.env == (f"qa/{folder}/suites/sums.jsonl",)  # not below the working directory


ONE = '[[entries]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"suite\.toml: entries is missing, wanted one table \[\[entries\]\] or more"),
        ("entries = 3", "entries is 3, wanted one table"),
        ("entries = []", r"entries is \[\], wanted one table"),
        ("entries = [1]", r"entries is \[1\], wanted one table"),
        ("entrys = []", r"setting 'entrys' is unknown; did you mean 'entries'\?"),
        ("versions = '0'\n[[entries]]", "setting 'versions' is unknown"),
        ("[[entries]]", "entry 1: name is missing, wanted a text"),
        ("[[entries]]\nname = 7", "entry 1: name is 7, wanted a text"),
        (ONE, "entry 'a': neither env nor questions given, wanted env or questions"),
        (f'{ONE}env = "addition"\nquestions = "sums.jsonl"', "env and questions given, wanted env or questions"),
        (f"{ONE}env = 1", "entry 'a': env is 1, wanted a text"),
        (f'{ONE}env = "addition"\nnum_exampels = 3', r"entry 'a': setting 'num_exampels' is unknown; did you mean"),
        (f'{ONE}env = "addition"\nn = "4"', "entry 'a': n is '4', wanted a whole number"),
        (f'{ONE}env = "addition"\nn = 0', "entry 'a': n is 0, wanted at least 1"),
        (f'{ONE}env = "addition"\nn = 1e400', "entry 'a': n is inf, wanted a whole number"),
        (f'{ONE}env = "addition"\nn = true', "entry 'a': n is True, wanted a whole number"),
        (f'{ONE}env = "addition"\ntemperature = nan', "entry 'a': temperature is nan"),
        (f'{ONE}env = "addition"\ntools = "calculator"', "entry 'a': tools is 'calculator', wanted "),
        (f'{ONE}env = "addition"\noptions = 3', "entry 'a': options is 3, wanted a table"),
        (f'{ONE}env = "addition"\noptions = {{x = 1979-05-27}}', "entry 'a': options is .*, wanted values that JSON"),
        (f'{ONE}env = "addition"\noptions = {{x = inf}}', "entry 'a': options is .*, wanted values that JSON"),
        (
            f'{ONE}env = "addition"\nmeasures = ["mean_rewrad"]',
            "entry 'a': measure 'mean_rewrad' is unknown; did you mean",
        ),
        (f'{ONE}env = "addition"\nmeasures = ["mine.sql"]', r"measures names 'mine\.sql', but there is no file .*mine"),
        (f'{ONE}env = "addition"\nmeasures = "mean_reward"', "entry 'a': measures is 'mean_reward', wanted"),
        (
            f'{ONE}env = "addition"\nparams = {{threshhold = 1}}',
            "entry 'a': .*parameter 'threshhold' is unknown; did you",
        ),
        (
            f'{ONE}questions = "sum.jsonl"',
            r"entry 'a': questions names 'sum\.jsonl', but there is no file /.*sum\.jsonl",
        ),
        (f'{ONE}questions = "s3://b/sums.jsonl"', "entry 'a': questions is s3://b/sums.jsonl, a URL"),
        (f'{ONE}questions = "{"x" * 5000}.jsonl"', "entry 'a': questions names .*, but there is no file"),
        (f'{ONE}questions = "a\\u0000b.jsonl"', "entry 'a': questions names .*, but there is no file"),
        (
            f'{ONE}questions = "sums.jsonl"\noptions = {{scorer = "scor.py:short"}}',
            r"entry 'a': scorer names 'scor\.py', but there is no file",
        ),
        (f'{ONE}env = "cats.py:Cats"', r"entry 'a': env names 'cats\.py', but there is no file"),
        (f'{ONE}env = "addition"\nparser = "think|mine.py:P"', r"parser names 'mine\.py', but there is no file"),
        (
            f'{ONE}env = "addition"\n{ONE}env = "opposites"',
            r"suite\.toml: entries 1 and 2 are both named 'a'",
        ),
        ("n = 1\nn = 2", r"suite\.toml: Cannot overwrite a value"),
        ("[[entries]", r"suite\.toml: "),
        (b"name = '\xff'", r"suite\.toml: byte 8 is 0xff, which is not UTF-8"),
        ("entries = " + "[" * 100_000, r"suite\.toml: "),
    ],
)
def test_a_wrong_suite_is_refused_with_its_file_and_key(folder: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(LudicError, match=message):
        read(folder, text)


def test_what_is_no_file_is_refused(folder: Path) -> None:
    for path in ("gone.toml", "suites"):
        with pytest.raises(ConfigError, match=rf"there is no suite .*{path}; wanted a TOML file"):
            read_suite(path, EvalConfig())


def test_settings_beside_a_suite_are_refused(folder: Path) -> None:
    path = write(folder, f'{ONE}env = "addition"')
    with pytest.raises(ConfigError, match="n is given beside a suite, which decides it; write it into suites"):
        read_suite(path, EvalConfig(n=2))


SUITE = """
max_tokens = 8
accept_incomplete = true
n = 2
num_examples = 4

[[entries]]
name = "sums"
env = "addition"

[[entries]]
name = "rows"
questions = "sums.jsonl"
options = {scorer = "score.py:short"}
measures = ["mean_reward", "pass_at_k"]
params = {k = 2}

[[entries]]
name = "game"
env = "guess_number"
max_steps = 2
num_examples = 1
"""


@pytest.fixture
def make_run(folder: Path, request: pytest.FixtureRequest) -> Any:
    model = request.getfixturevalue("model")
    return lambda name: ludic.Run(put_run(str(folder / name), RunConfig(model=model, env=("addition",))))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny_models import make_model

    return make_model(tmp_path_factory.mktemp("model"), seed=1)


OPTIONS: dict[str, Any] = {"versions": 0, "device": "cpu", "examples_per_call": 2}


@pytest.mark.slow
def test_a_stopped_suite_ends_with_the_table_of_an_unbroken_one(folder: Path, make_run: Any) -> None:
    path, stopped = write(folder, SUITE), make_run("stopped")
    stop, stored = threading.Event(), []

    def store_three(batch: Any) -> None:
        stored.append(batch)
        if len(stored) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.eval(suite=path, report=store_three, stop=stop, in_flight=1, **OPTIONS | {"examples_per_call": 1})
    assert 3 <= len(stopped.root.list("evals")) < 9
    found = stopped.eval(suite=path, **OPTIONS)
    unbroken = make_run("unbroken").eval(suite=path, **OPTIONS)
    assert found.to_dict() | {"root": ""} == unbroken.to_dict() | {"root": ""}
    assert found.samples.select("entry", "num_examples", "num_samples").rows() == [
        ("sums", 4, 8),
        ("rows", 4, 8),
        ("game", 1, 2),
    ]
    rows = found.measures.filter(entry="rows").select("measure", "k", "num_examples").rows()
    assert rows == [("mean_reward", None, 4), ("pass_at_k", 2, 4)]
    assert ["rows", "0", "mean_reward"] in [line.split()[:3] for line in str(found).splitlines()]


@pytest.mark.slow
def test_changed_questions_or_graders_are_another_evaluation(folder: Path, make_run: Any) -> None:
    path, run = write(folder, SUITE), make_run("run")

    def evaluations(**options: Any) -> dict[str, str]:
        found = run.eval(suite=path, **OPTIONS, **options).samples
        return dict(zip(found["entry"], found["evaluation"], strict=True))

    first = evaluations()
    (folder / "suites/sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in SUMS[:3]))
    second = evaluations()
    (folder / "suites/score.py").write_text(SCORER.replace("20", "30"))
    third = evaluations(update_code=True)
    assert len({first["rows"], second["rows"], third["rows"]}) == 3
    assert first["sums"] == second["sums"] == third["sums"]
    with pytest.raises(ConfigError, match="measures and params do not apply beside a suite"):
        run.eval(suite=path, measures=["mean_reward"], **OPTIONS)
    write(folder, SUITE.replace('"guess_number"', '"guess_numbr"'))
    with pytest.raises(ConfigError, match=r"suite\.toml, entry 'game': environment 'guess_numbr' is unknown; did you"):
        run.eval(suite=path, **OPTIONS)
