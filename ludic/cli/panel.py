"""A Glance drawn as a panel, within 80 columns. Pure."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from statistics import fmean

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ludic.cli.glance import WINDOW, Glance, Row, Trainer
from ludic.cli.output import number, plural, printable, sparkline

_BAR_WIDTH = 40
_VALUE_WIDTH = 62
"""Of what stands beside a name, where a terminal has 80 columns."""
_RECENT_STEPS = 20
"""That the figures of a step are averaged over, and drops counted in."""
_UNEVEN = 1.05
"""Tokens of the fullest rank over the mean of all from which on it is worth a word."""
_MOST_WORKERS = 8
_STATES = {
    "alive": ("renews its lease", "green"),
    "silent": ("silent for {unchanged}, longer than its lease: dead or cut off", "bold red"),
    "ended": ("has ended", "dim"),
    "dead": ("its process is gone", "bold red"),
    "unknown": ("not watched long enough to tell if it lives", "yellow"),
}
# In the order of a step; what step_s holds besides its parts is "other".
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


def draw(glance: Glance) -> Panel:
    """All that a glance says, within 80 columns."""
    pairs = Table.grid(padding=(0, 2))
    for name, value in _lines(glance):
        pairs.add_row(Text(name, style="bold"), value)
    parts: list[RenderableType] = [pairs]
    if glance.calls:
        parts += [Text(), _by_environment(glance), Text(), _by_worker(glance)]
    return Panel(Group(*parts), title=Text(printable(glance.root.url)), expand=False)


def _lines(glance: Glance) -> Iterator[tuple[str, RenderableType]]:
    run = glance.root.run
    yield "model", Text(printable(f"{run.model}, {plural(run.groups_per_batch, 'group')} of {run.group_size} a batch"))
    yield "trainer", _trainer(glance.trainer, glance.root.url)
    steps, recent = glance.steps, glance.steps[-_RECENT_STEPS:]
    if not steps:
        num_groups = sum(row["num_groups"] or 0 for row in glance.calls)
        yield (
            "step",
            Text(f"none yet; {plural(num_groups, 'group')} sampled in the last {_age(WINDOW.total_seconds())}"),
        )
    else:
        yield "step", _progress(steps[-1]["step"], glance.trainer)
        yield "reward", _curve([row["reward_mean"] for row in steps])
        yield "loss", Text(_joined(steps[-1], _LOSS))
        yield "speed", Text(_speed(recent, glance))
        yield "time", _where_time_goes(recent)
        yield "waiting", Text(f"{plural(steps[-1]['num_pending_groups'] or 0, 'group')} when the last step was planned")
    yield "policy", Text(_policy(glance))
    yield "checkpoint", Text(_checkpoint(glance))
    if steps:
        yield "dropped", Text(_drops(recent))
    yield from _troubles(steps)


def _trainer(trainer: Trainer | None, url: str) -> Text:
    if trainer is None:
        return Text(f"none has started; `ludic train {printable(url)}` starts one")
    text = Text(printable(f"attempt {trainer.attempt_id}, {trainer.owner}"))
    if trainer.pulse is None:
        return text
    state, style = _STATES[trainer.pulse.state]
    return text.append(": ").append(state.format(unchanged=_age(trainer.pulse.unchanged_s)), style=style)


def _progress(step: int, trainer: Trainer | None) -> RenderableType:
    num_steps = trainer.num_steps if trainer else None
    if num_steps is None:
        return Text(f"{step:,}")
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(f"{step:,} of {num_steps:,}"), ProgressBar(num_steps, step, width=_BAR_WIDTH))
    return grid


def _curve(rewards: Sequence[float | None]) -> Text:
    """The newest reward, and how it came there."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return Text("no rollout was scored")
    curve = sparkline(scored, _BAR_WIDTH)
    return Text(f"{scored[-1]:.3f}  ").append(curve, style="green").append(f"  over {plural(len(rewards), 'step')}")


_LOSS = {
    "loss": "{:.4g}",
    "grad_norm": "gradient norm {:.3g}",
    "entropy": "entropy {:.3g}",
    "sampler_kl": "sampler KL {:.1g}",
    "preference_accuracy": "{:.0%} of pairs preferred",
}


def _joined(row: Row, formats: Mapping[str, str]) -> str:
    """What a row has of these columns."""
    return ", ".join(text.format(row[name]) for name, text in formats.items() if row[name] is not None) or "-"


def _speed(recent: Sequence[Row], glance: Glance) -> str:
    parts = [f"{_mean(recent, 'tokens_per_s'):,.0f} tokens/s trained"]
    if any(row["mfu"] is not None for row in recent):
        parts.append(f"MFU {_mean(recent, 'mfu'):.1%}")
    if (uneven := _mean(recent, "token_imbalance")) >= _UNEVEN:
        parts.append(f"the fullest rank {uneven - 1:.0%} above the mean")
    return ", ".join([*parts, f"{_rates(glance.calls, glance.at)['num_tokens'] / 60:,.0f} tokens/s sampled"])


def _where_time_goes(recent: Sequence[Row]) -> Text:
    """Shares of the loop's seconds, as a bar and in figures; below it what runs beside the loop."""
    seconds = {name: value for name, value in _seconds(recent).items() if value > 0}
    total = sum(seconds.values()) or 1.0
    text = Text()
    for name, width in _widths(seconds, _BAR_WIDTH).items():
        text.append("█" * width, style=_COLOURS[name])
    text.append(f"  {total / len(recent):.3g} s a step\n")
    text.append(_legend({name: value / total for name, value in seconds.items()}))
    if any(row["read_s"] is not None for row in recent):
        text.append(f"\nbeside it: read {_mean(recent, 'read_s'):.2g} s, pack {_mean(recent, 'pack_s'):.2g} s")
    return text


def _legend(shares: Mapping[str, float]) -> Text:
    """Names in their colours with their shares, from half a percent on; a name stays beside its share."""
    text, width = Text(), 0
    for name, share in shares.items():
        if share < 0.005:
            continue
        words = f"{name} {share:.0%}"
        if width and width + 2 + len(words) > _VALUE_WIDTH:
            text.append("\n")
            width = 0
        text.append(("  " if width else "") + name, style=_COLOURS[name]).append(f" {share:.0%}")
        width += len(words) + (2 if width else 0)
    return text


def _seconds(rows: Sequence[Row]) -> dict[str, float]:
    """By phase, in the order of the loop; rows of an older schema know the whole step only."""
    sums = {name: sum(row[f"{name}_s"] or 0.0 for row in rows) for name in ("wait", "step", "publish", "checkpoint")}
    parts = {name: sum(row[f"{name}_s"] or 0.0 for row in rows) for name in _PARTS}
    if not any(parts.values()):
        return sums
    step_s = sums.pop("step")
    wait = {"wait": sums.pop("wait")}
    return {**wait, **parts, "other": max(0.0, step_s - sum(parts.values())), **sums}


def _widths(values: Mapping[str, float], width: int) -> dict[str, int]:
    """Cells of a bar for each value; all cells are given out."""
    total, done = sum(values.values()), 0.0
    widths: dict[str, int] = {}
    for name, value in values.items():
        widths[name] = round((done + value) / total * width) - round(done / total * width)
        done += value
    return widths


def _policy(glance: Glance) -> str:
    if glance.policy is None:
        return "none published"
    age_s = (glance.at - datetime.fromisoformat(glance.policy.created_at)).total_seconds()
    text = f"version {glance.policy.version}, {_age(max(0.0, age_s))} old"
    if not glance.steps or glance.steps[-1]["lag_mean"] is None:
        return text
    return f"{text}; lag {glance.steps[-1]['lag_mean']:.1f} versions, at most {glance.steps[-1]['lag_max']}"


def _checkpoint(glance: Glance) -> str:
    return "none yet" if glance.checkpoint is None else "step {1} of attempt {0}".format(*glance.checkpoint)


def _drops(recent: Sequence[Row]) -> str:
    drops: Counter[str] = Counter()
    for row in recent:
        drops.update(dict(row["drops"] or {}))
    what = ", ".join(f"{count:,} by {printable(reason)}" for reason, count in drops.most_common()) or "nothing"
    return f"{what}, in {plural(len(recent), 'step')}"


def _troubles(steps: Sequence[Row]) -> Iterator[tuple[str, Text]]:
    if steps and steps[-1]["num_unreadable_files"]:
        yield "unreadable", Text(f"{plural(steps[-1]['num_unreadable_files'], 'file')} set aside", style="bold red")
    if steps and steps[-1]["num_seq_len_truncated"]:
        text = f"{plural(steps[-1]['num_seq_len_truncated'], 'sequence')} cut to max_seq_len in the last step"
        yield "cut", Text(text, style="yellow")


def _by_environment(glance: Glance) -> Table:
    table = _table("environment", "rollouts/min", "reward", "tokens", "truncated", "unparsed", "failed")
    for env_name, calls in _grouped(glance.calls, "env_name").items():
        num_rollouts = sum(row["num_rollouts"] for row in calls)
        table.add_row(
            _name(env_name),
            f"{_rates(calls, glance.at)['num_rollouts']:,.0f}",
            number(_weighted(calls, "reward_mean"), 4),
            number(_weighted(calls, "response_length_mean"), 4),
            *(_fraction(calls, name, num_rollouts) for name in ("num_truncated", "num_parse_errors", "num_errors")),
        )
    return table


def _by_worker(glance: Glance) -> Table:
    table = _table("worker", "rollouts/min", "tokens/s", "version", "waiting", "last heard")
    workers = _grouped(glance.calls, "worker_id")
    for worker_id, calls in itertools.islice(workers.items(), _MOST_WORKERS):
        rates, busy_s = _rates(calls, glance.at), sum(row["step_s"] or 0.0 for row in calls)
        wait_s = sum(row["wait_s"] or 0.0 for row in calls)
        table.add_row(
            _name(worker_id),
            f"{rates['num_rollouts']:,.0f}",
            f"{rates['num_tokens'] / 60:,.0f}",
            str(calls[-1]["policy_version"]),
            f"{wait_s / (wait_s + busy_s):.0%}" if wait_s + busy_s else "-",
            f"{_age(_seconds_since(calls[-1], glance.at))} ago",
        )
    if len(workers) > _MOST_WORKERS:
        table.add_row(Text(f"and {len(workers) - _MOST_WORKERS:,} more", style="dim"))
    return table


def _table(name: str, *numbers: str) -> Table:
    """A column of names, cut where there is no room, and columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(name)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)  # so that it is names that give way
    return table


def _name(name: str) -> Text:
    return Text(printable(name), no_wrap=True, overflow="ellipsis")


def _grouped(rows: Iterable[Row], column: str) -> dict[str, list[Row]]:
    """Rows by the value of a column, sorted by it."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[column]].append(row)
    return dict(sorted(groups.items()))


def _rates(calls: Sequence[Row], at: datetime) -> dict[str, float]:
    """num_rollouts and num_tokens a minute: from the begin of the first call on, at most over WINDOW."""
    if not calls:
        return {"num_rollouts": 0.0, "num_tokens": 0.0}
    first_s = _seconds_since(calls[0], at) + (calls[0]["step_s"] or 0.0)
    minutes = min(max(first_s, 1.0), WINDOW.total_seconds()) / 60
    return {name: sum(row[name] for row in calls) / minutes for name in ("num_rollouts", "num_tokens")}


def _seconds_since(row: Row, at: datetime) -> float:
    """By two clocks, which may differ."""
    return max(0.0, (at - row["created_at"]).total_seconds())


def _weighted(calls: Sequence[Row], column: str) -> float | None:
    """Mean over rollouts; of those calls that have one."""
    known = [row for row in calls if row[column] is not None]
    num_rollouts = sum(row["num_rollouts"] for row in known)
    return sum(row[column] * row["num_rollouts"] for row in known) / num_rollouts if num_rollouts else None


def _fraction(calls: Sequence[Row], column: str, num_rollouts: int) -> str:
    """A dash where workers of an older version do not say."""
    if not num_rollouts or any(row[column] is None for row in calls):
        return "-"
    return f"{sum(row[column] for row in calls) / num_rollouts:.1%}"


def _mean(rows: Sequence[Row], column: str) -> float:
    return fmean([row[column] for row in rows if row[column] is not None] or [0.0])


def _age(seconds: float) -> str:
    """In the largest unit of which there are two or more."""
    for unit, size_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"
