"""Results of operations that have no home below: what was checked, sampled and trained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.results import Part, Result
from ludic.show.evaluations import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Result):
    """What checks found before a run starts."""

    root: str
    """URL or path of the root."""
    rows: Sequence[Mapping[str, str]]
    """One row for each check, with `check`, `state` (ok, look, wrong or left out) and `found`."""

    def parts(self) -> Iterator[Part]:
        """A line for each check."""
        width = max(len(row["state"]) for row in self.rows)
        for row in self.rows:
            yield f"{row['state']:<{width}}  {row['check']}: {row['found']}"

    @property
    def failure(self) -> str | None:
        num_wrong = sum(row["state"] == "wrong" for row in self.rows)
        return f"{num_wrong} of {len(self.rows)} checks found a mistake" if num_wrong else None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trained(Result):
    """How training ended."""

    root: str
    """URL or path of the root."""
    step: int
    """Last step in the weights."""
    num_steps: int | None
    """Step that training should reach; None if the stored rollouts decide."""
    evaluation: Evaluation | None = None
    """Mean rewards of the versions that were evaluated meanwhile."""
    hint: str = ""
    """What to look at next."""

    def to_dict(self) -> dict[str, Any]:
        figures = {"root": self.root, "step": self.step, "num_steps": self.num_steps}
        return figures if self.evaluation is None else figures | {"evaluation": self.evaluation.to_dict()}

    def parts(self) -> Iterator[Part]:
        """The mean rewards, and a sentence."""
        if self.evaluation is not None:
            yield from self.evaluation.parts()
        if self.num_steps is not None and self.step > self.num_steps:
            past = f"which is past num_steps {self.num_steps}; nothing to train"
            yield f"{self.root} is at step {self.step} already, {past}{self.hint}"
        else:
            of = f" of {self.num_steps}" if self.num_steps else ""
            yield f"trained to step {self.step}{of} in {self.root}{self.hint}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sampled(Result):
    """What a worker sampled."""

    root: str
    """URL or path of the root."""
    num_groups: int
    """Groups that were committed."""

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        yield f"{self.num_groups} groups committed to {self.root}"
