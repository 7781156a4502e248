"""Rows of a trainer of TRL: texts of its columns, calls of tools, and the bytes in which ranks send them."""

import datetime
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ludic.adapters.trl_rows import Generation, Sampling, distinct, from_bytes, metrics_of, row_of, to_bytes
from ludic.errors import RefusedRecordError
from ludic.records.rollout import MOST_WANTED_CHARACTERS

SAMPLING = Sampling(
    columns={"temperature": 0.5, "top_p": 1.0, "top_k": None, "max_tokens": 8, "engine": "vllm 0.32.0"},
    metadata={"min_p": "0.1"},
    stop_tokens=frozenset({9}),
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
MESSAGES = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "three"},
]


def generation(**columns: Any) -> Generation:
    """One row: a call of two tokens, a result of two, and an answer of one."""
    return Generation(
        number=7,
        first=0,
        version=3,
        purpose="train",
        prompt_ids=[[1, 2]],
        completion_ids=[np.array([3, 4, 5, 6, 9], np.int32)],
        tool_masks=[[1, 1, 0, 0, 1]],
        prompts=[[{"role": "user", "content": "1 + 2 ="}]],
        completions=[MESSAGES],
        inputs=[{"prompt": "not again", **columns}],
        rewards=np.array([[0.5, np.nan]], np.float32),
        reward_names=["right", "brief"],
        totals=np.array([0.5], np.float32),
        logged={"seen": [2]},
        sampler_logprobs=[[-1.0, -2.0, 0.0, 0.0, -120.0]],
        trainer_logprobs=[None],
        env_names=[None],
    )


def test_a_row_with_tools_has_a_step_for_each_call_of_the_model():
    row = row_of(generation(), 0, SAMPLING)
    assert [(step.start, step.end, step.action_target, step.action) for step in row["agent_steps"]] == [
        (0, 2, "internal", ""),
        (4, 5, "env", "three"),
    ]
    assert row["num_turns"] == 2
    assert [message.role for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["response_logprobs"].tolist() == [-1, -2, 0, 0, -100]
    assert (row["capture"], row["finish_reason"]) == ("sampler", "stop")
    assert row["reward_components"] == {"right": 0.5}


def test_a_rows_values_become_texts_and_what_is_no_text_is_counted_by_name():
    columns = {"day": datetime.date(2026, 11, 29), "ids": np.array([1, np.nan]), "seen": "before", "thing": object()}
    own = generation(answer=["42"], label=0, none=None, long="x" * 20_000, image=None, **columns)
    own = replace(own, logged={**own.logged, "said": ["x" * 201]})
    row = row_of(own, 0, SAMPLING)
    assert row["metadata"] == {"seen": "2", "min_p": "0.1"}
    stored = json.loads(row["example_columns"])
    assert stored.pop("long")["characters"] == 20_000
    assert stored == {"label": 0, "none": None, "day": "2026-11-29", "ids": [1, None], "seen": "before"}
    assert row["wanted"] == "42"
    assert own.not_kept == Counter({"thing": 1, "said": 1})
    cut = row_of(generation(solution="y" * 3_000), 0, SAMPLING)["wanted"]
    assert cut.startswith("y" * MOST_WANTED_CHARACTERS)
    assert "cut: 1,000 more" in cut


def test_a_column_of_megabytes_is_left_out_without_being_written_as_a_whole():
    """Columns of tests of programs are as large; each row of each step has them."""

    class Tests(list[str]):
        def __iter__(self) -> Iterator[str]:
            for number, test in enumerate(super().__iter__()):
                assert number < 2_000, "it was read on"
                yield test

    own = generation(tests=Tests(["assert"] * 5_000), cases={"in": Tests(["1"] * 5_000)}, few=Tests(["a"]))
    assert row_of(own, 0, SAMPLING)["example_columns"] == '{"few":["a"]}'
    assert own.not_kept == Counter({"tests": 1, "cases": 1})


def test_reward_functions_of_one_name_are_told_apart():
    assert distinct(["<lambda>", "brief", "<lambda>", "<lambda>"]) == ["<lambda>", "brief", "<lambda> 2", "<lambda> 3"]
    assert distinct(["a", "a", "a 2"]) == ["a", "a 3", "a 2"]


def test_messages_that_can_not_be_read_are_counted_and_the_row_is_kept():
    own = replace(generation(), prompts=[[{"role": "critic", "content": "1 + 2 ="}]])
    row = row_of(own, 0, SAMPLING)
    assert row["messages"] == ()
    assert "agent_steps" not in row
    ((reason, number),) = own.not_kept.items()
    assert reason.startswith("messages (")
    assert number == 1


def test_a_row_with_an_image_is_refused_by_the_name_of_its_column_or_part():
    part = {"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "what?"}]}
    for own in (generation(images=["a.png"]), replace(generation(), prompts=[[part]])):
        with pytest.raises(RefusedRecordError, match=r"^it has images?, and a root holds texts and tokens alone$"):
            row_of(own, 0, SAMPLING)


@pytest.mark.parametrize("unscored", [False, True])
def test_rows_are_the_same_on_the_rank_that_they_are_sent_to(unscored: bool):
    own = replace(generation(answer="3"), totals=np.array([np.nan if unscored else 0.5], np.float32))
    row = {**row_of(own, 0, SAMPLING), "place": [7, 0]}
    assert (row["episode_reward"] is None) == unscored == ("error" in row)
    bare = {name: value for name, value in row.items() if name not in ("response_logprobs", "action_mask")}
    note = {"used": [[5, 0.25], [6, None]], "failed": {"a row": 1}}
    found, found_note = from_bytes(to_bytes([row, bare], note))
    assert found_note == note
    for sent, received in zip([row, bare], found, strict=True):
        assert received.keys() == sent.keys()
        for name, value in sent.items():
            if isinstance(value, np.ndarray):
                assert received[name].dtype == value.dtype
                assert received[name].tolist() == value.tolist()
            else:
                assert received[name] == value
    assert from_bytes(to_bytes([], {})) == ([], {})


def test_numbers_of_trl_have_ludics_names_where_it_has_the_same():
    logs = {"loss": 0.5, "kl": 0.1, "clip_ratio/region_mean": 0.0, "step_time": 2, "reward": 1.0, "bad": float("nan")}
    assert metrics_of({**logs, "none": None, "text": "0.1"}) == {
        "loss": 0.5,
        "reference_kl": 0.1,
        "clip_fraction": 0.0,
        "step_s": 2.0,
        "reward": 1.0,
    }
