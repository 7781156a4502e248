"""The environment of this experiment: what the model is asked, and how its answer is scored. Change both.

`ludic check runs/first --config experiment.toml` tries it in seconds, without a start. If your questions and answers
are in a file, no class is needed: write env = ["qa/questions.jsonl"] into experiment.toml.
"""

from ludic.environments import Example, Score, Split
from ludic.records import Message

FORMS = ("story", "poem", "song", "letter")
PLACES = {
    "train": ("in the garden", "on the roof", "at night", "in the snow", "by the sea", "at school", "on the moon"),
    "heldout": ("in the kitchen", "in the rain", "under the bed"),
}


class Cats:
    """Write of cats, and of nothing else."""

    def example(self, index: int, split: Split) -> Example:
        """Return question number `index`: the same index and split always give the same one.

        split: "train", or "heldout" for the questions of evaluations, which are never trained on.
        """
        form, place = FORMS[index % len(FORMS)], PLACES[split][index // len(FORMS) % len(PLACES[split])]
        question = f"write a {form} about cats {place}"
        # If there is a right answer, name it: Example(..., wanted="4"). The model does not see it.
        return Example(example_id=question, messages=(Message(role="user", content=question),))

    def score(self, example: Example, answer: str) -> Score:
        """Score an answer, which may be any text, also an empty one. A higher reward is better."""
        words = answer.split()
        num_cats = words.count("cats")
        # The components are stored with each answer, and measure what the reward is made of.
        return Score(reward=num_cats / max(1, len(words)), components={"num_cats": num_cats, "num_words": len(words)})
