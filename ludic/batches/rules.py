"""Build the rules of the planner from the settings and the users' SQL and Python files in the root."""

from dataclasses import replace

from ludic.batches.config import BatchConfig
from ludic.code.kept import trusted_files
from ludic.errors import ConfigError
from ludic.sql.planner import BatchRules, LossUnit
from ludic.store import Root
from ludic.store.attempts import newest_attempt

_ENDLESS = 2**31 - 1
_FILTER_OF = {"max_off_policy_steps": "max_off_policy_steps", "max_age_s": "max_age"}


def batch_rules(
    config: BatchConfig, groups_per_batch: int, seed: int = 0, *, loss_unit: LossUnit = "row"
) -> BatchRules:
    """Return the planner's rules from the settings; max_off_policy_steps and max_age_s become filters.

    Offline these two are ignored, since no newer rollouts would come. seed: of the run. loss_unit: what the loss
    averages over. Raises ConfigError if sql_params holds a name that is a setting itself.
    """
    limits = {"max_off_policy_steps": config.max_off_policy_steps, "max_age_s": config.max_age_s}
    limits = {name: value for name, value in limits.items() if value is not None and not config.offline}
    for name in limits.keys() & config.sql_params.keys():
        raise ConfigError(f"sql_params has {name!r}, which is a setting of its own; leave it out of sql_params")
    return BatchRules(
        advantage=config.advantage,
        filters=(*config.filters, *(_FILTER_OF[name] for name in limits)),
        where=config.where,
        selection=config.selection or ("epochs" if config.offline else "fifo"),
        max_uses=(config.epochs or _ENDLESS) if config.offline else config.max_uses,
        params={**config.sql_params, **limits},
        seed=seed,
        baseline_over=config.baseline_over,
        loss_unit=loss_unit,
        scorers=config.scorers,
        reward_scorer=config.reward_scorer,
        mixed_scorers=config.mixed_scorers,
        wait_for_scores_s=0.0 if config.offline else config.wait_for_scores_s,
        groups_per_batch=groups_per_batch,
        max_seq_len=config.max_seq_len,
    )


def own_rules(root: Root, config: BatchConfig, *, loss_unit: LossUnit = "row") -> BatchRules:
    """Return the rules of a run's own trainer, with the users' files stored in the root.

    Raises ConsentError if a file came with the root and the user has not agreed to run it, ConfigError.
    """
    rules = batch_rules(config, root.run.groups_per_batch, root.run.seed, loss_unit=loss_unit)
    return replace(rules, files=trusted_files(root, rules.uses(names_in_root(root))))


def names_in_root(root: Root) -> frozenset[str]:
    """Return the newest attempt's advantage, filters and selection, which are the defaults of the next trainer."""
    attempt = newest_attempt(root)
    config = {} if attempt is None else attempt.config
    names = [config.get("advantage"), config.get("selection"), *(config.get("filters") or ())]
    return frozenset(name for name in names if isinstance(name, str))
