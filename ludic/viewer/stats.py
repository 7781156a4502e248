"""Summarize a root, from run.json to the last gradient step.

Reads footers and scalar columns, no tokens. Files that can't be read, or were quarantined, are listed and left out.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from ludic.maintenance.verify import TABLES, Footer, read_footers
from ludic.sql import connect
from ludic.sql.reports import read_reports
from ludic.sql.snapshot import count_rows
from ludic.store import Root
from ludic.store.catalogue import CHECKPOINTS, POLICIES
from ludic.store.policies import versions_with_weights
from ludic.store.root import Track, untracked
from ludic.store.tombstones import list_quarantined
from ludic.viewer.output import Shown, cell, number, pairs, plain_table, plural, printable, size, sparkline

if TYPE_CHECKING:
    import polars as pl

_MOST_VERSIONS = 10
_SHOWN_DIGITS = 12
_KEY_TITLES = {"policy_version": "version", "env_name": "env"}
_FRACTIONS = {
    "truncated": "truncated_fraction",
    "incomplete": "incomplete_fraction",
    "unparsed": "parse_error_fraction",
    "failed": "error_fraction",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Stats(Shown):
    """Figures of a run. Prints well; each table is a Polars DataFrame."""

    facts: Mapping[str, Any]
    """All figures as plain values, under the names that `ludic stats --json` prints."""
    tables: Mapping[str, pa.Table]
    """The tables of ludic.sql.reports."""

    @property
    def folders(self) -> "pl.DataFrame":
        """Files, rows and bytes of each folder of the root; num_rows is null for weights."""
        import polars as pl

        columns = {"folder": pl.String, "num_files": pl.Int64, "num_rows": pl.Int64, "size_bytes": pl.Int64}
        rows = [{"folder": name, "num_rows": None} | counts for name, counts in self.facts["folders"].items()]
        return pl.DataFrame(rows, schema=columns)

    @property
    def rollouts(self) -> "pl.DataFrame":
        """One row: counts of rollouts, groups, episodes, errors and tokens, and the mean reward."""
        return self._frame("rollouts")

    @property
    def environments(self) -> "pl.DataFrame":
        """Counts, mean reward and length (tokens), and fractions of rollouts that ended badly, by environment."""
        return self._frame("environments")

    @property
    def versions(self) -> "pl.DataFrame":
        """The same by policy version."""
        return self._frame("versions")

    @property
    def evals(self) -> "pl.DataFrame":
        """The same by policy version and environment, for evaluation rollouts."""
        return self._frame("evals")

    @property
    def drops(self) -> "pl.DataFrame":
        """Number of rollouts that gradient steps dropped, by reason."""
        return self._frame("drops")

    @property
    def scores(self) -> "pl.DataFrame":
        """Counts of values and failures, and the mean value, by scorer, its version, and name of the value."""
        return self._frame("scores")

    @property
    def attempts(self) -> "pl.DataFrame":
        """Starts of trainers; on_chain is false for those that a later attempt has replaced."""
        return self._frame("attempts")

    def _frame(self, name: str) -> "pl.DataFrame":
        import polars as pl

        frame = pl.from_arrow(self.tables[name])
        assert isinstance(frame, pl.DataFrame)
        return frame

    def print_to(self, console: Console) -> None:
        """Print tables for people."""
        console.print(pairs(describe_run(self.facts)))
        _print_folders(console, self.facts)
        if self.facts["rollouts"]["num_rollouts"]:
            _print_means(console, "environments", self.facts["environments"])
            _print_versions(console, self.facts["versions"])
        else:
            console.print("no rollouts yet")
        _print_means(console, "evals", self.facts["evals"])
        _print_scores(console, self.facts["scores"])
        _print_training(console, self.facts)
        for file in self.facts["unreadable"]:
            _print_file(console, "unreadable", "bold red", f"{file['name']}: {file['problem']}")
        for file in self.facts["quarantined"]:
            _print_file(console, "quarantined", "yellow", f"{file['name']}: {file['reason']}")


def collect_stats(root: Root, track: Track = untracked) -> Stats:
    """Return all figures of a run. Raises QueryError, StoreError."""
    counts: dict[str, dict[str, int]] = {"rollouts": count_rows(root, "rollouts"), "evals": count_rows(root, "evals")}
    footers = {folder: read_footers(root, folder, track, known=counts.get(folder)) for folder in TABLES}
    broken = [footer for found in footers.values() for footer in found if footer.problem]
    with connect(root, without=[footer.name for footer in broken]) as con:
        tables = read_reports(con, root)
    rows = {name: table.to_pylist() for name, table in tables.items()}
    (totals,), (steps,) = rows.pop("rollouts"), rows.pop("steps")
    rollout_bytes = sum(footer.size_bytes for footer in footers["rollouts"])
    num_tokens = totals["num_response_tokens"]
    drops = {row["reason"]: row["num_rollouts"] for row in rows.pop("drops")}
    weights = {folder: root.sizes(folder) for folder in ("policies", "checkpoints")}
    facts = {
        "root": root.url,
        "run_id": root.run_id,
        "run": asdict(root.run),
        "folders": {folder: _count(found) for folder, found in footers.items()}
        | {folder: {"num_files": len(sizes), "size_bytes": sum(sizes.values())} for folder, sizes in weights.items()},
        "rollouts": totals | {"bytes_per_response_token": rollout_bytes / num_tokens if num_tokens else None},
        **rows,
        "steps": steps | {"drops": drops},
        "policies": _policies(weights["policies"]),
        "checkpoints": _folders_with(weights["checkpoints"], CHECKPOINTS.file),
        "unreadable": [{"name": footer.name, "problem": footer.problem} for footer in broken],
        "quarantined": [asdict(file) for file in list_quarantined(root)],
    }
    return Stats(facts=facts, tables=tables)


def _count(footers: list[Footer]) -> dict[str, int]:
    return {
        "num_files": len(footers),
        "size_bytes": sum(footer.size_bytes for footer in footers),
        "num_rows": sum(footer.num_rows for footer in footers),
    }


def _policies(sizes: dict[str, int]) -> dict[str, Any]:
    """Count the versions that were claimed and the versions whose weights are still stored."""
    claimed = _folders_with(sizes, POLICIES.file)
    stored = versions_with_weights(sizes)
    return {"num_versions": len(claimed), "num_stored": len(stored), "newest_stored": max(stored, default=None)}


def _folders_with(sizes: dict[str, int], file: str) -> list[str]:
    return [name.removesuffix(f"/{file}") for name in sizes if name.endswith(f"/{file}")]


def _print_file(console: Console, what: str, style: str, line: str) -> None:
    console.print(Text(f"{what} ", style=style).append(printable(line), "default"), soft_wrap=True)


def describe_run(stats: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's main settings as texts by title. stats: root, run_id and run, as in `Stats.facts`."""
    run = stats["run"]
    ahead = "" if run["batches_ahead"] is None else f", batches_ahead {run['batches_ahead']}"
    top = "".join(f", {name} {number(run[name])}" for name in ("top_p", "top_k") if run[name] not in (None, 1))
    return {
        "run": f"{stats['root']}  {stats['run_id']}",
        "model": run["model"],
        "environments": ", ".join(run["env"]),
        "batch": f"{plural(run['groups_per_batch'], 'group')} of {run['group_size']}, "
        f"{plural(run['steps_per_version'], 'step')} a version",
        "sampling": f"temperature {number(run['temperature'])}{top}, max_tokens {run['max_tokens']}, "
        f"seed {run['seed']}",
        "workers": f"{run['num_workers']}{ahead}",
    }


def _print_folders(console: Console, stats: Mapping[str, Any]) -> None:
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
            *(f"{row[name]:.1%}" for name in _FRACTIONS.values()),
        )
    console.print(Text(key, style="bold"))
    console.print(table)


def _print_scores(console: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = plain_table("scorer", "version", "value", ">scores", ">mean", ">failed")
    for row in rows:
        names = (printable(row["scorer"]), printable(row["scorer_version"][:_SHOWN_DIGITS]), printable(row["name"]))
        table.add_row(*names, f"{row['num_scores']:,}", number(row["value_mean"], 4), f"{row['num_failed']:,}")
    console.print(Text("scores", style="bold"))
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


def _print_training(console: Console, stats: Mapping[str, Any]) -> None:
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
                f"mean off-policy steps {number(steps['off_policy_steps_mean'], 3)}",
                "dropped": f"{plural(steps['num_dropped'], 'rollout')}" + (f": {drops}" if drops else ""),
                "attempts": f"{len(attempts)}, the newest by {attempts[-1]['owner']} at {started}",
                "policy": f"newest with weights: version {stats['policies']['newest_stored']}",
            }
        )
    )
