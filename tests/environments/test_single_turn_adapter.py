import pytest

from ludic.environments.environment import Environment, Example, Score, Transition
from ludic.environments.single_turn import SingleTurn
from ludic.records.rollout import Message


class Echo:
    """Pays for each letter; says what it was asked."""

    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content=f"say {index}"),))

    def score(self, example, answer):
        return Score(
            reward=len(answer),
            components={"letters": len(answer)},
            info={"asked": example.example_id},
            extra={"x_first": answer[:1]},
        )


def test_an_episode_is_one_reset_and_one_step():
    environment = SingleTurn(Echo())
    assert isinstance(environment, Environment)
    assert environment.reset(environment.example(3, "train")) == (Message(role="user", content="say 3"),)
    assert environment.step("four") == Transition(
        observation=None,
        reward=4,
        reward_components={"letters": 4},
        terminated=True,
        truncated=False,
        info={"asked": "train-3"},
        extra={"x_first": "f"},
    )


def test_a_step_before_the_reset_or_after_the_end_says_what_to_do():
    environment = SingleTurn(Echo())
    with pytest.raises(RuntimeError, match=r"Echo: step\(\) without an open episode; call reset\(example\) first"):
        environment.step("early")
    environment.reset(environment.example(0, "train"))
    environment.step("once")
    with pytest.raises(RuntimeError, match="ends at its first step"):
        environment.step("twice")


def test_a_reset_opens_the_next_episode():
    environment = SingleTurn(Echo())
    for index in range(3):
        environment.reset(environment.example(index, "heldout"))
        assert environment.step("a").info == {"asked": f"heldout-{index}"}
