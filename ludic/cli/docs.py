"""Write docs/settings.md, a table of every setting: `python -m ludic.cli.docs > docs/settings.md`."""

from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

from ludic.adapters.clusters.config import ClusterConfig
from ludic.adapters.exports.exporting import ExportOptions
from ludic.code.consent import CodeSettings
from ludic.engines.config import EngineConfig
from ludic.eval.config import EvalConfig, MeasureConfig
from ludic.flags import about, default_text
from ludic.launch.config import LaunchConfig, ServeConfig
from ludic.maintenance.expiry_rule import ExpiryRule
from ludic.rollouts.config import Question, WorkerConfig
from ludic.run_config import RunConfig
from ludic.scoring.options import ScoreOptions
from ludic.settings import Setting, describe, settings_of
from ludic.training.config import TrainConfig

_INTRODUCTION = """# Settings

Written by `make format` from the fields of the dataclasses. A setting is a flag (`--learning-rate 1e-4`), a key of
the file of `--config FILE.toml` (`learning_rate = 1e-4`; a file that ends in .json holds the same as JSON) and an
argument in Python. The settings of an objective may stand in a table `[objective]` with its `name`. Flags come before
the file, the file before the preset of `--algorithm`, and this before what the root holds from an earlier start. `None`
is the text "None" in flags and TOML, and null in JSON."""

_USED_BY = {
    RunConfig: "run, create",
    TrainConfig: "run, train, launch",
    WorkerConfig: "worker",
    LaunchConfig: "run",
    EngineConfig: "run, worker, eval, launch",
    CodeSettings: "run, create, worker, train, eval",
    EvalConfig: "eval",
    MeasureConfig: "eval, eval compare, report",
    ScoreOptions: "score",
    Question: "sample",
    ServeConfig: "serve",
    ClusterConfig: "launch",
    ExportOptions: "export",
    ExpiryRule: "expire",
}
"""Commands that take the settings, by dataclass."""


def page() -> str:
    """Return docs/settings.md."""
    return "\n".join([_INTRODUCTION, *(line for owner in _USED_BY for line in _sections(owner)), ""])


def table(owner: Any) -> Iterator[str]:
    """Yield the lines of the tables of a dataclass's settings, one for each group."""
    groups: dict[str, list[Setting]] = {}
    for each in settings_of(owner):
        groups.setdefault(each.group, []).append(each)
    for group, settings in groups.items():
        if group:
            yield from ("", f"### {group}", "", f"{about(settings)}.")
        yield from ("", "| setting | value | default | meaning |", "| --- | --- | --- | --- |")
        yield from map(_row, settings)


def _sections(owner: Any) -> Iterator[str]:
    commands = ", ".join(f"`ludic {name}`" for name in _USED_BY[owner].split(", "))
    first = " ".join((owner.__doc__ or "").split("\n\n")[0].split())
    yield from ("", f"## {owner.__name__}", "", f"{first} Of {commands}.")
    yield from table(owner)


def _row(each: Setting) -> str:
    limits = "".join(f", {limit}" for limit in each.ranges)
    default = str(each.default).lower() if isinstance(each.default, bool) else default_text(each)
    default = "required" if each.default is MISSING else default
    cells = [f"`{each.name}`", f"{describe(each.kind)}{limits}", default, each.help]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(page(), end="")
