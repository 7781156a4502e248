"""Settings that older versions of ludic knew, or stored in attempts/N.json and checkpoint.json: new names, and gone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

RENAMED: Mapping[str, str] = {
    "normalize_over": "loss_normalization",
    "kl_in": "kl_placement",
    "truncate_ratio": "is_ratio_cap",
    "mask_ratio": "is_ratio_bounds",
    "mask_sequence_ratio": "is_sequence_ratio_bounds",
    "stall_limit_s": "rollout_timeout_s",
    "micro_token_budget": "max_tokens_per_micro_batch",
    "groups_per_call": "in_flight",
    "follow_quota": "follow_budget",
    "all": "all_versions",
    "catalog": "out",
    "target_bytes": "target_mb",
    "target": "out",
}
"""Current name of a setting by its former name."""


JOINED: Mapping[str, tuple[str, ...]] = {
    "sapo_tau": ("sapo_tau_positive", "sapo_tau_negative"),
    "dppo_bounds": ("dppo_high", "dppo_low"),
}
"""Former settings whose values are now one list, by its name."""


class Gone(NamedTuple):
    """A setting that ludic has no more."""

    instead: str
    """What to do or what happens in its place: the end of a sentence that begins with "is gone: "."""
    as_now: Any = None
    """The value with which an older trainer did what ludic does now."""
    successor: str = ""
    """The setting to give instead, of a trainer that goes on from another value; "" if ludic says it and goes on."""


GONE: Mapping[str, Gone] = {
    "tracker_project": Gone("set WANDB_PROJECT where the trainer runs"),
    "tracker_entity": Gone("set WANDB_ENTITY where the trainer runs"),
    "tracker_name": Gone("set WANDB_NAME where the trainer runs"),
    "tracker_tags": Gone("set WANDB_TAGS where the trainer runs, joined by commas", []),
    "keep_checkpoints_every": Gone(
        "keep_checkpoints keeps the newest ones, and all of them if it is None", successor="keep_checkpoints"
    ),
    "max_failed_batches": Gone("training stops after two batches in which every rollout failed", 2),
    **{
        each: Gone(f"{name} has the values of {' and '.join(former)}, in this order")
        for name, former in JOINED.items()
        for each in former
    },
    "ray_cpus": Gone("Ray reserves one CPU for each worker and each rank"),
    "ray_address": Gone("set RAY_ADDRESS where `ludic run` runs, such as RAY_ADDRESS=node1:6379"),
    "on_stop": Gone("a worker gives up groups that have begun, and its next life samples them again"),
}
"""What to do in the place of each setting that is gone, by name. None of them changes the weights that come out."""


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings read from JSON under their current names; a list is what its former settings were."""
    found = {RENAMED.get(name, name): value for name, value in settings.items()}
    for name, former in JOINED.items():
        if found.keys() >= {*former}:
            found[name] = [found.pop(each) for each in former]
    return found
