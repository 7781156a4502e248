"""Rewards for parts of an action fall at the tokens that end them."""

import pytest
from chat_models import chat_tokenizer, scripted_agent
from episodes import Script, end, run_episode

from ludic.agents.parsers import make_parser
from ludic.environments.environment import Score, SpanReward
from ludic.environments.single_turn_adapter import SingleTurn
from ludic.models.chat import decode

SAID = "<think>\nhm 🐈\n</think>\n\nthe answer is 42, sure"


def span(action: str, part: str, reward: float) -> SpanReward:
    start = action.index(part)
    return SpanReward(start=start, end=start + len(part), reward=reward)


@pytest.mark.parametrize("parser", ["whole", "think"])
def test_each_reward_falls_at_the_token_that_ends_its_part(parser: str) -> None:
    action = SAID if parser == "whole" else "the answer is 42, sure"
    spans = (span(action, "the answer", 0.25), span(action, "42", 0.5))
    agent = scripted_agent([SAID], parser=make_parser(parser))
    (row,) = run_episode(agent, Script([end(1.0, span_rewards=spans)]))
    assert (row.episode_reward, row.environment_steps[0].reward) == (1.75, 1.75)
    at = {index: reward for index, reward in enumerate(row.token_rewards.tolist()) if reward}
    assert list(at.values()) == [0.25, 0.5, 1.0]
    first, second, last = at
    assert last == row.response_length - 1
    for index, part in ((first, "the answer"), (second, "42")):
        before, through = (decode(chat_tokenizer(), row.response_tokens[:end]) for end in (index, index + 1))
        assert part in through
        assert part not in before


def test_a_rewritten_action_has_its_rewards_at_the_end() -> None:
    agent = scripted_agent(['{"b": 1,  "a": 2}'], parser=make_parser("json"))
    (row,) = run_episode(agent, Script([end(1.0, span_rewards=(SpanReward(start=0, end=3, reward=0.5),))]))
    assert row.token_rewards[-1] == row.token_rewards.sum() == 1.5


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (0, 99)])
def test_a_part_that_is_not_there_fails_the_episode(start: int, stop: int) -> None:
    transition = end(span_rewards=(SpanReward(start=start, end=stop, reward=1.0),))
    (row,) = run_episode(scripted_agent(["abc"]), Script([transition]))
    assert row.error == f"ValueError: a span is {start} to {stop}, wanted a part of the action's 3 characters"


def test_a_question_and_a_score_may_give_them_too() -> None:
    class Formatted:
        def example(self, index: int, split: str):
            return Script([]).example(index, split)

        def score(self, example: object, answer: str) -> Score:
            return Score(reward=1.0, span_rewards=(span(answer, "answer", 0.5),))

    (row,) = run_episode(scripted_agent(["the answer is 42"]), lambda: SingleTurn(Formatted()))
    assert row.episode_reward == 1.5
