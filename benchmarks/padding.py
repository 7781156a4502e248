"""What peers do in the place of packing: rows side by side, padded to the longest of a micro-batch."""

from collections.abc import Iterator, Sequence


def fill_padded(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indexes of rows, in order, as many at once as fit into the budget with their padding."""
    taken: list[int] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if taken and longest * (len(taken) + 1) > budget:
            yield taken
            taken, longest = [], length
        taken.append(index)
    yield taken
