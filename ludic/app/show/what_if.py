"""Show the results of what-if, bisect and cut."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ludic.base import Frame, Part, Result, plural, size
from ludic.eval import Bisected, Cut, Probe, Rerun

if TYPE_CHECKING:
    import polars as pl

_MOST_ROWS = 10
_ID_DIGITS = 12
_TITLES = {"rollout": "rollout (its end)", "mean_abs_difference": "diff.", "sign_flips": "flips"}
"""Titles that leave room for the others in 80 columns."""
_DERIVED = {"rollout": lambda row: row["rollout_id"][-_ID_DIGITS:]}  # ids created together begin alike
_LISTS = ("old_credit", "new_credit", "token_advantages", "new_token_advantages")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WhatIf(Result):
    """Stored batches by other rules, against the ledger. Prints well; `steps` and `rows` are Polars DataFrames."""

    url: str
    given: Mapping[str, Any]
    """Settings that differ from the run's."""
    rerun: Rerun
    branch: str | None = None
    """Root of the trained branch."""
    commands: Sequence[str] = field(default_factory=list)
    """Commands that evaluate the branch against the run in pairs."""

    @property
    def is_ledger(self) -> bool:
        """True if every plan equals the ledger in every bit."""
        return self.rerun.is_ledger

    @property
    def steps(self) -> "pl.DataFrame":
        """Counts and differences of credit, one row per step."""
        return self.rerun.steps

    @property
    def rows(self) -> "pl.DataFrame":
        """Every considered rollout, as planned, and with the prefix new_ by the other rules."""
        return self.rerun.rows

    def reasons(self) -> "pl.DataFrame":
        """Number of rollouts for each pair of actual and hypothetical fate."""
        import polars as pl

        return (
            self.rows.select(
                pl.col("reason").fill_null("used").alias("happened"),
                pl.col("new_reason").fill_null("used").alias("would_happen"),
            )
            .group_by("happened", "would_happen")
            .len("num_rollouts")
            .sort("happened", "would_happen")
        )

    def largest(self) -> "pl.DataFrame":
        """The rows whose credit differs most."""
        return (
            self.rows.drop(_LISTS)
            .sort("mean_abs_difference", "rollout_id", descending=[True, False], nulls_last=True)
            .head(_MOST_ROWS)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, as `ludic what-if --json` prints them."""
        return {
            "root": self.url,
            "settings": dict(self.given),
            "is_ledger": self.is_ledger,
            "other_trainers": list(self.rerun.other_trainers),
            "reasons": self.reasons().to_dicts(),
            "steps": self.steps.to_dicts(),
            "largest_differences": self.largest().to_dicts(),
            "branch": self.branch,
            "commands": list(self.commands),
        }

    def parts(self) -> Iterator[Part]:
        """Rollouts used or dropped by the other rules, then differences of credit by step and the largest ones."""
        if self.rerun.other_trainers:
            kept = "" if "advantage" in self.given else " Its advantages are kept."
            yield f"Happened: as {' and '.join(self.rerun.other_trainers)} used them.{kept}"
        if self.is_ledger:
            yield f"The same as the ledger, bit for bit, in {plural(self.steps.height, 'step')}."
        yield _frame("reasons", self.reasons(), "happened", "would_happen", "num_rollouts")
        yield ""
        names = ("step", "num_considered", "num_used", "num_new_used", "num_added", "num_removed")
        yield _frame("steps", self.steps, *names, "mean_abs_difference", "correlation", "sign_flips")
        if not self.is_ledger:
            yield ""
            yield "Largest differences of credit per token:"
            columns = ("step", "rollout", "episode_reward", "reason", "advantage", "new_reason", "new_advantage")
            yield _frame("largest_differences", self.largest(), *columns, "mean_abs_difference")
        if self.branch is not None:
            yield ""
            yield f"Trained the branch {self.branch}. To compare it with the run in pairs:"
            yield from (f"    {command}" for command in self.commands)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Bisection(Result):
    """The step at which a predicate turns true, and the checked steps. Prints well."""

    url: str
    found: Bisected

    @property
    def step(self) -> int | None:
        """Step at which the predicate turns true; None if it is not true at the end."""
        return self.found.found

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Steps that the search checked, in order."""
        return self.found.probes

    def to_dict(self) -> dict[str, Any]:
        return {"root": self.url, **asdict(self.found)}

    def parts(self) -> Iterator[Part]:
        """The answer in a sentence, then the checked steps."""
        yield self._answer()
        yield Frame(
            "probes",
            [asdict(probe) for probe in self.probes],
            ("step", "predicate", "num_rows"),
            most=len(self.probes),
            titles={"num_rows": f"rows of {self.found.table}"},
            derived={"predicate": _state},
        )

    def _answer(self) -> str:
        first, last = self.found.steps
        if self.step is None:
            return f"({self.found.predicate}) is not true at the last step, {last}; it may have been true for a while."
        if self.found.before is None:
            return f"({self.found.predicate}) is true from the start, step {first}."
        answer = f"({self.found.predicate}) turns true at step {self.step}; it is not at step {self.found.before}."
        num_probed = len({probe.step for probe in self.probes if probe.step < self.step})
        is_whole = num_probed >= self.step - first
        looked = f"The search assumes that it turns true once, and checked {num_probed} of the earlier steps."
        return answer if is_whole else f"{answer} {looked}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CutOut(Result):
    """A folder that replays one step. Prints well."""

    url: str
    cut: Cut

    def to_dict(self) -> dict[str, Any]:
        return {"root": self.url, **asdict(self.cut)}

    def parts(self) -> Iterator[Part]:
        """Contents of the folder, and the command that replays it."""
        made = self.cut
        one = made.first_step == made.step
        policy = "pruned" if made.policy_version is None else f"version {made.policy_version}"
        more = "" if one else " (no checkpoint is stored right before the step)"
        yield {
            "folder": f"{made.folder}, {size(made.size_bytes)}",
            "steps": f"{made.step}" if one else f"{made.first_step} to {made.step}{more}",
            "rollouts": f"{made.num_rollouts:,}",
            "policy before": policy,
            "replay": made.command,
        }
        if not made.weights_sha256:
            yield "The run no longer holds the exact weights after this step."
        for name, digest in made.weights_sha256.items():
            yield f"SHA-256 of {name} after the step: {digest}"


def _state(probe: Mapping[str, Any]) -> str:
    if not probe["num_rows"]:
        return "no rows"
    return "NULL" if probe["is_true"] is None else str(probe["is_true"]).lower()


def _frame(name: str, frame: "pl.DataFrame", *shown: str) -> Frame:
    derived = {name: of for name, of in _DERIVED.items() if name in shown}
    return Frame(name, frame.to_dicts(), shown, most=frame.height, titles=_TITLES, derived=derived)
