"""Errands: what counts, who gets what, and that splitting is better."""

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import run_episode

from ludic.agents.delegation import helper
from ludic.environments.environment import Environment, Example, TaskScorer
from ludic.environments.registry import make_environment
from ludic.environments.toys import Errands
from ludic.errors import ConfigError


def begun(*sums: tuple[int, int]) -> Errands:
    errands = Errands(num_errands=len(sums))
    errands.reset(Example(example_id="x", messages=errands.example(0, "train").messages, data={"sums": list(sums)}))
    return errands


def test_an_answer_counts_for_one_errand() -> None:
    last = begun((1, 2), (1, 2), (3, 4)).step("They are 3, 3 and 7")
    assert (last.reward, last.terminated, last.reward_components) == (pytest.approx(1 / 3), True, {"by_others": 0.0})
    assert begun((1, 2), (3, 4)).step("I do not know").reward == 0.0
    assert begun((1, 2)).step("9" * 5000).reward == 0.0


def test_others_do_what_the_agent_hands_on() -> None:
    errands = begun((1, 2), (3, 4), (5, 6))
    assert errands.score_task("helper", "What is 3+4 ?", "it is 7").reward == 1.0
    assert errands.score_task("helper", "3 + 4", "7").reward == 0.0  # somebody has done it
    assert errands.score_task("helper", "5 + 6", "12").reward == 0.0
    assert errands.score_task("helper", "8 + 8", "16").reward == 0.0  # nobody asked
    last = errands.step("3")
    assert (last.reward, last.reward_components) == (pytest.approx(2 / 3), {"by_others": pytest.approx(1 / 3)})


def test_who_hands_on_all_gets_all() -> None:
    example = Errands(num_errands=2).example(3, "train")
    (a, b), (c, d) = example.data["sums"]
    calls = "\n".join(hermes_call("delegate", task=f"{x} + {y}") for x, y in ((a, b), (c, d)))
    agent = scripted_agent([calls, str(a + b), str(c + d), "done"], sub_agents=(helper(),))
    rows = run_episode(agent, lambda: Errands(num_errands=2), example=example, max_tokens=200)
    assert [(row.agent_id, row.episode_reward) for row in rows] == [("agent", 1.0), ("helper", 1.0), ("helper", 1.0)]


def test_examples_are_drawn_per_split() -> None:
    ids = {split: {Errands().example(i, split).example_id for i in range(200)} for split in ("train", "heldout")}
    assert ids["train"].isdisjoint(ids["heldout"])
    assert Errands(seed=1).example(5, "train") == Errands(seed=1).example(5, "train")


def test_it_is_built_in_and_checks_its_options() -> None:
    environment = make_environment("errands", {"num_errands": 2})()
    assert isinstance(environment, Environment)
    assert isinstance(environment, TaskScorer)
    for options in ({"num_errands": 0}, {"highest": 0}):
        with pytest.raises(ConfigError, match="wanted a number from 1 to"):
            make_environment("errands", options)
