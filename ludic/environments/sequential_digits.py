"""SequentialDigits: write the digits from a first to a higher last one, in order.

The reward is dense: each correct digit in order counts the same, so learning shows early.
"""

from dataclasses import dataclass
from itertools import combinations, product

from ludic.environments.environment import Example, Score, Split
from ludic.environments.splits import nth, partition
from ludic.records import Message

TEMPLATES = (
    "count from {first} to {last}",
    "write the digits from {first} to {last}",
    "start at {first} and count up to {last}",
    "list every digit from {first} to {last} in order",
)
# Only the pair is the key, so that a held-out sequence does not occur in training in other words.
_BY_SPLIT = partition(
    product(combinations(range(10), 2), range(len(TEMPLATES))), key=lambda task: f"{task[0][0]}-{task[0][1]}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialDigits:
    """Single-turn environment; reward = share of the sequence that the answer's digits begin with, from 0 to 1.

    All digits 0 to 9 in the answer are read one by one ("3 4 5", "345" and "3, 4 and 5" are equal). The first wrong
    digit ends the count, and digits after the full sequence are ignored.
    """

    seed: int = 0

    def example(self, index: int, split: Split) -> Example:
        (first, last), template = nth(_BY_SPLIT[split], index, self.seed)
        return Example(
            example_id=f"{first}-{last}/{template}",
            messages=(Message(role="user", content=TEMPLATES[template].format(first=first, last=last)),),
            data={"sequence": "".join(map(str, range(first, last + 1)))},
        )

    def score(self, example: Example, answer: str) -> Score:
        sequence = example.data["sequence"]
        written = [character for character in answer if character in "0123456789"]
        correct = _common_prefix_length(written, sequence)
        return Score(
            reward=correct / len(sequence),
            components={"correct_digits": correct, "written_digits": len(written), "sequence_length": len(sequence)},
        )


def _common_prefix_length(written: list[str], wanted: str) -> int:
    for index, (left, right) in enumerate(zip(written, wanted, strict=False)):
        if left != right:
            return index
    return min(len(written), len(wanted))
