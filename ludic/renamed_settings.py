"""New names of settings that older versions of ludic knew, or stored in attempts/N.json and checkpoint.json."""

from collections.abc import Mapping
from typing import Any

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


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings read from JSON under their current names."""
    return {RENAMED.get(name, name): value for name, value in settings.items()}
