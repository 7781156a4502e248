"""Diagnostics of a run from its metrics, such as no learning signal: since when, and the setting to look at. Pure.

Workers and trainers log the diagnostics; panel, report and viewer show them.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise, takewhile
from statistics import fmean, median
from typing import Any

from ludic.records import NO_LOGPROBS, Row, add_rewards
from ludic.run.config import RunConfig

_MOST = 0.5
"""Share of bad rollouts above which there is a diagnostic."""
_FEWEST_STEPS = 3
"""Minimum number of consecutive bad steps that count as diagnostic."""
_RECENT_STEPS = 20
_NEWEST_ROWS = 64
_WHAT_TO_DO = {
    "drop_errors": "they failed or were not scored; look at the column error of rollouts",
    "drop_incomplete_completions": "they hit max_tokens; start a run with a higher --max-tokens",
    "drop_parse_errors": "their answers could not be parsed, or were refused; start a run with --accept-incomplete",
    "drop_truncated": "a limit of the environment ended them; raise it, or leave the filter out",
    "drop_zero_variance_groups": "their groups have equal rewards; look at the environment's score, or --temperature",
    "max_off_policy_steps": "their weights are too old; lower --batches-ahead, or raise --max-off-policy-steps",
    "max_age": "they are too old; add workers, or raise --max-age-s",
    **NO_LOGPROBS,
}
_MOST_MISMATCH = 0.01
"""Mean k3, in nats, of rollouts that the trainer's own weights sampled, above which there is a diagnostic. It is half
the mean square of the log ratio, so ratios are then off by a factor of about e^0.14: numerics alone bring tokens near
the usual clip of 0.2. Rounding logits of about 10 to bfloat16 gives some 1e-4."""
_WITHOUT_RATIO = ("sft", "dpo", "ipo", "orpo")
"""Objectives whose loss does not use the sampler's logprobs."""
_ON_PURPOSE = ("where", "drop_not_best_of_group")
"""Filters whose purpose is to drop most rollouts."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A problem of a run, with advice."""

    kind: str
    """Identifies the diagnostic; does not change with its numbers."""
    text: str
    env_name: str | None = None
    """The environment that has it; None for a diagnostic of the whole run."""
    since: "Since | None" = None
    """Its beginning; None if the metrics do not show it."""

    def __str__(self) -> str:
        return f"{self.since}: {self.text}" if self.since else self.text


@dataclass(frozen=True, slots=True)
class Since:
    """The beginning of what a diagnostic reports."""

    step: int | None
    """The first gradient step that has it, or that made the first weights with it; None if unknown."""
    version: int | None = None
    """The first version of the weights that has it; None for a diagnostic of steps."""
    or_before: bool = False
    """True if the known metrics do not reach back to the beginning."""

    def __str__(self) -> str:
        or_before = " or before" if self.or_before else ""
        if self.step is not None:
            return f"since step {self.step:,}{or_before}"
        return f"since version {self.version}{or_before}" if self.version else "since the start"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSamples:
    """Samples of one environment while a version was the newest: sums over the workers' metrics rows."""

    env_name: str
    version: int
    step: int | None = None
    """The gradient step of these weights; None if unknown, or not taken yet."""
    num_rollouts: int = 0
    num_groups: int = 0
    num_equal_groups: int = 0
    """Groups in which all rewards are equal."""
    num_errors: int = 0
    num_parse_errors: int = 0
    num_scored: int = 0
    """Rollouts of rows that have a mean reward."""
    reward_sum: float = 0.0

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.num_scored if self.num_scored else None

    def plus(self, row: Row) -> "VersionSamples":
        """Return the sums with another row; nulls of an older ludic count as 0."""
        num_rollouts, reward = row["num_rollouts"] or 0, row["reward_mean"]
        return replace(
            self,
            num_rollouts=self.num_rollouts + num_rollouts,
            num_groups=self.num_groups + (row["num_groups"] or 0),
            num_equal_groups=self.num_equal_groups + (row["num_zero_variance_groups"] or 0),
            num_errors=self.num_errors + (row["num_errors"] or 0),
            num_parse_errors=self.num_parse_errors + (row["num_parse_errors"] or 0),
            num_scored=self.num_scored + (0 if reward is None else num_rollouts),
            reward_sum=self.reward_sum + (0.0 if reward is None else reward * num_rollouts),
        )


History = Mapping[str, Sequence[VersionSamples]]
"""Samples by environment, with each version, in order of versions."""


class DiagnosticLog:
    """Logs each diagnostic once, and again only if it returns after an absence."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._known: set[str] = set()

    def report(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Log new diagnostics. diagnostics: all current ones."""
        now = {diagnostic.kind: diagnostic for diagnostic in diagnostics}
        for kind in now.keys() - self._known:
            self._logger.warning("%s", now[kind])
        self._known = set(now)


def warn_of_rows(
    logger: logging.Logger, find: Callable[[Sequence[Row]], Iterable[Diagnostic]]
) -> Callable[[Row], None]:
    """Return a function that takes a process's metrics rows one by one, and logs the diagnostics in them.

    find: called with the newest 64 rows.
    """
    log, newest = DiagnosticLog(logger), deque[Row](maxlen=_NEWEST_ROWS)

    def take(row: Row) -> None:
        newest.append(row)
        log.report(find(list(newest)))

    return take


def find_sampling_diagnostics(
    calls: Sequence[Row], run: RunConfig, history: History | None = None
) -> Iterator[Diagnostic]:
    """Find at most one diagnostic for each environment, in the newest rows that hold a batch of groups.

    calls: rows of workers, oldest first. history: says since when; None leaves it out.
    """
    for env_name in sorted({row["env_name"] for row in calls}):
        newest = _newest([row for row in calls if row["env_name"] == env_name], run.groups_per_batch)
        diagnostic = _find_failures(env_name, newest) or _find_refusals(env_name, newest, run)
        diagnostic = diagnostic or _find_equal_rewards(env_name, newest, run)
        if diagnostic is not None:
            is_bad = _IS_BAD[diagnostic.kind.removesuffix(f" in {env_name}")]
            yield replace(diagnostic, since=_since((history or {}).get(env_name, ()), is_bad))


_IS_BAD: Mapping[str, Callable[[VersionSamples], bool]] = {
    "failures": lambda it: it.num_errors > _MOST * it.num_rollouts,
    "refusals": lambda it: it.num_parse_errors > _MOST * it.num_rollouts,
    "equal rewards": lambda it: it.num_equal_groups >= it.num_groups,
}
"""Returns whether a version has a diagnostic, by the kind of diagnostic."""


def _since(versions: Sequence[VersionSamples], is_bad: Callable[[VersionSamples], bool]) -> Since | None:
    """Return the beginning of the last versions that are all bad; None if the newest one is not."""
    num_bad = len(list(takewhile(is_bad, reversed(versions))))
    if not num_bad:
        return None
    first = versions[-num_bad]
    is_start = first.version == 0 or first.step == 1
    return Since(first.step, first.version, or_before=num_bad == len(versions) and not is_start)


_VERSIONS_OF_A_LEVEL = 5
"""Versions over which rewards are averaged before they are compared."""
_MOST_LOST = 1 / 3
"""Share of what a reward had gained that it may lose again without a diagnostic."""
_CHANGES = 3
"""A fall is above this many times the median change from one version to the next, which is mostly noise."""


def find_falls(history: History) -> Iterator[Diagnostic]:
    """Find environments whose reward rose and fell, or only fell: the newest level is far below the best.

    A level is the mean of 5 versions. If the reward has not risen since the first level, its height counts from 0.
    """
    for env_name, versions in sorted(history.items()):
        scored = [it for it in versions if it.num_scored]
        if len(scored) >= 2 * _VERSIONS_OF_A_LEVEL and (diagnostic := _find_fall(env_name, scored)) is not None:
            yield diagnostic


def _find_fall(env_name: str, scored: Sequence[VersionSamples]) -> Diagnostic | None:
    rewards = [it.reward_sum / it.num_scored for it in scored]
    levels = [_level(scored[: stop + 1]) for stop in range(_VERSIONS_OF_A_LEVEL - 1, len(scored))]
    noise = _CHANGES * median(abs(after - before) for before, after in pairwise(rewards))
    best = max(levels)
    gained = best - levels[0]
    lowest = best - max(noise, _MOST_LOST * (gained if gained > noise else abs(best)))
    num_low = len(list(takewhile(lambda level: level < lowest, reversed(levels))))
    if not num_low:
        return None
    first = len(scored) - num_low
    while rewards[first - 1] < lowest:  # a level falls later than the rewards that it averages
        first -= 1
    peak = scored[levels.index(best) + _VERSIONS_OF_A_LEVEL - 1]
    when = str(Since(peak.step, peak.version)).removeprefix("since ")
    text = (
        f"the reward in {env_name} fell from {best:.4g} ({when}) to {levels[-1]:.4g}; look at entropy, clip fraction "
        "and sampler KL of the steps before; a lower --learning-rate may prevent it"
    )
    return Diagnostic(f"fall in {env_name}", text, env_name, Since(scored[first].step, scored[first].version))


def _level(versions: Sequence[VersionSamples]) -> float:
    """Return the mean reward of the rollouts of the last versions."""
    newest = versions[-_VERSIONS_OF_A_LEVEL:]
    return add_rewards(it.reward_sum for it in newest) / sum(it.num_scored for it in newest)


def find_some_failures(calls: Sequence[Row], run: RunConfig, history: History | None = None) -> Iterator[Diagnostic]:
    """Find the environments in which some of the newest rollouts failed; `find_sampling_diagnostics` finds those where
    most did.

    calls: rows of workers, oldest first. history: says since when; None leaves it out.
    """
    for env_name in sorted({row["env_name"] for row in calls}):
        rows = _newest([row for row in calls if row["env_name"] == env_name], run.groups_per_batch)
        num_errors, num_rollouts = _sum(rows, "num_errors"), _sum(rows, "num_rollouts")
        first = next((row["first_error"] for row in rows if row["first_error"]), None)
        if first and num_errors <= _MOST * num_rollouts:
            text = f"{num_errors:,} of {num_rollouts:,} rollouts failed in {env_name}; the first error: "
            since = _since((history or {}).get(env_name, ()), lambda it: it.num_errors > 0)
            yield Diagnostic(f"some failures in {env_name}", f"{text}{_on_one_line(first)}", env_name, since)


def find_training_diagnostics(steps: Sequence[Row], config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Find steps that learn nothing or move the weights too far, and filters that drop most rollouts.

    steps: rows of gradient steps, in order. config: settings of the trainer, as in attempts/N.json.
    """
    num_still = len(list(takewhile(lambda row: _is_still(row, config), reversed(steps))))
    if num_still >= _FEWEST_STEPS:
        yield Diagnostic(
            "no gradient", _describe_stillness(steps[-num_still:]), since=_since_step(steps[-num_still:], steps)
        )
    recent = steps[-_RECENT_STEPS:]
    yield from find_leaps(recent, config)
    if len(recent) >= _FEWEST_STEPS:
        yield from _find_drops(recent)


_MOST_CLIPPED = 0.1
_MOST_KL = 0.5
"""Mean k3 of a step, in nats; off-policy steps of a model that learns fast have about a third of it."""
LEAPS = "leaps"
"""Kind of the diagnostic of `find_leaps`."""


def find_leaps(steps: Sequence[Row], config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Find steps whose weights are far from those that sampled: much is clipped, or the sampler KL is high.

    steps: rows of gradient steps, in order. config: settings of the trainer, as in attempts/N.json.
    """
    if _is_offline(config) or config.get("objective") in _WITHOUT_RATIO:
        return
    far = [
        row for row in steps if _number(row, "clip_fraction") > _MOST_CLIPPED or _number(row, "sampler_kl") > _MOST_KL
    ]
    if not far:
        return
    worst = max(far, key=lambda row: _number(row, "sampler_kl"))
    clipped, kl = _number(worst, "clip_fraction"), _number(worst, "sampler_kl")
    numbers = f"sampler KL {kl:.2g} nats" + (f", {clipped:.1%} of the tokens clipped" if clipped else "")
    newest = "the newest " if _number(steps[0], "step") > 1 else ""
    yield Diagnostic(
        LEAPS,
        f"in {len(far):,} of {newest}{len(steps):,} steps the trainer's weights were far from those that sampled, most "
        f"in step {worst['step']:,} ({numbers}); lower --learning-rate, or --max-off-policy-steps",
        since=Since(far[0]["step"]),
    )


def _number(row: Row, column: str) -> float:
    """Return a value of a row; 0 if the row lacks it."""
    return row.get(column) or 0.0


def _is_offline(config: Mapping[str, Any]) -> bool:
    return bool(config.get("offline")) or config.get("replay_batches") is not None


def _since_step(bad: Sequence[Row], steps: Sequence[Row]) -> Since | None:
    """Return the beginning of the last steps, which are all bad; None if there are none."""
    if not bad:
        return None
    first = bad[0].get("step")
    return None if first is None else Since(first, or_before=len(bad) == len(steps) and first > 1)


_TRUNCATED_SUPPORT = (
    "the trainer takes its logprobs over all tokens, so each importance ratio is too small by a factor, the "
    "probability that the kept tokens have together; where it falls below the clip, rollouts of negative advantage "
    "have no gradient; start a run without --keep-sampling-mask False"
)


def find_truncated_support(run: RunConfig, config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Find settings with which the sampler leaves out tokens, while the loss assumes that it samples from all tokens.

    config: settings of the trainer, as in attempts/N.json.
    """
    if run.keep_sampling_mask is not False or config.get("objective") in _WITHOUT_RATIO:
        return
    for name in ("top_p", "top_k"):
        values = [getattr(run, name), *run.sweep.get(name, ())]
        cuts = [str(value) for value in values if value not in (None, 1)]
        if cuts:
            text = f"{name} is {' or '.join(dict.fromkeys(cuts))}, and the tokens that were kept are not stored"
            yield Diagnostic(f"truncated by {name}", f"{text}: {_TRUNCATED_SUPPORT}")


def find_mismatch(steps: Sequence[Row], run: RunConfig, config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Find that sampler and trainer give different logprobs under the same weights.

    steps: rows of gradient steps, in order. config: settings of the trainer, as in attempts/N.json.
    """
    if _is_offline(config):
        return  # the weights change without a new version
    if any(find_truncated_support(run, config)):
        return  # that setting explains the difference
    same = [
        row["sampler_kl"]
        for row in steps
        if row["off_policy_steps_max"] == 0 and (row["step"] - 1) % run.steps_per_version == 0
    ]
    found = [kl for kl in same if kl is not None][-_RECENT_STEPS:]
    if found and sum(found) / len(found) > _MOST_MISMATCH:
        yield Diagnostic(
            "mismatch",
            f"sampler_kl is {sum(found) / len(found):.2g} nats per token in {len(found):,} steps on rollouts of the "
            "trainer's own weights, wanted about 0: sampler and trainer compute other probabilities; compare their "
            "dtype, attention and --float32-head, and look at the view mismatch (--keep-token-stats)",
        )


_SEEN_WITHIN = timedelta(minutes=1)
"""Delay with which the row of a step may appear after those of workers that sampled meanwhile."""
_STEPS_OF_NO_BOUND = 100
"""Value used for a max_off_policy_steps of None, with which any number of groups may be open."""


def find_shortage(
    steps: Sequence[Row], calls: Sequence[Row], run: RunConfig, config: Mapping[str, Any]
) -> Iterator[Diagnostic]:
    """Find that far more groups were sampled since the newest step than a batch needs, and no batch for a minute.

    steps, calls: rows in order. Calls in which every rollout failed are left out: that is another diagnostic.
    """
    since = steps[-1]["created_at"] if steps else calls[0]["created_at"] if calls else None
    sampled = [row for row in calls if not steps or row["created_at"] > since]
    if not sampled or sampled[-1]["created_at"] - since < _SEEN_WITHIN:
        return
    num_groups = sum(row["num_groups"] or 0 for row in sampled if row["num_errors"] != row["num_rollouts"])
    _, most_open = run.budget_bounds(config.get("max_off_policy_steps") or _STEPS_OF_NO_BOUND)
    if num_groups > most_open + 2 * run.groups_per_version:
        filters = ", ".join(config.get("filters") or ()) or "none"
        text = f"{num_groups:,} groups were sampled since the newest step, and they made no batch"
        yield Diagnostic("no batch", f"{text}; look at the trainer's log and at its filters ({filters})")


def _newest(calls: Sequence[Row], num_groups: int) -> list[Row]:
    """Return the newest calls that together have at least num_groups groups, or all calls."""
    found: list[Row] = []
    for row in reversed(calls):
        found.insert(0, row)
        if _sum(found, "num_groups") >= num_groups:
            break
    return found


def _find_failures(env_name: str, calls: Sequence[Row]) -> Diagnostic | None:
    num_rollouts, num_errors = _sum(calls, "num_rollouts"), _sum(calls, "num_errors")
    if num_errors <= _MOST * num_rollouts:
        return None
    share = "every one" if num_errors == num_rollouts else f"{num_errors / num_rollouts:.0%}"
    first = _on_one_line(next((row["first_error"] for row in calls if row["first_error"]), "not stored in the metrics"))
    text = f"{share} of {num_rollouts:,} rollouts failed in {env_name}; the first error: {first}"
    return Diagnostic(f"failures in {env_name}", text, env_name)


def _on_one_line(text: str) -> str:
    """Return an environment's text without characters that could control a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def _find_refusals(env_name: str, calls: Sequence[Row], run: RunConfig) -> Diagnostic | None:
    if _sum(calls, "num_groups") < run.groups_per_batch:
        return None
    num_rollouts, num_refused = _sum(calls, "num_rollouts"), _sum(calls, "num_parse_errors")
    if num_refused <= _MOST * num_rollouts:
        return None
    share = f"{num_refused / num_rollouts:.0%} of {num_rollouts:,} answers in {env_name}"
    if not run.accept_incomplete and _sum(calls, "num_incomplete_completions") > num_refused / 2:
        text = f"{share} hit max_tokens ({run.max_tokens}) and were refused unscored"
        text += "; start a run with --accept-incomplete, or with a higher --max-tokens"
    else:
        text = f"{share} could not be parsed; look at some with `ludic view --text`"
    return Diagnostic(f"refusals in {env_name}", text, env_name)


def _find_equal_rewards(env_name: str, calls: Sequence[Row], run: RunConfig) -> Diagnostic | None:
    num_groups = _sum(calls, "num_groups")
    if num_groups < run.groups_per_batch or _sum(calls, "num_zero_variance_groups") < num_groups:
        return None
    rewards = [row["reward_mean"] for row in calls if row["reward_mean"] is not None]
    text = f"rewards are equal within each of {num_groups:,} groups in {env_name}"
    text += f" (about {fmean(rewards):.4g})" if rewards else ""
    text += ", so there is nothing to learn from; look at the environment's score, or at --temperature"
    return Diagnostic(f"equal rewards in {env_name}", text, env_name)


def _is_still(row: Row, config: Mapping[str, Any]) -> bool:
    """Return whether rewards changed nothing in a step."""
    is_still = row["advantage_mean"] == 0 and row["advantage_std"] == 0
    return row["grad_norm"] == 0 or (is_still and _learns_from_rewards(config))


def _learns_from_rewards(config: Mapping[str, Any]) -> bool:
    """Return whether a step learns from rewards alone; a KL penalty in the loss teaches nothing new."""
    is_penalised = config.get("kl_weight") and config.get("kl_placement", "loss") != "loss"
    return config.get("objective") != "sft" and config.get("advantage") != "zero" and not is_penalised


def _describe_stillness(steps: Sequence[Row]) -> str:
    rewards = [row["reward_mean"] for row in steps if row["reward_mean"] is not None]
    mean = f" (mean reward {fmean(rewards):.4g})" if rewards else ""
    return (
        f"the last {len(steps):,} steps got no gradient: all advantages or gradients are 0{mean}; look at the "
        "environment's score, and at answers that were cut at max_tokens or not parsed"
    )


def _find_drops(steps: Sequence[Row]) -> Iterator[Diagnostic]:
    drops: Counter[str] = Counter()
    for row in steps:
        drops.update(dict(row["drops"] or {}))
    for reason in _ON_PURPOSE:
        drops.pop(reason, None)
    num_rollouts = _sum(steps, "num_rollouts") + drops.total()
    if drops.total() <= _MOST * num_rollouts:
        return
    reason, most = drops.most_common(1)[0]
    what_to_do = _WHAT_TO_DO.get(reason, "look at that filter")
    share = f"{drops.total() / num_rollouts:.0%} of {num_rollouts:,} rollouts in {len(steps)} steps"
    yield Diagnostic(f"drops by {reason}", f"filters dropped {share}, {reason} most ({most:,}): {what_to_do}")


def _sum(rows: Sequence[Row], column: str) -> int:
    """Sum a column; a null, as in rows of an older version that lack the column, counts as 0."""
    return sum(row[column] or 0 for row in rows)
