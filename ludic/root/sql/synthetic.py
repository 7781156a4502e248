"""Try the rules of a batch on synthetic rows, to find mistakes in the user's SQL before a run starts.

The rows cover the cases of a run: groups of different rewards, a group of equal rewards, a failed episode, a NaN
reward, a truncated episode. Rewards are above 0 and at most 1, so that their logarithm is finite. Rules that read
scores, or columns that only real rows fill, such as reward_components, are not tried. Raises QueryError and
ConfigError, as the planner does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError, QueryError
from ludic.records import NO_COLUMNS, SCALAR_COLUMNS, rollouts_schema
from ludic.root.sql.planner import ADDED, BatchRules, Planner

_MOST_IN_GROUP = 8
_LENGTH = 12
_GROUPS: Mapping[str, Callable[[int, float], dict[str, Any]]] = {
    "different-rewards": lambda index, reward: {"episode_reward": reward},
    "more-different-rewards": lambda index, reward: {"episode_reward": 0.5 + reward / 2},
    "equal-rewards": lambda index, reward: {"episode_reward": 0.5},
    "one-failed": lambda index, reward: {"episode_reward": reward} if index else {"error": "made up"},
    "one-nan": lambda index, reward: {"episode_reward": reward if index else float("nan")},
    "one-truncated": lambda index, reward: (
        {"episode_reward": reward}
        | ({} if index else {"truncated": True, "truncation_reason": "max_steps", "terminated": False})
    ),
}
"""Values of an episode of each synthetic group, by its index and a reward that differs within the group."""


def try_rules(
    rules: BatchRules,
    extra_columns: Mapping[str, str] = NO_COLUMNS,
    *,
    group_size: int,
    env_name: str = "made_up",
    is_weighted: bool = True,
) -> str:
    """Plan a batch of synthetic rows; return a sentence with the result.

    group_size: of the run. is_weighted: whether the loss multiplies by the advantage, so that an advantage of 0 trains
    nothing. Raises QueryError if a rule fails or an advantage is not finite, ConfigError if the advantage compares the
    rollouts of a group and group_size is 1.
    """
    rules = replace(rules, groups_per_batch=len(_GROUPS))
    planner = Planner(rules, extra_columns)
    others = [name for name in planner.columns if name not in SCALAR_COLUMNS]
    if others or rules.scorers:
        read = ", ".join(others) or "scores"
        return f"advantage {rules.advantage} loads; not tried on synthetic rows, since the rules read {read}"
    ledger = _plan(planner, min(group_size, _MOST_IN_GROUP), env_name)
    if ledger is None:
        return f"advantage {rules.advantage} loads; not tried, since filters and selection leave no synthetic row"
    if group_size == 1 and is_weighted and _is_zero(ledger):
        several = _plan(Planner(rules, extra_columns), _MOST_IN_GROUP, env_name)
        if several is not None and not _is_zero(several):
            raise ConfigError(
                f"group_size is 1, and advantage {rules.advantage} compares the rollouts of a group, so that every "
                "advantage is 0 and nothing is learned; set group_size to 2 or more, such as 8, or choose advantage "
                "reinforce, which does not compare"
            )
    num_used = pc.sum(ledger["used"]).as_py()
    return f"advantage {rules.advantage} gives {num_used} of {ledger.num_rows} synthetic rollouts a finite number"


def _plan(planner: Planner, group_size: int, env_name: str) -> pa.Table | None:
    planner.add(_rows(planner, group_size, env_name))
    try:
        return planner.plan(step=1, attempt_id=1, trainer_version=0, at_least=1)
    except QueryError as error:
        raise QueryError(f"{error} (tried on synthetic rows, in groups such as {', '.join(_GROUPS)})") from error


def _is_zero(ledger: pa.Table) -> bool:
    return bool(pc.all(pc.equal(ledger.filter(ledger["used"])["advantage"], 0), min_count=0).as_py())


def _rows(planner: Planner, group_size: int, env_name: str) -> pa.Table:
    schema = rollouts_schema({})
    wanted = [schema.field(name) for name in planner.columns] + list(ADDED)
    rows = list(_made_up(group_size, env_name))
    return pa.table({field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in wanted})


def _made_up(group_size: int, env_name: str) -> Iterator[dict[str, Any]]:
    created_at = datetime.now(UTC)
    for number, (name, values) in enumerate(_GROUPS.items()):
        for index in range(group_size):
            rollout_id = f"{name}-{index}"
            reward = (number + 1) / len(_GROUPS) if group_size == 1 else (index + 1) / group_size
            # fmt: off
            yield {
                "rollout_id": rollout_id, "group_id": name, "episode_id": rollout_id, "trajectory_id": rollout_id,
                "run_id": "made-up", "group_key": name, "group_index": index, "group_size": group_size,
                "request_index": number * group_size + index, "env_name": env_name, "env_example_id": name,
                "purpose": "train", "agent_id": "agent", "depth": 0, "segment_index": 0, "worker_id": "w0-made-up",
                "sequence": number, "created_at": created_at, "policy_version": 0, "policy_version_last": 0,
                "model": "made up", "temperature": 1.0, "top_p": 1.0, "max_tokens": 2 * _LENGTH, "seed": index,
                "prompt_length": _LENGTH, "response_length": _LENGTH + index, "action_length": _LENGTH + index,
                "num_turns": 1, "terminated": True, "truncated": False, "finish_reason": "stop",
                "incomplete_completion": False, "parse_error": False,
                "file": "made-up.parquet", "row_group": number, "row": index, "arrival": number,
                **values(index, reward),
            }
            # fmt: on
