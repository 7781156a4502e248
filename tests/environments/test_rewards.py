"""Rewards as functions of a completion and of columns: what they get, how they add up, and what is refused."""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from ludic.environments.environment import Example, GroupAnswer, Score
from ludic.environments.rewards import Rubric, columns_of, sees_group
from ludic.errors import ConfigError, ScorerError

COLUMNS = {"answer": 7, "level": None, "question": "3 + 4?"}
EXAMPLE = Example(example_id="x", messages=(), data={"question": "3 + 4?", "answer": "7", "columns": COLUMNS})


def right(completion: str, answer: int) -> bool:
    return completion == str(answer)


def length(completion: str, unit: int = 10) -> float:
    return len(completion) / unit


async def judged(completion: str, **columns: Any) -> Score:
    await asyncio.sleep(0)
    return Score(reward=2.0, components={"columns": len(columns)}, info={"judge": "kind"})


def rank(completions: list[str], answer: int) -> list[float]:
    return [len(text) + answer for text in completions]


def score(rubric: Rubric, answer: str) -> Score:
    found = rubric.score(EXAMPLE, answer)

    async def awaited() -> Score:
        assert inspect.isawaitable(found)
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def test_the_reward_is_the_sum_of_the_values_times_their_weights() -> None:
    rubric = Rubric({"right": (right, 1.0), "short": (length, -0.5), "watched": (length, 0.0)})
    # right: 7 is no text, but its text is; 1 character of 10: 1 - 0.5 * 0.1
    parts = {"right": 1.0, "short": 0.1, "watched": 0.1}
    assert score(rubric, "7") == Score(reward=0.95, correct=True, components=parts)
    parts = {"right": 0.0, "short": 0.2, "watched": 0.2}
    assert score(rubric, "no") == Score(reward=-0.1, correct=False, components=parts)
    assert score(Rubric({"short": (length, 1.0)}), "no").correct is None


def test_a_coroutine_is_awaited_beside_a_plain_function_and_gets_all_columns() -> None:
    rubric = Rubric({"right": (right, 1.0), "judged": (judged, 0.25)})
    assert score(rubric, "7") == Score(
        reward=1.5,
        correct=True,
        components={"right": 1.0, "judged": 2.0, "judged.columns": 3},
        info={"judged.judge": "kind"},
    )


def ratio(completion: str) -> float:
    return float("nan")


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_reward_that_is_no_finite_number_is_named_with_its_place_and_the_others_are_kept(weight: float) -> None:
    rubric = Rubric({"ratio": (ratio, weight), "right": (right, 1.0)})
    place = rf"\(test_rewards.py:{ratio.__code__.co_firstlineno}, in ratio\)$"
    with pytest.raises(ScorerError, match=rf"reward ratio returned nan, wanted a finite number {place}") as caught:
        score(rubric, "7")
    assert caught.value.components == {"right": 1.0}
    large = Rubric({"large": (lambda completion: Score(reward=1.0, components={"x": 1e39}), 1.0)})
    with pytest.raises(ScorerError, match=r"reward large returned 1e\+39 as the component x, wanted a number up to 3"):
        score(large, "7")


def test_one_value_of_a_group_that_is_no_finite_number_is_named() -> None:
    rubric = Rubric({"rank": (lambda completions: [1.0, float("inf")], 1.0)})
    with pytest.raises(ScorerError, match=r"reward rank returned inf, wanted a finite number \(test_rewards.py:\d+"):
        rubric.score_group(EXAMPLE, answers("a", "b"))


def test_a_value_of_none_is_left_out_of_the_sum() -> None:
    rubric = Rubric({"silent": (lambda completion: None, 2.0), "short": (length, 1.0), "right": (right, 0)})
    assert score(rubric, "no") == Score(reward=0.2, correct=False, components={"short": 0.2, "right": 0.0})
    # What is only measured scores no answer.
    with pytest.raises(ScorerError, match="the answer is not scored: reward silent returned None"):
        score(Rubric({"silent": (lambda completion: None, 2.0), "short": (length, 0)}), "no")


def answers(*texts: str, **fields: Any) -> Sequence[GroupAnswer]:
    given: dict[str, Any] = {"reward": 0.5, "components": {"right": 0.5}, **fields}
    return [
        GroupAnswer(text=text, messages=(), group_index=at, agent_id="agent", **given) for at, text in enumerate(texts)
    ]


def test_a_reward_that_sees_the_group_is_added_to_those_of_single_answers() -> None:
    rubric = Rubric({"right": (right, 1.0), "rank": (rank, 0.1)})
    assert rubric.score_group(EXAMPLE, answers("a", "abc")) == [
        Score(reward=pytest.approx(0.5 + 0.8), components={"right": 0.5, "rank": 8.0}),
        Score(reward=pytest.approx(0.5 + 1.0), components={"right": 0.5, "rank": 10.0}),
    ]
    assert score(Rubric({"rank": (rank, 0.1)}), "a") == Score(reward=0, components={})


def test_a_reward_that_sees_the_group_says_what_is_correct_unless_another_one_has_said_it() -> None:
    best = Score(reward=1.0, correct=True, components={"votes": 3.0}, info={"why": "longest"}, extra={"x_rank": 1})
    rubric = Rubric({"vote": (lambda completions: [best, False], 0.5)})
    first, second = rubric.score_group(EXAMPLE, answers("abc", "a", components={}))
    components = {"vote": 1.0, "vote.votes": 3.0}
    assert first == Score(
        reward=1.0, correct=True, components=components, info={"vote.why": "longest"}, extra={"x_rank": 1}
    )
    assert second == Score(reward=0.5, correct=False, components={"vote": 0.0})
    first, second = rubric.score_group(EXAMPLE, answers("abc", "a", correct=False))
    assert (first.correct, second.correct) == (False, False)


def test_an_answer_that_a_group_leaves_unscored_keeps_its_own_score() -> None:
    rubric = Rubric({"right": (right, 1.0), "rank": (lambda completions: [None, 4.0], 0.5)})
    first, second = rubric.score_group(EXAMPLE, answers("a", "b"))
    assert first == Score(reward=0.5, components={"right": 0.5})
    assert second == Score(reward=2.5, components={"right": 0.5, "rank": 4.0})
    with pytest.raises(ScorerError, match="answer 0 of 2 is not scored: reward rank returned None"):
        Rubric({"rank": (lambda completions: [None, 4.0], 0.5)}).score_group(EXAMPLE, answers("a", "b", components={}))


@pytest.mark.parametrize("found", [3.0, [1.0], "ab", None])
def test_a_group_needs_a_number_for_each_answer(found: object) -> None:
    rubric = Rubric({"rank": (lambda completions: found, 1.0)})
    with pytest.raises(ScorerError, match=r"reward rank returned .*, wanted a list of 2 numbers, one an answer"):
        rubric.score_group(EXAMPLE, answers("a", "b"))


def test_a_reward_that_returns_no_number_is_named() -> None:
    with pytest.raises(ScorerError, match=r"reward right returned 'yes', wanted a number or a Score"):
        score(Rubric({"right": (lambda completion: "yes", 1.0)}), "7")


def test_the_columns_of_a_reward_are_its_parameters() -> None:
    assert columns_of("r", right, COLUMNS, "the data set") == ["answer"]
    assert columns_of("r", length, COLUMNS, "the data set") == []
    assert columns_of("r", judged, COLUMNS, "the data set") == ["answer", "level", "question"]
    assert [sees_group(each) for each in (right, judged, rank)] == [False, False, True]


def by_position(completion: str, answer: str, /) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completion, anwser: 1.0, r"reward r: column 'anwser' is unknown; did you mean 'answer'\?.*\(q.jsonl\)"),
        (lambda text: 1.0, r"reward r takes \(text\), wanted completion, the answer, or completions, all answers"),
        (by_position, r"reward r takes completion by position only; leave out the /"),
    ],
)
def test_parameters_that_are_no_columns_are_refused(function: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        columns_of("r", function, COLUMNS, "q.jsonl")
