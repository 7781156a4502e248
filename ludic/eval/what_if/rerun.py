"""Run other rules over the stored batches of a run, and compare with its ledger, step by step.

Reads attempts/, batches/, rollouts/, scores/, expired/ and code/; writes nothing. Raises ConfigError, which names the
missing step or file, QueryError if the rules do not fit the rollouts, and ConsentError for code of the root that the
user has not agreed to run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, get_args

import numpy as np
import polars as pl
import pyarrow as pa

from ludic.base import Track, untracked
from ludic.errors import ConfigError, StoreError
from ludic.root import Root, read_attempt
from ludic.root.rows import attempt_of_steps, read_ledger, read_rollouts
from ludic.root.sql import BatchRules, load_advantage, load_filter, load_selection
from ludic.run import find_files, run_of, trusted_files
from ludic.settings import given as as_given
from ludic.training import Objective, TrainConfig, load_algorithm, to_config
from ludic.training.batches import Replanner, batch_rules

_MASK = "action_mask"
_WITHOUT_RATIO = {each.name for each in get_args(Objective) if not each.needs_logprobs}
_ROWS_TOGETHER = 1024
"""Maximum rows of whole steps whose rollouts are read together, since from a bucket several files are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Results of other rules on stored batches."""

    steps: pl.DataFrame
    """One row per step: counts, and how the credit of tokens differs."""
    rows: pl.DataFrame
    """One row per considered rollout and step; columns of the other rules have the prefix new_."""
    is_ledger: bool
    """True if every plan equals the ledger bit for bit."""
    other_trainers: tuple[str, ...] = ()
    """Trainers of other programs that used the rollouts as the ledger says; their rules are not ludic's."""


def rerun(root: Root, given: Mapping[str, Any], steps: str | None = None, track: Track = untracked) -> Rerun:
    """Plan stored steps by the run's own rules, changed by the settings given. steps: "7" or "10-20"; None is all."""
    planned = planned_steps(root)
    wanted = parse_steps(steps, planned, root.url)
    frames: list[pl.DataFrame] = []
    is_ledger = True
    others: dict[str, None] = {}
    for attempt_id, group in groupby(wanted, key=lambda step: planned[step]):
        other = read_attempt(root, attempt_id).other_trainer
        if other is not None:
            others[other.name] = None
        config = config_of(root, attempt_id, given)
        cut_at = None if other is not None else config_of(root, attempt_id, {}).batch.max_seq_len
        most = cut_at, config.batch.max_seq_len
        rules = rules_of_step(root, config, given)
        if other is not None:  # that trainer used its rows, whatever logprobs were stored
            rules = replace(rules, needs_logprobs=False)
        replanner = Replanner(root, rules)
        of_attempt = list(group)
        found = _read_steps(root, planned, of_attempt, [*replanner.columns, _MASK])
        for ledger, rollouts in track(found, len(of_attempt), f"attempt {attempt_id}"):
            plan = replanner.plan(ledger, rollouts)
            if other is not None:
                plan = _as_recorded(root, other.name, ledger, plan, keeps_advantages="advantage" not in given)
            is_ledger &= plan.equals(ledger)
            frames.append(compare_plans(ledger, plan, rollouts[_MASK], most))
    return Rerun(
        steps=pl.DataFrame([summarize(frame) for frame in frames], infer_schema_length=None),
        rows=pl.concat(frames),
        is_ledger=is_ledger,
        other_trainers=tuple(others),
    )


def _as_recorded(root: Root, trainer: str, ledger: pa.Table, plan: pa.Table, *, keeps_advantages: bool) -> pa.Table:
    """Return the plan of a recorded step, with the trainer's own advantages unless others are requested.

    Raises ConfigError if the ledger lacks an advantage that the comparison needs.
    """
    used = {
        name: ledger.filter(ledger["used"]).column(name).to_pylist()
        for name in ("rollout_id", "advantage", "token_advantages")
    }
    own = dict(zip(used["rollout_id"], zip(used["advantage"], used["token_advantages"], strict=True), strict=True))
    wanted = plan.filter(plan["used"])["rollout_id"].to_pylist() if keeps_advantages else []
    for rollout_id in (*own, *wanted):
        if own.get(rollout_id, (None,))[0] is None:
            raise ConfigError(
                f"{root.url}: step {ledger['step'][0]}: rollout {rollout_id} has no advantage of {trainer}"
                + ("; choose steps with advantages, by --steps" if rollout_id in own else "; name --advantage")
            )
    if not keeps_advantages:
        return plan
    rows = [
        own[rollout_id] if is_used else (None, None)
        for rollout_id, is_used in zip(plan["rollout_id"].to_pylist(), plan["used"].to_pylist(), strict=True)
    ]
    for name, values in zip(("advantage", "token_advantages"), zip(*rows, strict=True), strict=True):
        index = plan.schema.get_field_index(name)
        plan = plan.set_column(index, plan.schema.field(name), pa.array(values, plan.schema.field(name).type))
    return plan


def _read_steps(
    root: Root, planned: Mapping[int, int], steps: Sequence[int], columns: Sequence[str]
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield each step's ledger rows and columns of their rollouts; rollouts of many steps are read together."""
    waiting: list[pa.Table] = []
    for step in steps:
        waiting.append(read_step(root, planned, step))
        if sum(ledger.num_rows for ledger in waiting) >= _ROWS_TOGETHER or step == steps[-1]:
            rollouts = read_considered(root, pa.concat_tables(waiting), list(dict.fromkeys(columns)))
            stops = accumulate(ledger.num_rows for ledger in waiting)
            for ledger, stop in zip(waiting, stops, strict=True):
                yield ledger, rollouts.slice(stop - ledger.num_rows, ledger.num_rows)
            waiting = []


# --- Rules: those of the trainer that planned a step, with the settings given now ----------------------


def given_settings(
    *,
    advantage: str | None,
    filters: "tuple[str, ...] | None",
    algorithm: str | None,
    sql_params: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the settings that differ from the run's: an algorithm's, overridden by those given themselves."""
    own = {"advantage": advantage, "filters": filters, "sql_params": sql_params or None}
    preset = load_algorithm(algorithm) if algorithm is not None else {}
    return preset | {name: value for name, value in own.items() if value is not None}


def config_of(root: Root, attempt_id: int, given: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of an attempt with those given now. Raises ConfigError if the attempt has no rules."""
    attempt = read_attempt(root, attempt_id)
    if attempt.other_trainer is not None:
        return _config_beside(root, attempt.other_trainer.name, given)
    earlier = attempt.config
    if earlier.get("replay_batches") and earlier.get("replan_from") is None:
        raise ConfigError(
            f"{root.url}: attempt {attempt_id} repeats the batches of {earlier['replay_batches']} without rules of "
            "its own; run what-if on that run"
        )
    settings = {**as_given(earlier, f"attempt {attempt_id} of {root.url}", "stored"), **given}
    if settings.get("objective") in _WITHOUT_RATIO:
        settings.pop("compute_logprobs", None)  # which no setting of a what-if could undo
    return to_config(settings)


def _config_beside(root: Root, trainer: str, given: Mapping[str, Any]) -> TrainConfig:
    """Return ludic's defaults with the settings given, since of another program's trainer only the used rows are
    known."""
    if not given:
        raise ConfigError(
            f"{root.url}: {trainer} trained these steps by its own rules; name others: --advantage, --filters or "
            "--algorithm"
        )
    return to_config(given)


def rules_of_step(root: Root, config: TrainConfig, given: Mapping[str, Any]) -> BatchRules:
    """Return the rules of a plan. Files that are given now are read from this machine, others from the root's code/."""
    run = run_of(root)
    rules = batch_rules(config.batch, run.groups_per_batch, run.seed, **config.loss.of_batches)
    named = {given.get("advantage"), *(given.get("filters") or ())}
    uses = rules.uses()
    files = find_files(root, [use for use in uses if use.setting in named], update=True).files
    others = rules.uses({use.setting for use in uses if use.setting not in named})
    kept = trusted_files(root, [use for use in others if use.setting not in named])
    rules = replace(rules, files={**kept, **files})
    # The run's parameters of a replaced advantage or filter have no meaning here.
    wanted = _parameters(rules) | (given.get("sql_params") or {}).keys()
    return replace(rules, params={name: value for name, value in rules.params.items() if name in wanted})


def _parameters(rules: BatchRules) -> set[str]:
    texts = [
        load_advantage(rules.advantage, rules.files),
        *(load_filter(name, rules.files) for name in rules.filters),
        load_selection(rules.selection, rules.files),
    ]
    return {name for text in texts for name in text.parameters}


# --- Steps of a run's effective ledger -----------------------------------------------------------------


def planned_steps(root: Root) -> dict[int, int]:
    """Return the attempt_id of each step of the effective ledger, in order of steps. Raises ConfigError for none."""
    planned = attempt_of_steps(root)
    if not planned:
        raise ConfigError(f"{root.url}: no step has been planned (batches/ is empty); train the run first")
    return planned


def parse_steps(text: str | None, planned: Mapping[int, int], url: str) -> list[int]:
    """Return the planned steps of "7" or "10-20"; None is all. Raises ConfigError for a step that was not planned."""
    if text is None:
        return list(planned)
    first, dash, last = text.strip().partition("-")
    if not first.isdecimal() or not (last.isdecimal() if dash else True):
        raise ConfigError(f"steps is {text!r}, wanted one step such as 7, or a range such as 10-20")
    low, high = int(first), int(last or first)
    for step in (low, high):
        check_planned(step, planned, url)
    if low > high:
        raise ConfigError(f"steps is {text!r}; the first step comes after the last one")
    return [step for step in planned if low <= step <= high]


def check_planned(step: int, planned: Mapping[int, int], url: str) -> None:
    """Raise ConfigError unless a step was planned."""
    if step not in planned:
        raise ConfigError(f"{url} has no step {step}; its batches have steps {min(planned)} to {max(planned)}")


def read_step(root: Root, planned: Mapping[int, int], step: int) -> pa.Table:
    """Return the ledger rows of a planned step."""
    return read_ledger(root, planned[step], step)


def read_considered(root: Root, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return columns of the rollouts of ledger rows, in their order. Raises ConfigError if their files are gone."""
    try:
        return read_rollouts(root, rows, columns)
    except StoreError as error:
        found = zip(rows["file"].to_pylist(), rows["step"].to_pylist(), strict=True)
        gone = next(((name, step) for name, step in found if f"/{name} " in str(error)), None)
        if gone is None:
            raise
        raise ConfigError(
            f"{root.url}: step {gone[1]} needs {gone[0]}, which is gone: its rollouts have expired or were deleted"
        ) from error


# --- Credit of tokens ----------------------------------------------------------------------------------
# The credit of a sampled token is its advantage times the weight of its row; it is 0 if the row is not used, and beyond
# max_seq_len. Works on tables in memory.

_SIDES = ("used", "reason", "advantage", "weight", "token_advantages")
"""Columns of the ledger that both plans have."""
_FACTS = ["step", "rollout_id", "group_id", "env_name", "policy_version", "episode_reward", "response_length"]
_NO_ROW_FITS = "where"
"""Reason of rows that the plan does not contain: `where` is true of no row of their group."""


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
    """Return the figures of a step. NULL: no rollout is used, or a correlation with constant credit."""
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
