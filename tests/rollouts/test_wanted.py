"""The wanted answer and the columns of the data set are stored with each rollout, and no model ever sees them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import chat_tokenizer, hermes_call, scripted_agent
from gateway.scripted import ScriptedEngine
from tiny_models import committed_rows, publish
from transformers import AutoTokenizer

from ludic.agents.agent import Agent
from ludic.environments.environment import Example, GroupAnswer, Score, Transition
from ludic.environments.limits import LimitedEnvironments
from ludic.environments.registry import make_environment
from ludic.environments.rewards import Rubric
from ludic.environments.single_turn import SingleTurn
from ludic.models.decoding import decode
from ludic.records.rollout import Message, Rollout
from ludic.rollouts.sampler import GroupSampler, episodes_of_run
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

SECRET = "sesame"
EXAMPLE = Example(
    example_id="e",
    messages=(Message(role="user", content="say the word"),),
    wanted=SECRET,
    columns={"hint": SECRET, "level": 3},
)
"""Whose wanted answer is in no text that a model should see."""


class Question:
    """Scores the wanted answer, or raises or returns what `found` says."""

    found: Mapping[str, Any] = {}

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def score(self, example: Example, answer: str) -> Any:
        found = self.found.get(answer, answer == example.wanted)
        if isinstance(found, Exception):
            raise found
        return found


class Game:
    """Three steps; each says whether the answer so far is correct, and the last says nothing of it."""

    says: Sequence[bool | None] = (False, True, None)

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> tuple[Message, ...]:
        self.step_index = 0
        return example.messages

    def step(self, action: str) -> Transition:
        correct, self.step_index = self.says[self.step_index], self.step_index + 1
        is_over = self.step_index == len(self.says)
        return Transition(observation=None if is_over else "again", reward=0.0, terminated=is_over, correct=correct)


class Duel:
    """Two agents who move once, at the same time; only the second one is right."""

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> Mapping[str, tuple[Message, ...]]:
        return dict.fromkeys(("first", "second"), example.messages)

    def next_agents(self) -> Sequence[str]:
        return ("first", "second")

    def step(self, actions: Mapping[str, str]) -> Mapping[str, Transition]:
        return {
            agent: Transition(observation=None, reward=0.0, terminated=True, correct=agent == "second")
            for agent in actions
        }


def sample(environment: Any, agent: Agent, **run: Any) -> list[Rollout]:
    """Rows of one group."""
    make = (lambda: SingleTurn(environment)) if hasattr(environment, "score") else lambda: environment
    config = RunConfig(model="m", env=("own",), **({"group_size": 1, "max_tokens": 128} | run))
    sampler = GroupSampler(
        run=config,
        run_episode=episodes_of_run(config, agent),
        environments={"own": LimitedEnvironments("own", make)},
    )
    return list(sampler.sample([0], "worker").groups[0].rollouts)


def prompts(agent: Agent) -> list[str]:
    """Everything that the model was given."""
    engine = agent.engine
    assert isinstance(engine, ScriptedEngine)
    return [decode(chat_tokenizer(), sample.request.prompt_tokens) for sample in engine.log]


def answers(found: Mapping[str, Any]) -> list[bool | None]:
    """What is stored as correct for each answer, of which the scorer says this."""
    rows = sample(
        type("Own", (Question,), {"found": found})(), scripted_agent(list(found)), group_size=len(found), max_steps=1
    )
    by_text = {row.messages[-1].content: row.correct for row in rows}
    return [by_text[answer] for answer in found]


def test_a_row_has_the_wanted_answer_and_whether_that_was_given() -> None:
    rows = sample(Question(), scripted_agent([SECRET, "open"]), group_size=2)
    assert {row.messages[-1].content: (row.wanted, row.correct, row.episode_reward) for row in rows} == {
        SECRET: (SECRET, True, 1.0),
        "open": (SECRET, False, 0.0),
    }


def test_only_a_scorer_that_says_so_makes_an_answer_correct() -> None:
    said = {
        "number": 1.0,
        "yes": True,
        "numpy": np.bool_(False),
        "score": Score(reward=1.0),
        "right": Score(reward=0.0, correct=True),
        "numpy right": Score(reward=0.0, correct=np.bool_(True)),  # type: ignore[arg-type]
        "fails": KeyError("own"),
    }
    assert answers(said) == [None, True, False, None, True, True, None]


def test_correct_must_be_a_truth_value() -> None:
    (row,) = sample(
        type("Own", (Question,), {"found": {"a": Score(reward=1.0, correct=0.5)}})(),  # type: ignore[arg-type]
        scripted_agent(["a"]),
    )
    assert row.error == "TypeError: correct that score returned is 0.5, wanted True, False or None"
    assert (row.wanted, row.correct, row.episode_reward) == (SECRET, None, None)


@pytest.mark.parametrize(
    ("wanted", "error"),
    [(7, "the wanted answer of an example is 7, wanted a str"), ("\ud800", "holds half a surrogate pair")],
)
def test_a_wanted_answer_that_is_no_text_is_refused_with_what_was_found(wanted: Any, error: str) -> None:
    class Wrong(Question):
        def example(self, index: int, split: str) -> Example:
            return Example(example_id="e", messages=EXAMPLE.messages, wanted=wanted)

    (row,) = sample(Wrong(), scripted_agent(["a"]))
    assert error in (row.error or "")


def test_a_row_holds_the_beginning_of_a_long_answer_and_the_scorer_gets_all() -> None:
    class Long(Question):
        def example(self, index: int, split: str) -> Example:
            return Example(example_id="e", messages=EXAMPLE.messages, wanted="x" * 2_003)

        def score(self, example: Example, answer: str) -> Any:
            return len(example.wanted or "") == 2_003

    (row,) = sample(Long(), scripted_agent(["a"]))
    assert (row.wanted, row.correct) == ("x" * 2_000 + "\n[cut: 3 more characters]", True)


def test_the_last_step_that_knows_says_whether_an_episode_is_correct() -> None:
    def correct(*says: bool | None) -> bool | None:
        (row,) = sample(type("Own", (Game,), {"says": says})(), scripted_agent(["a"] * len(says)))
        return row.correct

    assert correct(False, True, None) is True
    assert correct(True, False) is False
    assert correct(None, None) is None


def test_scores_of_a_group_may_say_which_answers_are_correct() -> None:
    class Judged(Question):
        def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> Sequence[Score]:
            return [Score(reward=2.0, correct=True if answer.text == "open" else None) for answer in answers]

    rows = sample(Judged(), scripted_agent(["open", "shut"]), group_size=2)
    # `score` said False of both, and `score_group` says nothing of the second
    assert {row.messages[-1].content: row.correct for row in rows} == {"open": True, "shut": False}


def test_each_agent_of_an_environment_has_the_wanted_answer() -> None:
    rows = sample(Duel(), scripted_agent(["a", "b"]))
    assert [(row.agent_id, row.wanted, row.correct) for row in rows] == [
        ("first", SECRET, False),
        ("second", SECRET, True),
    ]


def test_a_sub_agent_works_on_another_task() -> None:
    agent = scripted_agent([hermes_call("delegate", task="help"), "yes", SECRET])
    rows = sample(Question(), agent, sub_agents=("helper",))
    assert [(row.depth, row.wanted, row.correct) for row in rows] == [(0, SECRET, True), (1, None, None)]
    # The columns are those of the episode, so that all its rows are grouped alike.
    assert {row.example_columns for row in rows} == {'{"hint":"sesame","level":3}'}
    (row,) = sample(Question(), scripted_agent(["a"]), max_column_characters=0)
    assert row.example_columns is None


def test_columns_that_are_no_mapping_of_names_are_refused() -> None:
    for columns in ([("level", 3)], {3: "level"}):

        class Wrong(Question):
            def example(self, index: int, split: str) -> Example:
                return Example(example_id="e", messages=EXAMPLE.messages, columns=columns)  # type: ignore[arg-type] # noqa: B023

        (row,) = sample(Wrong(), scripted_agent(["a"]))
        assert "the columns of an example are" in (row.error or "")
        assert "wanted a mapping of names to values" in (row.error or "")


@pytest.mark.parametrize(
    ("environment", "run", "script"),
    [
        (Question, {}, ["open"]),
        (Game, {}, ["open"] * 3),
        (Game, {"context": "summary:2"}, ["open", "open", "summary", "open"]),
        (Duel, {}, ["open"] * 2),
        (Question, {"sub_agents": ("helper",)}, [hermes_call("delegate", task="help"), "yes", "open"]),
    ],
)
def test_no_call_of_the_model_has_the_wanted_answer(
    environment: Callable[[], Any], run: Mapping[str, Any], script: Sequence[str]
) -> None:
    agent = scripted_agent(script)
    rows = sample(environment(), agent, **run)
    assert {row.wanted for row in rows if row.depth == 0} == {SECRET}
    assert len(prompts(agent)) == len(script)
    for prompt in prompts(agent):
        assert "say the word" in prompt or "help" in prompt
        assert SECRET not in prompt
    for row in rows:
        said = [row.messages, row.agent_steps, row.environment_steps, row.metadata, row.env_example_id]
        assert SECRET not in repr(said)


OWN = """
import datetime

from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message

class Own:
    run_in = "{run_in}"

    def example(self, index, split):
        prompt = Message(role="user", content=f"{{index}}+1=")
        return Example(example_id=f"e{{index}}", messages=(prompt,), wanted=f"{{index * 1000 + 777}}",
                       columns={{"day": datetime.date(2026, 1, 1), "index": index}})

    def score(self, example, answer):
        import numpy as np
        assert example.columns["day"].year == 2026
        return Score(reward=0.5, correct=np.bool_(int(example.wanted) % 2000 == 777))
"""


@pytest.mark.slow
@pytest.mark.parametrize("run_in", ["loop", "thread", "process"])
def test_a_worker_stores_the_wanted_answer_and_shows_it_to_nobody(
    run_in: str, tmp_path: Path, folder: str, run_config: Callable[..., RunConfig], work: Callable[..., int]
) -> None:
    (tmp_path / "own.py").write_text(OWN.format(run_in=run_in))
    root = create_root(str(tmp_path / "run"), run_config(env=(f"{tmp_path}/own.py:Own",), accept_incomplete=True))
    publish(root, folder, budget=4)
    work(root, num_groups=4)
    rows = committed_rows(root, "env_example_id", "wanted", "correct", "example_columns", "prompt_tokens", "messages")
    numbers = [int(row["env_example_id"].removeprefix("e")) for row in rows]
    assert len(rows) == 8
    assert [(row["wanted"], row["correct"], row["example_columns"]) for row in rows] == [
        (f"{number * 1000 + 777}", number % 2 == 0, f'{{"day":"2026-01-01","index":{number}}}') for number in numbers
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, number in zip(rows, numbers, strict=True):
        prompt = tokenizer.decode(row["prompt_tokens"])
        assert f"{number}+1=" in prompt.replace(" ", "")
        assert "777" not in prompt.replace(" ", "")
        assert row["messages"][0]["content"] == f"{number}+1="


# --- Environments of ludic -----------------------------------------------------------------------------------------

SINGLE = ("addition", "number_comparison", "word_problems", "opposites", "sequential_digits")


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_wanted_answer_of_an_environment_is_correct_and_another_one_is_not(name: str, split: Any) -> None:
    environment = make_environment(name)()
    for index in range(50):
        example = environment.example(index, split)
        assert isinstance(example.wanted, str)
        for answer, correct in ((example.wanted, True), ("", False), (f"{example.wanted[:-1]}x", False)):
            environment.reset(example)
            transition = environment.step(answer)
            assert transition.correct is correct
            assert transition.correct == (transition.reward == 1)


def test_a_guess_is_wrong_until_it_is_right() -> None:
    environment = make_environment("guess_number")()
    example = environment.example(0, "train")
    environment.reset(example)
    assert environment.step("no number").correct is False
    assert environment.step(f"{(int(example.wanted) + 1) % 10}").correct is False
    assert environment.step(example.wanted).correct is True


def test_a_reward_without_a_right_answer_wants_none() -> None:
    environment = make_environment("moar_cats")()
    example = environment.example(0, "train")
    environment.reset(example)
    assert (example.wanted, environment.step("cats").correct) == (None, None)


@pytest.mark.parametrize(
    ("scorer", "answer", "right", "wrong"),
    [("exact", " 7 ", "7", "8"), ("numeric", "7", "it is 7.0", "none"), ("regex", "^(?i:yes)$", "YES", "yes!")],
)
def test_stored_questions_want_their_answer(scorer: str, answer: str, right: str, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "one.parquet"
    write_rows(file, [{"question": "What?", "answer": answer}])
    environment = make_environment(f"qa/{file}", {"scorer": scorer, "heldout_share": 0})()
    example = environment.example(0, "train")
    assert example.wanted == answer
    for text, correct in ((right, True), (wrong, False)):
        environment.reset(example)
        assert environment.step(text).correct is correct


def write_rows(file: Path, rows: Sequence[Mapping[str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "caesar_cipher"])
def test_a_generator_wants_its_answer(name: str) -> None:
    environment = make_environment(f"reasoning_gym/{name}")()
    example = environment.example(0, "train")
    assert example.wanted == example.data["entry"]["answer"]
    for text, correct in ((example.wanted, True), ("", False)):
        environment.reset(example)
        assert environment.step(f"<answer>{text}</answer>").correct is correct


@pytest.mark.slow
def test_a_generator_with_many_right_answers_wants_none() -> None:
    assert make_environment("reasoning_gym/graph_color")().example(0, "train").wanted is None


def test_the_first_reward_that_says_so_decides_whether_an_answer_is_correct() -> None:
    def verdict(*values: Any) -> bool | None:
        rewards = {f"r{number}": (lambda completion, value=value: value, 1.0) for number, value in enumerate(values)}
        score = Rubric(rewards).score(Example(example_id="e", messages=(), data={"columns": {}}), "text")
        assert isinstance(score, Score)
        return score.correct

    assert verdict(1.0, 0.5) is None
    assert verdict(True, 0.0) is True
    assert verdict(1.0, False, True) is False
    assert verdict(None, True, False) is True
    assert verdict(Score(reward=0.0, correct=True)) is True
