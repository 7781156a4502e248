"""Environments of the package gymnasium whose observations are text, `gymnasium/NAME` or `gymnasium/module:NAME`.

`module` is imported first, so that it registers its environments. Observations are gymnasium.spaces.Text; actions are
Text, or Discrete, written as an integer. An example is a seed for reset; splits differ in seeds, so an environment with
few starts has the same starts in both.
"""

import importlib
import re
import weakref
from functools import partial
from typing import Any

from ludic.base import is_installed, module_file, package_of, require
from ludic.environments import Example, Family, Split, Transition, draw
from ludic.errors import ConfigError
from ludic.records import Message
from ludic.settings import only_exceptions
from ludic.settings.user_code import describe

PREFIX = "gymnasium/"
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_SHOWN = 60


def names() -> tuple[str, ...]:
    """Return the ids that other packages have registered: none of gymnasium's own has text as observations."""
    if not is_installed("gymnasium"):
        return ()
    import gymnasium

    modules = {name: _module_of(spec) for name, spec in gymnasium.registry.items()}
    return tuple(sorted(name for name, module in modules.items() if module.partition(".")[0] != "gymnasium"))


def _module_of(spec: Any) -> str:
    """Return the module of a registered Env, which is named, or given as a class or a function."""
    entry = spec.entry_point
    return entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")


def is_known(name: str) -> bool:
    """Import the module in a name, and return whether the id is registered. Raises ConfigError."""
    require("gymnasium", "gymnasium", f"environment {PREFIX}{name}")
    import gymnasium

    module, colon, environment_id = name.rpartition(":")
    if colon:
        try:
            with only_exceptions():
                importlib.import_module(module)
        except Exception as error:
            raise ConfigError(
                f"environment {PREFIX}{name}: module {module!r} can't be imported: {describe(error)}"
            ) from error
        if environment_id not in gymnasium.registry:
            raise ConfigError(
                f"environment {PREFIX}{name}: module {module!r} does not register {environment_id!r}; "
                f"registered are {', '.join(names()) or 'none but those of gymnasium'}"
            )
    return environment_id in gymnasium.registry


def source(name: str) -> tuple[str | None, str | None]:
    """Return the source file of an Env, and the package that it belongs to."""
    import gymnasium

    module = _module_of(gymnasium.registry[name.rpartition(":")[2]])
    return module_file(module), package_of(module)


class Gymnasium:
    """Environment of several steps around a gymnasium.Env; `terminated` and `truncated` are the Env's own.

    An action that is not in the action space is not played: the observation says so, and the reward is 0.
    `max_steps` is the limit that the Env was registered with; without one it is that of the run.
    """

    def __init__(self, name: str, /, *, seed: int = 0, system_prompt: str | None = None, **options: Any) -> None:
        """Make the Env. options: of its constructor.

        Raises ConfigError if its spaces are not text.
        """
        import gymnasium

        self._seed = seed
        self._system = () if system_prompt is None else (Message(role="system", content=system_prompt),)
        self._again = partial(Gymnasium, name, seed=seed, system_prompt=system_prompt, **options)
        self._env = gymnasium.make(name.rpartition(":")[2], **options)
        weakref.finalize(self, self._env.close)
        self._check_spaces(name)
        self.max_steps = self._env.spec.max_episode_steps if self._env.spec else None

    def example(self, index: int, split: Split) -> Example:
        # Below 2**31: environments pass their seed to NumPy and to code in C.
        seed = draw(lambda random: random.getrandbits(31), str, index, split, self._seed)
        return Example(example_id=str(seed), messages=self._again()._start(seed), data={"seed": seed})

    def reset(self, example: Example) -> tuple[Message, ...]:
        return self._start(example.data["seed"])

    def step(self, action: str) -> Transition:
        read = self._read(action)
        if read is None:
            return Transition(observation=f"This is no action: wanted {self._wanted()}.", reward=0.0, terminated=False)
        observation, reward, terminated, truncated, info = self._env.step(read)
        return Transition(
            observation=str(observation),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info={str(key): str(value) for key, value in info.items() if isinstance(value, str | int | float)},
        )

    def _start(self, seed: int) -> tuple[Message, ...]:
        observation, _ = self._env.reset(seed=seed)
        return (*self._system, Message(role="user", content=str(observation)))

    def _read(self, action: str) -> Any:
        """Return the action of a text; None if the space does not have it."""
        from gymnasium.spaces import Discrete

        space = self._env.action_space
        if not isinstance(space, Discrete):
            return next((text for text in (action, action.strip()) if space.contains(text)), None)
        number = int(action) if _INTEGER.fullmatch(action.strip()) else None
        # The Env gets the space's own type: some environments index arrays with it.
        return space.dtype.type(number) if number is not None and space.contains(number) else None

    def _wanted(self) -> str:
        from gymnasium.spaces import Discrete

        space = self._env.action_space
        if isinstance(space, Discrete):
            return f"an integer from {space.start} to {space.start + space.n - 1}"
        characters = "".join(sorted(space.character_set))
        shown = characters if len(characters) <= _SHOWN else f"{characters[:_SHOWN]}..."
        return f"{space.min_length} to {space.max_length} characters of {shown}"

    def _check_spaces(self, name: str) -> None:
        from gymnasium.spaces import Discrete, Text

        for what, space, kinds in (
            ("observation_space", self._env.observation_space, (Text,)),
            ("action_space", self._env.action_space, (Text, Discrete)),
        ):
            if not isinstance(space, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"{what} of {PREFIX}{name} is {space}, wanted {wanted} of gymnasium.spaces")


FAMILY = Family(make=Gymnasium, names=names, is_known=is_known, source=source)
