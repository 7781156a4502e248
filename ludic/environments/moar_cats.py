"""MoarCats: write a text with the word "cats" as often as possible, after the word "love".

The smallest environment that shows learning: a model of 90k parameters with a vocabulary of 256
words learns it in seconds. The prompts use only the lower-case words in WORDS and no punctuation.
"""

import re
from dataclasses import dataclass
from itertools import pairwise, product
from math import sqrt

from ludic.environments.environment import Example, Score, Split
from ludic.environments.splits import nth, partition
from ludic.records import Message

TEMPLATES = (
    "write a {form} about cats {scene}",
    "please write a {form} with cats {scene}",
    "tell me a {form} about cats {scene}",
    "can you tell a {form} of cats {scene}",
    "i love cats so write a {form} for me {scene}",
    "we want a {form} about cats {scene}",
    "give us a good {form} with many cats {scene}",
    "my friends love cats so tell them a {form} {scene}",
    "here is a picture of cats {scene} now write a {form}",
    "make up a {form} where cats play {scene}",
    "what would cats do {scene} tell me in a {form}",
    "all i need is a {form} about cats {scene}",
)
FORMS = ("story", "poem", "song", "letter", "tale", "joke", "note", "book", "speech", "dream", "riddle", "play")
SCENES = (
    "in the garden",
    "on the roof",
    "at night",
    "in the snow",
    "by the sea",
    "at school",
    "in a small boat",
    "on a big farm",
    "under the bed",
    "in the kitchen",
    "on the moon",
    "in the rain",
    "near an old house",
    "with a red ball",
    "after dinner",
    "in the city",
)
PROMPTS = tuple(template.format(form=form, scene=scene) for template, form, scene in product(TEMPLATES, FORMS, SCENES))
WORDS = tuple(sorted({word for prompt in PROMPTS for word in prompt.split()}))
"""All words of all prompts, for a tokenizer with this vocabulary."""

_BY_SPLIT = partition(enumerate(PROMPTS), key=lambda numbered: numbered[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoarCats:
    """Single-turn environment; reward = (cats + 10 x love_cats) / sqrt(1 + length), without upper bound.

    cats: occurrences of the word "cats". love_cats: occurrences of "love" directly before "cats". length: number of
    words. Case is ignored, and a word is a run of letters, digits and underscores.
    """

    seed: int = 0

    def example(self, index: int, split: Split) -> Example:
        number, prompt = nth(_BY_SPLIT[split], index, self.seed)
        return Example(example_id=f"prompt-{number}", messages=(Message(role="user", content=prompt),))

    def score(self, example: Example, answer: str) -> Score:
        words = re.findall(r"\w+", answer.lower())
        cats = words.count("cats")
        love_cats = sum(pair == ("love", "cats") for pair in pairwise(words))
        return Score(
            reward=(cats + 10 * love_cats) / sqrt(1 + len(words)),
            components={"cats": cats, "love_cats": love_cats, "length": len(words)},
        )
