"""Show how much of evaluated prompts occurs in trained texts."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ludic.eval.contamination import Overlaps
from ludic.viewer.output import Shown, cell, number, plain_table

if TYPE_CHECKING:
    import polars as pl

_SHOWN = 20


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Contamination(Shown):
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

    def print_to(self, console: Console) -> None:
        """Print the total of each environment, then the examples with the most overlap."""
        table = plain_table("env", ">examples", ">with overlap", ">n-grams", ">trained on", ">share")
        for row in self.total.to_dicts():
            counts = (row[name] for name in ("num_examples", "num_overlapping", "num_ngrams", "num_found"))
            table.add_row(cell(row["env_name"]), *(f"{count:,}" for count in counts), number(row["share"], 4))
        console.print(table)
        rows = [row for row in self.examples.to_dicts() if row["num_found"]]
        table = plain_table("example", ">n-grams", ">trained on", "most with rollout", ">of them")
        for row in rows[:_SHOWN]:
            found = f"{row['num_ngrams']:,}", f"{row['num_found']:,}"
            table.add_row(cell(row["env_example_id"]), *found, cell(row["rollout_id"]), f"{row['num_shared']:,}")
        if rows:
            console.print(table)
        if len(rows) > _SHOWN:
            console.print(Text(f"{len(rows) - _SHOWN:,} more examples with overlap", style="dim"))
        if self.num_absent:
            said = f"{self.num_absent:,} of {self.num_trained:,} trained rollouts are not stored here, so not compared"
            console.print(Text("warning ", style="yellow").append(said, "default"), soft_wrap=True)
