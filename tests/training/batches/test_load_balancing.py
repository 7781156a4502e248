"""Sequences are dealt to ranks by row group: even in tokens, and little is read twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.training.batches.packing import MOST_READ, UNEVEN, deal, imbalance, tokens_read


def dealt(lengths, num_ranks, row_groups):
    """Lengths of the sequences of each rank."""
    lengths, row_groups = np.array(lengths), np.array(row_groups)
    ranks = deal(lengths, num_ranks, row_groups)
    return [lengths[ranks == rank].tolist() for rank in range(num_ranks)]


@st.composite
def batches(draw):
    """Lengths, ranks, and row groups of neighbours, all of them numbered."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 7)), max_size=40))
    lengths = np.array([length for length, _ in pairs], np.int64)
    row_groups = np.unique([number for _, number in pairs], return_inverse=True)[1].astype(np.int64)
    return lengths, draw(st.integers(1, 5)), row_groups


def test_whole_row_groups_go_longest_first_to_the_rank_with_the_fewest_tokens():
    # row groups of 9 = 4 + 5, 6, 5 and 4 tokens: 9 -> rank 0, 6 -> rank 1, 5 -> rank 1 (6 < 9), 4 -> rank 0 (9 < 11):
    # 13 and 11. No sequence of rank 0 is shorter than the difference of 2, so no move would make them more even.
    assert dealt([4, 5, 6, 5, 4], 2, [0, 0, 1, 2, 3]) == [[4, 5, 4], [6, 5]]


def test_a_row_group_is_split_where_the_ranks_would_be_uneven():
    # One row group of 12 tokens: all on rank 0, imbalance 2. Half of the difference is 6: 5 moves, and 1 as well.
    # Both ranks read it then, so twice the tokens; even ranks are worth that.
    lengths, row_groups = np.array([5, 4, 2, 1]), np.zeros(4, np.int64)
    ranks = deal(lengths, 2, row_groups)
    assert ranks.tolist() == [1, 0, 0, 1]
    assert tokens_read(lengths, ranks, row_groups) == 24
    assert imbalance(np.bincount(ranks, lengths)) == 1.0


def test_the_smallest_row_group_is_the_one_that_is_split():
    # Row groups of 60, 50 and 30 tokens in sequences of 5: 60 -> rank 0; 50 and then 30 -> rank 1. 60 and 80, imbalance
    # 1.14. Two sequences even it out, and to read 30 tokens twice is cheaper than 50.
    lengths, row_groups = np.full(28, 5), np.repeat([0, 1, 2], [12, 10, 6])
    ranks = deal(lengths, 2, row_groups)
    assert np.bincount(ranks, lengths).tolist() == [70, 70]
    assert tokens_read(lengths, ranks, row_groups) == 140 + 30


def test_a_little_is_read_twice_to_make_slightly_uneven_ranks_even():
    # 10 row groups of 10 tokens on rank 0 or 1, and one of 6: 50 and 56 tokens, imbalance 1.057. 3 of the 6 move:
    # 53 and 53, and 106 + 6 tokens are read, 1.06 times as many.
    lengths = np.array([10] * 10 + [1] * 6)
    row_groups = np.array([*range(10), *[10] * 6])
    ranks = deal(lengths, 2, row_groups)
    assert np.bincount(ranks, lengths).tolist() == [53, 53]
    assert tokens_read(lengths, ranks, row_groups) == 112


def test_one_rank_has_all_and_reads_it_once():
    lengths, row_groups = np.array([3, 1, 2]), np.array([0, 0, 1])
    ranks = deal(lengths, 1, row_groups)
    assert ranks.tolist() == [0, 0, 0]
    assert tokens_read(lengths, ranks, row_groups) == 6


def test_no_sequences_are_even():
    nothing = np.zeros(0, np.int64)
    assert deal(nothing, 2, nothing).tolist() == []
    assert imbalance(np.zeros(2)) == 1.0


@given(batches())
def test_every_sequence_has_one_rank_and_the_same_one_each_time(batch):
    ranks = deal(*batch)
    assert ranks.shape == batch[0].shape
    assert set(ranks.tolist()) <= set(range(batch[1]))
    assert ranks.tolist() == deal(*batch).tolist()


@given(batches())
def test_ranks_are_even_enough_or_nothing_that_is_left_would_make_them_so(batch):
    lengths, num_ranks, _ = batch
    ranks = deal(*batch)
    loads = np.bincount(ranks, lengths, num_ranks)
    of_fullest = lengths[(ranks == loads.argmax()) & (lengths > 0)]
    assert imbalance(np.bincount(ranks, lengths, num_ranks)) <= UNEVEN or of_fullest.min() >= loads.max() - loads.min()


@given(batches())
def test_little_is_read_twice_unless_whole_row_groups_are_uneven(batch):
    lengths, num_ranks, row_groups = batch
    ranks = deal(*batch)
    whole = np.sort(np.bincount(row_groups, lengths, 1))[::-1]
    loads = np.zeros(num_ranks)
    for size in whole:
        loads[loads.argmin()] += size
    if loads.max() <= UNEVEN * loads.mean():
        assert tokens_read(lengths, ranks, row_groups) <= MOST_READ * lengths.sum()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_batch_of_many_files_is_read_little_more_than_once(num_ranks):
    # Log-normal lengths in 16 row groups of 32, as the files of many workers are.
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.5, 1.0, 512).astype(np.int64)
    row_groups = np.repeat(np.arange(16), 32)
    ranks = deal(lengths, num_ranks, row_groups)
    assert tokens_read(lengths, ranks, row_groups) <= 1.25 * lengths.sum()
    assert imbalance(np.bincount(ranks, lengths, num_ranks)) <= UNEVEN
