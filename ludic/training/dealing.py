"""Which rank trains on which sequence: even in tokens, and few row groups read by several ranks. Pure NumPy.

A rank reads every row group that holds a sequence of its own, and Parquet has none smaller to read. So whole row groups
are dealt, and one is split only where the ranks would else be uneven.
"""

# Shapes: S = sequences, R = ranks, G = row groups.

import heapq

import numpy as np

EVEN = 1.02
"""The fullest rank's tokens over the mean of all ranks; up to here nothing is split."""
UNEVEN = 1.1
"""Above it row groups are split whatever is read twice: a rank that waits for another costs more than reading."""
MOST_READ = 1.2
"""Tokens of the row groups that all ranks read over those of all row groups, while the ranks are not UNEVEN."""


def deal(lengths: np.ndarray, num_ranks: int, row_groups: np.ndarray) -> np.ndarray:
    """(S,) int64: the rank of each sequence; a function of the arguments alone.

    lengths: (S,) int64 tokens of each sequence. row_groups: (S,) int64, the number, from 0, of what is read to get it.

    Whole row groups go, longest first, to the rank with the fewest tokens (Graham 1969, LPT). Then sequences move from
    the fullest rank to the emptiest until the ranks are EVEN, or until more than MOST_READ would be read and they
    are not UNEVEN, or until every sequence of the fullest is as long as the difference.
    """
    ranks = _deal_whole(lengths, num_ranks, row_groups)
    while (moved := _even_out(ranks, lengths, num_ranks, row_groups)) is not None:
        ranks = moved
    return ranks


def imbalance(loads: np.ndarray) -> float:
    """The fullest rank over the mean of all; 1 where all have the same, or nothing. loads: (R,) tokens of each rank."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def tokens_read(lengths: np.ndarray, ranks: np.ndarray, row_groups: np.ndarray) -> int:
    """Of the row groups that each rank reads, all ranks together; one rank alone reads lengths.sum()."""
    sizes = np.bincount(row_groups, lengths)
    pairs = np.unique(ranks * len(sizes) + row_groups)
    return int(sizes[pairs % len(sizes)].sum())


def _deal_whole(lengths: np.ndarray, num_ranks: int, row_groups: np.ndarray) -> np.ndarray:
    sizes = np.bincount(row_groups, lengths).astype(np.int64)
    rank_of = np.zeros(len(sizes), np.int64)
    loads = [(0, rank) for rank in range(num_ranks)]
    for row_group in np.argsort(-sizes, kind="stable").tolist():
        tokens, rank = heapq.heappop(loads)
        rank_of[row_group] = rank
        heapq.heappush(loads, (tokens + int(sizes[row_group]), rank))
    return rank_of[row_groups]


def _even_out(ranks: np.ndarray, lengths: np.ndarray, num_ranks: int, row_groups: np.ndarray) -> np.ndarray | None:
    """The ranks after the move that makes the least to read; None where none is needed, or none is worth it.

    The sum of the squared loads falls with every move, so moves come to an end.
    """
    loads = np.bincount(ranks, lengths, num_ranks)
    if imbalance(loads) <= EVEN:
        return None
    fullest, emptiest = int(loads.argmax()), int(loads.argmin())
    difference = loads[fullest] - loads[emptiest]
    movable = (ranks == fullest) & (lengths > 0) & (lengths < difference)
    moves = []
    for row_group in np.unique(row_groups[movable]).tolist():
        moved = ranks.copy()
        moved[_fitting(np.flatnonzero(movable & (row_groups == row_group)), lengths, difference / 2)] = emptiest
        left = abs(difference / 2 - lengths[moved != ranks].sum())
        moves.append((tokens_read(lengths, moved, row_groups), left, row_group, moved))
    if not moves:
        return None
    num_read, *_, moved = min(moves, key=lambda move: move[:3])
    return moved if num_read <= MOST_READ * lengths.sum() or imbalance(loads) > UNEVEN else None


def _fitting(indexes: np.ndarray, lengths: np.ndarray, wanted: float) -> list[int]:
    """Of these sequences, longest first, those that fit into the wanted tokens; the shortest where none does."""
    by_length = indexes[np.argsort(-lengths[indexes], kind="stable")].tolist()
    fitting = []
    for index in by_length:
        if lengths[index] <= wanted:
            fitting.append(index)
            wanted -= lengths[index]
    return fitting or by_length[-1:]
