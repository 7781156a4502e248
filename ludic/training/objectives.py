"""Table of the settings that each objective reads; settings that it would ignore are refused. Imports no torch.

Raises ConfigError, which names the setting and what to do.
"""

from collections.abc import Mapping
from typing import Any, Literal

from ludic.errors import ConfigError

Objective = Literal[
    "reinforce", "ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo", "vespo", "sft", "dpo", "ipo", "orpo"
]
"""Names of functions in ludic.training.losses."""

PAIRED: tuple[Objective, ...] = ("dpo", "ipo", "orpo")
"""Objectives that compare the two sides of a pair."""
OFF_POLICY: tuple[Objective, ...] = ("reinforce", "ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo", "vespo")
"""Objectives that use advantages and importance ratios."""

READ_BY: Mapping[str, tuple[Objective, ...]] = {
    "clip_low": ("ppo_clip", "cispo", "gspo", "gmpo"),
    "clip_high": ("ppo_clip", "cispo", "gspo", "gmpo"),
    "dual_clip": ("ppo_clip", "gspo"),
    "is_ratio_cap": ("reinforce",),
    "ratio_level": ("reinforce",),
    "is_ratio_bounds": OFF_POLICY,
    "is_sequence_ratio_bounds": OFF_POLICY,
    "mask_sequence_kl": OFF_POLICY,
    "log_ratio_weight": OFF_POLICY,
    "whiten_advantages": OFF_POLICY,
    "kl_placement": OFF_POLICY,
    "sapo_tau_positive": ("sapo",),
    "sapo_tau_negative": ("sapo",),
    "dppo_low": ("dppo",),
    "dppo_high": ("dppo",),
    "vespo_k": ("vespo",),
    "vespo_lambda": ("vespo",),
    "dpo_beta": ("dpo", "ipo"),
    "orpo_weight": ("orpo",),
}
"""Settings that only some objectives read; settings that are not listed are read by all."""
BOUNDS: Mapping[Objective, tuple[str, ...]] = {
    "reinforce": ("is_ratio_cap", "is_ratio_bounds"),
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("clip_low", "clip_high"),
    "gspo": ("clip_low", "clip_high", "dual_clip"),
    "gmpo": ("clip_low", "clip_high"),
}
"""Settings that bound the importance ratio of an objective."""
_WANT_A_BOUND: tuple[Objective, ...] = ("ppo_clip", "cispo", "gspo", "gmpo")
_WANT_A_REFERENCE: tuple[Objective, ...] = ("dpo", "ipo")
_OF_KL = ("kl_estimator", "kl_placement")
"""Settings that are used only with kl_weight."""
DECIDE_IGNORED = ("objective", "kl_weight")
"""Settings that decide which others are ignored."""


def check_objective(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that the objective ignores, lacks or can't use.

    settings, defaults: TrainConfig's values and defaults by name. A setting equal to its default counts as not given.
    """
    given = [name for name in settings if name in defaults and _as_tuple(settings[name]) != _as_tuple(defaults[name])]
    for name in given:
        if name in _ignored(settings):
            raise ConfigError(f"{name} is {settings[name]}, {_why_ignored(name, settings)}")
    _check_values(settings)
    _check_bound(settings)
    if settings["objective"] in PAIRED:
        _check_paired(settings)


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, since JSON and TOML have no tuples."""
    return tuple(value) if isinstance(value, list) else value


def without_ignored(settings: Mapping[str, Any], chosen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an earlier trainer's settings without those that its objective ignores; older versions accepted these.

    chosen: new values of DECIDE_IGNORED, by name.
    """
    now = {**settings, **(chosen or {})}
    if "objective" not in now:
        return dict(settings)
    return {name: value for name, value in settings.items() if name not in _ignored(now)}


def _ignored(settings: Mapping[str, Any]) -> set[str]:
    ignored = {name for name, objectives in READ_BY.items() if settings["objective"] not in objectives}
    return ignored if settings.get("kl_weight") is not None else ignored | set(_OF_KL)


def _why_ignored(name: str, settings: Mapping[str, Any]) -> str:
    objective, readers = settings["objective"], READ_BY.get(name)
    if readers is None or objective in readers:
        return "but there is no kl_weight; set kl_weight, or leave it out"
    return f"which {objective} ignores; leave it out, or set objective to {' or '.join(readers)}"


def _check_values(settings: Mapping[str, Any]) -> None:
    clip_low, dual_clip = settings["clip_low"], settings["dual_clip"]
    loss_normalization, constant_tokens = settings["loss_normalization"], settings["constant_tokens"]
    if clip_low is not None and clip_low > 1:
        raise ConfigError(f"clip_low is {clip_low}, wanted at most 1: a ratio is never below 0")
    if dual_clip is not None and dual_clip <= 1:
        raise ConfigError(f"dual_clip is {dual_clip}, wanted above 1")
    for name in ("is_ratio_bounds", "is_sequence_ratio_bounds"):
        bounds = settings[name]
        if bounds is not None and not bounds[0] < 1 < bounds[1]:
            raise ConfigError(f"{name} is {bounds}, wanted one bound from 0 to below 1 and one above 1")
    for name in ("vespo_k", "vespo_lambda"):
        if not all(0 < value < float("inf") for value in settings[name]):
            raise ConfigError(f"{name} is {settings[name]}, wanted two numbers above 0")
    if (loss_normalization == "constant") != (constant_tokens is not None):
        raise ConfigError(
            f"loss_normalization is {loss_normalization} and constant_tokens is {constant_tokens}; "
            "set constant_tokens with loss_normalization constant, and only then"
        )


def _check_bound(settings: Mapping[str, Any]) -> None:
    objective: Objective = settings["objective"]
    if objective in _WANT_A_BOUND and all(settings[name] is None for name in BOUNDS[objective]):
        raise ConfigError(
            f"objective is {objective}, which clips the importance ratio, but there is no bound to clip at; "
            f"set {' or '.join(BOUNDS[objective])}, such as clip_high 0.2"
        )


def _check_paired(settings: Mapping[str, Any]) -> None:
    objective, loss_normalization = settings["objective"], settings["loss_normalization"]
    if objective in _WANT_A_REFERENCE and settings["reference"] is None:
        raise ConfigError(
            f"objective is {objective} but there is no reference; set reference to a model, such as the first one"
        )
    if loss_normalization != "sequences":
        raise ConfigError(
            f"loss_normalization is {loss_normalization}, and {objective} takes the mean over pairs; "
            "set it to sequences"
        )
