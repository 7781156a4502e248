"""What ludic.environments.environment promises, on every built-in environment and some of reasoning_gym's."""

import json
import os
import runpy
import subprocess
import sys
from math import isfinite

import pytest

from ludic.environments.environment import Environment, Example, Split
from ludic.environments.registry import make_environment
from ludic.settings.kinds import ENVIRONMENT

GYM = ("leg_counting", "chain_sum", "coin_flip", "acre", "spiral_matrix", "prime_factorization")
SEVERAL_STEPS = {"errands", "guess_number", "tic_tac_toe", "tic_tac_toe_self_play"}
"""Games, whose examples share a prompt and have no answer to a question."""
NAMES = (*sorted({*ENVIRONMENT.names()} - SEVERAL_STEPS), *(f"reasoning_gym/{name}" for name in GYM))
INDEXES = range(2000)

ODD_TEXTS = {
    "empty": "",
    "blank": " \n\t ",
    "unicode": "猫 ½ ٣ é \U0001f408 \x00 \u202e",
    "lone surrogate": "\ud83d",
    "long words": "cats and dogs " * 20_000,
    "long number": "7" * 20_000,
    "open brackets": "([{<" * 5_000,
    "open tags": "<answer>" * 5_000,
    "empty tags": "<answer></answer>",
    "code": "__import__('os').abort()",
    "tower": "9**9**9**9",
    "json": '{"a": [1, null]}',
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def environment(name: str) -> Environment:
    return make_environment(name, seed=7)()


def reward(environment: Environment, example: Example, answer: str) -> float:
    environment.reset(example)
    return environment.step(answer).reward


def right_answer(example: Example) -> str:
    match dict(example.data):
        case {"result": value} | {"sum": value} | {"larger": value} | {"sequence": value} | {"opposite": value}:
            return str(value)
        case {"entry": entry}:
            return f"Let me think.\n<answer>{entry['answer']}</answer>"
    return "love cats love cats"


def wrong_answer(example: Example) -> str:
    match dict(example.data):
        case {"smaller": smaller}:
            return str(smaller)
        case {"entry": _}:
            return "<answer>banana</answer>"
    return "banana 5000"


def prompt(example: Example) -> str:
    return "\n".join(message.content for message in example.messages)


def test_the_same_arguments_give_the_same_example(name: str, environment: Environment):
    other = make_environment(name, seed=7)()
    for split in ("train", "heldout"):
        forward = [environment.example(index, split) for index in range(30)]
        backward = [other.example(index, split) for index in reversed(range(30))]
        assert forward == backward[::-1]


def test_another_seed_gives_other_examples(name: str, environment: Environment):
    other = make_environment(name, seed=8)()
    assert [environment.example(i, "train").example_id for i in range(20)] != [
        other.example(i, "train").example_id for i in range(20)
    ]


@pytest.mark.slow
def test_train_and_heldout_share_no_example_and_no_prompt(environment: Environment):
    train = [environment.example(index, "train") for index in INDEXES]
    heldout = [environment.example(index, "heldout") for index in INDEXES]
    assert not {e.example_id for e in train} & {e.example_id for e in heldout}
    assert not {prompt(e) for e in train} & {prompt(e) for e in heldout}


def test_one_example_id_stands_for_one_prompt(environment: Environment):
    examples = [environment.example(index, "train") for index in INDEXES]
    prompts = {e.example_id: prompt(e) for e in examples}
    assert all(prompts[e.example_id] == prompt(e) for e in examples)
    assert len(set(prompts.values())) == len(prompts) > 30


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("index", [0, 2**31, 2**32, 2**62])
def test_any_index_has_an_example(environment: Environment, index: int, split: Split):
    example = environment.example(index, split)
    assert example.example_id
    assert prompt(example).strip()
    assert example.messages[-1].role == "user"


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS.keys())
def test_any_text_is_scored_below_the_right_answer(environment: Environment, text: str):
    example = environment.example(3, "train")
    environment.reset(example)
    transition = environment.step(text)
    assert transition.terminated
    assert transition.observation is None
    assert all(isfinite(part) for part in (transition.reward, *transition.reward_components.values()))
    if text != ODD_TEXTS["long words"]:  # which is a fair text for moar_cats
        assert transition.reward < reward(environment, example, right_answer(example))


def test_the_right_answer_gets_the_full_reward_and_a_wrong_one_less(name: str, environment: Environment):
    # MoarCats has no upper bound: (2 + 10 x 2) / sqrt(1 + 4) = 9.84 for "love cats love cats".
    full = 22 / 5**0.5 if name == "moar_cats" else 1.0
    for index in range(50):
        example = environment.example(index, "heldout")
        assert reward(environment, example, right_answer(example)) == pytest.approx(full)
        assert reward(environment, example, wrong_answer(example)) < full / 2


DESCRIBE_EXAMPLES = """
import json, sys
from ludic.environments.registry import make_environment
def describe(name):
    environment = make_environment(name, seed=7)()
    examples = [environment.example(i, split) for i in (0, 1, 2**62) for split in ("train", "heldout")]
    return [[e.example_id, *(m.content for m in e.messages)] for e in examples]
if __name__ == "__main__":
    json.dump({name: describe(name) for name in sys.argv[1:]}, sys.stdout)
"""


@pytest.mark.slow
def test_another_process_gives_the_same_examples(tmp_path):
    script = tmp_path / "describe.py"
    script.write_text(DESCRIBE_EXAMPLES)
    describe = runpy.run_path(str(script))["describe"]
    other_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other_seed}
    command = [sys.executable, script, *NAMES]
    theirs = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert theirs == {name: describe(name) for name in NAMES}
