"""Create a run. A module of its own: it imports `Run`, which imports the modules that have its methods."""

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Unpack

from ludic.app.operations.operation import operation
from ludic.run import RunConfig
from ludic.settings import CodeSettings, SettingsError, Shown, check_names, convert, settings_of, split
from ludic.training import TrainConfig

if TYPE_CHECKING:
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import CreateSettings

RootUrl = Annotated[str | PathLike[str], Shown("ROOT", by_position=True)]


@operation(run=RunConfig, code=CodeSettings)
def create(
    root: RootUrl,
    *,
    model: str | PathLike[str] | None = None,
    env: str | Sequence[str] | None = None,
    like: "str | PathLike[str] | Run | None" = None,
    **settings: Unpack["CreateSettings"],
) -> "Run":
    """Create a run without starting a process.

    Opens an existing run with the same settings. Raises ConfigError if the settings differ from those of the existing
    run or an environment does not load, ModelError if there is no such model, and ConsentError for code that the user
    has not agreed to run.

    Args:
        root: Folder or URL of the run to create.
        model: Folder, Hugging Face id or URL of the first weights.
        env: Environments, by name or path/to/file.py:Class.
        like: Run whose settings and code the new run shares, and its model if no model is given.
    """
    from ludic.app.launch.roots import create_run, prepare_run_code, start_like
    from ludic.app.operations.run import Run
    from ludic.root import Root

    url = str(root)
    own = {each.name for each in settings_of(CodeSettings)}
    check_names([name for name in settings if name not in own], RunConfig, "setting of a run")
    parts = split(settings, run=RunConfig, code=CodeSettings)
    code = convert(CodeSettings, parts["code"])
    if like is None:
        named = {"model": None if model is None else str(model), "env": (env,) if isinstance(env, str) else env}
        run = convert(RunConfig, parts["run"] | {name: each for name, each in named.items() if each is not None})
        return Run(create_run(url, run, TrainConfig(), code))
    if env is not None or parts["run"]:
        raise SettingsError("like gives the settings of the run; leave out env and settings, or leave out like")
    source = like.root if isinstance(like, Run) else Root.open(str(like))
    made = start_like(url, source, None if model is None else str(model))
    if code.is_given:
        prepare_run_code(made, TrainConfig(), code)
    return Run(made)
