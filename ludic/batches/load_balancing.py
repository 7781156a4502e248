"""Assign sequences to ranks: even in tokens, with few row groups read by several ranks. Pure NumPy.

A rank reads each row group that holds one of its sequences; a row group is the smallest unit to read in Parquet. So
whole row groups are assigned, and a row group is split only if the ranks would otherwise be uneven.
"""

# Shapes: S = sequences, R = ranks, G = row groups.

import heapq

import numpy as np

EVEN = 1.02
"""Tokens of the fullest rank over the mean of all ranks up to which nothing is split."""
UNEVEN = 1.1
"""Imbalance above which row groups are split whatever is read twice: waiting for a rank costs more than reading."""
MOST_READ = 1.2
"""Maximum tokens read by all ranks together over the tokens of all row groups, while the ranks are not UNEVEN."""


def deal(lengths: np.ndarray, num_ranks: int, row_groups: np.ndarray) -> np.ndarray:
    """Return (S,) int64: the rank of each sequence. Deterministic.

    lengths: (S,) int64 tokens of each sequence. row_groups: (S,) int64, number of the sequence's row group, from 0.

    Whole row groups are assigned, longest first, to the rank with the fewest tokens (Graham 1969, LPT). Then sequences
    move from the fullest rank to the emptiest until the ranks are EVEN, or until more than MOST_READ would be read and
    they are not UNEVEN, or until every sequence of the fullest rank is at least as long as the difference.
    """
    ranks = _deal_whole(lengths, num_ranks, row_groups)
    while (moved := _even_out(ranks, lengths, num_ranks, row_groups)) is not None:
        ranks = moved
    return ranks


def imbalance(loads: np.ndarray) -> float:
    """Return tokens of the fullest rank over the mean; 1 if all are equal or 0. loads: (R,) tokens of each rank."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def tokens_read(lengths: np.ndarray, ranks: np.ndarray, row_groups: np.ndarray) -> int:
    """Return the tokens of the row groups that each rank reads, summed over ranks; one rank reads lengths.sum()."""
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
    """Return the ranks after the move that adds the least to read; None if no move is needed or worthwhile.

    Every move lowers the sum of squared loads, so moves end.
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
    """Return those of these sequences, longest first, that fit into the wanted tokens; if none fits, the shortest."""
    by_length = indexes[np.argsort(-lengths[indexes], kind="stable")].tolist()
    fitting = []
    for index in by_length:
        if lengths[index] <= wanted:
            fitting.append(index)
            wanted -= lengths[index]
    return fitting or by_length[-1:]
