"""Figures of a run in SQL, for `Run.stats`: rollouts by environment and by version, evals, steps, drops, attempts.

Reads scalar columns, no tokens. Raises QueryError if a file can't be read (`connect(root, without=...)` leaves it out).
"""

import duckdb
import pyarrow as pa

from ludic.sql.query import ask_table
from ludic.store import Root

_ROLLOUTS = """
select
    count(*) as num_rollouts,
    count(distinct group_id) as num_groups,
    count(distinct episode_id) as num_episodes,
    count(*) filter (error is not null) as num_errors,
    sum(prompt_length)::bigint as num_prompt_tokens,
    sum(response_length)::bigint as num_response_tokens,
    avg(episode_reward) as reward_mean,
    min(created_at) as first_created_at,
    max(created_at) as last_created_at
from rollouts
"""

MEANS = """
    count(*) as num_rollouts,
    count(distinct group_id) as num_groups,
    avg(episode_reward) as reward_mean,
    avg(response_length) as response_length_mean,
    avg(truncated::integer) as truncated_fraction,
    avg(incomplete_completion::integer) as incomplete_fraction,
    avg(parse_error::integer) as parse_error_fraction,
    avg((error is not null)::integer) as error_fraction
"""
"""Select list over rollouts or evals: counts, means and fractions of a version or an environment."""
_ENVIRONMENTS = f"select env_name, {MEANS} from rollouts group by env_name order by env_name"  # noqa: S608
_VERSIONS = f"select policy_version, {MEANS} from rollouts group by all order by all"  # noqa: S608
_EVALS = f"select policy_version, env_name, {MEANS} from evals group by all order by all"  # noqa: S608

_STEPS = """
select
    max(step) as last_step,
    count(*) filter (used) as num_used,
    count(*) filter (not used) as num_dropped,
    avg(off_policy_steps) filter (used) as off_policy_steps_mean
from batches
"""
_DROPS = "select reason, count(*) as num_rollouts from batches where not used group by reason order by all"
_ATTEMPTS = """
select attempt_id, parent_attempt, parent_step, owner, created_at, first_step is not null as on_chain
from attempts
left join attempt_chain using (attempt_id)
order by attempt_id
"""
_SCORES = """
select
    scorer,
    scorer_version,
    name,
    count(value) as num_scores,
    count(*) - count(value) as num_failed,
    avg(value) as value_mean,
    max(created_at) as last_created_at
from scores
group by scorer, scorer_version, name
order by scorer, last_created_at, scorer_version, name
"""

_REPORTS = {
    "rollouts": _ROLLOUTS,
    "environments": _ENVIRONMENTS,
    "versions": _VERSIONS,
    "evals": _EVALS,
    "steps": _STEPS,
    "drops": _DROPS,
    "attempts": _ATTEMPTS,
    "scores": _SCORES,
}


def read_reports(con: duckdb.DuckDBPyConnection, root: Root) -> dict[str, pa.Table]:
    """Return each report by name; rollouts and steps have one row, the others a row per item."""
    return {name: ask_table(con, root, sql) for name, sql in _REPORTS.items()}
