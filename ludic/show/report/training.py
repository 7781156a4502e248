"""Figures of a training run, aggregated in SQL: steps, drops, and the best and worst groups with conversations."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb

from ludic.show.report.conversations import read_conversations
from ludic.show.report.plots import Figure, Series, draw
from ludic.show.watch import Watcher
from ludic.sql.query import ask
from ludic.store import Root
from ludic.store.tables import POPULATIONS

_NUM_GROUPS = 3
"""Number of best groups, and of worst groups."""
_MOST_ERRORS = 8

_SAMPLED = "sampled_tokens_per_s"
"""Column of the query that no file holds."""
_STEPS = """
with measured as materialized ( -- of many small files, which are read once
    select kind, attempt_id, step, created_at, num_tokens, {columns}
    from metrics
),

steps as (
    select measured.*, created_at - lag(created_at) over (order by step) as since
    from measured
    inner join attempt_chain using (attempt_id)
    where kind = 'train' and step >= first_step and step <= coalesce(last_step, step)
),

sampled as (
    select steps.step, sum(calls.num_tokens) as num_tokens
    from (from measured where kind = 'worker') as calls
    asof join steps on calls.created_at <= steps.created_at
    group by steps.step
)

select step, {columns}, coalesce(sampled.num_tokens, 0) / nullif(epoch(since), 0) as sampled_tokens_per_s
from steps
left join sampled using (step)
order by step
"""
_OUTCOMES = """
with outcomes as (select step, used, if(used, 'used', 'dropped by ' || coalesce(reason, '?')) as outcome from batches)

select step, outcome, count(*) as num_rollouts
from outcomes
group by step, used, outcome
order by used desc, outcome, step
"""
_GROUPS = """
select
    *,
    row_number() over (order by reward_mean desc, policy_version desc, group_id) as best,
    row_number() over (order by reward_mean, policy_version desc, group_id) as worst
from groups
where isfinite(reward_mean)
qualify best <= $most or worst <= $most
order by best
"""
_ROLLOUTS = """
with uses as (
    select rollout_id, arg_min(struct_pack(step, used, reason, advantage), step) as use
    from batches
    where group_id in (select unnest($ids::varchar[]))
    group by rollout_id
)

select
    group_id, group_index, agent_id, depth, rollout_id, version, episode_reward, response_length,
    coalesce(error, truncation_reason, finish_reason) as ending, use
from rollouts
left join uses using (rollout_id)
where version in (select unnest($versions::bigint[])) and group_id in (select unnest($ids::varchar[]))
order by group_id, group_index, depth
"""
_NEWEST_METRICS = """
from metrics
qualify row_number() over (partition by kind order by created_at desc) <= 1000
"""
_ERRORS = """
select env_name, left(error, 2000) as error, count(*) as num_rollouts, max(version) as last_version
from rollouts
where error is not null
group by all
order by num_rollouts desc, error
limit $most
"""

# Title, unit, note, and columns of the metrics by their names in the figure.
_FIGURES: Sequence[tuple[str, str, str, Mapping[str, str]]] = (
    ("Reward", f"mean of a step's {POPULATIONS['reward_mean']}", "", {"reward": "reward_mean"}),
    (
        "Response length",
        f"tokens, mean of a step's {POPULATIONS['response_length_mean']}",
        "",
        {"length": "response_length_mean"},
    ),
    ("Entropy", "nats per token", "", {"entropy": "entropy"}),
    ("KL to the reference model", "nats per token", "", {"KL": "reference_kl"}),
    (
        "Mismatch of sampler and trainer",
        "nats per token",
        "KL of the sampler's logprobs to the trainer's, by the estimators k3 and k1. It grows with off-policy steps.",
        {"k3": "sampler_kl", "k1": "sampler_kl_k1"},
    ),
    (
        "Importance ratio",
        "trainer's over sampler's probability",
        "",
        {"1st percentile": "ratio_p01", "mean": "ratio_mean", "99th percentile": "ratio_p99"},
    ),
    ("Clipped tokens", "share of a step's tokens", "", {"clipped": "clip_fraction"}),
    (
        "Lag",
        "off-policy steps",
        "Versions between the weights that sampled and those that train.",
        {"mean": "off_policy_steps_mean", "highest": "off_policy_steps_max"},
    ),
    ("Throughput", "tokens per second", "", {"trained": "tokens_per_s", "sampled": _SAMPLED}),
    ("Time of a step", "seconds", "", {"step": "step_s", "waiting for rollouts": "wait_s"}),
    ("Gradient norm", "before clipping", "", {"norm": "grad_norm"}),
)
_STORED_COLUMNS = sorted({column for *_, columns in _FIGURES for column in columns.values()} - {_SAMPLED})


def step_figures(con: duckdb.DuckDBPyConnection, root: Root) -> list[Figure]:
    """Return the plots of gradient steps, without steps that a later attempt has replaced; [] if there are none."""
    rows = ask(con, root, _STEPS.format(columns=", ".join(_STORED_COLUMNS)))
    if not rows:
        return []
    figures = [
        draw(title, unit, "step", [_series(name, column, rows) for name, column in columns.items()], note=note)
        for title, unit, note, columns in _FIGURES
    ]
    return [*figures, _drops(ask(con, root, _OUTCOMES))]


def _series(name: str, column: str, rows: Sequence[Mapping[str, Any]]) -> Series:
    return Series(name=name, values={row["step"]: row[column] for row in rows})


def _drops(rows: Sequence[Mapping[str, Any]]) -> Figure:
    steps = sorted({row["step"] for row in rows})
    counts = {(row["step"], row["outcome"]): row["num_rollouts"] for row in rows}
    outcomes = list(dict.fromkeys(row["outcome"] for row in rows))
    series = [
        Series(name=outcome, values={step: counts.get((step, outcome), 0) for step in steps}) for outcome in outcomes
    ]
    note = "" if any(outcome != "used" for outcome in outcomes) else "No rollout was dropped."
    return draw("Rollouts used and dropped", "rollouts per step", "step", series, note=note)


def read_troubles(con: duckdb.DuckDBPyConnection, root: Root) -> list[str]:
    """Return the troubles of the run that its newest metrics show, as `ludic watch` words them."""
    status = Watcher(root.url, lambda: ask(con, root, _NEWEST_METRICS)).look()
    return [trouble.text for trouble in status.troubles()]


def read_errors(con: duckdb.DuckDBPyConnection, root: Root) -> list[dict[str, Any]]:
    """Return the most frequent errors of rollouts."""
    return ask(con, root, _ERRORS, {"most": _MOST_ERRORS})


def read_groups(con: duckdb.DuckDBPyConnection, root: Root) -> dict[str, list[dict[str, Any]]]:
    """Return the best and the worst groups by mean reward, each with its rollouts and two conversations.

    A group of two lists is among the best only. Of equal groups the newest come first.
    """
    groups = ask(con, root, _GROUPS, {"most": _NUM_GROUPS})
    versions = sorted({group["version"] for group in groups})
    params = {"ids": [group["group_id"] for group in groups], "versions": versions}
    rows = ask(con, root, _ROLLOUTS, params) if groups else []
    found = [{**group, "rollouts": [row for row in rows if row["group_id"] == group["group_id"]]} for group in groups]
    chosen = {row["rollout_id"]: row["version"] for group in found for _, row in _extremes(group["rollouts"])}
    texts = read_conversations(con, root, "rollouts", chosen)
    for group in found:
        group["shown"] = [
            {"name": name, "row": row, "messages": texts.get(row["rollout_id"], [])}
            for name, row in _extremes(group["rollouts"])
        ]
    best = [group for group in found if group["best"] <= _NUM_GROUPS]
    worst = sorted((group for group in found if group not in best), key=lambda group: group["worst"])
    return {"Best groups": best, "Worst groups": worst}


def _extremes(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the best and the worst rollout of a group; one if their rewards are equal."""
    scored = sorted((row for row in rows if row["episode_reward"] is not None), key=lambda row: row["episode_reward"])
    if not scored:
        return
    if scored[0]["episode_reward"] == scored[-1]["episode_reward"]:
        yield "one of equal rewards", scored[-1]
        return
    yield "best rollout", scored[-1]
    yield "worst rollout", scored[0]
