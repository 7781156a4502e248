"""Run other rules over the stored batches of a run, and compare with its ledger, step by step.

Reads attempts/, batches/, rollouts/, scores/ and code/; writes nothing. Raises ConfigError if steps or rollouts are
missing, QueryError if the rules do not fit the rollouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import polars as pl

from ludic.batches.replay import Replanner
from ludic.store import Root
from ludic.store.root import Track, untracked
from ludic.what_if.credit import compare_plans, summarize
from ludic.what_if.rules import config_of, rules_of_step
from ludic.what_if.steps import parse_steps, planned_steps, read_considered, read_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What other rules would have made of stored batches."""

    steps: pl.DataFrame
    """One row per step: counts, and how the credit of tokens differs."""
    rows: pl.DataFrame
    """One row per considered rollout and step; columns of the other rules have the prefix new_."""
    is_ledger: bool
    """Whether every plan equals the ledger in every bit."""


def rerun(root: Root, given: Mapping[str, Any], steps: str | None = None, track: Track = untracked) -> Rerun:
    """Plan stored steps by the run's own rules, changed by the settings given. steps: "7" or "10-20"; None is all."""
    planned = planned_steps(root)
    wanted = parse_steps(steps, planned, root.url)
    frames: list[pl.DataFrame] = []
    is_ledger = True
    for attempt_id, group in groupby(wanted, key=lambda step: planned[step]):
        config = config_of(root, attempt_id, given)
        most = config_of(root, attempt_id, {}).batch.max_seq_len, config.batch.max_seq_len
        replanner = Replanner(root, rules_of_step(root, config, given), read_considered)
        of_attempt = list(group)
        for step in track(of_attempt, len(of_attempt), f"attempt {attempt_id}"):
            ledger = read_step(root, planned, step)
            plan = replanner.plan(ledger)
            is_ledger &= plan.equals(ledger)
            masks = read_considered(root, ledger, ["action_mask"])["action_mask"]
            frames.append(compare_plans(ledger, plan, masks, most))
    return Rerun(
        steps=pl.DataFrame([summarize(frame) for frame in frames], infer_schema_length=None),
        rows=pl.concat(frames),
        is_ledger=is_ledger,
    )
