"""Compare the plans of a step by the ledger and by other rules: rows used or dropped, and the credit of each token.

The credit of a sampled token is its advantage times the weight of its row; it is 0 if the row is not used, and beyond
max_seq_len. Works on tables in memory.
"""

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

_SIDES = ("used", "reason", "advantage", "weight", "token_advantages")
"""Columns of the ledger that both plans have."""
_FACTS = ["step", "rollout_id", "group_id", "env_name", "policy_version", "episode_reward", "response_length"]
_NO_ROW_FITS = "where"
"""Reason of rows of which the plan knows nothing: `where` is true of no row of their group."""


def compare_plans(ledger: pa.Table, plan: pa.Table, masks: pa.ChunkedArray, lengths: tuple[Any, Any]) -> pl.DataFrame:
    """Return one row per considered rollout: the ledger's columns, the plan's with the prefix new_, and differences.

    masks: action_mask of the ledger's rows. lengths: max_seq_len by which the ledger and the plan cut sequences. The
    columns old_credit and new_credit hold the credit of each sampled token.
    """
    before = _frame(ledger.select([*_FACTS, "prompt_length", *_SIDES]))
    after = _frame(plan.select(["rollout_id", *_SIDES])).rename({name: f"new_{name}" for name in _SIDES})
    rows = before.join(after, on="rollout_id", how="left", maintain_order="left").with_columns(
        pl.when(pl.col("new_used").is_null()).then(pl.lit(_NO_ROW_FITS)).otherwise("new_reason").alias("new_reason"),
        pl.col("new_used").fill_null(False),
        pl.col("new_weight").fill_null(0.0),
    )
    of_tokens = {
        name: [_credit(row, prefix, mask, most) for row, mask in zip(rows.to_dicts(), masks.to_pylist(), strict=True)]
        for name, prefix, most in (("old_credit", "", lengths[0]), ("new_credit", "new_", lengths[1]))
    }
    return rows.drop("prompt_length").with_columns(
        *(pl.Series(name, values, dtype=pl.List(pl.Float64)) for name, values in of_tokens.items()),
        pl.Series(
            "mean_abs_difference",
            [_mean_abs(old, new) for old, new in zip(of_tokens["old_credit"], of_tokens["new_credit"], strict=True)],
            dtype=pl.Float64,
        ),
    )


def summarize(rows: pl.DataFrame) -> dict[str, Any]:
    """Return the figures of a step. NULL: no rollout is used, or a correlation with credit that is all equal."""
    used = rows.filter(pl.col("used") | pl.col("new_used"))
    old, new = (np.concatenate([np.zeros(0), *used[name].to_list()]) for name in ("old_credit", "new_credit"))
    return {
        "step": rows["step"][0],
        "num_considered": rows.height,
        "num_used": int(rows["used"].sum()),
        "num_new_used": int(rows["new_used"].sum()),
        "num_added": rows.filter(~pl.col("used") & pl.col("new_used")).height,
        "num_removed": rows.filter(pl.col("used") & ~pl.col("new_used")).height,
        "num_tokens": len(old),
        "mean_abs_difference": float(np.abs(new - old).mean()) if len(old) else None,
        "correlation": _correlation(old, new),
        "sign_flips": float((old * new < 0).mean()) if len(old) else None,
    }


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _credit(row: dict[str, Any], prefix: str, mask: list[bool] | None, most: int | None) -> list[float]:
    """Return the credit of each sampled token of a row."""
    length = row["response_length"]
    sampled = np.ones(length, bool) if mask is None else np.array(mask, bool)
    if not row[f"{prefix}used"]:
        return [0.0] * int(sampled.sum())
    per_token = row[f"{prefix}token_advantages"]
    values = np.full(length, row[f"{prefix}advantage"]) if per_token is None else np.array(per_token, np.float64)
    if most is not None:
        values[max(0, most - row["prompt_length"]) :] = 0
    return (values * row[f"{prefix}weight"])[sampled].tolist()


def _mean_abs(old: list[float], new: list[float]) -> float | None:
    return float(np.abs(np.subtract(new, old)).mean()) if old else None


def _correlation(old: np.ndarray, new: np.ndarray) -> float | None:
    if len(old) < 2 or old.std() == 0 or new.std() == 0:
        return None
    return float(np.corrcoef(old, new)[0, 1])
