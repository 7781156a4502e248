"""The state of a run at one moment: trainer, newest steps, rates, policy, diagnostics; and its panel. Pure.

`ludic.app.show.watch` reads the state. The panel is at most 120 columns wide, and never wider than the terminal.
"""

import io
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ludic.app.show.balance import MOST_WAITING, Balance, find_balance
from ludic.base import RECORDED_ENV, Result, age, number, of_total, open_console, plural, size, sparkline
from ludic.base.results import printable
from ludic.records import Row
from ludic.root import CheckpointId, EpisodeClaim, LeaseState, OtherTrainer, Policy, Root, other_trainer
from ludic.run import (
    LEAPS,
    Diagnostic,
    History,
    RunConfig,
    find_falls,
    find_leaps,
    find_mismatch,
    find_sampling_diagnostics,
    find_shortage,
    find_some_failures,
    find_training_diagnostics,
    find_truncated_support,
    is_recorded_run,
    run_of,
)
from ludic.training import describe_computing

if TYPE_CHECKING:
    from ludic.app.show.stats import Stats

WINDOW = timedelta(minutes=5)
"""Time window of the workers' rates."""
_BALANCE_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The newest trainer of a run."""

    attempt_id: int
    owner: str
    lease_state: LeaseState | None
    """State of its lease; None if an older ludic, without leases, started it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its settings; empty until it has stored them."""

    @property
    def num_steps(self) -> int | None:
        return self.config.get("num_steps")

    @property
    def other(self) -> OtherTrainer | None:
        """The trainer of another program, whose steps are recorded; None if ludic's own trains."""
        return other_trainer(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMeans:
    """Means over examples of the stored evaluations of a version in one environment."""

    version: int
    env_name: str
    num_rollouts: int
    reward_mean: float | None
    """Mean reward; None if no sample is scored."""
    accuracy: float | None
    """Share of correct answers; None if it is known of no answer."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunStatus(Result):
    """State of a run at one moment. Prints as the panel of `ludic watch`."""

    root: Root
    at: datetime
    trainer: Trainer | None
    steps: list[Row]
    """Newest gradient steps that no later attempt has replaced, in order."""
    calls: list[Row]
    """Calls of the workers' engines within WINDOW, oldest first."""
    policy: Policy | None
    """Newest published policy."""
    checkpoint: CheckpointId | None
    """Newest complete checkpoint."""
    newest_calls: list[Row] = field(default_factory=list)
    """Newest calls of the workers' engines, of any age, oldest first."""
    history: History = field(default_factory=dict)
    """Samples of the workers by environment, with each known version."""
    evals: Sequence[EvalMeans] = ()
    """Means of the newest version with stored evaluations, by environment."""
    agent_episodes: Sequence[EpisodeClaim] = ()
    """Episodes that gateways served in a process of their own."""
    unreadable: Sequence[str] = ()
    """Problems of damaged files, without which the rest is shown."""
    read_totals: "Stats | None" = None
    """Figures of all that is stored, if they were asked for; then they are printed too."""
    is_out: bool = False
    """Whether it was printed already."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values; the root by its place."""
        own = ("root", "history", "evals", "agent_episodes", "read_totals", "is_out")
        others = [each.name for each in fields(self) if each.name not in own]
        values = {name: getattr(self, name) for name in others}
        plain = {name: asdict(each) if is_dataclass(each) else each for name, each in values.items()}  # type: ignore[arg-type]
        return {
            "root": self.root.url,
            **plain,
            "history": {name: list(map(asdict, versions)) for name, versions in self.history.items()},
            "evals": list(map(asdict, self.evals)),
            "agent_episodes": _ends(self.agent_episodes),
            "balance": self.balance and asdict(self.balance),
            "diagnostics": list(map(str, self.diagnostics())),
            **({} if self.read_totals is None else {"totals": self.read_totals.to_dict()}),
        }

    def print_to(self, console: Console) -> None:
        """Print the panel of `ludic watch`, then the totals."""
        console.print(draw(self, console.width))
        if self.read_totals is not None:
            self.read_totals.print_to(console)

    @property
    def totals(self) -> "Stats":
        """Figures of all that is stored: DataFrames folders, rollouts, environments, versions, evals, attempts.

        Read when asked for, unless `Run.watch(totals=True)` has read them. Raises QueryError.
        """
        from ludic.app.show.stats import collect_stats

        return self.read_totals or collect_stats(self.root)

    @property
    def balance(self) -> "Balance | None":
        """Balance of trainer and workers over at most 20 newest steps; None if unknown."""
        calls = self.calls if len(self.calls) > len(self.newest_calls) else self.newest_calls
        return find_balance(self.steps[-_BALANCE_STEPS:], calls)

    def diagnostics(self, *, of_all_steps: bool = False) -> Iterator[Diagnostic]:
        """Yield the diagnostics of the run that its newest metrics show.

        of_all_steps: far steps are those of all known steps, as in a run that has ended, instead of the newest.
        """
        run, config = run_of(self.root), self.trainer.config if self.trainer else {}
        yield from find_sampling_diagnostics(self.newest_calls, run, self.history)
        yield from find_falls(self.history)
        yield from find_some_failures(self.newest_calls, run, self.history)
        # Steps of earlier trainers had other settings: sft, say, learns without advantages.
        own_steps = [row for row in self.steps if self.trainer and row["attempt_id"] == self.trainer.attempt_id]
        yield from find_truncated_support(run, config)
        of_all_steps = of_all_steps or self._has_ended
        for diagnostic in find_training_diagnostics(own_steps, config):
            if not (of_all_steps and diagnostic.kind == LEAPS):
                yield diagnostic
        if of_all_steps:
            yield from find_leaps(self.steps, config)
        yield from find_mismatch(own_steps, run, config)
        yield from find_shortage(self.steps, self.newest_calls, run, config)

    @property
    def _has_ended(self) -> bool:
        lease = self.trainer.lease_state if self.trainer else None
        return lease is not None and lease.state in ("ended", "dead")


# --- The panel -------------------------------------------------------------------------------------------------------

_MOST_COLUMNS = 120
_FRAME_WIDTH, _NAME_WIDTH = 4, 14
"""Columns of the frame, and of the lines' names."""
_BAR_WIDTH = 72
"""Columns of the widest bar or curve."""
_SHORTEST_BAR = 6
"""Columns of the narrowest progress bar that is drawn."""
_SHORTEST_CURVE = 20
"""Columns of the narrowest curve or bar that has text beside it."""
_SHORTEST_NAME, _LONGEST_NUMBER = 12, 10
"""Maximum columns of an environment's name, and of its newest reward."""
_STARTING_S = 120.0
"""Seconds after the creation of a run in which its trainer may still be loading a model."""
_RECENT_STEPS = 20
"""Number of steps over which figures are averaged and drops are counted."""
_UNEVEN = 1.05
"""Ratio of the fullest rank's tokens to the mean of all ranks from which the panel mentions it."""
_STATES = {
    "alive": ("renews its lease", "green"),
    "silent": ("silent for {unchanged}, longer than its lease: dead or disconnected", "bold red"),
    "ended": ("has ended", "dim"),
    "dead": ("its process is gone", "bold red"),
    "unknown": ("not watched long enough to know whether it is alive", "yellow"),
}
# Parts of step_s, in the order of a step; the remaining seconds are "other".
_PARTS = ("reference", "forward", "backward", "collectives", "optimizer")
_COLOURS = {
    "wait": "red",
    "reference": "bright_blue",
    "forward": "green",
    "backward": "cyan",
    "collectives": "magenta",
    "optimizer": "blue",
    "other": "white",
    "step": "green",
    "publish": "yellow",
    "checkpoint": "bright_black",
}


def draw(status: RunStatus, columns: int = _MOST_COLUMNS) -> RenderableType:
    """Return a status as a panel. columns: width of the terminal; the panel uses at most 120."""
    inner = min(columns, _MOST_COLUMNS) - _FRAME_WIDTH
    title, pairs = Text(printable(status.root.url)), Table.grid(padding=(0, 2))
    pairs.add_column()
    pairs.add_column(overflow="fold")
    if len(title) > inner - 2:  # the frame would cut the title
        pairs.add_row(Text("root", style="bold"), title.copy())
        title = Text("ludic")
    for name, value in _lines(status, inner - _NAME_WIDTH):
        pairs.add_row(Text(name, style="bold"), value)
    parts: list[RenderableType] = [pairs]
    if status.newest_calls or status.calls:
        parts += [Text(), by_environment(status, inner), Text(), by_worker(status, inner)]
    return Constrain(Panel(Group(*parts), title=title, expand=False), inner + _FRAME_WIDTH)


_NARROW = 44
"""Columns of bars and curves of a page, which wraps texts itself."""


def as_texts(status: RunStatus) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the lines of the panel as names and texts, without diagnostics; and its tables, in full width."""
    lines = [
        (name, value.plain if isinstance(value, Text) else _text_of(value, _MOST_COLUMNS))
        for name, value in _lines(status, _NARROW)
        if name not in ("warning", "unreadable")
    ]
    has_calls = bool(status.newest_calls or status.calls)
    tables = [by_environment(status, _MOST_COLUMNS), by_worker(status, _MOST_COLUMNS)] if has_calls else []
    return lines, [_text_of(table, _MOST_COLUMNS) for table in tables]


def _text_of(value: RenderableType, columns: int) -> str:
    file = io.StringIO()
    open_console(file=file, width=columns, color_system=None, force_jupyter=False).print(value)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").splitlines())


def _lines(status: RunStatus, width: int) -> Iterator[tuple[str, RenderableType]]:
    """Yield names and their values. width: columns that a value may take."""
    run = run_of(status.root)
    is_other = status.trainer is not None and status.trainer.other is not None
    for diagnostic in status.diagnostics():  # first, since a low terminal shows only the first lines
        yield "warning", Text(printable(str(diagnostic)), style="bold red")
    for problem in status.unreadable:
        yield "unreadable", Text(printable(problem), style="bold red")
    yield "model", Text(printable(f"{run.model}{_batch(status, run)}"))
    if status.agent_episodes:
        ends = _ends(status.agent_episodes)
        yield "agents", Text(", ".join(f"{plural(count, 'episode')} {end}" for end, count in ends.items()))
    yield "trainer", _trainer(status)
    if status.trainer and (computing := describe_computing(status.trainer.config)):
        yield "computes in", Text(printable(computing))
    steps, recent = status.steps, status.steps[-_RECENT_STEPS:]
    if not steps:
        num_groups = sum(row["num_groups"] or 0 for row in status.calls)
        yield (
            "step",
            Text(f"none yet; {plural(num_groups, 'group')} sampled in the last {age(WINDOW.total_seconds())}"),
        )
    else:
        yield "step", _progress(status, width)
        yield "reward", _rewards(status, width)
        if status.evals:
            yield "evaluation", Text("\n".join(map(_evaluated, status.evals)))
        for name, column in _CURVES.items():
            if any(row[column] is not None for row in steps):
                yield name, _curve([row[column] for row in steps], width)
        yield "loss", Text(_losses(steps[-1]))
        if others := _others(steps[-1]):
            yield "other", Text(others)
        if not is_other or any(row["tokens_per_s"] is not None for row in recent):
            yield "speed", Text(_speed(recent, status))
        if not is_other or any(_seconds(recent).values()):
            yield "time", _where_time_goes(steps[-status.balance.num_steps :] if status.balance else recent, width)
        if status.balance is not None:
            advice = status.balance.advice(run.batches_ahead)
            yield "balance", Text("; ".join(filter(None, (str(status.balance), advice))))
        if not is_other:
            num_pending = steps[-1]["num_pending_groups"] or 0
            yield "queue", Text(f"{plural(num_pending, 'finished group')} left for later steps after the last plan")
        if held_up := _waited_for(status.calls):
            yield "workers", Text(held_up)
    if not is_other or status.policy is not None:
        yield "policy", Text(_policy(status))
    if publishing := _publishing(recent, status.newest_calls):
        yield "publishing", Text(publishing)
    if num_at_risk := _most_at_risk(status.calls):
        yield "at risk", Text(f"up to {plural(num_at_risk, 'running episode')}, if a worker is killed")
    if not is_other or status.checkpoint is not None:
        checkpoint = "none yet" if status.checkpoint is None else "step {1} of attempt {0}".format(*status.checkpoint)
        yield "checkpoint", Text(checkpoint)
    if steps and (not is_other or any(row["drops"] is not None for row in recent)):
        yield "dropped", Text(_drops(recent, of=len(steps)))
    yield from _diagnostics(steps)


def _ends(episodes: Sequence[EpisodeClaim]) -> dict[str, int]:
    """Return how many episodes ended in each way, or are open; the most frequent first."""
    return dict(Counter(it.end.replace("_", " ") if it.end else "open" for it in episodes).most_common())


def _batch(status: RunStatus, run: RunConfig) -> str:
    """Return the size of a batch; of a recorded run, what its newest step trained on, if it has one."""
    if not is_recorded_run(status.root):
        return f", {plural(run.groups_per_batch, 'group')} of {run.group_size} a batch"
    if not status.steps or status.steps[-1]["num_groups"] is None:
        return ""
    newest = status.steps[-1]
    return (
        f", {plural(newest['num_groups'], 'group')} with {plural(newest['num_rollouts'], 'rollout')} in its newest step"
    )


def _trainer(status: RunStatus) -> Text:
    trainer, url = status.trainer, printable(status.root.url)
    if trainer is None and status.agent_episodes:
        train = f"`ludic train NEW --offline --sources {url}` trains on them"
        return Text(
            f"none: a gateway records agents here; `ludic assemble {url}` makes rollouts of ended episodes, {train}"
        )
    if trainer is None and RECORDED_ENV in run_of(status.root).env:
        return Text("none yet: another program records here, and its first step is still to come")
    if trainer is None:
        age_s = _seconds_since_creation(status)
        if age_s is not None and age_s < _STARTING_S:
            return Text(f"none yet; the run was created {age(age_s)} ago, and a trainer loads its model first")
        return Text(f"none has started; unless one is loading its model, `ludic train {url}` starts one")
    name = f"{trainer.other.name}, recorded as " if trainer.other is not None else ""
    text = Text(printable(f"{name}attempt {trainer.attempt_id}, {trainer.owner}"))
    if trainer.lease_state is None:
        return text
    state, style = _STATES[trainer.lease_state.state]
    if trainer.lease_state.state == "ended" and _is_cut_short(status):
        state, style = "has ended before its last step; the command that started it continues the run", "yellow"
    return text.append(": ").append(state.format(unchanged=age(trainer.lease_state.unchanged_s)), style=style)


def _is_cut_short(status: RunStatus) -> bool:
    """Return whether the trainer has steps left, as far as they are known."""
    num_steps = status.trainer.num_steps if status.trainer and status.trainer.other is None else None
    return num_steps is not None and (not status.steps or status.steps[-1]["step"] < num_steps)


def _seconds_since_creation(status: RunStatus) -> float | None:
    """Return the seconds since the run was created; None if its run_id has no time."""
    created_at = status.root.created_at
    return None if created_at is None else max(0.0, (status.at - created_at).total_seconds())


def _progress(status: RunStatus, width: int) -> RenderableType:
    step, num_steps = status.steps[-1]["step"], status.trainer.num_steps if status.trainer else None
    text = Text(of_total(step, num_steps))
    left_s = _seconds_left(status)
    last = Text("" if left_s is None else f"{age(left_s)} left")
    bar = min(_BAR_WIDTH, width - len(text) - len(last) - 4)
    if num_steps is None or bar < _SHORTEST_BAR:
        return text if left_s is None else text.append(", ").append(last)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(text, ProgressBar(num_steps, step, width=bar), last)
    return grid


def _seconds_left(status: RunStatus) -> float | None:
    """Return the seconds to the last step at the pace of the newest steps; None if unknown, or if no trainer runs.

    The pace is that of one attempt, with its waits, checkpoints and published versions.
    """
    trainer, newest = status.trainer, status.steps[-1]
    if trainer is None or trainer.num_steps is None or newest["step"] >= trainer.num_steps:
        return None
    is_running = trainer.lease_state is None or trainer.lease_state.state in ("alive", "unknown")
    own = [row for row in status.steps[-_RECENT_STEPS:] if row["attempt_id"] == trainer.attempt_id]
    if not is_running or len(own) < 2:
        return None
    step_s = (own[-1]["created_at"] - own[0]["created_at"]).total_seconds() / (len(own) - 1)
    return max(0.0, (trainer.num_steps - newest["step"]) * step_s - min(step_s, _seconds_since(newest, status.at)))


def _rewards(status: RunStatus, width: int) -> Text:
    """Return the curve of all rewards by step; of several environments also that of each, by version."""
    text = _curve([row["reward_mean"] for row in status.steps], width)
    if len(status.history) < 2:
        return text
    names = {name: printable(name) for name in status.history}
    most = max(_SHORTEST_NAME, width - _LONGEST_NUMBER - _BAR_WIDTH // 3)
    longest = min(most, max(map(len, names.values())))
    for name, versions in status.history.items():
        rewards = [it.reward_mean for it in versions if it.reward_mean is not None]
        shown = names[name] if len(names[name]) <= longest else f"{names[name][: longest - 1]}…"
        newest = number(rewards[-1], 4) if rewards else "not scored"
        text.append(f"\n{shown:{longest}}  {newest:>{_LONGEST_NUMBER}}  ")
        left = min(_BAR_WIDTH, width - longest - _LONGEST_NUMBER - 4)
        if left >= _SHORTEST_BAR:
            text.append(sparkline(rewards, left), style="green")
    return text


def _evaluated(means: EvalMeans) -> str:
    accuracy = "" if means.accuracy is None else f", {means.accuracy:.1%} correct"
    reward = "no rollout was scored" if means.reward_mean is None else f"reward {means.reward_mean:.4g}"
    where = f"version {means.version} in {printable(means.env_name)}"
    return f"{where}: {reward}{accuracy}, {plural(means.num_rollouts, 'rollout')}"


def _curve(values: Sequence[float | None], width: int) -> Text:
    """Return the newest value and a sparkline of all values."""
    known = [value for value in values if value is not None]
    if not known:
        return Text("no rollout was scored")
    first, last = f"{known[-1]:.3f}", f"over {plural(len(values), 'step')}"
    left = width - len(first) - len(last) - 4
    if left < _SHORTEST_CURVE:
        return Text(f"{first} {last}\n").append(sparkline(known, min(_BAR_WIDTH, width)), style="green")
    curve = sparkline(known, min(_BAR_WIDTH, left))
    return Text(f"{first}  ").append(curve, style="green").append(f"  {last}")


_CURVES = {"length": "response_length_mean", "entropy": "entropy"}
_LOSS = {
    "loss": "{:.4g}",
    "grad_norm": "gradient norm {:.3g}",
    "sampler_kl": "sampler KL {:.1g}",
    "clip_fraction": "clipped {:.1%}",
    "learning_rate": "learning rate {:.3g}",
    "preference_accuracy": "{:.0%} of pairs preferred",
}


def _losses(row: Row) -> str:
    """Format the columns of _LOSS that are not null, joined by commas; a dash if all are null."""
    return ", ".join(text.format(row[name]) for name, text in _LOSS.items() if row[name] is not None) or "-"


_MOST_OTHERS = 8


def _others(row: Row) -> str:
    """Format the numbers of another trainer that are no columns of metrics, by its names; empty if there are none."""
    values = {name: value for name, value in dict(row["other"] or {}).items() if name not in row}
    shown = ", ".join(f"{printable(name)} {number(value, 4)}" for name, value in list(values.items())[:_MOST_OTHERS])
    left = len(values) - _MOST_OTHERS
    return shown + (f" and {left:,} more, in the column other of metrics" if left > 0 else "")


def _speed(recent: Sequence[Row], status: RunStatus) -> str:
    parts = [f"{_mean(recent, 'tokens_per_s'):,.0f} tokens/s trained"]
    if any(row["mfu"] is not None for row in recent):
        parts.append(f"MFU {_mean(recent, 'mfu'):.1%}")
    if (uneven := _mean(recent, "token_imbalance")) >= _UNEVEN:
        parts.append(f"the fullest rank has {uneven - 1:.0%} more tokens than the mean")
    return ", ".join([*parts, f"{rates(status.calls, status.at)['num_tokens'] / 60:,.0f} tokens/s sampled"])


def _where_time_goes(recent: Sequence[Row], width: int) -> Text:
    """Draw each phase's share of the loop's seconds as a bar and as figures, and the times of the reading thread."""
    seconds = {name: value for name, value in _seconds(recent).items() if value > 0}
    total = sum(seconds.values()) or 1.0
    text, of_all = Text(), f"{total / len(recent):.3g} s a step"
    beside = width - len(of_all) - 2
    bar = min(_BAR_WIDTH, beside if beside >= _SHORTEST_CURVE else width)
    for name, cells in _widths(seconds, bar).items():
        text.append("█" * cells, style=_COLOURS[name])
    text.append(f"{'  ' if bar <= beside else chr(10)}{of_all}\n")
    text.append(_legend({name: value / total for name, value in seconds.items()}, width))
    if any(row["read_s"] is not None for row in recent):
        times = f"read {_mean(recent, 'read_s'):.2g} s, pack {_mean(recent, 'pack_s'):.2g} s"
        text.append(f"\nmeanwhile, for the next step: {times}")
    return text


def _legend(shares: Mapping[str, float], most: int) -> Text:
    """Return names in their colours with their shares, without shares below 0.5%; no line break within a pair."""
    text, width = Text(), 0
    for name, share in shares.items():
        if share < 0.005:
            continue
        words = f"{name} {share:.0%}"
        if width and width + 2 + len(words) > most:
            text.append("\n")
            width = 0
        text.append(("  " if width else "") + name, style=_COLOURS[name]).append(f" {share:.0%}")
        width += len(words) + (2 if width else 0)
    return text


def _seconds(rows: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each phase, in the order of the loop; rows of an older schema hold only the whole step."""
    sums = {name: sum(row[f"{name}_s"] or 0.0 for row in rows) for name in ("wait", "step", "publish", "checkpoint")}
    parts = {name: sum(row[f"{name}_s"] or 0.0 for row in rows) for name in _PARTS}
    if not any(parts.values()):
        return sums
    step_s = sums.pop("step")
    wait = {"wait": sums.pop("wait")}
    return {**wait, **parts, "other": max(0.0, step_s - sum(parts.values())), **sums}


def _widths(values: Mapping[str, float], width: int) -> dict[str, int]:
    """Return the number of a bar's cells for each value; they sum to `width`."""
    total, done = sum(values.values()), 0.0
    widths: dict[str, int] = {}
    for name, value in values.items():
        widths[name] = round((done + value) / total * width) - round(done / total * width)
        done += value
    return widths


def _policy(status: RunStatus) -> str:
    if status.policy is None:
        return "none published"
    age_s = (status.at - datetime.fromisoformat(status.policy.created_at)).total_seconds()
    text = f"version {status.policy.version}, published {age(max(0.0, age_s))} ago"
    if not status.steps or status.steps[-1]["off_policy_steps_mean"] is None:
        return text
    mean, largest = (status.steps[-1][f"off_policy_steps_{of}"] for of in ("mean", "max"))
    return f"{text}; off-policy steps {mean:.1f}, at most {largest}"


def _publishing(recent: Sequence[Row], calls: Sequence[Row]) -> str:
    """Format the cost of a version: its bytes, and the seconds until workers sample with it; empty if unknown."""
    parts = []
    if any(row["publish_bytes"] is not None for row in recent):
        num_bytes, write_s = _mean(recent, "publish_bytes"), _mean(recent, "publish_write_s")
        parts.append(f"{size(num_bytes)} a version, written in {write_s:.2g} s")
    swaps = [row for row in calls if row["first_token_s"] is not None][-_RECENT_STEPS:]
    if swaps:
        first, fetch, load = (_mean(swaps, name) for name in ("first_token_s", "fetch_s", "load_s"))
        parts.append(f"workers sample with it after {first:.2g} s (fetch {fetch:.2g} s, load {load:.2g} s)")
    return "; ".join(parts)


def _waited_for(calls: Sequence[Row]) -> str:
    """Format the reason of the workers' waits, if they ran no episode for a large part of the time; else empty."""
    waits: defaultdict[str, float] = defaultdict(float)
    for row in calls:
        if row["waited_for"] is not None:
            waits[row["waited_for"]] += row["wait_s"] or 0.0
    total_s = sum((row["wait_s"] or 0.0) + (row["step_s"] or 0.0) for row in calls)
    if sum(waits.values()) <= MOST_WAITING * total_s:
        return ""
    what = max(waits, key=waits.__getitem__)
    names = {"budget": "the trainer, which limits the number of open groups", "weights": "new weights"}
    return f"wait for {names.get(what, printable(what))}"


def _most_at_risk(calls: Sequence[Row]) -> int:
    """Return the maximum number of episodes of a worker, by its newest row."""
    newest = {row["worker_id"]: row["num_running"] or 0 for row in calls}
    return max(newest.values(), default=0)


def _drops(recent: Sequence[Row], of: int) -> str:
    """Format the drops of the newest steps. of: number of all shown steps."""
    drops: Counter[str] = Counter()
    for row in recent:
        drops.update(dict(row["drops"] or {}))
    newest = f"in {'the newest ' if len(recent) < of else ''}{plural(len(recent), 'step')}"
    what = ", ".join(f"{count:,} by {printable(reason)}" for reason, count in drops.most_common())
    return f"{what}, {newest}" if what else f"no rollouts {newest}"


def _diagnostics(steps: Sequence[Row]) -> Iterator[tuple[str, Text]]:
    if steps and steps[-1]["num_unreadable_files"]:
        yield "unreadable", Text(f"{plural(steps[-1]['num_unreadable_files'], 'file')} quarantined", style="bold red")
    if steps and steps[-1]["num_seq_len_truncated"]:
        text = f"{plural(steps[-1]['num_seq_len_truncated'], 'sequence')} cut to max_seq_len in the last step"
        yield "cut", Text(text, style="yellow")


def _mean(rows: Sequence[Row], column: str) -> float:
    return fmean([row[column] for row in rows if row[column] is not None] or [0.0])


# --- Its tables of environments and workers, or lines if the terminal is too narrow ----------------------------------

_MOST_WORKERS = 8
_GAPS = (2, 1)
"""Spaces between two columns: the wider gap if it fits."""
_SHORTEST_ID = 9
"""Characters of a worker's id that distinguish it from others; the rest may be cut."""
_COUNTS = {
    "truncated": "num_truncated",
    "max_tokens": "num_incomplete_completions",
    "unparsed": "num_parse_errors",
    "failed": "num_errors",
}


def _last_calls(status: RunStatus) -> tuple[Sequence[Row], datetime]:
    """Return the calls of the last minutes in which there were any, oldest first, and the end of these minutes."""
    if status.calls:
        return status.calls, status.at
    end = status.newest_calls[-1]["created_at"]
    return [row for row in status.newest_calls if row["created_at"] >= end - WINDOW], end


def by_environment(status: RunStatus, width: int) -> RenderableType:
    """Return rates and means of each environment's newest rollouts. width: in columns."""
    rows = {}
    newest, at = _last_calls(status)
    for env_name, calls in _grouped(newest, "env_name").items():
        num_rollouts = sum(row["num_rollouts"] for row in calls)
        rows[env_name] = {
            "rollouts/min": f"{rates(calls, at)['num_rollouts']:,.0f}",
            "reward": number(_weighted(calls, "reward_mean"), 4),
            "tokens": number(_weighted(calls, "response_length_mean"), 4),
            **{title: _fraction(calls, column, num_rollouts) for title, column in _COUNTS.items()},
        }
    return _number_table("environment", rows, width, name_width=max(map(len, map(printable, rows))))


def by_worker(status: RunStatus, width: int) -> RenderableType:
    """Return rates of each worker, at most the first 8. width: in columns."""
    rows = {}
    newest, at = _last_calls(status)
    workers = _grouped(newest, "worker_id")
    for worker_id, calls in itertools.islice(workers.items(), _MOST_WORKERS):
        of_worker, busy_s = rates(calls, at), sum(row["step_s"] or 0.0 for row in calls)
        wait_s = sum(row["wait_s"] or 0.0 for row in calls)
        rows[worker_id] = {
            "rollouts/min": f"{of_worker['num_rollouts']:,.0f}",
            "tokens/s": f"{of_worker['num_tokens'] / 60:,.0f}",
            "version": str(calls[-1]["policy_version"]),
            "waiting": f"{wait_s / (wait_s + busy_s):.0%}" if wait_s + busy_s else "-",
            "last heard": f"{age(_seconds_since(calls[-1], status.at))} ago",
        }
    table = _number_table("worker", rows, width, name_width=_SHORTEST_ID)
    if len(workers) <= _MOST_WORKERS:
        return table
    return Group(table, Text(f"and {len(workers) - _MOST_WORKERS:,} more", style="dim"))


def rates(calls: Sequence[Row], at: datetime) -> dict[str, float]:
    """Return num_rollouts and num_tokens per minute, since the beginning of the first call or over WINDOW, if
    shorter."""
    if not calls:
        return {"num_rollouts": 0.0, "num_tokens": 0.0}
    first_s = _seconds_since(calls[0], at) + (calls[0]["step_s"] or 0.0)
    minutes = min(max(first_s, 1.0), WINDOW.total_seconds()) / 60
    return {name: sum(row[name] for row in calls) / minutes for name in ("num_rollouts", "num_tokens")}


def _number_table(title: str, rows: Mapping[str, Mapping[str, str]], width: int, *, name_width: int) -> RenderableType:
    """Return a table of names and numbers, or lines if the numbers do not fit beside `name_width` columns of a name.

    rows: by name, values by title.
    """
    titles = list(next(iter(rows.values())))
    numbers = [max(len(title), *(len(row[title]) for row in rows.values())) for title in titles]
    fitting = [gap for gap in _GAPS if sum(numbers) + gap * len(numbers) + name_width <= width]
    if not fitting:
        return Group(*(line for name, row in rows.items() for line in _as_lines(name, row, width)))
    table = Table(box=None, pad_edge=False, padding=(0, fitting[0], 0, 0), header_style="bold")
    table.add_column(title)
    for each in titles:
        table.add_column(each, justify="right", no_wrap=True)  # so that names are cut, not numbers
    for name, row in rows.items():
        table.add_row(_name(name), *row.values())
    return table


def _as_lines(name: str, row: Mapping[str, str], width: int) -> list[Text]:
    """Return a name and the lines of its values below it; no line break between a value and its title."""
    lines = [_name(name, "bold")]
    words = ""
    for title, value in row.items():
        added = f"{words}, {title} {value}" if words else f"  {title} {value}"
        if words and len(added) + 1 > width:
            lines.append(Text(f"{words},"))
            added = f"  {title} {value}"
        words = added
    return [*lines, Text(words)]


def _name(name: str, style: str = "") -> Text:
    return Text(printable(name), no_wrap=True, overflow="ellipsis", style=style)


def _grouped(rows: Iterable[Row], column: str) -> dict[str, list[Row]]:
    """Group rows by the value of a column, sorted by it."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[column]].append(row)
    return dict(sorted(groups.items()))


def _seconds_since(row: Row, at: datetime) -> float:
    """Return the seconds since a row was written, at least 0: the writer's clock may differ from this machine's."""
    return max(0.0, (at - row["created_at"]).total_seconds())


def _weighted(calls: Sequence[Row], column: str) -> float | None:
    """Return the mean over rollouts of the calls whose column is not null; None if there are none."""
    known = [row for row in calls if row[column] is not None]
    num_rollouts = sum(row["num_rollouts"] for row in known)
    return sum(row[column] * row["num_rollouts"] for row in known) / num_rollouts if num_rollouts else None


def _fraction(calls: Sequence[Row], column: str, num_rollouts: int) -> str:
    """Return a count as a percentage of rollouts; a dash if a worker of an older version did not store it."""
    if not num_rollouts or any(row[column] is None for row in calls):
        return "-"
    return f"{sum(row[column] for row in calls) / num_rollouts:.1%}"
