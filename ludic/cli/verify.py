"""`ludic verify ROOT`: check every file and the data of a run; list the findings and exit with 1 if there are any.

With --repair, broken files are quarantined first, and the remaining findings are listed.
"""

import itertools
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

import ludic
from ludic.cli.flags.verify import Settings
from ludic.errors import LudicError
from ludic.maintenance.verify import Finding, Report, meaning_of
from ludic.viewer.output import print_json, printable, progress_bar, stdout_console


class UnsoundError(LudicError, ValueError):
    """A root has findings."""


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    with progress_bar() as track:
        report = run.verify(repair=settings.repair, track=track)
    if settings.json:
        print_json({"root": run.url, "sound": not report.findings} | asdict(report))
    else:
        _print(stdout_console(), run.url, report)
    if report.findings:
        raise UnsoundError(f"{run.url} is not sound: {_count(report.findings)}")


def _print(console: Console, url: str, report: Report) -> None:
    _print_by_check(console, "repaired, ", report.repaired, "green")
    _print_by_check(console, "", report.findings, "bold red")
    _print_by_check(console, "note, ", report.notes, "dim")
    if not report.findings:
        console.print(f"{url} is sound", soft_wrap=True)


def _print_by_check(console: Console, prefix: str, findings: Iterable[Finding], style: str) -> None:
    for check, found in itertools.groupby(findings, key=lambda finding: finding.check):
        title = Text(f"{prefix}{check}: ", style=style).append(meaning_of(check), style="not bold not dim default")
        console.print(title, soft_wrap=True)
        for finding in found:
            where = f"{finding.where}: " if finding.where else ""
            console.print(Text(f"  {printable(where)}{printable(finding.problem)}"), soft_wrap=True)


def _count(findings: list[Finding]) -> str:
    """Return the number of findings per check, such as "2 unreadable, 1 policy"."""
    groups = itertools.groupby(sorted(finding.check for finding in findings))
    return ", ".join(f"{len(list(found))} {check}" for check, found in groups)
