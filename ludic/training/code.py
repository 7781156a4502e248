"""The texts that a trainer plans with: found, consented to, kept in the root."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ludic.sql.code import rule_uses
from ludic.sql.planner import BatchRules, Planner
from ludic.store import Root
from ludic.store.attempts import newest_attempt
from ludic.store.code import keep_files, trusted_files
from ludic.training.config import TrainConfig
from ludic.training.feed import batch_rules


def own_rules(root: Root, config: TrainConfig) -> BatchRules:
    """What makes a batch, with the texts of users' files as the root has them.

    Raises ConsentError for a text that came with the root and that the user has not agreed to, ConfigError, QueryError.
    """
    rules = batch_rules(config, root.run.groups_per_batch, root.run.seed)
    rules = replace(rules, files=trusted_files(root, rule_uses(rules, names_in_root(root))))
    if rules.files:
        Planner(rules, root.run.extra_columns)  # what can't run is not kept, so that a mended file is read again
        keep_files(root, rules.files)
    return rules


def names_in_root(root: Root) -> frozenset[str]:
    """The advantage, filters and selection of the newest attempt, which a trainer takes over unless told otherwise."""
    attempt = newest_attempt(root)
    return frozenset() if attempt is None else names_in(attempt.config)


def names_in(config: Mapping[str, Any]) -> frozenset[str]:
    """The advantage, filters and selection of stored settings."""
    names = [config.get("advantage"), config.get("selection"), *(config.get("filters") or ())]
    return frozenset(name for name in names if isinstance(name, str))
