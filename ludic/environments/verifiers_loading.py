"""Load an environment of the package verifiers, and refuse one that needs more than text.

Importing this module imports verifiers.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.session import hook_boundary
from verifiers.v1.utils.decorators import discover_decorated

from ludic.code.run import describe, only_exceptions
from ludic.environments.environment import Split
from ludic.environments.splits import partition
from ludic.errors import ConfigError

PLAIN_HARNESSES = ("bash", "null")
"""The harnesses of verifiers that an environment gets without asking for one; ludic takes their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An Env with its tasks."""

    env: Any
    tasks: Sequence[Any]
    numbers: Mapping[Split, Sequence[int]]
    """Numbers of the tasks of each split."""
    max_turns: int | None
    """Maximum turns of the agent, by its configuration."""


@lru_cache(maxsize=16)
def load(config_json: str, num_tasks: int | None) -> Loaded:
    """Load an environment and its tasks, once in a process.

    config_json: the Env's configuration. num_tasks: number of tasks to take; None takes all. Raises ConfigError.
    """
    config = json.loads(config_json)
    name = config["taskset"]["id"]
    try:
        with only_exceptions():
            env = vf.load_environment(vf.resolve_env_config(config))
            _refuse(_problems(env), name)
            if num_tasks is None and not env.taskset.bounded:
                raise ConfigError("the Taskset is infinite; the option num_tasks says how many tasks to take")
            tasks = list(islice(env.taskset, num_tasks))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the package verifiers can't load it: {describe(error)}") from error
    for task in tasks:
        _refuse(_task_problems(task), name)
    (agent,) = agent_config_fields(env.config).values()
    numbers = partition(range(len(tasks)), lambda number: task_digest(tasks[number]))
    return Loaded(env=env, tasks=tasks, numbers=numbers, max_turns=agent.max_turns)


def task_digest(task: Any) -> str:
    """Return the digest of a task without its position and names, so that equal tasks are in one split."""
    data = task.data.model_dump(mode="json", exclude={"idx", "id", "name"}, exclude_none=True)
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _refuse(problems: Iterator[str], name: str) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise ConfigError(f"{name} {problem}; ludic runs environments of verifiers that need only text")


def _problems(env: Any) -> Iterator[str]:
    """Yield what an Env needs beyond text."""
    harnesses = env.config.agent_harnesses()
    taskset, task_class = type(env.taskset), type(env.taskset).task_type()
    if len(harnesses) != 1:
        yield f"has several agents, {', '.join(harnesses)}"
    for harness in harnesses.values():
        if harness.id not in PLAIN_HARNESSES:
            yield f"brings the harness {harness.id!r}"
    if type(env).start is not vf.Env.start or type(env).stop is not vf.Env.stop:
        yield "starts shared resources, in start() of its Env"
    if taskset.toolsets(env.config.taskset) or task_class.toolsets(env.config.taskset.task):
        yield "has tools of its own, in toolsets()"
    if task_class.NEEDS_CONTAINER:
        yield "needs a container"
    if env.config.taskset.task.judges:
        yield "has judges, which ask another model"
    task_config = env.config.taskset.task
    for plugged in (*task_config.rewards.values(), *task_config.metrics.values(), *task_config.stops.values()):
        # Consent covers the options, and so not the text of a file that they name.
        if plugged.fn and ".py" in plugged.fn:
            yield f"has the function {plugged.fn} of a file; name it as module:function"


def _task_problems(task: Any) -> Iterator[str]:
    """Yield what a Task needs beyond text."""
    for field in ("image", "skills", "artifacts"):
        if getattr(task.data, field):
            yield f"has tasks with the field {field}"
    if discover_decorated(task, "intercept"):
        yield "changes requests, by @vf.intercept"
    for function in (*task.hooks("reward"), *task.hooks("metric"), *_own_hooks(task)):
        if _needs_runtime(function):
            yield f"has the function {function.__name__}, which wants a runtime"
    for function in task.hooks("stop"):
        if hook_boundary(function, allow_trace=True) is not vf.Trace:
            yield f"has the stop {function.__name__}, which wants a Request or a Response"
    for message in task.data.prompt if isinstance(task.data.prompt, list) else ():
        if not isinstance(message.content, str) or message.role not in ("system", "user", "assistant"):
            yield f"has a prompt with a message of the role {message.role} that is not plain text"


def _own_hooks(task: Any) -> list[Callable[..., Any]]:
    """Return those methods setup and finalize that a task's class has written itself."""
    hooks = (("setup", vf.Task.setup), ("finalize", vf.Task.finalize))
    return [getattr(task, name) for name, inherited in hooks if getattr(type(task), name) is not inherited]


def _needs_runtime(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
