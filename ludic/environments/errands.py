"""Errands: several small sums, of which each agent can do one; handing on the others is the better policy."""

import re
from dataclasses import dataclass, field
from random import Random

from ludic.environments.environment import Example, Score, Split, Transition
from ludic.environments.splits import draw
from ludic.errors import ConfigError
from ludic.records import Message

_SUM = re.compile(r"(\d{1,4}) ?\+ ?(\d{1,4})(?!\d)")
_NUMBER = re.compile(r"(?<!\d)\d{1,5}(?!\d)")


@dataclass(slots=True, kw_only=True)
class Errands:
    """Environment of one step that scores tasks which its agent hands to others; see TaskScorer.

    The reward is the share of the errands that were done, by the agent or by others. An answer's last number counts for
    one errand that has this result. A task counts if it names a sum of the list that nobody has done; the component
    `by_others` is the share of such errands. Another agent gets 1 for a right result, else 0. Raises ConfigError if
    num_errands is not from 1 to 20, or highest not from 1 to 1000.
    """

    num_errands: int = 3
    highest: int = 9
    """Largest summand."""
    seed: int = 0
    max_steps: int = 1
    _open: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    _num_by_others: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.num_errands <= 20:
            raise ConfigError(f"num_errands is {self.num_errands}, wanted a number from 1 to 20")
        if not 1 <= self.highest <= 1000:
            raise ConfigError(f"highest is {self.highest}, wanted a number from 1 to 1000")

    def example(self, index: int, split: Split) -> Example:
        sums = draw(self._draw_sums, str, index, split, self.seed)
        listed = "; ".join(f"{a} + {b}" for a, b in sums)
        question = f"Compute {listed}. Your answer counts for one of them only, so hand on the others."
        return Example(example_id=listed, messages=(Message(role="user", content=question),), data={"sums": sums})

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._open, self._num_by_others = list(example.data["sums"]), 0
        return example.messages

    def step(self, action: str) -> Transition:
        numbers = _NUMBER.findall(action)
        done = next((each for each in self._open if numbers and sum(each) == int(numbers[-1])), None)
        num_done = self._num_by_others + (done is not None)
        return Transition(
            observation=None,
            reward=num_done / self.num_errands,
            reward_components={"by_others": self._num_by_others / self.num_errands},
            terminated=True,
        )

    def score_task(self, agent_id: str, task: str, answer: str) -> Score:
        asked = [(int(a), int(b)) for a, b in _SUM.findall(task)]
        found = next((each for each in self._open if each in asked), None)
        numbers = _NUMBER.findall(answer)
        if found is None or not numbers or int(numbers[-1]) != sum(found):
            return Score(reward=0.0)
        self._open.remove(found)
        self._num_by_others += 1
        return Score(reward=1.0)

    def _draw_sums(self, random: Random) -> list[tuple[int, int]]:
        return [(random.randint(0, self.highest), random.randint(0, self.highest)) for _ in range(self.num_errands)]
