"""Compare the training rewards of runs where they are comparable: at equal steps, and at equal trained tokens.

Reads batches/ and metrics/ through SQL, without steps that a later attempt has replaced, so a run that was resumed is
one curve. Raises QueryError if a file can't be read.

A run's reward at a step is its mean over the groups that the last `window` steps considered, used or dropped, where a
group counts once, with the mean of its scored rollouts. The interval has the group as its unit, because rollouts of one
group share their prompt and mostly their weights (Cameron and Miller 2015, "A practitioner's guide to cluster-robust
inference", Journal of Human Resources 50, 317-372): the standard error of the groups' means, with Student's t. Two runs
differ by Welch's interval (ludic.eval.statistics.welch). It is that of independent groups; where both runs ask the same
prompts, it is wider than needed.

Such an interval covers prompts and samples. It does not cover what another seed of the same settings would give, which
is often more (Henderson et al. 2018, "Deep reinforcement learning that matters", arXiv 1709.06560; Agarwal et al. 2021,
"Deep reinforcement learning at the edge of the statistical precipice", arXiv 2108.13264). Between groups of runs, the
run is the unit: the mean over runs of a run's reward, with Student's t over the runs, from 2 runs on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb
import numpy as np

from ludic.eval import statistics
from ludic.eval.config import WINDOW
from ludic.eval.statistics import Interval
from ludic.root import Root
from ludic.root.sql import ask_table, figure

FEWEST_RUNS = 2
"""Runs from which there is an interval over runs, which Student's t makes wide."""

At = Literal["step", "tokens"]
"""What is equal for all runs where their rewards are compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunProgress:
    """Steps of a run, without those that a later attempt has replaced. S = its steps."""

    steps: np.ndarray
    """(S,) int64, ascending"""
    tokens: np.ndarray
    """(S,) int64, tokens through the model in all steps up to this one"""

    @property
    def last_step(self) -> int | None:
        """None before the first step."""
        return int(self.steps[-1]) if len(self.steps) else None

    @property
    def num_tokens(self) -> int:
        """Tokens that the run has trained on."""
        return int(self.tokens[-1]) if len(self.tokens) else 0

    def window_at(self, at: At, amount: int, size: int = WINDOW) -> "Window | None":
        """Return the last `size` steps, or all, up to a step or up to a number of trained tokens; None for no step."""
        reached = self.steps[(self.steps if at == "step" else self.tokens) <= amount]
        return (int(reached[-size:][0]), int(reached[-1])) if len(reached) else None


Window = tuple[int, int]
"""First and last step over which a reward is averaged."""


def read_progress(con: duckdb.DuckDBPyConnection, root: Root) -> RunProgress:
    """Return the steps of a run."""
    rows = ask_table(con, root, figure("progress"))
    steps, tokens = (np.array(rows[name].to_pylist(), np.int64) for name in ("step", "num_tokens"))
    return RunProgress(steps=steps, tokens=np.cumsum(tokens))


def common_amounts(runs: Sequence[RunProgress]) -> dict[At, int]:
    """Return the largest step and number of trained tokens that all runs have reached, without those that have none."""
    steps = [run.last_step for run in runs if run.last_step is not None]
    tokens = [run.num_tokens for run in runs if run.num_tokens]
    least: dict[At, Sequence[int]] = {"step": steps, "tokens": tokens}
    return {at: min(of_runs) for at, of_runs in least.items() if of_runs}


def read_rewards(
    con: duckdb.DuckDBPyConnection, root: Root, window: Window | None, env: Sequence[str] = ()
) -> np.ndarray:
    """Return (V,) float64, the mean reward of each group of a window, in the order of their ids.

    env: environments that count; none are all.
    """
    if window is None:
        return np.empty(0)
    params = {"first_step": window[0], "last_step": window[1], "envs": list(env) or None}
    # A list between: `to_numpy` imports pandas if it is installed, which takes half a second.
    return np.array(ask_table(con, root, figure("rewards_of_groups"), params)["reward"].to_pylist(), np.float64)


def reward_columns(
    baseline: np.ndarray | None, values: np.ndarray, confidence: float, *, fewest: int = statistics.FEWEST_EXAMPLES
) -> Mapping[str, Any]:
    """Return the columns of a row of rewards: mean, interval, and the difference from the baseline with its interval.

    values: (V,) rewards of groups, or of runs. baseline: (B,) those of the baseline; None for its own row. fewest:
    values from which there is an interval.
    """
    found = statistics.clustered(values, confidence, fewest=fewest)
    none = Interval(estimate=None)
    gain = none if baseline is None else statistics.welch(baseline, values, confidence, fewest=fewest)
    return {
        "estimate": found.estimate,
        "low": found.low,
        "high": found.high,
        "difference": gain.estimate,
        "difference_low": gain.low,
        "difference_high": gain.high,
    }
