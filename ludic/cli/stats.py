"""`ludic stats ROOT`: summarize a root, from run.json to the last gradient step.

Reads footers and scalar columns, no tokens. Files that can't be read, or were set aside, are listed and left out.
"""

from dataclasses import asdict
from typing import Any

import duckdb
from rich.console import Console
from rich.text import Text

from ludic.cli.flags.stats import Settings
from ludic.cli.output import (
    Track,
    cell,
    number,
    pairs,
    plain_table,
    plural,
    print_json,
    printable,
    progress_bar,
    size,
    sparkline,
    stdout_console,
    untracked,
)
from ludic.cli.query import ask
from ludic.fsck import TABLES, Footer, read_footers
from ludic.sql import connect
from ludic.sql.snapshot import count_rows
from ludic.store import Root
from ludic.store.repair import list_set_aside

_MOST_VERSIONS = 10
_KEY_TITLES = {"policy_version": "version", "env_name": "env"}
_FRACTIONS = {
    "truncated": "truncated_fraction",
    "incomplete": "incomplete_fraction",
    "unparsed": "parse_error_fraction",
    "failed": "error_fraction",
}

_TOTALS = """
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

_MEANS = """
    count(*) as num_rollouts,
    count(distinct group_id) as num_groups,
    avg(episode_reward) as reward_mean,
    avg(response_length) as response_length_mean,
    avg(truncated::integer) as truncated_fraction,
    avg(incomplete_completion::integer) as incomplete_fraction,
    avg(parse_error::integer) as parse_error_fraction,
    avg((error is not null)::integer) as error_fraction
"""
_BY_ENVIRONMENT = f"select env_name, {_MEANS} from rollouts group by env_name order by env_name"  # noqa: S608
_BY_VERSION = f"select policy_version, {_MEANS} from rollouts group by all order by all"  # noqa: S608
_EVALS = f"select policy_version, env_name, {_MEANS} from evals group by all order by all"  # noqa: S608

_STEPS = """
select
    max(step) as last_step,
    count(*) filter (used) as num_used,
    count(*) filter (not used) as num_dropped,
    avg(lag) filter (used) as lag_mean
from batches
"""
_DROPS = "select reason, count(*) as num_rollouts from batches where not used group by reason order by all"
_ATTEMPTS = """
select attempt_id, parent_attempt, parent_step, owner, created_at, first_step is not null as on_chain
from attempts
left join attempt_chain using (attempt_id)
order by attempt_id
"""


def main(settings: Settings) -> None:
    root = Root.open(settings.root)
    with progress_bar() as track:
        stats = collect(root, track)
    if settings.json:
        print_json(stats)
    else:
        _print(stdout_console(), stats)


def collect(root: Root, track: Track = untracked) -> dict[str, Any]:
    """Return all figures, under the names that --json prints. Raises QueryError, StoreError."""
    counts: dict[str, dict[str, int]] = {"rollouts": count_rows(root, "rollouts"), "evals": count_rows(root, "evals")}
    footers = {folder: read_footers(root, folder, track, known=counts.get(folder)) for folder in TABLES}
    broken = [footer for found in footers.values() for footer in found if footer.problem]
    con = connect(root, without=[footer.name for footer in broken])
    totals = ask(con, root, _TOTALS)[0]
    rollout_bytes = sum(footer.size_bytes for footer in footers["rollouts"])
    num_tokens = totals["num_response_tokens"]
    weights = {folder: root.sizes(folder) for folder in ("policies", "checkpoints")}
    return {
        "root": root.url,
        "run_id": root.run_id,
        "run": asdict(root.run),
        "folders": {folder: _count(found) for folder, found in footers.items()}
        | {folder: {"num_files": len(sizes), "size_bytes": sum(sizes.values())} for folder, sizes in weights.items()},
        "rollouts": totals | {"bytes_per_response_token": rollout_bytes / num_tokens if num_tokens else None},
        "environments": ask(con, root, _BY_ENVIRONMENT),
        "versions": ask(con, root, _BY_VERSION),
        "evals": ask(con, root, _EVALS),
        "steps": ask(con, root, _STEPS)[0] | {"drops": _drops(con, root)},
        "attempts": ask(con, root, _ATTEMPTS),
        "policies": _policies(weights["policies"]),
        "checkpoints": _folders_with(weights["checkpoints"], "checkpoint.json"),
        "unreadable": [{"name": footer.name, "problem": footer.problem} for footer in broken],
        "set_aside": [asdict(file) for file in list_set_aside(root)],
    }


def _count(footers: list[Footer]) -> dict[str, int]:
    return {
        "num_files": len(footers),
        "size_bytes": sum(footer.size_bytes for footer in footers),
        "num_rows": sum(footer.num_rows for footer in footers),
    }


def _drops(con: duckdb.DuckDBPyConnection, root: Root) -> dict[str, int]:
    return {row["reason"]: row["num_rollouts"] for row in ask(con, root, _DROPS)}


def _policies(sizes: dict[str, int]) -> dict[str, Any]:
    """Count the versions that were claimed and the versions whose weights are still stored."""
    claimed = _folders_with(sizes, "policy.json")
    stored = sorted(int(name.rpartition("=")[2]) for name in _folders_with(sizes, "config.json"))
    return {"num_versions": len(claimed), "num_stored": len(stored), "newest_stored": max(stored, default=None)}


def _folders_with(sizes: dict[str, int], file: str) -> list[str]:
    return [name.removesuffix(f"/{file}") for name in sizes if name.endswith(f"/{file}")]


def _print(console: Console, stats: dict[str, Any]) -> None:
    _print_run(console, stats)
    _print_folders(console, stats)
    if stats["rollouts"]["num_rollouts"]:
        _print_means(console, "environments", stats["environments"])
        _print_versions(console, stats["versions"])
    else:
        console.print("no rollouts yet")
    _print_means(console, "evals", stats["evals"])
    _print_training(console, stats)
    for file in stats["unreadable"]:
        _print_file(console, "unreadable", "bold red", f"{file['name']}: {file['problem']}")
    for file in stats["set_aside"]:
        _print_file(console, "set aside", "yellow", f"{file['name']}: {file['reason']}")


def _print_file(console: Console, what: str, style: str, line: str) -> None:
    console.print(Text(f"{what} ", style=style).append(printable(line), "default"), soft_wrap=True)


def _print_run(console: Console, stats: dict[str, Any]) -> None:
    run = stats["run"]
    top = "".join(f", {name} {number(run[name])}" for name in ("top_p", "top_k") if run[name] not in (None, 1))
    console.print(
        pairs(
            {
                "run": f"{stats['root']}  {stats['run_id']}",
                "model": run["model"],
                "environments": ", ".join(run["env"]),
                "batch": f"{plural(run['groups_per_batch'], 'group')} of {run['group_size']}, "
                f"{plural(run['steps_per_version'], 'step')} a version",
                "sampling": f"temperature {number(run['temperature'])}{top}, max_tokens {run['max_tokens']}, "
                f"seed {run['seed']}",
                "workers": f"{run['num_workers']}, batches_ahead {run['batches_ahead']}",
            }
        )
    )


def _print_folders(console: Console, stats: dict[str, Any]) -> None:
    totals = stats["rollouts"]
    table = plain_table("folder", ">files", ">rows", ">size", "")
    for folder, found in stats["folders"].items():
        rows = f"{found['num_rows']:,}" if "num_rows" in found else ""
        note = ""
        if folder == "rollouts" and totals["num_rollouts"]:
            note = (
                f"{totals['num_groups']:,} groups, {totals['num_response_tokens']:,} response tokens, "
                f"{totals['bytes_per_response_token']:.1f} B each"
            )
        if folder == "policies":
            note = f"{stats['policies']['num_versions']} versions, {stats['policies']['num_stored']} with weights"
        if folder == "checkpoints":
            note = ", ".join(name.removeprefix("checkpoints/") for name in stats["checkpoints"])
        table.add_row(folder, f"{found['num_files']:,}", rows, size(found["size_bytes"]), note)
    console.print(table)


def _print_means(console: Console, key: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    keys = [name for name in _KEY_TITLES if name in rows[0]]
    titles = [_KEY_TITLES[name] for name in keys]
    table = plain_table(*titles, ">rollouts", ">reward", ">tokens", *(f">{title}" for title in _FRACTIONS))
    table.collapse_padding = True  # else eight columns need more than 80 characters
    for row in rows:
        table.add_row(
            *(cell(row[name]) for name in keys),
            f"{row['num_rollouts']:,}",
            number(row["reward_mean"], 4),
            f"{row['response_length_mean']:.1f}",
            *(_percent(row[name]) for name in _FRACTIONS.values()),
        )
    console.print(Text(key, style="bold"))
    console.print(table)


def _print_versions(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print a sparkline of all versions, and a table of the first and last versions."""
    rewards = [row["reward_mean"] for row in rows if row["reward_mean"] is not None]
    if len(rewards) > 1:
        line = f"reward by version  {number(rewards[0], 4)} {sparkline(rewards, 40)} {number(rewards[-1], 4)}"
        console.print(Text(line, style="green"), no_wrap=True, overflow="ellipsis")
    half = _MOST_VERSIONS // 2
    shown = rows if len(rows) <= _MOST_VERSIONS else [*rows[:half], *rows[-half:]]
    left_out = len(rows) - len(shown)
    title = f"versions ({left_out} in the middle left out)" if left_out else "versions"
    _print_means(console, title, shown)


def _print_training(console: Console, stats: dict[str, Any]) -> None:
    steps, attempts = stats["steps"], stats["attempts"]
    if not attempts:
        console.print("never trained")
        return
    drops = ", ".join(f"{reason} {count:,}" for reason, count in steps["drops"].items())
    started = f"{attempts[-1]['created_at']:%Y-%m-%d %H:%M:%S} UTC"
    console.print(
        pairs(
            {
                "steps": f"{steps['last_step'] or 0} planned, {steps['num_used']:,} rollouts used, "
                f"mean lag {number(steps['lag_mean'], 3)}",
                "dropped": f"{plural(steps['num_dropped'], 'rollout')}" + (f": {drops}" if drops else ""),
                "attempts": f"{len(attempts)}, the newest by {attempts[-1]['owner']} at {started}",
                "policy": f"newest with weights: version {stats['policies']['newest_stored']}",
            }
        )
    )


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}"
