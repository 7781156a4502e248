"""Run a grid of runs on this machine: one `ludic run` for each combination of settings, several at the same time.

Each run has a root of its own, whose name follows from the settings, so that the same grid continues in the same roots.
The output of a run goes to logs/run.log of its root. Raises ConfigError for settings that can't be run.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.live import Live
from rich.text import Text

from ludic.app.launch.process import KILL_AFTER_S, config_args, stop_variables
from ludic.app.launch.supervisor import ChildProcess, stop_processes
from ludic.app.show.run_table import RunTable
from ludic.app.show.runs import RunSummary, summarise
from ludic.base import VARIABLE, Gpus, Part, is_url, left_out, number, of_total, open_console, plural, private_folder
from ludic.base.results import print_part, printable
from ludic.base.row_files import to_plain
from ludic.errors import ConfigError
from ludic.root import LOGS
from ludic.settings import Setting, refuse_unknown

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

_LOG = "run.log"

_POLL_S = 0.2
_LOOK_EVERY_S = 2.0
_MOST_NAME_BYTES = 200
_DIGITS = 8
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=,-]+")
_MOST_WORDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """One combination of a grid."""

    name: str
    """Its settings as text, such as learning_rate=1e-6,seed=0: the name of its root."""
    url: str
    settings: Mapping[str, Any]
    """Values of the grid's settings, by name."""


# --- Combinations ----------------------------------------------------------------------------------------------------


def combinations(folder: str, given: Sequence[str], table: Mapping[str, Setting]) -> list[GridRun]:
    """Return all combinations of values, in the order of the names of their settings.

    given: such as learning_rate=1e-6,3e-6. table: settings by name. Raises ConfigError for a setting that is unknown or
    given twice, and for a value that does not convert or is given twice.
    """
    values: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, listed = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not name:
            raise ConfigError(f"--set is {text!r}, wanted NAME=VALUE,VALUE, such as learning_rate=1e-6,3e-6")
        refuse_unknown([name], table)
        if name in values:
            raise ConfigError(f"--set gives {name} twice; give all of its values at once: {name}=VALUE,VALUE")
        values[name] = _values(table[name], listed)
    names = sorted(values)
    runs = []
    for texts in itertools.product(*(values[name] for name in names)):
        name = _root_name(dict(zip(names, texts, strict=True)))
        settings = {each: values[each][text] for each, text in zip(names, texts, strict=True)}
        runs.append(GridRun(name=name, url=f"{folder.rstrip('/')}/{name}", settings=settings))
    return runs


def _values(setting: Setting, listed: str) -> dict[str, Any]:
    """Return the values of a setting by their texts, which are the same however a value was typed."""
    found: dict[str, Any] = {}
    for text in _split(listed):
        value = setting.convert([text] if setting.is_list else text, f"--set {setting.name}", "flag")
        if (shown := _text(value)) in found:
            raise ConfigError(f"--set gives {setting.name} the value {shown} twice")
        found[shown] = value
    return found


def _split(listed: str) -> list[str]:
    """Split a text at its commas, except those within brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in listed:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _text(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, float):
        return re.sub(r"e([+-])0+(?=\d)", r"e\1", repr(value))
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _root_name(texts: Mapping[str, str]) -> str:
    """Return the name of a root: of letters, digits and few signs; a digest stands for what is left out."""
    whole = ",".join(f"{name}={text}" for name, text in texts.items())
    parts = [f"{name}={_UNSAFE.sub('-', text.replace(',', '+').replace('=', '-'))}" for name, text in texts.items()]
    safe = ",".join(parts)
    if safe == whole and len(safe) <= _MOST_NAME_BYTES:
        return safe
    return f"{safe[:_MOST_NAME_BYTES]}-{hashlib.sha256(whole.encode()).hexdigest()[:_DIGITS]}"


# --- Processes -------------------------------------------------------------------------------------------------------


class GridProcesses:
    """The `ludic run` processes of a grid. Use it in `with`: at the end all of them have stopped."""

    def __init__(
        self, runs: Sequence[GridRun], settings: Mapping[str, Any], jobs: int, *, gpus: Gpus, stop_within_s: int
    ) -> None:
        """runs: in the order of their starts. settings: of all runs, by name. jobs: runs at the same time.

        gpus: of this machine, shared out among the jobs. stop_within_s: time that each process of a run has to stop.
        """
        self.waiting = deque(runs)
        self.running: dict[int, tuple[GridRun, ChildProcess]] = {}
        """Runs with their processes, by the number of their job."""
        self.failed: dict[str, str] = {}
        """Last words of the processes that failed, by the names of their runs."""
        self.log_level = logging.INFO
        """Level of the entries about starts and ends."""
        self._settings, self._stop_within_s = settings, stop_within_s
        self._gpus = [gpus[job::jobs] for job in range(jobs)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A run waits for its own processes, and kills them, before it ends.
        within_s = self._stop_within_s + math.ceil(2 * KILL_AFTER_S)
        stop_processes([child for _, child in self.running.values()], stop_variables(within_s))

    def poll(self) -> bool:
        """Note which processes have ended, and start the next ones; returns whether there are any."""
        for job, (run, child) in list(self.running.items()):
            if (code := child.process.poll()) is not None:
                del self.running[job]
                self._end(run, child, code)
        for job, gpus in enumerate(self._gpus):
            if self.waiting and job not in self.running:
                self._start(job, self.waiting.popleft(), gpus)
        return bool(self.running)

    def _start(self, job: int, run: GridRun, gpus: Gpus) -> None:
        args = ["ludic", "run", run.url, *config_args("run", to_plain({**self._settings, **run.settings}))]
        see = {VARIABLE: ",".join(gpus)} if gpus else {}
        child = ChildProcess(name=run.name, args=lambda: args, log=_log(run.url), environment=see)
        self.running[job] = (run, child)
        child.start({})
        logger.log(self.log_level, "%s: started; its output goes to %s", run.name, child.log)

    def _end(self, run: GridRun, child: ChildProcess, code: int) -> None:
        child.kill_rest()
        if code:
            self.failed[run.name] = left_out(child.last_words(), _MOST_WORDS)
        how = f"failed: {self.failed[run.name]}" if code else "done"
        logger.log(self.log_level, "%s: %s", run.name, how)


def _log(url: str) -> Path:
    if is_url(url):
        return private_folder(f"ludic-logs-{os.geteuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}") / _LOG
    return Path(url, LOGS.folder, _LOG)


def run_grid(processes: GridProcesses, runs: Sequence[GridRun]) -> None:
    """Run all that wait, and show a line for each run of the grid in a terminal; else what happens is logged.

    After Ctrl-C all processes have stopped, in order if they could, and KeyboardInterrupt is raised.
    """
    console = open_console(stderr=True)
    if not console.is_terminal:
        with processes:
            while processes.poll():
                time.sleep(_POLL_S)
        return
    processes.log_level, looked = logging.DEBUG, -math.inf  # the lines say it
    with Live(console=console, auto_refresh=False) as live, processes:
        while processes.poll():
            if time.monotonic() - looked >= _LOOK_EVERY_S:
                live.update(Text("\n".join(_lines(processes, runs)), no_wrap=True), refresh=True)
                looked = time.monotonic()
            time.sleep(_POLL_S)


def _lines(processes: GridProcesses, runs: Sequence[GridRun]) -> Iterator[str]:
    """Yield a line for each run: running ones with what their roots hold."""
    started = {run.name: run.url for run, _ in processes.running.values()}
    waiting = {run.name for run in processes.waiting}
    found = dict(zip(started, summarise(started.values()), strict=True))
    width = max(len(run.name) for run in runs)
    for run in runs:
        if run.name in found:
            said = _progress(found[run.name])
        elif run.name in processes.failed:
            said = f"failed: {processes.failed[run.name]}"
        else:
            said = "waiting" if run.name in waiting else "done"
        yield printable(f"{run.name:<{width}}  {said}")


def _progress(run: RunSummary) -> str:
    if not run.step:
        return "starting"
    reward = "" if run.reward is None else f", reward {number(run.reward, 4)}"
    return f"step {of_total(run.step, run.num_steps)}{reward}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GridTable(RunTable):
    """The runs of a grid, after its end."""

    failed: Mapping[str, str]
    """Last words of the processes that failed, by the names of their runs."""

    def parts(self) -> Iterator[Part]:
        """The table, and the last words of each process that failed."""
        yield from RunTable.parts(self)
        yield from self._words()

    def print_to(self, console: "Console") -> None:
        """Print the table, and the last words of each process that failed."""
        RunTable.print_to(self, console)
        for line in self._words():
            print_part(console, line)

    def _words(self) -> Iterator[str]:
        return (f"{name} failed: {words}" for name, words in self.failed.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of the runs, and the last words of processes that failed."""
        return {**RunTable.to_dict(self), "failed": dict(self.failed)}

    @property
    def failure(self) -> str | None:
        if not self.failed:
            return None
        return f"{plural(len(self.failed), 'run')} of {len(self.runs)} failed; the same command tries them once more"
