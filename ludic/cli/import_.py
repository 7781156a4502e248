"""`ludic import ROOT --from FORMAT FILES...`: import rollouts that other programs wrote.

Prints the imported rollouts per file to stdout, and fields and records that were not imported to stderr.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console

import ludic
from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import start_for_import
from ludic.cli.flags.import_ import Settings
from ludic.errors import ConfigError, MissingRootError
from ludic.store.records import ImportReport
from ludic.viewer.output import plural, print_json, printable, progress_bar, stdout_console

_MOST_REFUSED = 10


def main(settings: Settings) -> None:
    load_format(settings.from_)  # before a run is started for the files
    if not settings.files:
        raise ConfigError("no file to import was named")
    run = _open_run(settings)
    with progress_bar() as track:
        options = {name: getattr(settings, name) for name in ("env", "tokenizer", "model")}
        reports = run.import_(settings.files, settings.from_, **options, track=track)
    if settings.json:
        print_json({"root": run.url, "files": [asdict(report) for report in reports]})
    else:
        _print_losses(reports)
        _print_summary(reports)


def _open_run(settings: Settings) -> ludic.Run:
    try:
        return ludic.open(settings.root)
    except MissingRootError:
        if settings.model is None:
            raise ConfigError(f"{settings.root} holds no run; --model FOLDER_OR_ID starts one") from None
    sizes = {"group_size": settings.group_size, "groups_per_batch": settings.groups_per_batch}
    return ludic.Run(start_for_import(settings.root, settings.model, settings.from_, env=settings.env, **sizes))


def _print_summary(reports: Sequence[ImportReport]) -> None:
    console = stdout_console()
    for report in reports:
        rollouts = f"{plural(report.num_rollouts, 'rollout')} in {plural(report.num_groups, 'group')}"
        note = "; was there already" if report.was_there else ""
        text = f"{report.file}: {rollouts}, of {plural(report.num_records, 'record')}{note}"
        console.print(printable(text), soft_wrap=True)


def _print_losses(reports: Sequence[ImportReport]) -> None:
    """Print what rollouts lack, and the fields and records of the files that were not imported as columns."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    for report in reports:
        lines = [
            _fields("kept as metadata", report.kept_as_metadata),
            _fields("not kept", report.not_kept),
            *(f"refused, line {refusal.line}: {refusal.reason}" for refusal in report.refused[:_MOST_REFUSED]),
        ]
        if len(report.refused) > _MOST_REFUSED:
            lines.append(f"refused, {len(report.refused) - _MOST_REFUSED:,} more: --json lists all")
        if report.num_unscored:
            lines.append(f"{report.num_unscored:,} rollouts without a reward: stored, never trained on")
        if report.num_without_logprobs:
            lines.append(
                f"{report.num_without_logprobs:,} rollouts without logprobs: no importance ratio can be taken; "
                "ludic train --filters drop_absent_logprobs leaves them out"
            )
        for line in filter(None, lines):
            console.print(f"{printable(report.file)}: {printable(line)}")


def _fields(title: str, counts: Mapping[str, int]) -> str:
    return f"{title}: {', '.join(f'{name} ({count:,})' for name, count in counts.items())}" if counts else ""
