"""Opposites: the antonym of a common English word, from a table of pairs."""

import re
from dataclasses import dataclass

from ludic.environments.environment import Example, Score, Split
from ludic.environments.splits import nth, partition
from ludic.records import Message

PAIRS = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"),
    ("black", "white"), ("fast", "slow"), ("old", "new"), ("open", "closed"), ("full", "empty"),
    ("rich", "poor"), ("strong", "weak"), ("happy", "sad"), ("early", "late"), ("near", "far"),
    ("wet", "dry"), ("clean", "dirty"), ("loud", "quiet"), ("thick", "thin"), ("wide", "narrow"),
    ("deep", "shallow"), ("high", "low"), ("inside", "outside"), ("above", "below"), ("before", "after"),
    ("first", "last"), ("begin", "end"), ("push", "pull"), ("give", "take"), ("buy", "sell"),
    ("win", "lose"), ("love", "hate"), ("laugh", "cry"), ("sink", "float"), ("arrive", "leave"),
    ("remember", "forget"), ("ask", "answer"), ("accept", "refuse"), ("build", "destroy"), ("increase", "decrease"),
    ("always", "never"), ("everything", "nothing"), ("yes", "no"), ("true", "false"), ("good", "bad"),
    ("heavy", "light"), ("hard", "soft"), ("easy", "difficult"), ("sharp", "blunt"), ("smooth", "rough"),
    ("sweet", "sour"), ("tall", "short"), ("young", "aged"), ("alive", "dead"), ("asleep", "awake"),
    ("brave", "cowardly"), ("cheap", "expensive"), ("safe", "dangerous"), ("war", "peace"), ("friend", "enemy"),
    ("north", "south"), ("east", "west"), ("summer", "winter"), ("sunrise", "sunset"),
)  # fmt: skip
"""Pairs of opposites. Every word is in only one pair, so each question has one answer."""

QUESTIONS = tuple(question for one, other in PAIRS for question in ((one, other), (other, one)))
_BY_SPLIT = partition(QUESTIONS, key=lambda question: "/".join(sorted(question)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opposites:
    """Single-turn environment; reward 1 if the last word of the answer is the antonym, else 0. Case is ignored.

    The component `format` is 1 if the answer is one word. Both questions of a pair are in the same split.
    """

    seed: int = 0

    def example(self, index: int, split: Split) -> Example:
        word, opposite = nth(_BY_SPLIT[split], index, self.seed)
        return Example(
            example_id=word,
            messages=(Message(role="user", content=f"What is the opposite of {word}? Answer with one word."),),
            data={"opposite": opposite},
        )

    def score(self, example: Example, answer: str) -> Score:
        words = re.findall(r"\w+", answer.lower())
        correct = float(words[-1:] == [example.data["opposite"]])
        return Score(reward=correct, components={"correct": correct, "format": float(len(words) == 1)})
