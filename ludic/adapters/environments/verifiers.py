"""Environments of the package verifiers, `verifiers/NAME`: NAME is an installed package.

Both of its APIs run: the older one, a function `load_environment` (verifiers 0.1.11 to 0.3), and v1, a class Taskset
(0.4). The module of NAME tells which one it is. verifiers plays and scores the episode; ludic's agent takes the place
of the model. `verifiers_legacy.py` and `verifiers_v1.py` say what each refuses.
"""

import importlib
import importlib.util
import json
import re
import weakref
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.base import installed_version, is_installed, module_file, package_of, require
from ludic.environments import Example, Family, Split, Transition, nth
from ludic.errors import ConfigError
from ludic.records import Message, ToolCall
from ludic.settings import failure_of, only_exceptions

if TYPE_CHECKING:
    from ludic.adapters.environments.verifiers_turns import EnvironmentTurn, Loaded, VerifiersEpisode

PREFIX = "verifiers/"

NEWEST_LEGACY = "0.3.1"
"""Newest version of verifiers that has load_environment."""


def names() -> tuple[str, ...]:
    """Return the modules of the installed packages that depend on verifiers."""
    if not is_installed("verifiers"):
        return ()
    dependents = [each for each in distributions() if any(need.startswith("verifiers") for need in each.requires or ())]
    files = [file for each in dependents for file in each.files or ()]
    return tuple(sorted({file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}))


def is_known(name: str) -> bool:
    """Return whether a module of this name is installed. Raises ConfigError if verifiers is not."""
    require("verifiers", "verifiers", f"environment {PREFIX}{name}")
    return module_of(name) is not None


def module_of(name: str) -> str | None:
    """Return the module of an id, as verifiers finds it: its own, or that of another package; None if there is none."""
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    own = () if _is_legacy() else (f"verifiers.v1.tasksets.{module}",)
    candidates = (*own, module) if module.isidentifier() else ()
    return next((each for each in candidates if importlib.util.find_spec(each)), None)


def _is_legacy() -> bool:
    """Return whether the installed verifiers has the older API; a version has one of them."""
    return importlib.util.find_spec("verifiers.envs") is not None


def source(name: str) -> tuple[str | None, str | None]:
    """Return the source file of a module, and the package that it belongs to."""
    module = module_of(name) or ""
    return module_file(module), package_of(module)


# --- Loading ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def load(name: str, options_json: str, num_tasks: int | None) -> "Loaded":
    """Load an environment and its examples, once in a process.

    options_json: its options. num_tasks: number of tasks or rows to take; None takes all. Raises ConfigError.
    """
    version, options = installed_version("verifiers"), json.loads(options_json)
    try:
        with only_exceptions():
            module = module_of(name) or name
            _import(module)
            if _is_legacy():
                from ludic.adapters.environments import verifiers_legacy

                return verifiers_legacy.load(module, options, num_tasks)
            from ludic.adapters.environments import verifiers_v1

            return verifiers_v1.load(name, options, num_tasks)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"verifiers {version} can't load it: {failure_of(error).error}") from error


def _import(module_name: str) -> None:
    """Import the module of an environment. Raises ConfigError if it is of the API that this verifiers lacks."""
    version = installed_version("verifiers")
    too_old = ConfigError(
        f"it has load_environment, which verifiers {version} can't load; pip install 'verifiers=={NEWEST_LEGACY}'"
    )
    try:
        module = importlib.import_module(module_name)
    except (AttributeError, ImportError) as error:
        if _is_legacy() or not _names_load_environment(module_name):
            raise
        raise too_old from error
    has_function = callable(getattr(module, "load_environment", None))
    if _is_legacy() and not has_function:
        raise ConfigError(f"it has no load_environment, and a Taskset needs verifiers 0.4; {version} is installed")
    if not _is_legacy() and has_function and not getattr(module, "__all__", ()):
        raise too_old


def _names_load_environment(module_name: str) -> bool:
    """Return whether the text of a module defines or imports load_environment; nothing of it runs."""
    path = Path(module_file(module_name) or "")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return re.search(r"(def|import.*) load_environment\b", text) is not None


# --- The environment -------------------------------------------------------------------------------------


class Verifiers:
    """Environment of several steps around one of verifiers, which gives its reward at the end of an episode.

    It is a ToolRunner: a completion with tool calls is a step, whose calls verifiers runs. Each component of the reward
    is what a function returned times its weight, under the function's name, or a metric. `truncated` is set if a limit
    of the package ended the episode.
    """

    def __init__(self, name: str, /, *, seed: int = 0, num_tasks: int | None = None, **options: Any) -> None:
        """Load the environment; once in a process.

        num_tasks: take only the first tasks, or rows of a data set; an infinite Taskset needs it. options: arguments of
        load_environment; of v1, fields of the Env's configuration, such as agent={"max_turns": 4}, and `taskset` with
        those of the Taskset's. Raises ConfigError.
        """
        self._seed = seed
        self._loaded = load(name, json.dumps(options, sort_keys=True), num_tasks)
        self._episode: VerifiersEpisode | None = None
        self.max_steps = self._loaded.max_turns

    def example(self, index: int, split: Split) -> Example:
        numbers = self._loaded.numbers[split]
        if not numbers:
            total = sum(map(len, self._loaded.numbers.values()))
            raise ConfigError(f"it has {total} tasks, none of them in the split {split}")
        number = nth(numbers, index, self._seed)
        return self._loaded.example(number)

    async def reset(self, example: Example) -> tuple[Message, ...]:
        from ludic.adapters.environments.verifiers_turns import VerifiersEpisode

        loaded, number = self._loaded, example.data["number"]
        self._episode = VerifiersEpisode(lambda line: loaded.play(number, line))
        # ludic may leave an episode in the middle, at a limit of its own.
        weakref.finalize(self, self._episode.cancel)
        return await self._episode.begin()

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return () if self._episode is None else self._episode.tools

    async def step(self, action: str) -> Transition:
        assert self._episode is not None, "step() before reset()"
        return _transition(await self._episode.answer(action))

    async def run_tools(self, text: str, calls: Sequence[ToolCall]) -> Transition:
        assert self._episode is not None, "run_tools() before reset()"
        return _transition(await self._episode.answer(text, calls))


def _transition(turn: "EnvironmentTurn") -> Transition:
    outcome = turn.outcome
    if outcome is None:
        return Transition(observation=turn.observation, reward=0.0, terminated=False, tool_results=turn.results)
    return Transition(
        observation=turn.observation,
        reward=outcome.reward,
        reward_components=outcome.components,
        terminated=not outcome.is_cut,
        truncated=outcome.is_cut,
        info={"stop_condition": outcome.stop_condition},
        tool_results=turn.results,
    )


FAMILY = Family(make=Verifiers, names=names, is_known=is_known, source=source)
