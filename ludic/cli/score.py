"""`ludic score ROOT --scorer FILE.py:FUNCTION`, or `--judge-url URL ...`: score stored rollouts.

Prints the counts to stdout, and the most frequent reasons of failures to stderr.
"""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import ludic
from ludic.cli.flags.score import Settings
from ludic.viewer.output import number, plural, print_json, printable, progress_bar, stdout_console

if TYPE_CHECKING:
    from ludic.scoring.score import ScoreReport

_SHOWN_DIGITS = 12


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    with progress_bar() as track:
        report = run.score(track=track, **asdict(settings.options))
    if settings.json:
        print_json({"root": run.url, **asdict(report)})
        return
    stdout_console().print(printable(_text(report)), soft_wrap=True)
    for reason, count in report.reasons.items():
        print(printable(f"ludic: {count:,} failed: {reason}"), file=sys.stderr)


def _text(report: "ScoreReport") -> str:
    parts = [f"{plural(report.num_scored, 'rollout')} scored", f"{report.num_failed:,} failed"]
    if report.num_done_before:
        parts.append(f"{report.num_done_before:,} scored before")
    if report.num_input_tokens or report.num_output_tokens:
        parts.append(f"{report.num_input_tokens:,} tokens read, {report.num_output_tokens:,} written")
    if report.cost is not None:
        parts.append(f"cost {number(report.cost)}")
    return f"{report.scorer}@{report.version[:_SHOWN_DIGITS]}: {'; '.join(parts)}"
