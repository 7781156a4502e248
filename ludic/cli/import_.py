"""`ludic import ROOT --from FORMAT FILES...`: import rollouts that other programs wrote.

Prints the imported rollouts per file to stdout, and fields and records that were not imported to stderr. Raises
ConfigError if the format is unknown, a file is foreign, or the root does not exist and no model is named.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ludic.cli.flags.import_ import Settings
from ludic.cli.output import plural, print_json, printable, progress_bar, stdout_console
from ludic.errors import ConfigError, MissingRootError
from ludic.exchange.formats import load_format
from ludic.exchange.importing import ImportReport, import_file
from ludic.inference.chat import load_tokenizer
from ludic.store import Root, RunConfig
from ludic.training.first_model import first_tokenizer, is_hub_id, local_folder, remember_model, write_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_REFUSED = 10


def main(settings: Settings) -> None:
    format_ = load_format(settings.from_)
    if not settings.files:
        raise ConfigError("no file to import was named")
    env_name = settings.env or format_.name
    root = _open_root(settings, env_name)
    tokenizer = settings.tokenizer or root.run.model
    get_tokenizer = functools.cache(lambda: _load_tokenizer(root, settings.tokenizer))
    reports = []
    with progress_bar() as track:
        for url in track(settings.files, len(settings.files), "files"):
            report = import_file(
                root, url, format_, env_name=env_name, tokenizer=tokenizer, get_tokenizer=get_tokenizer
            )
            reports.append(report)
    if settings.json:
        print_json({"root": root.url, "files": [asdict(report) for report in reports]})
    else:
        _print_losses(reports)
        _print_summary(reports)


def _open_root(settings: Settings, env_name: str) -> Root:
    try:
        root = Root.open(settings.root, writable=True)
    except MissingRootError:
        if settings.model is None:
            raise ConfigError(f"{settings.root} holds no run; --model FOLDER_OR_ID starts one") from None
        run = RunConfig(
            model=settings.model,
            env=(env_name,),
            group_size=settings.group_size,
            groups_per_batch=settings.groups_per_batch,
        )
        root = Root.create(settings.root, run)
        if not is_hub_id(settings.model):  # an id would download weights, which an import does not need
            remember_model(root)
        return root
    if settings.model not in (None, root.run.model):
        remember_model(root, settings.model)
    return root


def _load_tokenizer(root: Root, source: str | None) -> "PreTrainedTokenizerBase":
    """Load a tokenizer. source: folder, Hugging Face id or URL; None means the run's own, stored in its root."""
    if source is not None:
        with local_folder(source, with_weights=False) as folder:
            return load_tokenizer(str(folder))
    with tempfile.TemporaryDirectory(prefix="ludic-tokenizer-") as folder:
        write_files(first_tokenizer(root), Path(folder))
        return load_tokenizer(folder)


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
