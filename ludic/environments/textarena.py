"""Games of one player of the package textarena, `textarena/NAME`.

An example is a seed; the game that it starts is the same in every process, except for games that iterate over sets of
strings. Splits differ in seeds: a game with few starts, such as GuessTheNumber, has the same starts in both.

Limits of textarena 0.7.4: Hangman, WordLadder, WordSearch and Wordle read word lists of NLTK, which must be downloaded
(python -m nltk.downloader words averaged_perceptron_tagger_eng); GuessWho and TwentyQuestions ask a model over the
network; Klondike and UltimateTexasHoldem can't be imported.
"""

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from ludic.environments.environment import Example, Split, Transition
from ludic.environments.optional import is_installed, require
from ludic.environments.splits import draw
from ludic.errors import ConfigError
from ludic.installed import name_and_version
from ludic.records import Message

PREFIX = "textarena/"
_VARIANTS = ("-train", "-raw")


def names() -> tuple[str, ...]:
    """Return the games of one player, without their variants; none if the package is missing."""
    single = _single_player_games() if is_installed("textarena") else ()
    return tuple(sorted(name for name in single if not name.endswith(_VARIANTS)))


@cache
def _single_player_games() -> frozenset[str]:
    modules = {name: spec.entry_point.partition(":")[0] for name, spec in _registry().items()}
    single = {module for module in set(modules.values()) if "SinglePlayerState(" in _source(module)}
    return frozenset(name for name, module in modules.items() if module in single)


def is_known(name: str) -> bool:
    """Return whether textarena has a game of this name, of any number of players. Raises ConfigError without it."""
    require("textarena", "textarena", f"environment {PREFIX}{name}")
    return name in _registry()


def source(name: str) -> tuple[str | None, str | None]:
    """Return the path of a game's source file, and textarena with its version."""
    return str(_path(_registry()[name].entry_point.partition(":")[0])), name_and_version("textarena")


def _registry() -> dict[str, Any]:
    import textarena  # noqa: F401  (registers all games)
    from textarena.envs.registration import ENV_REGISTRY

    return ENV_REGISTRY


def _source(module: str) -> str:
    path = _path(module)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _path(module: str) -> Path:
    """Return a game's file. Importing its package would run it, and some can't be imported."""
    import textarena

    return Path(textarena.__file__).parents[1] / f"{module.replace('.', '/')}.py"


class TextArena:
    """Environment of a game of one player; the game gives its reward at its end, 0 before.

    Each observation has only what is new, since the conversation holds the rest; so the variants of a name that differ
    in the observation, such as -train and -raw, are alike. An action without brackets gets them, except in -raw.
    `max_steps` is twice the turns of the game, which answers an invalid move by asking again.
    """

    def __init__(self, name: str, /, *, seed: int = 0, **options: Any) -> None:
        """Make the game. options: of the game's constructor, such as max_turns.

        Raises ConfigError if the game has several players or can't be started.
        """
        if name not in _single_player_games():
            raise ConfigError(
                f"{PREFIX}{name} is a game of several players; ludic plays textarena's games of one player"
            )
        self._name, self._seed, self._options = name, seed, options
        self._random_state = random.getstate()
        self._game = self._make()
        turns = getattr(_unwrapped(self._game), "max_turns", None)
        self.max_steps = 2 * turns if isinstance(turns, int) and turns > 0 else None

    def example(self, index: int, split: Split) -> Example:
        seed = draw(lambda random: random.getrandbits(31), str, index, split, self._seed)
        return Example(
            example_id=str(seed), messages=TextArena(self._name, **self._options)._start(seed), data={"seed": seed}
        )

    def reset(self, example: Example) -> tuple[Message, ...]:
        return self._start(example.data["seed"])

    def step(self, action: str) -> Transition:
        with self._own_random():
            is_done, _ = self._game.step(action)
        state = _unwrapped(self._game).state
        if not is_done:
            return Transition(observation=self._news(), reward=0.0, terminated=False)
        about = state.game_info[0]
        return Transition(
            observation=None,
            reward=float((state.rewards or {}).get(0, 0.0)),
            reward_components={"invalid_move": float(bool(about.get("invalid_move")))},
            terminated=True,
            info={"reason": str(about.get("reason", ""))},
        )

    def _make(self) -> Any:
        import textarena

        with self._own_random():
            return textarena.make(self._name, **self._options)

    def _start(self, seed: int) -> tuple[Message, ...]:
        self._random_state = random.Random(seed).getstate()
        self._game = self._make()
        with self._own_random():
            self._game.reset(num_players=1, seed=seed)
        return (Message(role="user", content=self._news()),)

    def _news(self) -> str:
        """Return what the game has said since the last call; the player's own actions are left out."""
        state = _unwrapped(self._game).state
        texts = [text for sender, text, _ in state.get_current_player_observation() if sender < 0]
        return "\n".join(texts) or "Go on."

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Give the game its own random numbers: games use those of the process, which episodes share.

        Drops what games print.
        """
        outside = random.getstate()
        random.setstate(self._random_state)
        try:
            with redirect_stdout(io.StringIO()):
                yield
        finally:
            self._random_state = random.getstate()
            random.setstate(outside)


def _unwrapped(game: Any) -> Any:
    import textarena

    while isinstance(game, textarena.Wrapper):
        game = game.env
    return game
