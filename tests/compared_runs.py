"""Runs whose ledgers and metrics are made from rewards by hand, without rollouts."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from ludic.records import arrow_schema
from ludic.root.attempts import record_attempt
from ludic.root.claims import claim, newest_claim
from ludic.root.code import to_dicts
from ludic.root.json_records import CodeRecord
from ludic.root.root import Root
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.tables import MetricsLog
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.training.config import TrainConfig

Groups = Sequence[Sequence[float | None]]
"""Rewards of the rollouts of each group."""


def make_compared(
    url: str,
    steps: Mapping[int, Groups],
    *,
    tokens: int = 10,
    run: Mapping[str, Any] | None = None,
    **train: Any,
) -> Root:
    """A run with an attempt and the steps. tokens: of each response. train: settings of the trainer."""
    root = put_run(url, RunConfig(**{"model": "m", "env": ("addition",), **(run or {})}))
    train_on(root, steps, tokens=tokens, **train)
    return root


def train_on(
    root: Root,
    steps: Mapping[int, Groups],
    *,
    tokens: int = 10,
    parent: tuple[int, int] | None = None,
    numerics: Mapping[str, Any] | None = None,
    code: Sequence[CodeRecord] = (),
    env_name: str = "addition",
    **train: Any,
) -> None:
    """Add an attempt with steps; parent: the attempt and the step that it resumed from."""
    lease = claim(root, newest_claim(root), released=True)
    config, facts = TrainConfig.of(**train).flat(), numerics or {"device": "cpu"}
    made = record_attempt(root, lease, parent, config, facts, code=to_dicts(code))
    with closing(MetricsLog(root, "train", f"{made.attempt_id}")) as log:
        for step, groups in steps.items():
            write_ledger(root, made, step, _ledger(made.attempt_id, step, groups, tokens, env_name))
            known = [reward for group in groups for reward in group if reward is not None]
            mean = sum(known) / len(known) if known else None
            log.write(attempt_id=made.attempt_id, step=step, policy_version=step, reward_mean=mean)


def _ledger(attempt_id: int, step: int, groups: Groups, tokens: int, env_name: str) -> pa.Table:
    schema = arrow_schema("batches")
    zeros = {"batch_index": 0, "policy_version": 0, "trainer_version": 0, "lag": 0, "row_group": 0, "prompt_length": 5}
    rows = [
        {
            **zeros,
            "attempt_id": attempt_id,
            "step": step,
            "rollout_id": f"{step}-{number}-{index}",
            "group_id": f"{step}-{number}",
            "env_name": env_name,
            "file": "made-up.parquet",
            "row": index,
            "response_length": tokens,
            "episode_reward": reward,
            "advantage": 0.0,
            "weight": 1.0,
            "used": reward is not None,
            "reason": None if reward is not None else "drop_errors",
        }
        for number, group in enumerate(groups)
        for index, reward in enumerate(group)
    ]
    return pa.Table.from_pylist(rows, schema=schema)
