"""Rewards for parts of an action fall at the tokens that end them."""

from typing import Any

import pytest
from chat_models import chat_tokenizer, scripted_agent
from episodes import Script, end, run_episode

from ludic.agents.parsers import Parsed, make_parser
from ludic.environments.environment import Score, SpanReward
from ludic.environments.single_turn import SingleTurn
from ludic.models.decoding import decode

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


@pytest.mark.parametrize(
    ("parser", "said", "before"),
    [
        ("tag:answer", "<answer> 1</answer> because 1 is right", "<answer> "),
        ("think|tag:answer", "<think>\n1 + 0 = 1\n</think>\n\n<answer>1</answer>, yes, 1", "<answer>"),
        ("boxed", r"1 is 1, so \boxed{ 1 }, since 1", r"boxed{ "),
        ("regex:x=(\\d)", "1 x=1 1", "x="),
        ("think", "<think>1</think> 1", "</think> "),
    ],
)
def test_an_action_that_is_there_more_than_once_has_its_reward_where_it_was_read(
    parser: str, said: str, before: str
) -> None:
    agent = scripted_agent([said], parser=make_parser(parser))
    (row,) = run_episode(agent, Script([end(0.0, span_rewards=(SpanReward(start=0, end=1, reward=1.0),))]))
    (index,) = row.token_rewards.nonzero()[0].tolist()
    end_of_answer = said.rindex(before) + len(before) + 1
    through, without = (decode(chat_tokenizer(), row.response_tokens[:stop]) for stop in (index + 1, index))
    assert len(without) < end_of_answer <= len(through)


@pytest.mark.parametrize("start", [None, 1, -1, "here"])
def test_without_a_right_start_the_reward_of_an_action_that_is_there_twice_is_at_the_end(start: Any) -> None:
    class First:
        def parse(self, text: str) -> Parsed:
            return Parsed(action=text[0], start=start)

    for said, is_at_end in (("1 because 1", True), ("1 because", False)):
        agent = scripted_agent([said], parser=First())
        (row,) = run_episode(agent, Script([end(0.0, span_rewards=(SpanReward(start=0, end=1, reward=1.0),))]))
        assert row.token_rewards.nonzero()[0].tolist() == [row.response_length - 1 if is_at_end else 0]


def test_a_character_of_several_tokens_has_its_reward_at_the_last_of_them() -> None:
    spans = (SpanReward(start=0, end=1, reward=1.0), SpanReward(start=1, end=2, reward=2.0))
    (row,) = run_episode(scripted_agent(["😀b"]), Script([end(0.0, span_rewards=spans)]))
    # Four bytes, a letter, and the end.
    assert row.token_rewards.tolist() == [0, 0, 0, 1, 2, 0]


def test_a_rewritten_action_has_its_rewards_at_the_end() -> None:
    agent = scripted_agent(['{"b": 1,  "a": 2}'], parser=make_parser("json"))
    (row,) = run_episode(agent, Script([end(1.0, span_rewards=(SpanReward(start=0, end=3, reward=0.5),))]))
    assert row.token_rewards[-1] == row.token_rewards.sum() == 1.5


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (0, 99)])
def test_a_part_that_is_not_there_fails_the_episode(start: int, stop: int) -> None:
    transition = end(span_rewards=(SpanReward(start=start, end=stop, reward=1.0),))
    (row,) = run_episode(scripted_agent(["abc"]), Script([transition]))
    assert (
        row.error
        == f"ValueError: a span that step returned is {start} to {stop}, wanted a part of the action's 3 characters"
    )


def test_a_question_and_a_score_may_give_them_too() -> None:
    class Formatted:
        def example(self, index: int, split: str):
            return Script([]).example(index, split)

        def score(self, example: object, answer: str) -> Score:
            return Score(reward=1.0, span_rewards=(span(answer, "answer", 0.5),))

    (row,) = run_episode(scripted_agent(["the answer is 42"]), lambda: SingleTurn(Formatted()))
    assert row.episode_reward == 1.5
