"""Make the folder of a first experiment, which runs at once: an environment, its settings, a notebook, a tiny model.

The files are those of ludic/app/operations/first_experiment/, as they are.
"""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated

from ludic.app.operations.operation import operation
from ludic.base import Part, Result, is_url, temporary_folder
from ludic.errors import ConfigError
from ludic.settings import Shown

_TEMPLATES = Path(__file__).with_name("first_experiment")
_MODEL = "model"
_COMMANDS = (
    ("ludic check runs/first --config experiment.toml", "try all parts, without a start"),
    ("ludic run runs/first --config experiment.toml", "train, in a minute or two"),
    ("ludic report runs/first --output report.html", "curves, answers and evaluations as one page"),
    ("jupyter lab notebook.ipynb", "the same from Python; after pip install jupyterlab"),
)
"""Commands that run in the new folder, and what each does."""
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Initialized(Result):
    """The new folder of an experiment."""

    folder: str
    files: Sequence[str]
    """Names of the files and folders in it."""
    commands: Sequence[str]
    """What to type next, in this order."""

    def parts(self) -> Iterator[Part]:
        """The files, and the commands as lines to paste."""
        yield f"{self.folder} holds {', '.join(self.files)}. What comes next:"
        yield ""
        width = max(len(command) for command, _ in _COMMANDS)
        notes = dict(_COMMANDS)
        for command in self.commands:
            yield f"    {command:<{width}}  # {notes[command]}" if command in notes else f"    {command}"
        yield ""
        yield "Write your own environment into environment.py, and your model into experiment.toml."


@operation(group="First", place=2, trains=True)
def init(folder: Annotated[str | PathLike[str], Shown("FOLDER", by_position=True)]) -> "Initialized":
    """Make a folder with an environment, its settings and a notebook, which run at once.

    Also makes a tiny model of random weights, so that nothing is downloaded. Writes all files or none. Raises
    ConfigError if the folder is not empty or can't be written.

    Args:
        folder: A new folder, or an empty one.
    """
    if is_url(fspath(folder)):
        raise ConfigError(f"FOLDER is {fspath(folder)}, a URL; wanted a folder on this machine")
    target = Path(folder).absolute()
    try:
        _refuse_files(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that files are moved within one disk.
        with temporary_folder("init", beside=target.parent) as partial:
            new = partial / "new"
            shutil.copytree(_TEMPLATES, new, ignore=shutil.ignore_patterns("__pycache__"))
            _make_model(new / _MODEL)
            files = sorted(f"{path.name}/" if path.is_dir() else path.name for path in new.iterdir())
            _move_all(new, target)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror or error}") from error
    commands = [
        *(() if target == Path.cwd() else (f"cd {shlex.quote(fspath(folder))}",)),
        *(line for line, _ in _COMMANDS),
    ]
    return Initialized(folder=fspath(folder), files=files, commands=commands)


def _refuse_files(folder: Path) -> None:
    """Raise ConfigError if there is anything in a folder, or another file in its place."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file, wanted a new or an empty folder")
    if found := sorted(path.name for path in folder.iterdir()):
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"{folder} is not empty: it holds {', '.join(found[:_SHOWN])}{more}; name a new or an empty folder"
        )


def _make_model(folder: Path) -> None:
    """Write a tiny model that knows the words of the environment's questions and those of MoarCats."""
    from ludic.app.operations.first_experiment.environment import FORMS, PLACES
    from ludic.environments import WORDS
    from ludic.models import make_tiny_model

    make_tiny_model(str(folder), [*WORDS, *FORMS, *(place for places in PLACES.values() for place in places)])


def _move_all(source: Path, target: Path) -> None:
    """Move a folder to `target`, or its files if that exists; all or none. Raises OSError."""
    if not target.exists():
        source.rename(target)
        return
    moved: list[Path] = []
    try:
        for path in sorted(source.iterdir()):
            moved.append(path.rename(target / path.name))
    except BaseException:
        for path in moved:
            with suppress(OSError):
                path.rename(source / path.name)
        raise
