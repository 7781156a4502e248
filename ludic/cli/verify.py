"""`ludic verify ROOT`: check every file and the data of a run; exit 1 and a list when anything is wrong."""

import itertools
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from ludic.cli.fsck import Finding, check_root, meaning_of
from ludic.cli.output import print_json, printable, progress_bar, stdout_console
from ludic.cli.settings import RootUrl
from ludic.errors import LudicError
from ludic.store import Root


class UnsoundError(LudicError, ValueError):
    """A root has findings."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run. What is half-written by a run that goes on may be found as well."""
    json: bool = False
    """Print JSON instead of a list."""


def main(settings: Settings) -> None:
    root = Root.open(settings.root)
    with progress_bar() as track:
        findings = check_root(root, track)
    if settings.json:
        print_json({"root": root.url, "sound": not findings, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(stdout_console(), root, findings)
    if findings:
        raise UnsoundError(f"{root.url} is not sound: {_count(findings)}")


def _print(console: Console, root: Root, findings: list[Finding]) -> None:
    if not findings:
        console.print(f"{root.url} is sound", soft_wrap=True)
    for check, found in itertools.groupby(findings, key=lambda finding: finding.check):
        console.print(Text(f"{check}: ", style="bold red").append(meaning_of(check), style="not bold default"))
        for finding in found:
            where = f"{finding.where}: " if finding.where else ""
            console.print(Text(f"  {printable(where)}{printable(finding.problem)}"), soft_wrap=True)


def _count(findings: list[Finding]) -> str:
    """2 unreadable, 1 policy"""
    groups = itertools.groupby(sorted(finding.check for finding in findings))
    return ", ".join(f"{len(list(found))} {check}" for check, found in groups)
