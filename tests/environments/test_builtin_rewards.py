"""Rewards of the built-in environments, worked out by hand."""

import re

import pytest

from ludic.environments.environment import Example
from ludic.environments.moar_cats import PROMPTS, WORDS, MoarCats
from ludic.environments.splits import draw, nth, partition, split_of
from ludic.environments.toys import (
    PAIRS,
    STORIES,
    Addition,
    NumberComparison,
    Opposites,
    SequentialDigits,
    WordProblems,
)
from ludic.errors import ConfigError


def asked(**data: object) -> Example:
    return Example(example_id="x", messages=(), data=data)


@pytest.mark.parametrize(
    ("text", "cats", "love_cats", "length", "reward"),
    [
        ("", 0, 0, 0, 0),
        ("?!", 0, 0, 0, 0),
        ("Cats, CATS and cats.", 3, 0, 4, 3 / 5**0.5),
        ("I love cats", 1, 1, 3, 11 / 2),  # (1 + 10) / sqrt(1 + 3)
        ("love cats. I love my cats", 2, 1, 6, 12 / 7**0.5),  # the second love is not next to cats
        ("cat scats catsup cats's", 1, 0, 5, 1 / 6**0.5),  # whole words only; cats's is cats and s
        ("dogs dogs dogs", 0, 0, 3, 0),
    ],
)
def test_moar_cats_counts_cats_and_loved_cats_by_words(text, cats, love_cats, length, reward):
    score = MoarCats().score(asked(), text)
    assert score.components == {"cats": cats, "love_cats": love_cats, "length": length}
    assert score.reward == pytest.approx(reward)


def test_moar_cats_prompts_use_few_lower_case_words_and_ask_for_cats():
    assert len(WORDS) <= 120
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert {word for prompt in PROMPTS for word in prompt.split()} == set(WORDS)
    assert all("cats" in prompt.split() for prompt in PROMPTS)
    assert len(set(PROMPTS)) == len(PROMPTS) == 12 * 12 * 16


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3 4 5 6", 1),
        ("3456", 1),
        ("3, 4, 5 and 6!", 1),
        ("3 4 5 6 7", 1),
        ("3 4 5", 3 / 4),
        ("3 4 6 5", 2 / 4),
        ("3", 1 / 4),
        ("4 5 6", 0),
        ("٣ ٤ ٥ ٦", 0),  # digits of another script
        ("three", 0),
    ],
)
def test_sequential_digits_pays_the_share_that_is_right_from_the_start(text, reward):
    assert SequentialDigits().score(asked(sequence="3456"), text).reward == pytest.approx(reward)


def test_sequential_digits_asks_for_the_sequence_that_it_scores():
    for index in range(200):
        example = SequentialDigits().example(index, "train")
        first, last = (character for character in example.messages[0].content if character.isdigit())
        sequence = example.data["sequence"]
        assert (sequence[0], sequence[-1]) == (first, last)
        assert sequence in "0123456789"
        assert len(sequence) >= 2


@pytest.mark.parametrize(
    ("text", "reward", "format_"),
    [
        ("1357", 1, 1),
        ("1000 + 357 = 1357.", 1, 1),
        ("The sum is 1,357", 1, 1),
        ("1357 or 1358", 0, 1),
        ("-1357", 0, 1),
        ("13,57", 0, 1),
        ("many", 0, 0),
    ],
)
def test_addition_reads_the_last_whole_number(text, reward, format_):
    score = Addition().score(asked(sum=1357), text)
    assert score.reward == reward
    assert score.components == {"correct": reward, "format": format_}


@pytest.mark.parametrize(
    ("text", "reward", "format_"),
    [("90", 1, 1), ("90 is larger than 17", 1, 1), ("17", 0, 1), ("17 < 90", 0, 1), ("9", 0, 0), ("both", 0, 0)],
)
def test_number_comparison_reads_the_first_whole_number(text, reward, format_):
    score = NumberComparison().score(asked(larger=90, smaller=17), text)
    assert score.reward == reward
    assert score.components == {"correct": reward, "format": format_}


def test_the_numbers_asked_about_are_those_that_are_scored():
    for index in range(200):
        left, right = map(int, Addition(max_digits=4).example(index, "train").example_id.split("+"))
        assert Addition(max_digits=4).example(index, "train").data == {"sum": left + right}
        one, other = map(int, NumberComparison().example(index, "train").example_id.split("-"))
        assert one != other
        assert NumberComparison().example(index, "train").data == {
            "larger": max(one, other),
            "smaller": min(one, other),
        }


@pytest.mark.parametrize("digits", [0, 101, "3", None, 2.0])
@pytest.mark.parametrize("environment", [Addition, NumberComparison, WordProblems])
def test_max_digits_is_checked_when_the_environment_is_built(environment, digits):
    with pytest.raises(ConfigError, match=r"max_digits is .*wanted a whole number from 1 to 100"):
        environment(max_digits=digits)


def test_operands_have_at_most_max_digits_and_every_length_occurs():
    ids = [Addition(max_digits=3).example(index, "train").example_id for index in range(300)]
    assert {len(operand) for example_id in ids for operand in example_id.split("+")} == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "reward", "format_"),
    [
        ("cold", 1, 1),
        ("Cold.", 1, 1),
        ("The opposite of hot is cold", 1, 0),
        ("cold, not hot", 0, 0),
        ("colder", 0, 1),
        ("", 0, 0),
    ],
)
def test_opposites_reads_the_last_word(text, reward, format_):
    score = Opposites().score(asked(opposite="cold"), text)
    assert score.reward == reward
    assert score.components == {"correct": reward, "format": format_}


def test_every_word_has_one_opposite_and_a_pair_is_in_one_split():
    words = [word for pair in PAIRS for word in pair]
    assert len(set(words)) == len(words) == 128
    trained = {Opposites().example(index, "train").example_id for index in range(200)}
    assert all((one in trained) == (other in trained) for one, other in PAIRS)


@pytest.mark.parametrize(
    ("text", "reward", "format_"),
    [
        ("1357", 1, 1),
        (" 1,357\n", 1, 1),
        ("1358", 0, 1),
        ("-1357", 0, 1),
        ("1357 apples", 0, 0),
        ("1357.0", 0, 0),
        ("", 0, 0),
        ("٣", 0, 0),  # a digit of another script
    ],
)
def test_word_problems_want_the_number_alone(text, reward, format_):
    score = WordProblems().score(asked(result=1357), text)
    assert score.reward == reward
    assert score.components == {"correct": reward, "format": format_}


def test_the_numbers_of_a_word_problem_are_those_of_its_expression():
    problems = [WordProblems(max_digits=4).example(index, "train") for index in range(300)]
    for problem in problems:
        story, expression = problem.messages[0].content, problem.data["expression"]
        assert set(re.findall("[0-9]+", story)) == set(re.findall("[0-9]+", expression))
        larger, smaller = int(expression.split()[0]), int(expression.split()[2])
        assert 10 <= smaller < larger
        worked_out = {"+": larger + smaller, "-": larger - smaller, "*": larger * smaller}
        assert problem.data["result"] == worked_out[expression.split()[1]]
    assert {problem.data["expression"].split()[1] for problem in problems} == {"+", "-", "*"}
    assert {len(number) for p in problems for number in p.data["expression"].split()[::2]} == {2, 3, 4}


def test_a_word_problem_ends_with_how_to_answer():
    assert WordProblems().example(0, "train").messages[0].content.endswith(r"? Answer with \boxed{...}.")
    assert WordProblems(ask="").example(0, "train").messages[0].content.endswith("?")
    assert all(story.endswith("?") for story, _ in STORIES)


def test_a_run_through_the_items_has_each_once_a_lap():
    items = "abcde"
    laps = [[nth(items, lap * 5 + index, seed=0) for index in range(5)] for lap in range(20)]
    assert all(sorted(lap) == list(items) for lap in laps)
    assert len({tuple(lap) for lap in laps}) > 1


def test_about_a_quarter_of_the_keys_is_held_out():
    parts = partition(range(4000), key=str)
    assert sorted(parts["train"] + parts["heldout"]) == list(range(4000))
    assert 900 < len(parts["heldout"]) < 1100
    assert all(split_of(str(item)) == "heldout" for item in parts["heldout"])


def test_drawing_from_too_few_examples_says_so():
    other = "train" if split_of("only one") == "heldout" else "heldout"
    with pytest.raises(ConfigError, match=f"split {other}: none of 200 draws.*'only one'.*too few different"):
        draw(lambda random: "only one", str, index=0, split=other, seed=0)
