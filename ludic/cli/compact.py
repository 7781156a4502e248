"""`ludic compact ROOT`: rewrite the many small files of sealed versions, and of requests/, into few large ones.

Safe while the run and readers continue. After an interruption, the same command finishes the work.
"""

from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

import ludic
from ludic.cli.flags.compact import Settings
from ludic.maintenance.compact import CompactedPartition, CompactionReport
from ludic.viewer.output import plain_table, plural, print_json, printable, progress_bar, size, stdout_console


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    with progress_bar() as track:
        report = run.compact(
            settings.before,
            all_versions=settings.all,
            target_bytes=settings.target_mb << 20,
            dry_run=settings.dry_run,
            track=track,
        )
    if settings.json:
        facts = asdict(report)
        print_json({"root": run.url, "before": facts.pop("before_version"), "dry_run": settings.dry_run} | facts)
    else:
        _print(stdout_console(), report, dry_run=settings.dry_run)


def _print(console: Console, report: CompactionReport, *, dry_run: bool) -> None:
    if report.partitions:
        _print_table(console, report.partitions)
    for skipped in report.skipped:
        console.print(Text(f"left alone: {printable(skipped.name)}: {printable(skipped.reason)}"), soft_wrap=True)
    num_files = sum(partition.num_files_before for partition in report.partitions)
    num_left = sum(partition.num_files_after for partition in report.partitions)
    if report.partitions:
        became = "would become" if dry_run else "became"
        done = f"{plural(num_files, 'file')} of {plural(len(report.partitions), 'partition')} {became} {num_left:,}"
    elif report.before_version == 0:
        done = "no version is sealed yet: name one with --before, or take --all of a run that is finished"
    else:
        done = "there is nothing to compact"
    console.print(done, soft_wrap=True)


def _print_table(console: Console, partitions: Iterable[CompactedPartition]) -> None:
    table = plain_table("partition", ">files", ">then", ">bytes", ">then")
    for partition in partitions:
        before, after = size(partition.size_bytes_before), size(partition.size_bytes_after)
        name = printable(partition.name)
        table.add_row(name, f"{partition.num_files_before:,}", f"{partition.num_files_after:,}", before, after)
    console.print(table)
