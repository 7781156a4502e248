from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import InvalidBatchError
from ludic.records.columns import Ragged
from ludic.training.batches.packing import (
    MicroBatch,
    PackedRagged,
    Sequences,
    TrainingSequence,
    assign,
    assign_pairs,
    cap,
    costs_of,
    cut_out,
    pack,
    pack_each,
)


def sequence(prompt, response, **values):
    """A sequence with these values of fields and of columns."""
    own = {field.name for field in fields(TrainingSequence)}
    columns = {"response_logprobs": np.full(len(response), -1.0, np.float32)}
    return TrainingSequence(
        prompt_tokens=np.array(prompt, np.int32),
        response_tokens=np.array(response, np.int32),
        columns=columns | {name: value for name, value in values.items() if name not in own},
        **{"rollout_id": "r1", "advantage": 2.0} | {name: value for name, value in values.items() if name in own},
    )


lengths_ranks_budget = st.tuples(
    st.lists(st.integers(0, 50), max_size=40).map(np.array), st.integers(1, 5), st.integers(1, 120)
)


@given(lengths_ranks_budget)
def test_every_sequence_is_assigned_once(case):
    lengths, num_ranks, budget = case
    plan = assign(lengths, num_ranks, budget)
    assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(range(len(lengths)))


@given(lengths_ranks_budget)
def test_a_micro_batch_is_within_budget_or_one_long_sequence(case):
    lengths, num_ranks, budget = case
    micro_batches = [m for rank in assign(lengths, num_ranks, budget) for m in rank]
    assert all(lengths[m].sum() <= budget or sum(lengths[m] > 0) == 1 for m in micro_batches if m)


@given(lengths_ranks_budget)
def test_every_rank_has_as_many_micro_batches(case):
    lengths, num_ranks, budget = case
    plan = assign(lengths, num_ranks, budget)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1


@given(lengths_ranks_budget)
def test_ranks_differ_by_no_more_than_the_longest_sequence(case):
    lengths, num_ranks, budget = case
    loads = [sum(int(lengths[i]) for m in rank for i in m) for rank in assign(lengths, num_ranks, budget)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_assignment_worked_out_by_hand():
    # longest first to the emptier rank: 9 -> 0, 5 -> 1, 4 -> 1 (5 < 9), 3 -> 0 (9 = 9), 2 -> 1 (9 < 12)
    # rank 0 with a budget of 10: [9], [3]; rank 1: [5, 4], then 2 does not fit into 1
    assert assign(np.array([2, 9, 4, 5, 3]), 2, 10) == [[[1], [4]], [[3, 2], [0]]]


def test_costs_grow_with_the_square_of_the_length():
    # 3 x (3 + 10) and 1 x (1 + 10): at 10 tokens attention would cost as much as the weights, 10 x 10 each.
    assert costs_of(np.array([3, 1, 10]), 10).tolist() == [39, 11, 200]


def test_even_costs_worked_out_by_hand():
    # Costs n x n: 64 and four of 16. By tokens, 8 + 4 and 4 + 4 + 4, which cost 80 and 48; by costs 64 and 64.
    lengths = np.array([8, 4, 4, 4, 4])
    assert assign(lengths, 2, 16) == [[[0, 3]], [[1, 2, 4]]]
    assert assign(lengths, 2, 16, costs=costs_of(lengths, 0)) == [[[0]], [[1, 2, 3, 4]]]


def lockstep_cost(plan, costs):
    """In each micro-batch all ranks wait for the dearest one."""
    return sum(max(costs[rank[number]].sum() for rank in plan) for number in range(len(plan[0])))


@given(lengths_ranks_budget, st.integers(0, 100))
def test_with_costs_each_sequence_is_assigned_once_and_within_budget(case, attention_tokens):
    lengths, num_ranks, budget = case
    lengths = lengths.astype(np.int64)
    costs = costs_of(lengths, attention_tokens)
    plan = assign(lengths, num_ranks, budget, costs=costs)
    micro_batches = [m for rank in plan for m in rank]
    assert sorted(i for m in micro_batches for i in m) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    assert all(lengths[m].sum() <= budget or sum(lengths[m] > 0) == 1 for m in micro_batches if m)
    assert all(costs[a].sum() >= costs[b].sum() for rank in plan for a, b in pairwise(rank))
    assert lockstep_cost(plan, costs) <= lockstep_cost(assign(lengths, num_ranks, budget), costs)


def test_ranks_wait_less_for_each_other_with_even_costs():
    """512 sequences of log-normal lengths, up to 16,384 tokens, on 8 ranks; the model has some 0.6 billion weights."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(7.5, 1.0, 512), 16_384).astype(np.int64)
    costs = costs_of(lengths, 8000)
    least = costs.sum() / 8
    assert lockstep_cost(assign(lengths, 8, 32_768), costs) > 1.017 * least
    assert lockstep_cost(assign(lengths, 8, 32_768, costs=costs), costs) < 1.01 * least


def test_a_rank_with_less_gets_empty_micro_batches():
    assert assign(np.array([7]), 2, 10) == [[[0]], [[]]]


def test_both_sides_of_a_pair_share_a_micro_batch():
    # pairs are 9 + 1 = 10 and 4 + 3 = 7 long, the single one 5; by length to the emptier rank: 10 -> 0, 7 -> 1, 5 -> 1
    plan = assign_pairs(np.array([9, 4, 5, 1, 3]), ["a", "b", None, "a", "b"], 2, 12)
    assert plan == [[[0, 3]], [[1, 4, 2]]]


@given(lengths_ranks_budget)
def test_without_pairs_the_assignment_is_that_of_sequences(case):
    lengths, num_ranks, budget = case
    assert assign_pairs(lengths, [None] * len(lengths), num_ranks, budget) == assign(lengths, num_ranks, budget)


def test_packing_worked_out_by_hand():
    first = sequence([10, 11], [12, 13], response_logprobs=np.array([-0.5, -0.25], np.float32))
    second = sequence(
        [20],
        [21, 22, 23],
        action_mask=np.array([True, False, True]),
        advantage=np.array([1.0, 0.0, -1.0], np.float32),
        weight=0.5,
        temperature=0.7,
    )
    batch = pack([first, second])
    # a response's last token (13, 23) predicts nothing and is no input
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 22]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch.logit_positions.tolist() == [1, 2, 3, 4, 5]
    assert batch.targets.tolist() == [12, 13, 21, 22, 23]
    assert batch.sampler_logprobs.tolist() == [-0.5, -0.25, -1, -1, -1]
    assert batch.advantages.tolist() == [2, 2, 1, 0, -1]
    assert batch.action_mask.tolist() == [True, True, True, False, True]
    assert batch.weights.tolist() == [1, 1, 0.5, 0.5, 0.5]
    assert batch.temperatures.tolist() == pytest.approx([1, 1, 0.7, 0.7, 0.7])
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.pair_ids.tolist() == [0, 0, 1, 1, 1]
    assert {t.dtype for t in (batch.input_ids, batch.position_ids, batch.targets)} == {torch.int64}
    assert {t.dtype for t in (batch.advantages, batch.weights, batch.sampler_logprobs)} == {torch.float32}


def test_an_empty_micro_batch_is_one_token_that_is_not_trained_on():
    batch = pack([])
    assert batch.input_ids.shape == (1, 1)
    assert batch.action_mask.tolist() == [False]


def test_a_sequence_without_a_response_is_left_out():
    batch = pack([sequence([1, 2], []), sequence([3], [4])])
    assert batch.input_ids.tolist() == [[3]]
    assert batch.sequence_ids.tolist() == [0]


def test_a_pair_has_the_number_of_its_first_sequence():
    batch = pack([sequence([1], [2], pair_id=pair_id) for pair_id in ("a", None, "b", "a", "b")])
    assert batch.sequence_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.pair_ids.tolist() == [0, 1, 2, 0, 2]


def test_micro_batches_packed_at_once_are_those_packed_one_by_one():
    rng = np.random.default_rng(0)
    rows = [
        sequence(
            rng.integers(0, 99, 1 + i % 3),
            rng.integers(0, 99, i % 5),
            response_logprobs=rng.normal(size=i % 5).astype(np.float32),
            action_mask=rng.random(i % 5) < 0.5 if i % 2 else None,
            advantage=rng.normal(size=i % 5).astype(np.float32) if i % 4 else float(i),
            weight=i / 4,
            temperature=0.5 + i,
            rollout_id=f"r{i}",
            pair_id="pair" if i in (7, 9) else None,
            kept_tokens=kept(*[[i]] * (i % 5)) if i in (1, 9) else None,
            experts=experts(*range(i % 3 + i % 5)) if i in (7, 9) else None,
        )
        for i in range(12)
    ]
    plans = [[3, 1, 0], [], [5], [11, 7, 2, 9], [10]]  # 0, 5 and 10 have no response
    for packed, plan in zip(pack_each(Sequences.of(rows), plans), plans, strict=True):
        alone = pack([rows[i] for i in plan])
        assert {*packed.columns, *packed.absent} == {"response_logprobs", "action_mask", "kept_tokens", "experts"}
        assert_same(packed, replace(alone, absent=packed.absent))  # which other rows say


def assert_same(found, expected):
    """Fields of micro-batches, of their columns, and of ragged ones."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif isinstance(expected, MicroBatch | PackedRagged):
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    else:
        assert np.array_equal(found, expected)


def test_cap_cuts_the_end_of_the_response_and_all_that_is_as_long():
    long = sequence([1, 2], [3, 4, 5], advantage=np.array([1, 2, 3], np.float32), action_mask=np.array([1, 0, 1], bool))
    capped, num_cut = cap(Sequences.of([long, sequence([1, 2], [3, 4])]), 4)
    assert num_cut == 1
    assert [tokens.tolist() for tokens in capped.response_tokens] == [[3, 4], [3, 4]]
    assert capped.advantage[0].tolist() == [1, 2]
    assert capped.advantage[1] == 2.0
    assert capped.num_action_tokens == 1 + 2


def test_cap_leaves_sequences_that_just_fit():
    fitting = Sequences.of([sequence([1, 2], [3, 4])])
    assert cap(fitting, 4) == (fitting, 0)


def test_a_prompt_over_the_cap_leaves_nothing_to_train_on():
    capped, num_cut = cap(Sequences.of([sequence([1, 2, 3], [4])]), 2)
    assert num_cut == 1
    assert capped.num_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "values", "message"),
    [
        (
            [1],
            {"response_logprobs": np.zeros(3, np.float32)},
            "rollout r1: response_logprobs has length 3, response_tokens has 2",
        ),
        ([1], {"response_logprobs": None}, "rollout r1: response_logprobs is NoneType, wanted a NumPy array"),
        (
            [1],
            {"response_logprobs": np.zeros((2, 2), np.float32)},
            r"rollout r1: response_logprobs is float32 of shape \(2, 2\), wanted a NumPy array of float32 of one dim",
        ),
        ([1], {"kept_tokens": np.zeros(2, np.int32)}, "rollout r1: kept_tokens is ndarray, wanted a Ragged of int32"),
        ([1], {"experts": np.zeros((2, 1), np.int16)}, r"rollout r1: experts is int16 of shape \(2, 1\), wanted a "),
        ([1], {"experts": np.zeros((2, 1, 0), np.int16)}, r"rollout r1: experts has shape \(2, 1, 0\), wanted 2: "),
        ([1], {"mask": np.ones(2, bool)}, "mask is not an array of a row, wanted one of prompt_tokens, "),
        ([1], {"advantage": np.zeros(1, np.float32)}, r"rollout r1: advantage has shape \(1,\)"),
        ([1], {"temperature": 0.0}, r"rollout r1: temperature is 0.0"),
        ([], {}, "rollout r1: prompt_tokens is empty"),
    ],
)
def test_a_sequence_that_cannot_be_trained_on_is_refused_by_name(prompt, values, message):
    with pytest.raises(InvalidBatchError, match=message):
        pack([sequence(prompt, [2, 3], **values)])


def kept(*lists):
    return Ragged.of(lists, np.int32)


def kept_by_token(batch):
    """The kept tokens of each response token of a micro-batch."""
    packed = batch.kept_tokens
    assert packed.rows.tolist() == np.repeat(np.arange(len(batch.targets)), np.diff(packed.bounds)).tolist()
    assert packed.has_any.tolist() == (np.diff(packed.bounds) > 0).tolist()
    return [packed.values[start:end].tolist() for start, end in pairwise(packed.bounds.tolist())]


def test_kept_tokens_lie_end_to_end_with_the_response_tokens():
    rows = [
        sequence([1], [5, 6], kept_tokens=kept([5, 9], [6])),
        sequence([1], [7]),
        sequence([1], [8, 2, 3], kept_tokens=kept([8], [], [1, 2, 3])),
    ]
    assert kept_by_token(pack(rows)) == [[5, 9], [6], [], [8], [], [1, 2, 3]]
    assert pack(rows).kept_tokens.values.dtype == torch.int64
    assert pack(rows[1:2]).kept_tokens is None
    one, other = pack_each(Sequences.of(rows), [[2], [1, 0]])
    assert kept_by_token(one) == [[8], [], [1, 2, 3]]
    assert kept_by_token(other) == [[], [5, 9], [6]]


def test_kept_tokens_are_cut_with_the_response():
    rows = Sequences.of([sequence([1, 1], [8, 2, 3], kept_tokens=kept([8], [], [1, 2, 3])), sequence([1], [4])])
    capped, num_cut = cap(rows, 4)
    assert (num_cut, kept_by_token(pack(capped))) == (1, [[8], [], []])
    assert pack(cap(rows, 2)[0]).targets.tolist() == [4]
    parts = cut_out(rows, np.array([0, 0]), np.array([0, 2]), np.array([1, 3]))
    assert kept_by_token(pack(parts)) == [[8], [1, 2, 3]]


def test_kept_tokens_of_another_length_are_refused():
    with pytest.raises(InvalidBatchError, match="kept_tokens has length 1, response_tokens has 2"):
        pack([sequence([1], [5, 6], kept_tokens=kept([5]))])


def experts(*numbers):
    """Two experts in one layer: a number and the one after it, for each token that is read."""
    return np.array([[[number, number + 1]] for number in numbers], np.int16)


def experts_by_token(batch):
    """The first of the two experts of each packed token."""
    return None if batch.experts is None else batch.experts[:, 0, 0].tolist()


def test_experts_lie_end_to_end_with_the_tokens_that_are_read():
    rows = [
        sequence([1, 2], [5, 6], experts=experts(10, 20, 50)),
        sequence([1], [7, 8]),
        sequence([3], [9], experts=experts(30)),
    ]
    assert experts_by_token(pack(rows)) == [10, 20, 50, -1, -1, 30]
    assert pack(rows).experts.dtype == torch.int16
    assert pack(rows[1:2]).experts is None
    one, other = pack_each(Sequences.of(rows), [[2], [1, 0]])
    assert (experts_by_token(one), experts_by_token(other)) == ([30], [-1, -1, 10, 20, 50])


def test_experts_are_cut_with_the_response():
    rows = Sequences.of([sequence([1, 1], [8, 2, 3], experts=experts(10, 11, 80, 20)), sequence([1], [4])])
    capped, num_cut = cap(rows, 4)
    assert (num_cut, experts_by_token(pack(capped))) == (1, [10, 11, 80, -1])
    # Parts of the response as sequences of their own: the second has 1 1 8 as its prompt.
    parts = cut_out(rows, *map(np.array, ([0, 0], [0, 1], [1, 3])))
    assert experts_by_token(pack(parts)) == [10, 11, 10, 11, 80, 20]


def test_experts_of_another_length_or_of_two_models_are_refused():
    with pytest.raises(InvalidBatchError, match=r"experts has shape \(3, 1, 2\), wanted 2: prompt_tokens, and"):
        pack([sequence([1], [5, 6], experts=experts(10, 50, 60))])
    rows = [
        sequence([1], [5], rollout_id=name, experts=values)
        for name, values in (("r1", experts(10)), ("r2", np.zeros((1, 2, 2), np.int16)))
    ]
    with pytest.raises(InvalidBatchError, match=r"rollout r2: experts is \(2, 2\) numbers a token, .* r1 \(1, 2\)"):
        pack(rows)
