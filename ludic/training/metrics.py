"""Metrics of a step's data, computed from its plan and named as in schemas/metrics.v1.json. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.batches.source import Plan


def step_metrics(plan: Plan, metrics: Mapping[str, float], *, num_tokens: int, num_truncated: int) -> dict[str, Any]:
    """Return the metrics of a training step together with those of its used and dropped rollouts."""
    used = plan.rows.filter(plan.rows.column("used"))
    # Policy versions of another run can't be compared with this run's.
    own = used.filter(pc.is_null(used.column("root")))
    dropped = plan.rows.filter(pc.invert(plan.rows.column("used")))
    return {
        **metrics,
        "policy_version": plan.rows.column("trainer_version")[0].as_py(),
        "num_rollouts": used.num_rows,
        "num_groups": len(used.column("group_id").unique()),
        "num_tokens": num_tokens,
        "num_seq_len_truncated": num_truncated,
        "reward_mean": _mean(plan.rows, "episode_reward"),
        "response_length_mean": _mean(used, "response_length"),
        "advantage_mean": _mean(used, "advantage"),
        "advantage_std": pc.stddev(used.column("advantage")).as_py(),
        "lag_mean": _mean(own, "lag"),
        "lag_max": pc.max(own.column("lag")).as_py(),
        "num_pending_groups": plan.num_pending_groups,
        "num_unreadable_files": plan.num_unreadable_files,
        "drops": dict(Counter(dropped.column("reason").to_pylist())),
    }


def trained_lengths(plan: Plan, max_seq_len: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt and response lengths, in tokens, of a step's used rollouts; max_seq_len may cut a response to 0."""
    used = plan.rows.filter(plan.rows.column("used"))
    prompts, responses = (used.column(name).to_numpy() for name in ("prompt_length", "response_length"))
    if max_seq_len is not None:
        responses = np.clip(responses, 0, np.maximum(0, max_seq_len - prompts))
    return prompts, responses


def _mean(table: pa.Table, column: str) -> float | None:
    return pc.mean(table.column(column)).as_py()
