"""Environments of the package verifiers (0.4), `verifiers/NAME`: NAME is an installed package with a Taskset.

ludic takes the place of the harness: it asks its own model, in plain turns. What runs is verifiers' own: the Taskset
gives the prompts, the Env decides the turns, and the Task's rewards, metrics and stops judge the Trace.

Refused with a reason, since it needs more than text: tools, intercepts, containers, rewards and hooks that want a
runtime, judges, several agents, and a harness of the package's own. A judge that a reward function calls itself is
outside of ludic's view.
"""

import importlib.util
import json
import weakref
from collections.abc import Mapping
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

from ludic.environments.environment import Example, Family, Split, Transition
from ludic.environments.splits import nth
from ludic.errors import ConfigError
from ludic.installed import is_installed, module_file, package_of, require
from ludic.records import Message

if TYPE_CHECKING:
    from ludic.adapters.environments.verifiers_episodes import Episode

PREFIX = "verifiers/"


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
    candidates = (f"verifiers.v1.tasksets.{module}", module) if module.isidentifier() else ()
    return next((each for each in candidates if importlib.util.find_spec(each)), None)


def source(name: str) -> tuple[str | None, str | None]:
    """Return the source file of a module, and the package that it belongs to."""
    module = module_of(name) or ""
    return module_file(module), package_of(module)


class Verifiers:
    """Environment of several steps around an Env of verifiers, which gives its reward at the end of an episode.

    The reward is the sum of the task's rewards times their weights. Each component is a reward times its weight, under
    its function's name, or a metric. `truncated` is set if max_turns of the agent's configuration ended the episode.
    """

    def __init__(
        self,
        name: str,
        /,
        *,
        seed: int = 0,
        num_tasks: int | None = None,
        taskset: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load the environment; once in a process.

        num_tasks: take only the first tasks; an infinite Taskset needs it. taskset: fields of its configuration.
        options: other fields of the Env's configuration, such as agent={"max_turns": 4}. Raises ConfigError.
        """
        from ludic.adapters.environments.verifiers_episodes import load

        self._seed = seed
        config = {**options, "taskset": {**(taskset or {}), "id": name}}
        self._loaded = load(json.dumps(config, sort_keys=True), num_tasks)
        self._episode: Episode | None = None
        self.max_steps = self._loaded.max_turns

    def example(self, index: int, split: Split) -> Example:
        from ludic.adapters.environments.verifiers_episodes import first_messages, plain, task_digest

        numbers = self._loaded.numbers[split]
        if not numbers:
            raise ConfigError(f"the Taskset has {len(self._loaded.tasks)} tasks, none of them in the split {split}")
        number = nth(numbers, index, self._seed)
        task = self._loaded.tasks[number]
        answer = getattr(task.data, "answer", None)
        return Example(
            example_id=task_digest(task)[:16],
            messages=plain(first_messages(task)),
            data={"number": number},
            wanted=None if answer is None else str(answer),
        )

    def reset(self, example: Example) -> tuple[Message, ...]:
        from ludic.adapters.environments.verifiers_episodes import Episode

        self._episode = Episode(self._loaded.env, self._loaded.tasks[example.data["number"]])
        # ludic may leave an episode in the middle, at a limit of its own.
        weakref.finalize(self, self._episode.cancel)
        return self._episode.begin()

    def step(self, action: str) -> Transition:
        assert self._episode is not None, "step() before reset()"
        observation = self._episode.answer(action)
        if observation is not None:
            return Transition(observation=observation, reward=0.0, terminated=False)
        return _judged(self._episode.trace)


def _judged(trace: Any) -> Transition:
    """Return the last transition of a scored Trace."""
    weighted = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    is_cut = trace.stop_condition == "max_turns"
    return Transition(
        observation=None,
        reward=sum(weighted.values()),
        reward_components={**metrics, **weighted},
        terminated=not is_cut,
        truncated=is_cut,
        info={"stop_condition": str(trace.stop_condition)},
    )


FAMILY = Family(make=Verifiers, names=names, is_known=is_known, source=source)
