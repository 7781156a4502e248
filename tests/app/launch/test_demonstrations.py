"""Demonstrations of a warm start: the same for a seed, mixed, scored, and read back as the model would write them."""

import re
from collections import Counter

import pytest

from ludic.agents.parsers import make_parser
from ludic.agents.tools.formats import make_tool_format
from ludic.app.demos.calculator import KINDS, PARSER, DemoRecord, make_demonstrations
from ludic.environments.splits import split_of
from ludic.environments.toys import WordProblems
from ludic.models.chat import render_text
from ludic.models.tiny import train_tokenizer
from ludic.records.messages import to_message


@pytest.fixture(scope="module")
def records() -> list[DemoRecord]:
    return list(make_demonstrations(300, 2))


def of_kind(records: list[DemoRecord], kind: str) -> list[DemoRecord]:
    return [record for record in records if record["metadata"]["kind"] == kind]


def test_a_seed_decides_them(records: list[DemoRecord]) -> None:
    assert list(make_demonstrations(20, 2)) == records[:40]
    assert list(make_demonstrations(20, 2, seed=1)) != records[:40]


def test_they_solve_problems_of_the_train_split_twice_each(records: list[DemoRecord]) -> None:
    ids = [record["env_example_id"] for record in records]
    assert ids == [WordProblems().example(index // 2, "train").example_id for index in range(600)]
    assert {split_of(example_id) for example_id in ids} == {"train"}


def test_the_kinds_have_the_shares_that_they_should(records: list[DemoRecord]) -> None:
    found = Counter(record["metadata"]["kind"] for record in records)
    assert sum(KINDS.values()) == pytest.approx(1)
    for kind, share in KINDS.items():
        assert found[kind] / 600 == pytest.approx(share, abs=0.08)  # four standard deviations of 600 draws


def test_only_good_ones_are_rewarded(records: list[DemoRecord]) -> None:
    rewards = {kind: {record["episode_reward"] for record in of_kind(records, kind)} for kind in KINDS}
    assert rewards["good"] == {1.0}
    assert rewards["no_box"] == rewards["no_call"] == {0.0}
    # Another operation may have the same result, but hardly ever has.
    assert sum(record["episode_reward"] for record in of_kind(records, "wrong_operation")) <= 1


def test_a_good_one_calls_the_calculator_and_answers_what_it_says(records: list[DemoRecord]) -> None:
    for record in of_kind(records, "good"):
        question, call, result, answer = record["messages"]
        function = call["tool_calls"][0]["function"]
        numbers = re.findall("[0-9]+", question["content"])
        assert set(re.findall("[0-9]+", function["arguments"]["expression"])) == set(numbers)
        assert make_parser(PARSER).parse(answer["content"]).action == result["content"]


def test_a_wrong_operation_contradicts_the_story_and_nothing_else_is_wrong(records: list[DemoRecord]) -> None:
    problems = {
        example.example_id: example.data for example in (WordProblems().example(i, "train") for i in range(300))
    }
    for record in of_kind(records, "wrong_operation"):
        said = record["messages"][1]["tool_calls"][0]["function"]["arguments"]["expression"].split()
        right = problems[record["env_example_id"]]["expression"].split()
        assert (said[0], said[2]) == (right[0], right[2])
        assert said[1] != right[1]


def test_rendered_by_the_template_they_are_in_the_hermes_format(records: list[DemoRecord]) -> None:
    tokenizer, hermes = train_tokenizer((), vocab_size=0), make_tool_format("hermes")
    for record in records[:50]:
        messages = [to_message(message) for message in record["messages"]]
        text = render_text(tokenizer, messages, tools=record["tools"], add_generation_prompt=False)
        assert '"name": "calculator"' in text.split("<|im_end|>")[0]
        found = hermes.parse(text)
        assert found.feedback is None
        wanted = [call.arguments for message in messages for call in message.tool_calls]
        assert [call.arguments for call in found.calls] == wanted
