"""Create roots with everything that a run needs on other machines: run.json, code/, model/.

Shared by the commands that start a run. Raises ConfigError if the settings differ from those of an existing run,
ModelError if the model is not found or differs from the run's first model.
"""

from dataclasses import replace

from ludic.errors import MissingRootError
from ludic.models.first_model import identify_at, local_folder, remember_model
from ludic.store import Root, RunConfig
from ludic.store.model import copy_kept, keep_model


def open_or_start(url: str, run: RunConfig) -> Root:
    """Open the run with these settings, or start it. The model of an existing run may be given at another location."""
    try:
        root = Root.open(url, writable=True)
    except MissingRootError:
        return _start(url, run)
    Root.create(url, replace(run, model=root.run.model))  # refuses other settings
    remember_model(root, None if run.model == root.run.model else run.model)
    return root


def start_like(url: str, like: Root, model: str | None) -> Root:
    """Start a run with the settings and code of another run, and with its model if `model` is None."""
    if model is not None:
        return _start(url, replace(like.run, model=model), like)
    root = Root.create(url, like.run, like=like)
    copy_kept(like, root)
    return root


def _start(url: str, run: RunConfig, like: Root | None = None) -> Root:
    """Start a run. The model is looked for first, so that a missing model leaves no root."""
    with local_folder(run.model) as folder:
        identity = identify_at(folder, run.model)
        root = Root.create(url, run, like=like)
        keep_model(root, folder, identity)
    return root
