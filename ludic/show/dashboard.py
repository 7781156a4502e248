"""Draw a RunStatus as a panel, at most 80 columns wide and no wider than the terminal. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from statistics import fmean
from uuid import UUID

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ludic.results import age, plural, printable, size, sparkline
from ludic.show.balance import MOST_WAITING
from ludic.show.dashboard_tables import by_environment, by_worker, rates
from ludic.show.status import WINDOW, Row, RunStatus, Trainer

_MOST_COLUMNS = 80
_FRAME_WIDTH, _NAME_WIDTH = 4, 14
"""Columns of the frame, and of the lines' names."""
_BAR_WIDTH = 40
_SHORTEST_BAR = 6
"""Columns of the narrowest progress bar that is drawn."""
_STARTING_S = 120.0
"""Seconds after the creation of a run in which its trainer may still be loading a model."""
_RECENT_STEPS = 20
"""Number of steps over which figures are averaged and drops are counted."""
_UNEVEN = 1.05
"""Ratio of the fullest rank's tokens to the mean of all ranks from which the panel mentions it."""
_STATES = {
    "alive": ("renews its lease", "green"),
    "silent": ("silent for {unchanged}, longer than its lease: dead or cut off", "bold red"),
    "ended": ("has ended", "dim"),
    "dead": ("its process is gone", "bold red"),
    "unknown": ("not watched long enough to tell if it lives", "yellow"),
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
    """Return a status as a panel. columns: width of the terminal; the panel uses at most 80."""
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
    if status.calls:
        parts += [Text(), by_environment(status, inner), Text(), by_worker(status, inner)]
    return Constrain(Panel(Group(*parts), title=title, expand=False), inner + _FRAME_WIDTH)


def _lines(status: RunStatus, width: int) -> Iterator[tuple[str, RenderableType]]:
    """Yield names and their values. width: columns that a value may take."""
    run = status.root.run
    for trouble in status.troubles():  # first, since a low terminal shows only the first lines
        yield "warning", Text(printable(trouble.text), style="bold red")
    yield "model", Text(printable(f"{run.model}, {plural(run.groups_per_batch, 'group')} of {run.group_size} a batch"))
    yield "trainer", _trainer(status)
    steps, recent = status.steps, status.steps[-_RECENT_STEPS:]
    if not steps:
        num_groups = sum(row["num_groups"] or 0 for row in status.calls)
        yield (
            "step",
            Text(f"none yet; {plural(num_groups, 'group')} sampled in the last {age(WINDOW.total_seconds())}"),
        )
    else:
        yield "step", _progress(steps[-1]["step"], status.trainer, width)
        yield "reward", _curve([row["reward_mean"] for row in steps], width)
        yield "loss", Text(_losses(steps[-1]))
        yield "speed", Text(_speed(recent, status))
        yield "time", _where_time_goes(recent, width)
        if status.balance is not None:
            yield "balance", Text(str(status.balance))
        yield "waiting", Text(f"{plural(steps[-1]['num_pending_groups'] or 0, 'group')} when the last step was planned")
        if held_up := _waited_for(status.calls):
            yield "workers", Text(held_up)
    yield "policy", Text(_policy(status))
    if publishing := _publishing(recent, status.newest_calls):
        yield "publishing", Text(publishing)
    if status.calls:
        yield "at risk", Text(f"{_most_at_risk(status.calls)} if a worker is killed: those that it runs")
    checkpoint = "none yet" if status.checkpoint is None else "step {1} of attempt {0}".format(*status.checkpoint)
    yield "checkpoint", Text(checkpoint)
    if steps:
        yield "dropped", Text(_drops(recent))
    yield from _troubles(steps)


def _trainer(status: RunStatus) -> Text:
    trainer, url = status.trainer, printable(status.root.url)
    if trainer is None:
        age_s = _seconds_since_creation(status)
        if age_s is not None and age_s < _STARTING_S:
            return Text(f"none yet; the run was created {age(age_s)} ago, and a trainer loads its model first")
        return Text(f"none has started; unless one is loading its model, `ludic train {url}` starts one")
    text = Text(printable(f"attempt {trainer.attempt_id}, {trainer.owner}"))
    if trainer.lease_state is None:
        return text
    state, style = _STATES[trainer.lease_state.state]
    return text.append(": ").append(state.format(unchanged=age(trainer.lease_state.unchanged_s)), style=style)


def _seconds_since_creation(status: RunStatus) -> float | None:
    """Return the seconds since the time in the run's uuid7; None if the run_id is not a UUID."""
    try:
        created_s = (UUID(status.root.run_id).int >> 80) / 1000
    except ValueError:
        return None
    return max(0.0, status.at.timestamp() - created_s)


def _progress(step: int, trainer: Trainer | None, width: int) -> RenderableType:
    num_steps = trainer.num_steps if trainer else None
    text = Text(f"{step:,}" if num_steps is None else f"{step:,} of {num_steps:,}")
    left = min(_BAR_WIDTH, width - len(text) - 2)
    if num_steps is None or left < _SHORTEST_BAR:
        return text
    grid = Table.grid(padding=(0, 2))
    grid.add_row(text, ProgressBar(num_steps, step, width=left))
    return grid


def _curve(rewards: Sequence[float | None], width: int) -> Text:
    """Return the newest reward and a sparkline of all rewards."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return Text("no rollout was scored")
    first, last = f"{scored[-1]:.3f}", f"over {plural(len(rewards), 'step')}"
    left = width - len(first) - len(last) - 4
    if left < _BAR_WIDTH // 2:
        return Text(f"{first} {last}\n").append(sparkline(scored, min(_BAR_WIDTH, width)), style="green")
    curve = sparkline(scored, min(_BAR_WIDTH, left))
    return Text(f"{first}  ").append(curve, style="green").append(f"  {last}")


_LOSS = {
    "loss": "{:.4g}",
    "grad_norm": "gradient norm {:.3g}",
    "entropy": "entropy {:.3g}",
    "sampler_kl": "sampler KL {:.1g}",
    "preference_accuracy": "{:.0%} of pairs preferred",
}


def _losses(row: Row) -> str:
    """Format the columns of _LOSS that are not null, joined by commas; a dash if all are null."""
    return ", ".join(text.format(row[name]) for name, text in _LOSS.items() if row[name] is not None) or "-"


def _speed(recent: Sequence[Row], status: RunStatus) -> str:
    parts = [f"{_mean(recent, 'tokens_per_s'):,.0f} tokens/s trained"]
    if any(row["mfu"] is not None for row in recent):
        parts.append(f"MFU {_mean(recent, 'mfu'):.1%}")
    if (uneven := _mean(recent, "token_imbalance")) >= _UNEVEN:
        parts.append(f"the fullest rank {uneven - 1:.0%} above the mean")
    return ", ".join([*parts, f"{rates(status.calls, status.at)['num_tokens'] / 60:,.0f} tokens/s sampled"])


def _where_time_goes(recent: Sequence[Row], width: int) -> Text:
    """Draw each phase's share of the loop's seconds as a bar and as figures, and the times of the reading thread."""
    seconds = {name: value for name, value in _seconds(recent).items() if value > 0}
    total = sum(seconds.values()) or 1.0
    text, of_all = Text(), f"{total / len(recent):.3g} s a step\n"
    bar = min(_BAR_WIDTH, width)
    for name, cells in _widths(seconds, bar).items():
        text.append("█" * cells, style=_COLOURS[name])
    text.append(("  " if bar + 2 + len(of_all) <= width else "\n") + of_all)
    text.append(_legend({name: value / total for name, value in seconds.items()}, width))
    if any(row["read_s"] is not None for row in recent):
        text.append(f"\nbeside it: read {_mean(recent, 'read_s'):.2g} s, pack {_mean(recent, 'pack_s'):.2g} s")
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
    text = f"version {status.policy.version}, {age(max(0.0, age_s))} old"
    if not status.steps or status.steps[-1]["lag_mean"] is None:
        return text
    mean, largest = (status.steps[-1][name] for name in ("lag_mean", "lag_max"))  # stored names
    return f"{text}; off-policy steps {mean:.1f}, at most {largest}"


def _publishing(recent: Sequence[Row], calls: Sequence[Row]) -> str:
    """Format what a version costs: its bytes, and the seconds until workers sample with it; empty if not known."""
    parts = []
    if any(row["publish_bytes"] is not None for row in recent):
        num_bytes, write_s = _mean(recent, "publish_bytes"), _mean(recent, "publish_write_s")
        parts.append(f"{size(num_bytes)} a version, written in {write_s:.2g} s")
    swaps = [row for row in calls if row["first_token_s"] is not None][-_RECENT_STEPS:]
    if swaps:
        first, fetch, load = (_mean(swaps, name) for name in ("first_token_s", "fetch_s", "load_s"))
        parts.append(f"first token after {first:.2g} s (fetch {fetch:.2g} s, load {load:.2g} s)")
    return "; ".join(parts)


def _waited_for(calls: Sequence[Row]) -> str:
    """Format what workers waited for, if they ran no episode for a good part of the time; else empty."""
    waits: defaultdict[str, float] = defaultdict(float)
    for row in calls:
        if row["waited_for"] is not None:
            waits[row["waited_for"]] += row["wait_s"] or 0.0
    total_s = sum((row["wait_s"] or 0.0) + (row["step_s"] or 0.0) for row in calls)
    if sum(waits.values()) <= MOST_WAITING * total_s:
        return ""
    what = max(waits, key=waits.__getitem__)
    names = {"budget": "the budget of open groups, which the trainer sets", "weights": "new weights"}
    return f"wait for {names.get(what, printable(what))}"


def _most_at_risk(calls: Sequence[Row]) -> str:
    """Return the most episodes that a worker ran, by its newest row."""
    newest = {row["worker_id"]: row["num_running"] or 0 for row in calls}
    return f"up to {plural(max(newest.values()), 'episode')}"


def _drops(recent: Sequence[Row]) -> str:
    drops: Counter[str] = Counter()
    for row in recent:
        drops.update(dict(row["drops"] or {}))
    what = ", ".join(f"{count:,} by {printable(reason)}" for reason, count in drops.most_common()) or "nothing"
    return f"{what}, in {plural(len(recent), 'step')}"


def _troubles(steps: Sequence[Row]) -> Iterator[tuple[str, Text]]:
    if steps and steps[-1]["num_unreadable_files"]:
        yield "unreadable", Text(f"{plural(steps[-1]['num_unreadable_files'], 'file')} quarantined", style="bold red")
    if steps and steps[-1]["num_seq_len_truncated"]:
        text = f"{plural(steps[-1]['num_seq_len_truncated'], 'sequence')} cut to max_seq_len in the last step"
        yield "cut", Text(text, style="yellow")


def _mean(rows: Sequence[Row], column: str) -> float:
    return fmean([row[column] for row in rows if row[column] is not None] or [0.0])
