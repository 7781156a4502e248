"""Import files that other programs wrote into a run, or into a run that is started for them.

Raises ConfigError if the format is unknown, a file is foreign, or the model is not the run's.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ludic.code.kept import create_root
from ludic.errors import ConfigError
from ludic.interop.imports.formats import load_format
from ludic.interop.imports.importing import import_file
from ludic.models.chat import load_tokenizer
from ludic.models.first_model import first_tokenizer, is_hub_id, local_folder, remember_model, write_files
from ludic.store import Root, RunConfig
from ludic.store.records import ImportReport
from ludic.store.track import Track, untracked
from ludic.temporary import temporary_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def import_files(
    root: Root,
    files: Sequence[str],
    format: str,
    *,
    env: str | None = None,
    tokenizer: str | None = None,
    model: str | None = None,
    track: Track = untracked,
) -> list[ImportReport]:
    """Import files, paths or URLs, of one format; return a report for each.

    format: the name of a built-in format, or the path of a user's. env: environment of records that name none, and of
    samples of other evaluation programs whatever their task; None uses the format's name. tokenizer: folder, Hugging
    Face id or URL of the tokenizer for texts; None uses the run's. model: another location of the run's model, which is
    stored in the run.
    """
    mapping = load_format(format)
    if env is not None:
        mapping = replace(mapping, env_field="")
    if not files:
        raise ConfigError("no file to import was named")
    if model not in (None, root.run.model):
        remember_model(root, model)
    get_tokenizer = functools.cache(lambda: _load_tokenizer(root, tokenizer))
    return [
        import_file(
            root,
            url,
            mapping,
            env_name=env or mapping.name,
            tokenizer=tokenizer or root.run.model,
            get_tokenizer=get_tokenizer,
        )
        for url in track(files, len(files), "files")
    ]


def start_for_import(
    url: str, model: str, format: str, *, env: str | None = None, group_size: int = 8, groups_per_batch: int = 8
) -> Root:
    """Start a run for imported rollouts. Weights of a Hugging Face id are not downloaded: an import needs none."""
    names = (env or load_format(format).name,)
    run = RunConfig(model=model, env=names, group_size=group_size, groups_per_batch=groups_per_batch)
    root = create_root(url, run)
    if not is_hub_id(model):
        remember_model(root)
    return root


def _load_tokenizer(root: Root, source: str | None) -> "PreTrainedTokenizerBase":
    """Load a tokenizer. source: folder, Hugging Face id or URL; None means the run's own, stored in its root."""
    if source is not None:
        with local_folder(source, with_weights=False) as folder:
            return load_tokenizer(str(folder))
    with temporary_folder("tokenizer") as folder:
        write_files(first_tokenizer(root), folder)
        return load_tokenizer(str(folder))
