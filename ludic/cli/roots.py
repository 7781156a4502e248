"""New roots, with all that a run needs to go on without the machine that started it: run.json, code/, model/.

Shared by the commands that start a run. Raises ConfigError for other settings than those of the run that is there,
ModelError for a model that is not found, or that is not the one that the run began with.
"""

from dataclasses import replace

from ludic.errors import MissingRootError
from ludic.store import Root, RunConfig
from ludic.store.model import copy_kept, keep_model
from ludic.training.first_model import identify_at, local_folder, remember_model


def open_or_start(url: str, run: RunConfig) -> Root:
    """The run with these settings, started where there is none; its model may be named by another place of it."""
    try:
        root = Root.open(url, writable=True)
    except MissingRootError:
        return _start(url, run)
    Root.create(url, replace(run, model=root.run.model))  # refuses other settings
    remember_model(root, None if run.model == root.run.model else run.model)
    return root


def start_like(url: str, like: Root, model: str | None) -> Root:
    """Start a run with the settings and the code of another, and its model where none is named."""
    if model is not None:
        return _start(url, replace(like.run, model=model), like)
    root = Root.create(url, like.run, like=like)
    copy_kept(like, root)
    return root


def _start(url: str, run: RunConfig, like: Root | None = None) -> Root:
    """The model is looked for first, so that a run without one leaves no root."""
    with local_folder(run.model) as folder:
        identity = identify_at(folder, run.model)
        root = Root.create(url, run, like=like)
        keep_model(root, folder, identity)
    return root
