"""Settings of a what-if: those of the trainer that planned a step, with the rules given now.

Reads attempts/ and the users' SQL and Python in code/. Raises ConfigError, and ConsentError for code of the root that
the user has not agreed to run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ludic.batches.rules import batch_rules
from ludic.code.kept import find_files, trusted_files
from ludic.errors import ConfigError
from ludic.settings import given as as_given
from ludic.sql.library import load_advantage, load_filter, load_selection
from ludic.sql.planner import BatchRules
from ludic.store import Root, read_attempt
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import to_config
from ludic.training.presets import load_algorithm


def given_settings(
    *,
    advantage: str | None,
    filters: "tuple[str, ...] | None",
    algorithm: str | None,
    sql_params: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the settings that differ from the run's: an algorithm's, overridden by those given themselves."""
    own = {"advantage": advantage, "filters": filters, "sql_params": sql_params or None}
    preset = load_algorithm(algorithm) if algorithm is not None else {}
    return preset | {name: value for name, value in own.items() if value is not None}


def config_of(root: Root, attempt_id: int, given: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of an attempt with those given now. Raises ConfigError if the attempt has no rules."""
    earlier = read_attempt(root, attempt_id).config
    if earlier.get("replay_batches") and earlier.get("replan_from") is None:
        raise ConfigError(
            f"{root.url}: attempt {attempt_id} repeats the batches of {earlier['replay_batches']} without rules of its "
            "own; ask about that run"
        )
    return to_config({**as_given(earlier, f"attempt {attempt_id} of {root.url}", "stored"), **given})


def rules_of_step(root: Root, config: TrainConfig, given: Mapping[str, Any]) -> BatchRules:
    """Return the rules of a plan. Files that are given now are read from this machine, others from the root's code/."""
    rules = batch_rules(config.batch, root.run.groups_per_batch, root.run.seed, loss_unit=config.loss.loss_unit)
    named = {given.get("advantage"), *(given.get("filters") or ())}
    uses = rules.uses()
    files = find_files(root, [use for use in uses if use.setting in named], update=True).files
    others = rules.uses({use.setting for use in uses if use.setting not in named})
    kept = trusted_files(root, [use for use in others if use.setting not in named])
    rules = replace(rules, files={**kept, **files})
    # The run's parameters of an advantage or filter that is replaced have no meaning here.
    wanted = _parameters(rules) | (given.get("sql_params") or {}).keys()
    return replace(rules, params={name: value for name, value in rules.params.items() if name in wanted})


def _parameters(rules: BatchRules) -> set[str]:
    texts = [
        load_advantage(rules.advantage, rules.files),
        *(load_filter(name, rules.files) for name in rules.filters),
        load_selection(rules.selection, rules.files),
    ]
    return {name for text in texts for name in text.parameters}
