"""Settings that choose and cut the rollouts of a batch. Imports no torch, so that `--help` answers at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Settings of batches; ludic.training.config.TrainConfig describes each one."""

    advantage: str = "rloo"
    filters: tuple[str, ...] = ()
    where: str | None = None
    selection: str | None = None
    sql_params: Mapping[str, float | int | str] = field(default_factory=dict)
    max_uses: int = 1
    max_off_policy_steps: int | None = 8
    max_age_s: float | None = None
    baseline_over: Literal["group", "kept"] = "group"
    offline: bool = False
    sources: tuple[str, ...] = ()
    epochs: int | None = None
    replay_batches: str | None = None
    micro_token_budget: int = 16384
    max_seq_len: int | None = None
    stall_limit_s: float | None = 1800.0
