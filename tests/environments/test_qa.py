"""qa/SOURCE: questions of JSONL and Parquet files and of datasets on the disk, all made here."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ludic.environments.environment import Environment
from ludic.environments.registry import make_environment, source_of
from ludic.environments.splits import is_heldout
from ludic.errors import ConfigError, ScorerError
from ludic.records.rollout import Message

SUMS = [
    {"question": f"What is {number} plus {number}?", "answer": str(2 * number), "level": number % 3}
    for number in range(200)
]


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: Sequence[Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
    return str(path)


def write_dataset(path: Path, rows: Sequence[Any]) -> str:
    datasets = pytest.importorskip("datasets", reason="datasets is in the extra datasets")
    datasets.Dataset.from_list(list(rows)).save_to_disk(path)
    return str(path)


WRITERS = {"rows.jsonl": write_jsonl, "rows.parquet": write_parquet, "folder": write_dataset}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Sequence[Any]], str]:
    """Writes rows in a format, and returns the name of the environment."""
    writer = WRITERS[request.param]
    return lambda rows: f"qa/{writer(tmp_path / request.param, rows)}"


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSONL, and returns the name of the environment."""
    return lambda *rows: f"qa/{write_jsonl(tmp_path / 'rows.jsonl', rows)}"


def make(name: str, **options: Any) -> Environment:
    return make_environment(name, options, seed=options.get("seed", 3))()


def reward(environment: Environment, answer: str, index: int = 0) -> float:
    environment.reset(environment.example(index, "train"))
    return environment.step(answer).reward


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_the_question_is_found_in_the_columns_of_other_programs(write, column):
    question = [{"role": "user", "content": "2 + 2?"}]
    rows = [{"id": number, column: question, "answer": "4"} for number in range(8)]
    environment = make(write(rows), heldout_share=0)
    assert environment.example(0, "train").messages == (Message(role="user", content="2 + 2?"),)


def test_every_format_gives_the_same_examples(write, jsonl):
    environment, other = make(write(SUMS)), make(jsonl(*SUMS))
    for split in ("train", "heldout"):
        assert [environment.example(i, split) for i in range(60)] == [other.example(i, split) for i in range(60)]


def test_a_question_is_asked_and_its_answer_is_rewarded(write):
    environment = make(write(SUMS[3:4]), heldout_share=0, system_prompt="Be brief.")
    example = environment.example(0, "train")
    assert [(message.role, message.content) for message in environment.reset(example)] == [
        ("system", "Be brief."),
        ("user", "What is 3 plus 3?"),
    ]
    right = environment.step(" 6\n")
    assert (right.reward, right.terminated, right.reward_components) == (1, True, {"correct": 1})
    assert reward(environment, "It is 6") == 0


def test_one_lap_serves_every_question_of_a_split_once(write):
    environment = make(write(SUMS))
    served = {
        split: [environment.example(i, split).data["question"] for i in range(200)] for split in ("train", "heldout")
    }
    num_train, num_heldout = (len(set(questions)) for questions in served.values())
    assert num_train + num_heldout == 200
    assert not set(served["train"]) & set(served["heldout"])
    for questions, number in ((served["train"], num_train), (served["heldout"], num_heldout)):
        assert len(set(questions[:number])) == number
    assert 25 < num_heldout < 75  # a quarter of 200, within four standard deviations


QUESTION_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


@given(st.lists(QUESTION_TEXTS, min_size=1, max_size=30), st.floats(0, 0.9), st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_every_question_is_in_one_split_whatever_its_text(questions, share, seed):
    assume(not all(is_heldout(question, share) for question in questions))
    with tempfile.TemporaryDirectory() as folder:
        name = f"qa/{write_jsonl(Path(folder) / 'rows.jsonl', [{'question': q, 'answer': 1} for q in questions])}"
        one, other = (make(name, heldout_share=share, seed=seed) for _ in range(2))
    served = {}
    for split in ("train", "heldout"):
        try:
            examples = [one.example(index, split) for index in range(len(questions))]
        except ConfigError:
            examples = []  # a small file may have no held-out question
        assert examples == [other.example(index, split) for index in range(len(examples))]
        served[split] = {example.data["question"] for example in examples}
    assert not served["train"] & served["heldout"]
    assert served["train"] | served["heldout"] == set(questions)


def test_the_seed_changes_the_order_and_not_the_split(write):
    name = write(SUMS)
    one, other = make(name, seed=1), make(name, seed=2)
    ids = [[environment.example(i, "heldout").example_id for i in range(25)] for environment in (one, other)]
    assert ids[0] != ids[1]
    everything = [{environment.example(i, "heldout").example_id for i in range(200)} for environment in (one, other)]
    assert everything[0] == everything[1]


@pytest.mark.parametrize(("share", "low", "high"), [(0.1, 5, 37), (0.5, 72, 128)])
def test_the_share_of_heldout_questions_is_an_option(jsonl, share, low, high):
    environment = make(jsonl(*SUMS), heldout_share=share)
    assert low < len({environment.example(i, "heldout").example_id for i in range(400)}) < high


def test_a_file_of_its_own_holds_the_heldout_questions(tmp_path, caplog):
    train = write_jsonl(tmp_path / "train.jsonl", SUMS[:30])
    test = write_jsonl(tmp_path / "test.jsonl", SUMS[25:40])
    environment = make(f"qa/{train}", heldout=test)
    trained = {environment.example(i, "train").data["question"] for i in range(60)}
    held_out = {environment.example(i, "heldout").data["question"] for i in range(60)}
    assert trained == {row["question"] for row in SUMS[:25]}
    assert held_out == {row["question"] for row in SUMS[25:40]}
    assert "5 of 30 questions are not trained on" in caplog.text


def test_a_dataset_brings_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is in the extra datasets")
    splits = {"train": SUMS[:20], "test": SUMS[20:30]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
        tmp_path / "both"
    )
    environment = make(f"qa/{tmp_path}/both", heldout="test")
    assert {environment.example(i, "heldout").data["question"] for i in range(20)} == {
        row["question"] for row in splits["test"]
    }
    only_test = make(f"qa/{tmp_path}/both", split="test", heldout_share=0)
    assert len({only_test.example(i, "train").example_id for i in range(20)}) == 10
    with pytest.raises(ConfigError, match=r"both has no split 'dev'; it has train, test"):
        make(f"qa/{tmp_path}/both", split="dev")


def test_chats_nested_columns_and_a_pattern_are_read(write):
    rows = [
        {
            "prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": f"{number} legs?"}],
            "reward_model": {"ground_truth": f"Half of it is {number}.\n#### {number}", "style": "rule"},
            "level": number,
        }
        for number in (4, 6)
    ]
    environment = make(
        write(rows),
        question="prompt",
        answer="reward_model.ground_truth",
        answer_pattern="#### (.+)",
        heldout_share=0,
    )
    examples = [environment.example(i, "train") for i in range(2)]
    assert sorted(example.data["answer"] for example in examples) == ["4", "6"]
    assert [message.role for message in examples[0].messages] == ["system", "user"]
    # Neither the question nor the right answer, which have columns of their own.
    assert sorted(example.columns["level"] for example in examples) == [4, 6]
    assert examples[0].columns == {"reward_model": {"style": "rule"}, "level": examples[0].columns["level"]}


def test_rows_keep_a_bounded_part_of_their_columns_and_scorers_get_all(jsonl, tmp_path):
    (tmp_path / "mine.py").write_text("def tests(example, answer):\n    return len(example.data['columns']['tests'])\n")
    name = jsonl({"question": "q", "answer": "a", "tests": "x" * 90_000, "level": 3, "day": None})
    options = {"columns": ["tests"], "scorer": f"{tmp_path}/mine.py:tests", "heldout_share": 0}
    environment = make(name, **options)
    example = environment.example(0, "train")
    assert (example.columns["level"], example.columns["day"], example.columns["tests"]["characters"]) == (
        3,
        None,
        90_000,
    )
    assert len(str(example.columns)) < 11_000
    assert reward(environment, "") == 90_000
    # Rows that are known by question and answer alone are read without the other columns, those of scorers aside.
    few = make(name, example_ids="question", **options).example(0, "train")
    assert few.columns.keys() == {"tests"}


@pytest.mark.parametrize(
    ("answer", "given", "is_right"),
    [
        ("1234.5", "It costs $1,234.5 in all.", True),
        ("1234.5", "1234.5 and then 7", False),
        ("-3", "x = -3", True),
        ("3", "10-3", True),
        ("0.5", ".5", True),
        ("12", "12.", True),
        ("12", "twelve", False),
        ("12", "", False),
        ("1e3", "1000", True),
        ("5", "7" * 20_000, False),
        ("100", "101", True),
        ("100", "102.1", False),
        ("0.5", "0.515", True),
        ("0.5", "0.525", False),
    ],
)
def test_numbers_are_compared_with_a_tolerance(jsonl, answer, given, is_right):
    # Two percent of the right number, or 0.02 if that is below 1: 100 takes 98 to 102, 0.5 takes 0.48 to 0.52.
    environment = make(jsonl({"question": "?", "answer": answer}), scorer="numeric", tolerance=0.02, heldout_share=0)
    assert reward(environment, given) == float(is_right)


USERS_SCORER = """
from ludic.environments.environment import Score
from qa_words import ENDING

def length(example, answer):
    level = example.data["columns"]["level"]
    return Score(reward=len(answer) - level, components={"ending": float(answer.endswith(ENDING))})

def is_right(example, answer):
    return answer == example.data["answer"]

def broken(example, answer):
    return "very good"
"""


def test_a_scorer_gets_the_columns_as_they_are_in_the_file(write):
    rows = [{"question": "2 + 2?", "answer": 4, "level": 1}]
    data = make(write(rows), columns=["answer", "level"], heldout_share=0).example(0, "train").data
    assert data == {"question": "2 + 2?", "answer": "4", "columns": {"answer": 4, "level": 1}}


def test_questions_without_an_answer_are_for_a_scorer_of_ones_own(write, tmp_path):
    (tmp_path / "mine.py").write_text("def length(example, answer):\n    return len(answer)\n")
    name = write([{"question": "Say something.", "level": 1}])
    environment = make(name, answer=None, scorer=f"{tmp_path}/mine.py:length", heldout_share=0)
    assert reward(environment, "four") == 4
    with pytest.raises(ConfigError, match=r"the scorer exact needs a right answer; name its column"):
        make(name, answer=None, heldout_share=0)


def test_a_users_scorer_gets_the_example_and_the_columns_it_asks_for(jsonl, tmp_path):
    (tmp_path / "qa_words.py").write_text("ENDING = '.'\n")
    (tmp_path / "mine.py").write_text(USERS_SCORER)
    name = jsonl(SUMS[1])
    environment = make(name, scorer=f"{tmp_path}/mine.py:length", columns=["level"], heldout_share=0)
    environment.reset(environment.example(0, "train"))
    transition = environment.step("four.")
    assert (transition.reward, transition.reward_components) == (5 - 1, {"ending": 1})
    assert reward(make(name, scorer=f"{tmp_path}/mine.py:is_right", heldout_share=0), "2") == 1
    with pytest.raises(
        ScorerError,
        match=r"mine\.py:broken returned 'very good', wanted a number or a Score \(mine.py:\d+, in",
    ):
        reward(make(name, scorer=f"{tmp_path}/mine.py:broken", heldout_share=0), "2")


def test_a_users_group_scorer_is_the_score_group_of_the_questions(jsonl, tmp_path):
    (tmp_path / "group.py").write_text("def shortest(example, answers):\n    return [0.0 for _ in answers]\n")
    environment = make(jsonl(SUMS[0]), group_scorer=f"{tmp_path}/group.py:shortest", heldout_share=0)
    assert environment.score_group(None, ["a", "b"]) == [0.0, 0.0]
    assert not hasattr(make(jsonl(SUMS[0]), heldout_share=0), "score_group")
    with pytest.raises(ConfigError, match=r"group_scorer 'exact' is unknown; .* your own is path/to/file\.py:function"):
        make(jsonl(SUMS[0]), group_scorer="exact", heldout_share=0)


def test_a_users_scorer_may_be_a_coroutine(jsonl, tmp_path):
    (tmp_path / "slow.py").write_text("async def score(example, answer):\n    return len(answer)\n")
    environment = make(jsonl(SUMS[0]), scorer=f"{tmp_path}/slow.py:score", heldout_share=0)
    environment.reset(environment.example(0, "train"))
    assert asyncio.run(environment.step("four")).reward == 4.0


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("nice", "scorer 'nice' is unknown; there are exact, numeric, math, regex, trl:.*; your own is path/to/file"),
        ("gone.py:score", r"scorer gone\.py:score: there is no file .*gone\.py"),
        ("{folder}/mine.py:lenght", r"mine\.py has no function 'lenght'"),
        ("{folder}/wrong.py:score", r"wrong\.py, line 1, failed: ZeroDivisionError"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_refused(jsonl, tmp_path, scorer, message):
    (tmp_path / "qa_words.py").write_text("ENDING = '.'\n")
    (tmp_path / "mine.py").write_text(USERS_SCORER)
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        make(jsonl(SUMS[0]), scorer=scorer.format(folder=tmp_path))


RUBRIC = """
import asyncio

from ludic.environments.environment import Score, SpanReward

def short(example, answer):
    return -len(answer)

async def praise(example, answer):
    await asyncio.sleep(0)
    spans = (SpanReward(start=0, end=1, reward=4.0),)
    return Score(reward=2.0, components={"warmth": 3.0}, info={"why": "kind"}, span_rewards=spans)

async def undecided(example, answer):
    return None

def nothing(example, answer):
    pass

def broken(example, answer):
    raise KeyError("level")
"""


@pytest.fixture
def rubric(jsonl, tmp_path) -> Callable[..., Any]:
    """rubric(answer, names): the transition of an answer to "What is 2 plus 2?", scored by these scorers."""
    (tmp_path / "rubric.py").write_text(RUBRIC)

    def score(answer: str, names: Any) -> Any:
        environment = make(jsonl(SUMS[2]), scorer=names, heldout_share=0)
        environment.reset(environment.example(0, "train"))
        found = environment.step(answer)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return score


def test_the_reward_of_several_scorers_is_the_sum_by_their_weights(rubric, tmp_path):
    file = f"{tmp_path}/rubric.py"
    # 1 * 1 - 0.25 * 1 + 0.5 * 2 + 0 * ...
    transition = rubric("4", {"exact": 1, f"{file}:short": 0.25, f"{file}:praise": 0.5, "numeric": 0})
    assert transition.reward == 1 - 0.25 + 1
    components = {"exact": 1, "exact.correct": 1, "short": -1, "praise": 2, "praise.warmth": 3}
    assert transition.reward_components == {**components, "numeric": 1, "numeric.correct": 1}
    assert transition.info == {"praise.why": "kind"}
    assert transition.correct is True
    assert [span.reward for span in transition.span_rewards] == [2.0]
    assert rubric("4", ["exact", f"{file}:short"]).reward == 0  # 1 - 1: each has weight 1


def test_a_scorer_that_returns_none_is_left_out_of_the_sum(rubric, tmp_path):
    file = f"{tmp_path}/rubric.py"
    transition = rubric("5", {f"{file}:undecided": 3, f"{file}:short": 1})
    assert (transition.reward, transition.reward_components, transition.correct) == (-1, {"short": -1}, None)
    with pytest.raises(ScorerError, match=r"the answer is not scored: .*:undecided, .*:nothing returned None"):
        rubric("5", [f"{file}:undecided", f"{file}:nothing"])
    with pytest.raises(ScorerError, match=r"rubric\.py:nothing returned None, so the answer is not scored; wanted"):
        rubric("5", f"{file}:nothing")


def test_an_error_of_one_scorer_fails_the_answer(rubric, tmp_path):
    with pytest.raises(KeyError, match="level"):
        rubric("5", [f"{tmp_path}/rubric.py:praise", f"{tmp_path}/rubric.py:broken"])


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ([], r"scorer is \[\], wanted a name, a list of names, or names with their weights, such as"),
        (7, "scorer is 7, wanted a name"),
        ({"exact": "1"}, "the weight of scorer exact is '1', wanted a number; 0 only measures"),
        ({"exact": True}, "the weight of scorer exact is True"),
        (["{file}:short", "trl:{file}:short"], "two scorers are called short; .* rename one of them"),
        (["exact", "nice"], "scorer 'nice' is unknown"),
    ],
)
def test_a_list_or_weights_that_can_not_be_used_are_refused(jsonl, tmp_path, scorer, message):
    (tmp_path / "rubric.py").write_text(RUBRIC)
    if isinstance(scorer, list):
        scorer = [name.format(file=tmp_path / "rubric.py") for name in scorer]
    with pytest.raises(ConfigError, match=message):
        make(jsonl(SUMS[0]), scorer=scorer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"rows\.jsonl has no rows, wanted at least one"),
        (b'\n{"question": "a", "answer": ', r"rows\.jsonl, line 2 is not JSON: Expecting value at character 29"),
        (b'{"question": "\xff", "answer": "b"}', r"rows\.jsonl, line 1 is not UTF-8 text: byte 0xff at 15"),
        (b"[1, 2]\n", r"rows\.jsonl, row 0 is 1, wanted a JSON object with the columns as keys"),
        (b'{"question": "a", "answer": 1}\n7\n', r"rows\.jsonl, line 2 is 7, wanted a JSON object with the columns as"),
        (
            b'{"questoin": "a", "answer": "b"}',
            r"line 1: column 'question' is unknown; did you mean 'questoin'\? There are questoin, answer",
        ),
        (b'{"question": 7, "answer": "b"}', r"line 1, column 'question' is 7, wanted a text, or a list of messages"),
        (b'{"question": " ", "answer": "b"}', r"line 1, column 'question' is empty"),
        (b'{"question": "a", "answer": null}', r"line 1, column 'answer' is None, wanted a text or a number"),
        (b'{"question": "a", "answer": true}', r"line 1, column 'answer' is True, wanted a text or a number"),
        (b'{"question": "\\ud83d", "answer": "b"}', r"line 1 holds half a character, \\ud83d"),
        (
            b'{"question": [{"role": "human", "content": "b"}], "answer": 1}',
            r"messages\[0\].role is 'human', wanted one of system, developer, user, assistant, tool",
        ),
        (b'{"question": [{"role": "user"}], "answer": 1}', r"messages\[0\] has no content, wanted a text"),
        (b'{"question": "a", "answer": ' + b"[" * 100_000, r"line 1 is not JSON"),
    ],
)
def test_a_broken_row_is_named(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        make(f"qa/{tmp_path}/rows.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": "soluton"}, r"line 1: column 'soluton' is unknown; did you mean 'solution'"),
        ({"answer": "solution.text"}, "line 1: column 'solution.text' is unknown"),
        ({"answer": "solution", "scorer": "numeric"}, r"line 2, column 'solution' is 'two'; the scorer numeric wants"),
        (
            {"answer": "pattern", "scorer": "regex"},
            r"line 2, column 'pattern' is '\('; the scorer regex wants a regular",
        ),
        ({"answer": "solution", "answer_pattern": r"\d+"}, r"line 2, .* is 'two', in which answer_pattern finds no"),
        ({"answer": "solution", "answer_pattern": "("}, r"answer_pattern '\(' is not a regular expression"),
        ({"answer": "solution", "columns": ["when"]}, r"line 1: column 'when' is unknown"),
        ({"answer": "solution", "columns": "when"}, r"columns is 'when', wanted a list of names"),
        ({"answer": "solution", "tolerance": 1}, "tolerance is 1, which the scorer exact does not take; numeric does"),
        (
            {"answer": "solution", "scorer": "numeric", "tolerance": -1},
            "tolerance is -1, wanted a number of at least 0",
        ),
        ({"answer": "solution", "heldout_share": 1.5}, "heldout_share is 1.5, wanted a number from 0 to 1"),
        ({"answer": "solution", "heldout_share": 0.5, "heldout": "b.jsonl"}, "give one of them"),
        ({"answer": "solution", "split": "test"}, r"split is 'test', which does not apply .* a file has no splits"),
        ({"answer": "solution", "revision": "main"}, r"revision is 'main', which does not apply"),
        ({"answer": "solution", "sha256": "0" * 64}, r"has sha256 [0-9a-f]{64}, wanted 0{64}: it is another file"),
        ({"answer": "solution", "anwser": "x"}, r"unexpected keyword argument 'anwser'; it takes \(\*, seed: int = 0"),
        ({"files": {}}, "unexpected keyword argument 'files'"),
    ],
)
def test_wrong_options_are_refused(jsonl, options, message):
    rows = ({"solution": "1", "pattern": "[0-9]"}, {"solution": "two", "pattern": "("})
    name = jsonl(*({"question": f"number {number}", **row} for number, row in enumerate(rows)))
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


@pytest.mark.parametrize(
    ("wrong", "there_are"),
    [
        ({"question": "text"}, "question, answer, level, info"),
        ({"answer": "zzz"}, "question, answer, level, info"),
        ({"columns": ["zzz"]}, "question, answer, level, info"),
        ({"answer": "zzz.y"}, "question, answer, level, info"),
        ({"answer": "info.y"}, "info.x, info.z"),
        ({"answer": "level.y"}, "level is 3"),
    ],
)
def test_a_wrong_column_lists_all_columns_of_every_format(write, wrong, there_are):
    row = {"question": "one", "answer": "1", "level": 3, "info": {"x": 1, "z": 2}}
    with pytest.raises(ConfigError) as raised:
        make(write([row, row]), **wrong)
    (name,) = wrong["columns"] if "columns" in wrong else wrong.values()
    told = str(raised.value).partition(f": column {name!r} is unknown; ")[2]
    assert told.lower().endswith(there_are)


@pytest.mark.parametrize("name", ["rows.tsv", "../nowhere/rows", "", "a b/c", "/nowhere"])
def test_what_is_no_source_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.tsv").write_text("question\tanswer\n")
    with pytest.raises(ConfigError, match=r"is not a source of questions; wanted a file \*\.jsonl, \*\.ndjson, "):
        make(f"qa/{name}")


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl can't be read: No such file"):
        make(f"qa/{tmp_path}/gone.jsonl")
    with pytest.raises(ConfigError, match=r"gone\.parquet can't be read: .*No such file"):
        make(f"qa/{tmp_path}/gone.parquet")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1" + b"\0" * 100)
    with pytest.raises(ConfigError, match=r"rows\.parquet is not a Parquet file that can be read"):
        make(f"qa/{tmp_path}/rows.parquet")
    with pytest.raises(ConfigError, match=r"is s3://bucket/rows\.jsonl, a URL; wanted a path on this machine"):
        make("qa/s3://bucket/rows.jsonl")


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    pytest.importorskip("datasets", reason="datasets is in the extra datasets")
    with pytest.raises(ConfigError, match=r"can't be loaded as a folder of Dataset\.save_to_disk: FileNotFoundError"):
        make(f"qa/{tmp_path}")


@pytest.mark.slow
def test_a_dataset_that_is_neither_here_nor_on_the_hub_is_explained(tmp_path):
    pytest.importorskip("datasets", reason="datasets is in the extra datasets")
    code = "from ludic.environments.registry import make_environment\nmake_environment('qa/nobody/no-such-set')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "'nobody/no-such-set' can't be loaded as a dataset on the Hugging Face Hub" in done.stderr
    assert "there is no such file or folder here either" in done.stderr


def test_a_split_without_questions_is_explained(jsonl):
    environment = make(jsonl(SUMS[0]), heldout_share=0)
    with pytest.raises(ConfigError, match=r"rows\.jsonl has 1 questions, none of them held out; raise heldout_share"):
        environment.example(0, "heldout")
    with pytest.raises(ConfigError, match=r"rows\.jsonl has 1 questions, none of them to train on; lower"):
        make(jsonl(SUMS[0]), heldout_share=1).example(0, "train")


def test_all_questions_may_be_held_out(write):
    environment = make(write(SUMS[:9]), heldout_share=1)
    held_out = {environment.example(index, "heldout").data["question"] for index in range(9)}
    assert held_out == {row["question"] for row in SUMS[:9]}


@pytest.mark.parametrize(
    ("pattern", "given", "is_right"),
    [
        ("4[012]", "some 41 cats", True),
        ("4[012]", "43", False),
        ("^(?i:yes)$", "YES", True),
        ("^(?i:yes)$", "YES, or no", False),
        ("a|b", "", False),
    ],
)
def test_a_regular_expression_is_looked_for_in_the_answer(jsonl, pattern, given, is_right):
    environment = make(jsonl({"question": "?", "answer": pattern}), scorer="regex", heldout_share=0)
    assert reward(environment, given) == float(is_right)


def test_the_file_of_heldout_questions_is_recorded_by_its_digest(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", SUMS[:3])
    test = write_jsonl(tmp_path / "test.jsonl", SUMS[3:5])
    before = source_of(f"qa/{train}", {"heldout": test})[2]
    assert before == {"heldout": source_of(f"qa/{test}", {})[0]}
    write_jsonl(tmp_path / "test.jsonl", SUMS[3:6])
    assert source_of(f"qa/{train}", {"heldout": test})[2] != before
    assert source_of(f"qa/{train}", {})[2] == source_of("addition", {})[2] == {}


def test_the_data_are_recorded_by_their_digest(write):
    name = write(SUMS[:5])
    before = source_of(name, {})
    assert before == source_of(name, {})
    make(name, sha256=before[0])
    path = Path(name.removeprefix("qa/"))
    file = path if path.is_file() else next(path.glob("*.arrow"))
    file.write_bytes(file.read_bytes() + b"\n")
    assert source_of(name, {})[0] != before[0]
    with pytest.raises(ConfigError, match=f"wanted {before[0]}: it is another file, or was changed"):
        make(name, sha256=before[0])


def test_two_answers_to_one_question_are_two_examples_of_one_split(jsonl):
    environment = make(jsonl(*({"question": "an even number?", "answer": n} for n in (2, 4))), heldout_share=0)
    assert len({environment.example(i, "train").example_id for i in range(2)}) == 2


def test_without_the_package_a_dataset_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package datasets is not installed; pip install 'ludic-rl\[datasets\]'"):
        make(f"qa/{tmp_path}")
