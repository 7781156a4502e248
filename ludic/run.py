"""Run: every verb of ludic on one root. The command line, notebooks and pipelines all use it.

Each method imports what it needs when it is called, so that `import ludic` stays light.
"""

from collections.abc import Sequence
from typing import Any

from ludic.bounds import check_names
from ludic.consent import CodeSettings
from ludic.errors import ConfigError
from ludic.launch import methods
from ludic.store import Root, RunConfig


class Run:
    """A run, by its root; `ludic.open` and `ludic.create` return one."""

    def __init__(self, root: Root) -> None:
        self.root = root

    @property
    def url(self) -> str:
        """URL or path of the root."""
        return self.root.url

    @property
    def config(self) -> RunConfig:
        """Settings that workers and trainers share, from run.json."""
        return self.root.run

    def __repr__(self) -> str:
        return f"ludic.open({self.url!r})"

    # --- Sample and train ----------------------------------------------------------------------------------

    work = methods.work
    train = methods.train
    launch = methods.launch


def open_run(url: str) -> Run:
    """Open the run at a folder or URL. Raises MissingRootError if there is none, SchemaError if run.json is damaged."""
    return Run(Root.open(url))


def create(
    url: str,
    *,
    model: str | None = None,
    env: str | Sequence[str] | None = None,
    like: "str | Run | None" = None,
    trust_code: bool = False,
    update_code: bool = False,
    **settings: Any,
) -> Run:
    """Create a run at a folder or URL, or open the existing one with the same settings.

    model: folder, Hugging Face id or URL of the first weights. env: environments, by name or path/to/file.py:Class.
    settings: fields of RunConfig. like: a run whose settings and code the new run shares, and its model if `model` is
    None. trust_code: agree to run the code that an existing root names, from now on. update_code: use users' files as
    they are on this machine now, and store them in the root.

    Raises ConfigError if the settings differ from those of the existing run or an environment does not load, ModelError
    if there is no such model, and ConsentError for code that the user has not agreed to run.
    """
    from ludic.launch.roots import create_run, start_like
    from ludic.training.config import TrainConfig

    if like is not None:
        if env is not None or settings:
            raise ConfigError("like gives the settings of the run; leave out env and settings, or leave out like")
        return Run(start_like(url, like.root if isinstance(like, Run) else Root.open(like), model))
    if model is None or env is None:
        raise ConfigError("model and env are missing: ludic.create(url, model=..., env=...), or like=RUN")
    check_names(settings, RunConfig, "a run")
    config = RunConfig(model=model, env=(env,) if isinstance(env, str) else tuple(env), **settings)
    code = CodeSettings(trust_code=trust_code, update_code=update_code)
    return Run(create_run(url, config, TrainConfig(), code))
