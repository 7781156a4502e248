"""A live view of a run in the terminal, from its metrics files alone."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from ludic.store import MetricsTail, Root

_LOOK_EVERY_S = 0.5
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Reward, version, lag and rates; `update` may be called often."""

    def __init__(self, root: Root, num_steps: int) -> None:
        self._tail = MetricsTail(root)
        self._title, self._num_steps = root.url, num_steps
        self._rewards: dict[int, float] = {}
        self._last: dict[str, Any] = {}
        self._num_rollouts = 0
        self._sampled: deque[tuple[float, int]] = deque()
        self._live = Live(console=Console(stderr=True), refresh_per_second=4)
        self._looked = 0.0

    def __enter__(self) -> "LiveView":
        self._live.start()
        self.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look()
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()  # rich leaves the last line open

    def update(self) -> None:
        """Look for new metrics, if the last look is old enough."""
        if time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self._look()

    def _look(self) -> None:
        self._looked = time.monotonic()
        for row in self._tail.poll():
            if row["kind"] == "worker":
                self._num_rollouts += row["num_rollouts"]
                self._sampled.append((row["created_at"].timestamp(), row["num_tokens"]))
            else:
                self._rewards[row["step"]] = row["reward_mean"] or 0.0
                if row["step"] >= self._last.get("step", 0):
                    self._last = row
        self._live.update(self._render())

    def _render(self) -> Panel:
        step = self._last.get("step", 0)
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{step} of {self._num_steps}", ProgressBar(self._num_steps, step, width=40))
        rewards = [self._rewards[step] for step in sorted(self._rewards)]
        latest = f"{rewards[-1]:.3f}" if rewards else "waiting for rollouts"
        table.add_row("reward", latest, f"[green]{sparkline(rewards, 40)}[/]")
        if self._last:
            table.add_row(
                "policy version", str(self._last["policy_version"]), f"lag {self._last['lag_mean']:.1f} versions"
            )
            table.add_row("rollouts", f"{self._num_rollouts:,}", f"{self._tokens_per_s():,.0f} tokens/s sampled")
            table.add_row("training", f"{self._last['tokens_per_s']:,.0f} tokens/s", self._wait_text())
        return Panel(table, title=self._title, expand=False)

    def _tokens_per_s(self) -> float:
        """Over the last ten seconds in which anything was sampled."""
        while len(self._sampled) > 1 and self._sampled[0][0] < self._sampled[-1][0] - 10:
            self._sampled.popleft()
        if len(self._sampled) < 2:
            return 0.0
        seconds = max(at for at, _ in self._sampled) - min(at for at, _ in self._sampled)
        return sum(tokens for _, tokens in self._sampled) / max(seconds, 0.1)

    def _wait_text(self) -> str:
        total = sum(self._last[name] or 0.0 for name in ("step_s", "wait_s", "publish_s"))
        return f"{self._last['wait_s'] / total:.0%} of the last step spent waiting for rollouts"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks of eight heights, averaged into at most `width` of them."""
    if not values:
        return ""
    num_bins = min(width, len(values))
    edges = [round(place * len(values) / num_bins) for place in range(num_bins + 1)]
    means = [fmean(values[start:stop]) for start, stop in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
