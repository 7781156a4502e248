"""`ludic export ROOT --format ...`: export a run's files as a table, its rows as text, its weights, its evaluations."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import ludic
from ludic.adapters.exports.inspect_logs import LogsReport
from ludic.adapters.exports.tables import TableReport
from ludic.adapters.exports.text import TextReport
from ludic.cli.flags.export import Settings
from ludic.viewer.output import plural, print_json, printable, progress_bar, size, stdout_console

if TYPE_CHECKING:
    from ludic.adapters.exports.weights import WeightsReport


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    target = settings.out or settings.catalog or (sys.stdout.buffer if settings.is_text else None)
    with progress_bar() as track:
        report = run.export(target=target, track=track, **asdict(settings.options))
    if not isinstance(report, TextReport):
        _print(report, settings)


def _print(report: "TableReport | WeightsReport | LogsReport", settings: Settings) -> None:
    if settings.json:
        print_json({"format": settings.options.format, **asdict(report)})
    else:
        stdout_console().print(printable(f"{report.location}: {_text(report, settings)}"), soft_wrap=True)
    if isinstance(report, TableReport):
        for name, reason in report.left_out.items():
            print(printable(f"ludic: {name} was left out: {reason}"), file=sys.stderr)


def _text(report: "TableReport | WeightsReport | LogsReport", settings: Settings) -> str:
    files = plural(report.num_files, "file")
    if isinstance(report, TableReport):
        changes = f"{plural(report.num_added, 'file')} added, {report.num_removed:,} removed"
        return f"{settings.options.format} table of {files}; {changes}"
    if isinstance(report, LogsReport):
        logs = f"{plural(report.num_files, 'log')} of {plural(report.num_samples, 'sample')}"
        return f"{logs}; `inspect view --log-dir` shows them"
    return f"{report.source} as {files}, {size(report.size_bytes)}"
