"""What is refused, and that the message names row, column and reason."""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
from strategies import changed, make_group

from ludic.errors import InvalidBatchError
from ludic.records.columns import Ragged, array_columns
from ludic.records.rollout import RolloutBatch, RolloutGroup, RolloutMetadata, ToolCall, WeightSpan
from ludic.records.validation import Problem, find_problems, validate

GROUP = make_group(group_size=2, response_length=4)
FIRST, SECOND = GROUP.rollouts
TURNS = make_group(group_size=1, response_length=7, num_turns=2, seed=7).rollouts[0]
"""action_mask 1 1 1 0 1 1 1."""


def batch_of(*groups: RolloutGroup) -> RolloutBatch:
    return RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id="w0"))


def group_of(*rollouts) -> RolloutGroup:
    return RolloutGroup(key="key", rollouts=rollouts)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def problems_of_second(**changes) -> list[tuple[str, str]]:
    """Column and reason of every problem, with these fields of the group's second row changed."""
    problems = find_problems(batch_of(group_of(FIRST, changed(SECOND, **changes))))
    rollout_id = changes.get("rollout_id", SECOND.rollout_id)
    assert {problem.where for problem in problems} <= {f"rollout {rollout_id}"}
    return [(problem.column, problem.reason) for problem in problems]


def test_a_sound_batch_passes():
    validate(batch_of(GROUP, make_group(seed=1, num_turns=3), make_group(seed=2, rewards=[1.0, None])))


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        # Lengths, types and shapes of the token lists
        ("response_logprobs", floats(-1, -1, -1), "has length 3, response_tokens has 4"),
        ("token_rewards", floats(), "has length 0, response_tokens has 4"),
        ("action_mask", np.ones(5, np.bool_), "has length 5, response_tokens has 4"),
        (
            "response_logprobs",
            np.zeros(4),
            "is float64 of shape (4,), wanted a NumPy array of float32",
        ),
        ("prompt_tokens", np.zeros((1, 2), np.int32), "is int32 of shape (1, 2), wanted a NumPy array of int32"),
        ("prompt_tokens", np.zeros(2, np.int64), "is int64 of shape (2,), wanted a NumPy array of int32"),
        ("prompt_tokens", [1, 2], "is list, wanted a NumPy array of int32"),
        ("prompt_tokens", None, "is NoneType, wanted a NumPy array of int32"),
        # Numbers
        ("response_logprobs", floats(-1, np.nan, -1, np.nan), "is nan at token 1, and 1 more, wanted a finite number"),
        ("response_logprobs", floats(-1, -1, -1, -np.inf), "is -inf at token 3, wanted a finite number"),
        ("response_logprobs", floats(-100, -100.5, -1, 0), "is -100.5 at token 1, wanted the logarithm"),
        ("response_tokens", tokens(0, -1, 5, 6), "is -1 at token 1, wanted a token id from 0 to 2147483647"),
        (
            "response_logprobs",
            floats(-1, 0.5, 0, 0),
            "is 0.5 at token 1, wanted the logarithm of a probability",
        ),
        ("token_rewards", floats(0, 0, np.inf, 0), "is inf at token 2, wanted a finite number"),
        ("prompt_tokens", tokens(3, -1), "is -1 at token 1, wanted a token id from 0 to 2147483647"),
        ("response_tokens", tokens(-5, 1, 1, 1), "is -5 at token 0, wanted a token id from 0 to 2147483647"),
        ("episode_reward", float("nan"), "is nan, wanted a finite double"),
        ("episode_reward", 10**400, f"is {10**400}, wanted a finite double"),
        ("episode_reward", np.float32("inf"), "is inf, wanted a finite double"),
        ("reward_components", {"a": 1.0, "b": float("inf")}, "is inf, wanted a finite double"),
        ("temperature", float("nan"), "is nan, wanted a finite float"),
        ("temperature", 1e39, "is 1e+39, wanted a finite float"),
        ("top_p", float("nan"), "is nan, wanted a finite float"),
        ("seed", 2**63, "is 9223372036854775808, wanted int64"),
        ("max_tokens", -(2**31) - 1, "is -2147483649, wanted int32"),
        # Python types
        ("env_example_id", None, "is null, wanted str"),
        ("model", 3, "is 3, wanted str"),
        ("terminated", 1, "is 1, wanted bool"),
        ("num_turns", True, "is True, wanted int"),
        ("num_turns", 1.0, "is 1.0, wanted int"),
        ("metadata", {"a": 1}, "is 1, wanted str"),
        ("metadata", "text", "is 'text', wanted Mapping"),
        ("messages", "text", "is 'text', wanted tuple"),
        (
            "model",
            "\ud83d",
            "is '\\ud83d', which holds half a surrogate pair; wanted text that can be encoded as UTF-8",
        ),
        # Meaning
        ("parent_segment_index", 0, "is 0, wanted the segment_index of an earlier row, or null"),
        ("weight_versions", (WeightSpan(version=-1, start=0, end=1),), "is -1, wanted at least 0"),
        ("weight_versions", (WeightSpan(version=1, start=2, end=2),), "is 2 with end 2, wanted a span after token 0"),
        ("weight_versions", (WeightSpan(version=1, start=0, end=5),), "is 0 with end 5, wanted a span after token 0"),
        ("prompt_tokens", tokens(), "is 0, wanted at least one prompt token"),
        ("episode_reward", None, "is null, wanted a reward, since no error is set"),
        ("env_example_id", "", "is '', wanted a text that is not empty"),
        ("episode_id", "", "is '', wanted a text that is not empty"),
        ("parent_rollout_id", "", "is '', wanted a text that is not empty"),
        ("depth", -1, "is -1, wanted at least 0"),
        ("policy_version_last", -1, "is -1, wanted at least policy_version"),
        ("finish_reason", "eos", "is 'eos', wanted stop or length or null"),
        ("truncated", True, "is null, wanted a reason when truncated is true, and only then"),
        ("truncation_reason", "env", "is 'env', wanted a reason when truncated is true, and only then"),
    ],
)
def test_a_bad_value_is_refused_with_its_column_and_reason(column, value, reason):
    ((found_column, found_reason),) = problems_of_second(**{column: value})
    assert found_column.partition("[]")[0] in (column, COLUMN_OF_RULE.get(column))
    assert found_reason.startswith(reason)


COLUMN_OF_RULE = {"prompt_tokens": "prompt_length", "truncated": "truncation_reason"}
"""Where a rule speaks of another column than the one that was changed."""


def test_an_element_that_is_no_record_is_refused():
    assert problems_of_second(messages=({"role": "user"},)) == [("messages[]", "is {'role': 'user'}, wanted Message")]


def test_a_truncation_reason_that_nobody_knows_is_refused():
    ((column, reason),) = problems_of_second(truncated=True, truncation_reason="bored")
    assert (column, reason) == (
        "truncation_reason",
        "is 'bored', wanted max_steps or env or max_seq_len or context_length or time_limit or budget or null",
    )


def test_a_logprob_may_be_above_zero_by_rounding_only():
    assert problems_of_second(response_logprobs=floats(5e-6, -1, -1, -1)) == []
    ((column, _),) = problems_of_second(response_logprobs=floats(5e-5, -1, -1, -1))
    assert column == "response_logprobs"


def test_a_token_that_was_not_sampled_has_no_logprob():
    rollout = changed(TURNS, response_logprobs=np.full(7, -1, np.float32))
    (problem,) = find_problems(batch_of(GROUP, group_of(rollout)))
    assert problem == Problem(
        where=f"rollout {TURNS.rollout_id}",
        column="response_logprobs",
        reason="is -1.0 at token 3, wanted 0, since action_mask is 0",
    )


def test_only_an_episode_that_failed_may_have_sampled_nothing():
    empty = dict.fromkeys(("response_logprobs", "token_rewards"), floats()) | {
        "response_tokens": tokens(),
        "agent_steps": (),
        "environment_steps": (),
    }
    assert problems_of_second(**empty, error="the server went away", episode_reward=None) == []
    assert problems_of_second(**empty) == [
        ("response_length", "is 0, wanted at least one response token, since no error is set")
    ]


@pytest.mark.parametrize(
    ("change", "column", "reason"),
    [
        ({"start": -1}, "start", "is -1 in turn 0, wanted 0 to end, which is 4"),
        ({"start": 3, "end": 2}, "start", "is 3 in turn 0, wanted 0 to end, which is 2"),
        ({"end": 5}, "end", "is 5 in turn 0, wanted at most response_length, which is 4"),
        ({"action_target": "tool"}, "action_target", "is 'tool', wanted internal or external or env"),
        ({"finish_reason": "eos"}, "finish_reason", "is 'eos', wanted stop or length or null"),
        ({"turn": 2**31}, "turn", "is 2147483648, wanted int32"),
        (
            {"tool_calls": (ToolCall(id="1", name="a", arguments=None),)},
            "tool_calls[].arguments",
            "is null, wanted str",
        ),
    ],
)
def test_a_bad_agent_step_is_refused(change, column, reason):
    step = replace(SECOND.agent_steps[0], **change)
    assert problems_of_second(agent_steps=(step,)) == [(f"agent_steps[].{column}", reason)]


@pytest.mark.parametrize(
    ("change", "column", "reason"),
    [
        ({"reward": float("-inf")}, "reward", "is -inf, wanted a finite double"),
        ({"agent_steps": (1,)}, "agent_steps", "is 1 in turn 0, wanted an index of the rollout's 1 agent_steps"),
        ({"agent_steps": ("0",)}, "agent_steps[]", "is '0', wanted int"),
        ({"info": {"a": None}}, "info", "is null, wanted str"),
    ],
)
def test_a_bad_environment_step_is_refused(change, column, reason):
    step = replace(SECOND.environment_steps[0], **change)
    assert problems_of_second(environment_steps=(step,)) == [(f"environment_steps[].{column}", reason)]


@pytest.mark.parametrize("capture", ["ids", "text"])
def test_logprobs_that_nobody_kept_are_zeros(capture):
    found = problems_of_second(capture=capture, response_logprobs=floats(0, -1, 0, -0.5))
    wanted = f"wanted zeros, since capture is {capture}: no logprobs were stored"
    assert found == [("response_logprobs", f"has 2 that are not 0, {wanted}")]
    assert problems_of_second(capture=capture, response_logprobs=floats(0, 0, 0, 0)) == []


def test_what_was_kept_of_the_sampling_is_a_known_level():
    wanted = "wanted sampler or trainer or ids or text or null"
    assert problems_of_second(capture="tokens") == [("capture", f"is 'tokens', {wanted}")]
    assert [problems_of_second(capture=level) for level in ("sampler", "trainer", None)] == [[], [], []]


def test_the_row_is_found_among_rows_of_other_lengths():
    rows = [
        make_group(group_size=1, seed=seed, response_length=length).rollouts[0] for seed, length in enumerate([3, 5, 2])
    ]
    bad = rows[1].response_logprobs.copy()
    bad[0] = np.nan
    rows[1] = changed(rows[1], response_logprobs=bad)
    (problem,) = find_problems(batch_of(*map(group_of, rows)))
    assert problem.where == f"rollout {rows[1].rollout_id}"
    assert problem.reason == "is nan at token 0, wanted a finite number"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"group_size": 3}, [("group_size", "is 3, the group has 2 episodes")]),
        ({"group_index": 2}, [("group_index", "is 2, wanted 0 to group_size - 1 (1)")]),
        ({"group_index": -1}, [("group_index", "is -1, wanted 0 to group_size - 1 (1)")]),
        ({"group_index": 0}, [("group_index", f"is 0, as in the group's episode {FIRST.episode_id}")]),
        ({"group_id": "other"}, [("group_id", f"is 'other', the first row of its group has {FIRST.group_id!r}")]),
        ({"env_name": "other"}, [("env_name", "is 'other', the first row of its group has 'moar_cats'")]),
        ({"purpose": "eval"}, [("purpose", "is 'eval', the first row of its group has 'train'")]),
        ({"rollout_id": FIRST.rollout_id}, [("rollout_id", "is that of 2 rows of the batch, wanted unique")]),
    ],
)
def test_rows_of_a_group_agree(changes, expected):
    assert problems_of_second(**changes) == expected


def test_a_name_that_hive_partitions_have_for_null_is_refused():
    rows = [replace(rollout, env_name="__HIVE_DEFAULT_PARTITION__") for rollout in GROUP.rollouts]
    assert {(each.column, each.reason) for each in find_problems(batch_of(group_of(*rows)))} == {
        ("env_name", "is '__HIVE_DEFAULT_PARTITION__', wanted another: pandas reads this folder name as null")
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"env_name": "a" * 252}, ("env_name", "wanted 251 bytes at most")),
        ({"env_name": "\u00fc" * 42}, ("env_name", "wanted 251 bytes at most")),
        (
            {"policy_version": 10**18, "policy_version_last": 10**18},
            ("policy_version", "is 1000000000000000000, wanted below 10**18, the limit of file names"),
        ),
    ],
)
def test_what_a_file_can_not_have_in_its_name_is_refused(changes, expected):
    rows = [replace(rollout, **changes) for rollout in GROUP.rollouts]
    problems = find_problems(batch_of(group_of(*rows)))
    assert {each.column for each in problems} == {expected[0]}
    assert all(each.reason.endswith(expected[1]) for each in problems)


def test_an_unknown_purpose_is_refused():
    rows = [replace(rollout, purpose="training") for rollout in GROUP.rollouts]
    assert [problem.reason for problem in find_problems(batch_of(group_of(*rows)))] == [
        "is 'training', wanted train or eval",
        "is 'training', wanted train or eval",
    ]


def test_group_size_counts_episodes_not_rows():
    again = replace(SECOND, rollout_id="segment", segment_index=1)
    assert find_problems(batch_of(group_of(FIRST, SECOND, again))) == []
    (problem,) = find_problems(batch_of(group_of(FIRST, SECOND, replace(again, group_index=0))))
    assert str(problem) == "rollout segment: group_index is 0, another row of its episode has 1"


def test_a_group_id_occurs_once_in_a_batch():
    other = make_group(group_size=1, seed=9).rollouts[0]
    (problem,) = find_problems(batch_of(GROUP, group_of(replace(other, group_id=FIRST.group_id))))
    assert str(problem) == f"group {FIRST.group_id}: group_id is that of 2 groups, wanted unique"


def test_empty_groups_and_batches_are_refused():
    with pytest.raises(InvalidBatchError, match="group 'q1': rollouts is empty, wanted at least one"):
        validate(batch_of(GROUP, RolloutGroup(key="q1", rollouts=())))
    with pytest.raises(InvalidBatchError, match="batch: groups is empty, wanted at least one group"):
        validate(batch_of())


def test_the_batch_says_who_made_it_and_when():
    metadata = RolloutMetadata(worker_id="", timestamp=datetime(2026, 1, 1))
    assert [str(problem) for problem in find_problems(RolloutBatch(groups=(GROUP,), metadata=metadata))] == [
        "batch: worker_id is '', wanted a text that is not empty",
        "batch: created_at is 2026-01-01 00:00:00, wanted a time zone, for example datetime.now(UTC)",
    ]


def test_all_bad_rows_are_listed_and_those_beyond_twenty_counted():
    rows = make_group(group_size=25).rollouts
    bad = [replace(rollout, finish_reason="eos") for rollout in rows[:23]]
    with pytest.raises(InvalidBatchError) as refused:
        validate(batch_of(group_of(*bad, *rows[23:])))
    lines = str(refused.value).split("\n  ")
    assert lines[0] == "the batch of worker w0 was refused whole, nothing was written:"
    assert lines[1:21] == [
        f"rollout {rollout.rollout_id}: finish_reason is 'eos', wanted stop or length or null" for rollout in bad[:20]
    ]
    assert lines[21:] == ["and 3 more"]


def test_twenty_bad_rows_are_all_listed():
    bad = [replace(rollout, finish_reason="eos") for rollout in make_group(group_size=20).rollouts]
    with pytest.raises(InvalidBatchError) as refused:
        validate(batch_of(group_of(*bad)))
    assert len(str(refused.value).split("\n  ")) == 1 + 20


def test_the_least_number_of_a_column_is_in_its_range():
    experts = np.array([[[0, 7]], [[-1, 7]], [[-1, 0]]], np.int16)
    assert array_columns()["experts"].bad_numbers(experts) == "is -1 at token 1, and 1 more, wanted 0 to 32767"


def test_a_row_of_the_wrong_type_does_not_hide_what_is_wrong_with_others():
    bad_type = replace(FIRST, episode_reward="high")
    bad_value = replace(make_group(group_size=1, seed=4).rollouts[0], depth=-1)
    assert [problem.column for problem in find_problems(batch_of(group_of(bad_type, SECOND), group_of(bad_value)))] == [
        "episode_reward",
        "depth",
    ]


# --- A run's own columns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"x_other": 1}, "x_other is not a column of this run, whose extra_columns are x_judge, x_score, x_spans"),
        ({"judge": "gpt"}, "judge is not a column of this run"),
        ({"x_judge": 1}, "x_judge is 1, wanted str"),
        ({"x_score": "high"}, "x_score is 'high', wanted float"),
        ({"x_score": float("nan")}, "x_score is nan, wanted a finite double"),
        ({"x_score": -np.inf}, "x_score is -inf, wanted a finite double"),
        ({"x_score": True}, "x_score is True, wanted float"),
        ({"x_judge": "\ud800"}, "x_judge is '\\ud800', which holds half a surrogate pair"),
        ({"x_spans": [1, 2**63]}, "x_spans[] is 9223372036854775808, wanted int64"),
        ({"x_spans": 3}, "x_spans is 3, wanted tuple"),
        ({"x_spans": [1, None]}, "x_spans[] is null, wanted int"),
    ],
)
def test_values_of_a_runs_own_columns_are_held_to_their_declaration(extra, problem):
    declared = {"x_judge": "string", "x_score": "double", "x_spans": "list<int64>"}
    (found,) = find_problems(batch_of(group_of(FIRST, replace(SECOND, extra=extra))), declared)
    assert str(found).startswith(f"rollout {SECOND.rollout_id}: {problem}")


def test_values_of_a_runs_own_columns_may_be_left_out_null_or_of_numpy():
    declared = {"x_score": "double", "x_count": "int64", "x_ok": "bool"}
    rows = [
        replace(FIRST, extra={"x_score": np.float32(0.5), "x_count": np.int16(3)}),
        replace(SECOND, extra={"x_ok": np.False_, "x_score": 1, "x_count": None}),
    ]
    assert find_problems(batch_of(group_of(*rows)), declared) == []


def test_extra_that_is_no_mapping_is_refused():
    (found,) = find_problems(batch_of(group_of(FIRST, replace(SECOND, extra=["x_a"]))))
    assert str(found) == f"rollout {SECOND.rollout_id}: extra is ['x_a'], wanted a mapping"


# SECOND has four tokens; those of TURNS at index 3 were not sampled.
SOUND = [sorted({int(token), 200_000}) for token in SECOND.response_tokens]


def kept(*lists: list[int]) -> Ragged:
    return Ragged.of(lists, np.int32)


def test_kept_tokens_of_every_token_are_sound():
    assert problems_of_second(kept_tokens=kept(*SOUND)) == []


@pytest.mark.parametrize(
    ("kept_tokens", "reason"),
    [
        (kept(*SOUND[:3]), "has length 3, response_tokens has 4"),
        (tokens(1, 2, 3, 4), "is ndarray, wanted a Ragged of int32"),
        (Ragged.of(SOUND, np.int64), "holds int64, wanted int32"),
        (
            Ragged(tokens(9, 1, 2, 3, 4), np.array([1, 2, 3, 4, 5])),
            "has bounds that do not rise from 0 to its 5 numbers",
        ),
        (Ragged(tokens(1, 2, 3, 4, 9), np.arange(5)), "has bounds that do not rise from 0 to its 5 numbers"),
        (Ragged(tokens(1, 2, 3), np.array([0, 2, 1, 2, 3])), "has bounds that do not rise from 0 to its 3 numbers"),
        (Ragged(tokens(1), np.array([0, 1, 1, 1, 9])), "has bounds that do not rise from 0 to its 1 numbers"),
        (
            Ragged(tokens(1), np.array([0, 1.0])),
            "has bounds that are not a non-empty one-dimensional integer array",
        ),
        (kept(*SOUND[:3], []), "at token 3 lacks the sampled token, wanted it among the kept ones"),
        (
            kept([200_000], SOUND[1], [200_000], SOUND[3]),
            "at token 0, and 1 more lacks the sampled token, wanted it among the kept ones",
        ),
        (kept(SOUND[0][::-1], *SOUND[1:]), f"is {SOUND[0][0]} at token 0, wanted sorted numbers, each once"),
        (
            kept(SOUND[0], [*SOUND[1][:1], *SOUND[1]], *SOUND[2:]),
            f"is {SOUND[1][0]} at token 1, wanted sorted numbers, each once",
        ),
        (kept([-1, *SOUND[0]], *SOUND[1:]), "is -1 at token 0, wanted a token id from 0 to 2147483647"),
    ],
)
def test_kept_tokens_that_the_trainer_can_not_renormalise_over_are_refused(kept_tokens, reason):
    ((column, found),) = problems_of_second(kept_tokens=kept_tokens)
    assert column == "kept_tokens"
    assert found.startswith(reason)


def test_tokens_that_were_not_sampled_keep_none():
    of_all = kept(*([token] for token in TURNS.response_tokens.tolist()))
    (problem,) = find_problems(batch_of(group_of(changed(TURNS, kept_tokens=of_all))))
    assert problem.reason == f"is [{TURNS.response_tokens[3]}] at token 3, wanted no numbers, since action_mask is 0"


def experts_of(num_read: int) -> np.ndarray:
    """Experts 1 and 4 of each of three layers."""
    return np.tile(np.array([1, 4], np.int16), (num_read, 3, 1))


READ = SECOND.prompt_length + SECOND.response_length - 1
OF_INT16 = "wanted a NumPy array of int16 of three dimensions"
ONE_A_TOKEN_READ = f"wanted {READ}: prompt_tokens, and response_tokens without the last one"


def test_experts_of_every_token_that_was_read_are_sound():
    assert problems_of_second(experts=experts_of(READ)) == []


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (experts_of(READ).astype(np.int32), f"is int32 of shape ({READ}, 3, 2), {OF_INT16}"),
        (experts_of(READ)[0], f"is int16 of shape (3, 2), {OF_INT16}"),
        ([[[1, 4]]], f"is list, {OF_INT16}"),
        (experts_of(READ + 1), f"has shape ({READ + 1}, 3, 2), {ONE_A_TOKEN_READ}"),
        (experts_of(READ)[:, :0], f"has shape ({READ}, 0, 2), {ONE_A_TOKEN_READ}"),
        (
            experts_of(READ)[..., ::-1].copy(),
            f"is 1 at token 0, and {READ - 1} more, wanted sorted numbers, each once",
        ),
        (experts_of(READ) - np.int16(2), f"is -1 at token 0, and {READ - 1} more, wanted 0 to 32767"),
    ],
)
def test_experts_that_no_router_chose_are_refused(experts, reason):
    assert problems_of_second(experts=experts) == [("experts", reason)]
