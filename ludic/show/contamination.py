"""Show how much of evaluated prompts occurs in trained texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ludic.eval.contamination import Overlaps
from ludic.results import Frame, Part, Result, Sentence

if TYPE_CHECKING:
    import polars as pl

_SHOWN = 20


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Contamination(Result):
    """Overlaps of evaluated prompts with trained texts. Prints well; the tables are Polars DataFrames."""

    overlaps: Overlaps

    @cached_property
    def examples(self) -> "pl.DataFrame":
        """N-grams of each example, those that were trained on, and the rollout that has most of them; most first."""
        import polars as pl

        frame = pl.from_arrow(self.overlaps.examples)
        assert isinstance(frame, pl.DataFrame)
        return frame

    @cached_property
    def total(self) -> "pl.DataFrame":
        """Examples and n-grams of each environment, and the share of n-grams that were trained on."""
        import polars as pl

        found = pl.col("num_found")
        sums = pl.col("num_ngrams").sum(), found.sum(), (found.sum() / pl.col("num_ngrams").sum()).alias("share")
        counts = (
            pl.len().cast(pl.Int64).alias("num_examples"),
            (found > 0).sum().cast(pl.Int64).alias("num_overlapping"),
        )
        return self.examples.group_by("env_name").agg(*counts, *sums).sort("env_name")

    @property
    def num_trained(self) -> int:
        """Rollouts that gradient steps used."""
        return self.overlaps.num_trained

    @property
    def num_absent(self) -> int:
        """Those of them whose text is not in these roots, and so was not compared."""
        return self.overlaps.num_absent

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, as `ludic eval contamination --json` prints them."""
        counts = {"num_trained": self.num_trained, "num_absent": self.num_absent}
        return {**counts, "total": self.total.to_dicts(), "examples": self.examples.to_dicts()}

    def parts(self) -> Iterator[Part]:
        """The total of each environment, then the examples with the most overlap."""
        columns = ("env_name", "num_examples", "num_overlapping", "num_ngrams", "num_found", "share")
        titles = {"num_overlapping": "with overlap", "num_ngrams": "n-grams", "num_found": "trained on"}
        yield Frame("total", self.total.to_dicts(), columns, titles=titles)
        rows = [row for row in self.examples.to_dicts() if row["num_found"]]
        if rows:
            titles |= {"env_example_id": "example", "rollout_id": "most with rollout", "num_shared": "of them"}
            shown = ("env_example_id", "num_ngrams", "num_found", "rollout_id", "num_shared")
            yield Frame("examples", rows, shown, most=_SHOWN, titles=titles)
        if self.num_absent:
            said = f"{self.num_absent:,} of {self.num_trained:,} trained rollouts are not stored here, so not compared"
            yield Sentence(said, mark="warning ", style="yellow")
