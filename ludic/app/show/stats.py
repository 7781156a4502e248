"""Compute the statistics of a run, from run.json to the last gradient step.

Reads footers and scalar columns, no tokens. Files that can't be read, or were quarantined, are listed and left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa

from ludic.app.show.evaluations import interval_text
from ludic.base import Frame, Part, Result, Sentence, Track, cell, number, plural, sparkline, untracked
from ludic.errors import SchemaError
from ludic.eval import clustered
from ludic.records import Row, comparable_reward
from ludic.root import CHECKPOINTS, POLICIES, OtherTrainer, Root, convert, decode_json, other_trainer, other_trainer_of
from ludic.root.maintenance import TABLES, FileFooter, read_footers
from ludic.root.rows import list_quarantined
from ludic.root.sql import connect, count_rows, read_reports, rewards_by, unreadable_records
from ludic.root.weights import versions_with_weights
from ludic.run import SAMPLING, Lost, RunConfig, is_recorded_run, run_of
from ludic.training import describe_computing, nearest_algorithm

if TYPE_CHECKING:
    import polars as pl

_MOST_VERSIONS = 10
OTHER_SETTINGS = "its settings"
"""Title of the settings of another program's trainer, a long text."""
FRACTIONS = ("incomplete_fraction", "unparsed_fraction", "other_limit_fraction", "error_fraction")
"""Shares of rollouts that ended badly, by cause, for people."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Stats(Result):
    """Figures of a run. Prints well; each table is a Polars DataFrame."""

    facts: Mapping[str, Any]
    """All figures as plain values, under the names that `ludic watch --totals --json` prints."""
    tables: Mapping[str, pa.Table]
    """The tables of ludic.root.sql.reports."""

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
        """The same by version: the oldest policy version that sampled a rollout of the group; it names the folder."""
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

    def to_dict(self) -> dict[str, Any]:
        return dict(self.facts)

    def parts(self) -> Iterator[Part]:
        """The run, its folders, means by environment and version, scores, training, and files left out."""
        facts = self.facts
        yield describe_run(facts, is_recorded=facts["is_recorded"])
        yield _folders(facts)
        yield from _captures(facts["rollouts"])
        if facts["rollouts"]["num_rollouts"]:
            yield from means_frames("environments", facts["environments"])
            yield from _versions(facts["versions"])
        else:
            yield "no rollouts yet"
        yield from means_frames("evals", facts["evals"])
        if facts["scores"]:
            columns = ("scorer", "scorer_version", "name", "num_scores", "value_mean", "num_failed")
            yield Frame("scores", facts["scores"], columns, titles={"name": "value"}, has_heading=True)
        yield _training(facts) if facts["attempts"] else "never trained"
        for life in facts["lost"]:
            yield Sentence(describe_lost(life), style="bold red")
        for file in facts["unreadable"]:
            yield Sentence(f"{file['name']}: {file['problem']}", mark="unreadable ", style="bold red")
        for file in facts["quarantined"]:
            yield Sentence(f"{file['name']}: {file['reason']}", mark="quarantined ", style="yellow")


def collect_stats(root: Root, track: Track = untracked) -> Stats:
    """Return all figures of a run. Raises QueryError, StoreError."""
    counts: dict[str, dict[str, int]] = {"rollouts": count_rows(root, "rollouts"), "evals": count_rows(root, "evals")}
    footers = {folder: read_footers(root, folder, track, known=counts.get(folder)) for folder in TABLES}
    broken = {footer.name: footer.problem for found in footers.values() for footer in found if footer.problem}
    broken |= {name: problem.removeprefix(f"{root.url}/{name} ") for name, problem in unreadable_records(root).items()}
    with connect(root, without=broken) as con:
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
        "run": asdict(run_of(root)),
        "folders": {folder: _count(found) for folder, found in footers.items()}
        | {folder: {"num_files": len(sizes), "size_bytes": sum(sizes.values())} for folder, sizes in weights.items()},
        "rollouts": totals | {"bytes_per_response_token": rollout_bytes / num_tokens if num_tokens else None},
        **rows,
        "steps": steps | {"drops": drops},
        "other_trainer": _other_trainer(root),
        "is_recorded": is_recorded_run(root),
        "policies": _policies(weights["policies"]),
        "checkpoints": _folders_with(weights["checkpoints"], CHECKPOINTS.file),
        "unreadable": [{"name": name, "problem": problem} for name, problem in broken.items()],
        "quarantined": [asdict(file) for file in list_quarantined(root)],
    }
    return Stats(facts=facts, tables=tables)


def _other_trainer(root: Root) -> str | None:
    """Return the name of the trainer of another program whose steps are recorded; None for ludic's own, or none.

    None also if the record of the newest attempt is broken, which `ludic verify` names.
    """
    try:
        other = other_trainer_of(root)
    except SchemaError:
        return None
    return None if other is None else other.name


def _count(footers: list[FileFooter]) -> dict[str, int]:
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


def describe_run(stats: Mapping[str, Any], *, is_recorded: bool) -> dict[str, str]:
    """Return a run's main settings as texts by title. stats: root, run_id, run and steps, as in `Stats.facts`.

    is_recorded: of another program's run, which stores few settings; its batches are those of the ledger.
    """
    run = stats["run"]
    about = {
        "run": f"{stats['root']}  {stats['run_id']}",
        "model": run["model"],
        "environments": ", ".join(run["env"]),
    }
    if is_recorded:
        texts = {"batch": _batches(stats["steps"]), "sampling": describe_sampling(run, is_recorded=True)}
        return {**about, **{title: text for title, text in texts.items() if text}}
    ahead = "" if run["batches_ahead"] is None else f", batches_ahead {run['batches_ahead']}"
    return {
        **about,
        "batch": f"{plural(run['groups_per_batch'], 'group')} of {run['group_size']}, "
        f"{plural(run['steps_per_version'], 'step')} a version",
        "sampling": describe_sampling(run, is_recorded=False),
        "workers": f"{run['num_workers']}{ahead}",
    }


def describe_sampling(values: Mapping[str, Any], *, is_recorded: bool) -> str:
    """Return the settings of SAMPLING and the seed in words. values: by name, of a run or of a row of rollouts.

    is_recorded: of another program's run, whose seed is unknown, and whose values may be defaults.
    """
    unsaid = {each.name: each.default for each in fields(RunConfig)} if is_recorded else {"top_p": 1.0}
    shown = [name for name in SAMPLING if values[name] is not None and values[name] != unsaid.get(name)]
    parts = [f"{name} {number(values[name])}" for name in shown]
    return ", ".join(parts if is_recorded else [*parts, f"seed {values['seed']}"])


def _batches(steps: Mapping[str, Any]) -> str:
    """Return the numbers of groups and rollouts that steps considered, from the fewest to the most; "" without
    steps."""
    if not steps["last_step"]:
        return ""
    groups, rollouts = (
        f"{number(low)} to {plural(high, name)}" if low < high else plural(high, name)
        for name, (low, high) in (("group", steps["groups_a_step"]), ("rollout", steps["rollouts_a_step"]))
    )
    return f"{groups}, {rollouts} a step"


def describe_lost(life: Mapping[str, Any]) -> str:
    """Describe the losses of a recorder in a sentence. life: a row of the report `lost`."""
    return f"{life['worker_id']}: {convert(decode_json(life['lost'].encode()), Lost)}"


def describe_superseded(steps: Mapping[str, Any]) -> str:
    """Describe the steps that later attempts trained again; "" if there are none. steps: the row of the report
    `steps`."""
    if not steps["num_superseded_steps"]:
        return ""
    num_steps, num_rollouts = (steps[name] for name in ("num_superseded_steps", "num_superseded"))
    return f"{plural(num_steps, 'step')} with {plural(num_rollouts, 'rollout')}, trained again by a later attempt"


def describe_trainer(settings: Mapping[str, Any], last_step: int | None) -> dict[str, str]:
    """Return a trainer's main settings as texts by title. settings: by name, as in attempts/N.json; may lack some."""
    other = other_trainer(settings)
    if other is not None:
        return {"trainer": other.name, **_other_settings(other), "steps": f"{last_step or 0:,}"}
    if "advantage" not in settings:
        return {}
    nearest = nearest_algorithm(settings)
    changed = {name: value for name, value in nearest[1].items() if name != "filters"} if nearest else {}
    own = ", ".join(f"{name} {cell(value).plain}" for name, value in changed.items())
    algorithm = "none of ludic's" if nearest is None else nearest[0] + (f" with {own}" if own else "")
    schedule, warmup = settings.get("schedule"), settings.get("warmup_steps")
    rank, alpha = settings.get("lora_rank"), settings.get("lora_alpha")
    computing = describe_computing(settings)
    return {
        "algorithm": algorithm,
        "advantage": settings["advantage"],
        "objective": settings.get("objective") or "-",
        "filters": ", ".join(settings.get("filters") or ()) or "none",
        "learning rate": f"{number(settings.get('learning_rate'))}, {schedule}"
        + (f" after {plural(warmup, 'step')} of warm-up" if warmup else ""),
        **({"computes in": computing} if computing else {}),
        "LoRA": "off: all weights are trained" if rank is None else f"rank {rank}, alpha {alpha}",
        "steps": f"{last_step or 0:,} of {settings.get('num_steps') or 0:,}",
    }


def _other_settings(trainer: OtherTrainer) -> dict[str, str]:
    """Return the settings of another program's trainer in one text; of TRL's 150 most are empty."""
    shown = [f"{name} {cell(value).plain}" for name, value in trainer.settings.items() if not _is_unset(value)]
    num_left = len(trainer.settings) - len(shown)
    left = f" ({num_left} that are null, false or empty are left out)" if num_left else ""
    return {OTHER_SETTINGS: ", ".join(shown) + left} if shown else {}


def _is_unset(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})  # 0 is a value, not an empty setting


def _folders(stats: Mapping[str, Any]) -> Frame:
    totals = stats["rollouts"]
    notes = {
        "policies": f"{stats['policies']['num_versions']} versions, {stats['policies']['num_stored']} with weights",
        "checkpoints": ", ".join(name.removeprefix("checkpoints/") for name in stats["checkpoints"]),
    }
    if totals["num_rollouts"]:
        notes["rollouts"] = (
            f"{totals['num_groups']:,} groups, {totals['num_response_tokens']:,} response tokens, "
            f"{totals['bytes_per_response_token']:.1f} B each"
        )
    rows = [
        {"folder": folder, "num_rows": None, **found, "note": notes.get(folder, "")}
        for folder, found in stats["folders"].items()
    ]
    columns = ("folder", "num_files", "num_rows", "size_bytes", "note")
    return Frame("folders", rows, columns, titles={"note": ""})


def _captures(totals: Mapping[str, Any]) -> Iterator[Sentence]:
    """Yield the number of rollouts without logprobs of the sampler, if there are any."""
    num_without, num_texts = totals["num_without_logprobs"], totals["num_from_text"]
    if num_without:
        share = num_without / totals["num_rollouts"]
        text = f"{num_without:,} rollouts ({share:.1%}) without the sampler's logprobs; {num_texts:,} made from texts"
        yield Sentence(text)


def means_frames(name: str, rows: Sequence[Mapping[str, Any]], heading: str = "") -> Iterator[Frame]:
    """Yield a table of means by version, environment or both; nothing without rows."""
    if rows:
        keys = [key for key in ("version", "policy_version", "env_name") if key in rows[0]]
        accuracy = ["accuracy"] if any(row["accuracy"] is not None for row in rows) else []
        columns = (*keys, "num_rollouts", "reward_mean", *accuracy, "response_length_mean", *FRACTIONS)
        yield Frame(name, rows, columns, most=len(rows), has_heading=True, heading=heading)


MOST_VALUES = 12
"""Number of values of a column that have a row each in its table of rewards."""


def rewards_frame(con: duckdb.DuckDBPyConnection, root: Root, column: str) -> Frame:
    """Return the mean reward of the rollouts by a value of theirs, over groups, with its interval.

    column: see ludic.root.sql.by_column. The values that most rollouts have come first; the heading counts the others.
    """
    found = rewards_by(con, root, column, MOST_VALUES)
    rows = []
    for row in found:
        rewards = np.array(row["rewards"] or [], np.float64)
        interval = clustered(rewards)
        figures = {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
        rows.append({**row, "num_examples": len(rewards), **figures})
    heading = f"Reward by {column}"
    if found and found[0]["num_values"] > len(found):
        num_left = found[0]["num_in_all"] - sum(row["num_rollouts"] for row in found)
        others = f"{plural(found[0]['num_values'] - len(found), 'other')}, with {plural(num_left, 'rollout')}"
        heading += f": the {len(found)} most frequent values, without {others}"
    return Frame(
        "rewards",
        rows,
        ("value", "num_rollouts", "num_examples", "estimate", "interval"),
        most=MOST_VALUES,
        heading=heading,
        titles={"value": column, "num_examples": "groups", "estimate": "mean reward", "interval": "95% interval"},
        derived={"interval": partial(interval_text, digits=3)},
    )


def _versions(rows: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Yield a sparkline of all versions, and a table of the first and last versions."""
    rewards = [row["reward_mean"] for row in rows if row["reward_mean"] is not None]
    if len(rewards) > 1:
        line = f"reward by version  {number(rewards[0], 4)} {sparkline(rewards, 40)} {number(rewards[-1], 4)}"
        yield Sentence(line, style="green")
    half = _MOST_VERSIONS // 2
    shown = rows if len(rows) <= _MOST_VERSIONS else [*rows[:half], *rows[-half:]]
    left_out = len(rows) - len(shown)
    yield from means_frames("versions", shown, f"versions ({left_out} in the middle left out)" if left_out else "")


def _training(stats: Mapping[str, Any]) -> dict[str, str]:
    steps, attempts = stats["steps"], stats["attempts"]
    drops = ", ".join(f"{reason} {count:,}" for reason, count in steps["drops"].items())
    started = f"{attempts[-1]['created_at']:%Y-%m-%d %H:%M:%S} UTC"
    newest, trainer = stats["policies"]["newest_stored"], stats["other_trainer"]
    superseded = describe_superseded(steps)
    return {
        **({"trainer": trainer} if trainer else {}),
        "steps": f"{steps['last_step'] or 0} planned, {steps['num_used']:,} rollouts used, "
        f"mean off-policy steps {number(steps['off_policy_steps_mean'], 3)}",
        "dropped": f"{plural(steps['num_dropped'], 'rollout')}" + (f": {drops}" if drops else ""),
        **({"superseded": f"{superseded}; in all_batches, not in batches"} if superseded else {}),
        "attempts": f"{len(attempts)}, the newest by {attempts[-1]['owner']} at {started}",
        "policy": "no weights are stored" if newest is None else f"newest with weights: version {newest}",
    }


def extremes(rows: Iterable[Row]) -> list[tuple[str, Row]]:
    """Return the best and the worst row of a group, each with a title; one row if their rewards are equal."""
    scored = sorted((row for row in rows if row["episode_reward"] is not None), key=lambda row: row["episode_reward"])
    if not scored:
        return []
    worst, best = scored[0], scored[-1]
    if comparable_reward(worst["episode_reward"]) == comparable_reward(best["episode_reward"]):
        return [("one of equal rewards", best)]
    return [("best", best), ("worst", worst)]
