"""SQL and Python files that a trainer plans with: find them, check consent, keep them in the root."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ludic.batches.online import batch_rules
from ludic.sql.code import rule_uses
from ludic.sql.planner import BatchRules, Planner
from ludic.store import Root, RunConfig
from ludic.store.attempts import newest_attempt
from ludic.store.code import keep_files, trusted_files
from ludic.training.config import TrainConfig


def own_rules(root: Root, config: TrainConfig) -> BatchRules:
    """Return the batch rules, with users' files as the root has them.

    Raises ConsentError if a file came with the root and the user has not agreed to run it, ConfigError, QueryError.
    """
    rules = rules_of(root.run, config)
    rules = replace(rules, files=trusted_files(root, rule_uses(rules, names_in_root(root))))
    if rules.files:
        # Raises before keep_files: a file that can't run is not kept, so that its fixed version is read next time.
        Planner(rules, root.run.extra_columns)
        keep_files(root, rules.files)
    return rules


def rules_of(run: RunConfig, config: TrainConfig) -> BatchRules:
    """Return the batch rules of a run's trainer. Raises ConfigError."""
    return batch_rules(config.batch, run.groups_per_batch, run.seed, pairs=config.loss.is_paired)


def names_in_root(root: Root) -> frozenset[str]:
    """Return the newest attempt's advantage, filters and selection, which are the defaults of the next trainer."""
    attempt = newest_attempt(root)
    return frozenset() if attempt is None else names_in(attempt.config)


def names_in(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of advantage, filters and selection in stored settings."""
    names = [config.get("advantage"), config.get("selection"), *(config.get("filters") or ())]
    return frozenset(name for name in names if isinstance(name, str))
