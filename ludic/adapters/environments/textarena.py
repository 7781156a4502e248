"""Games of the package textarena, `textarena/NAME`: of one player, or of several, whom agents play.

An example is a seed; the game that it starts is the same in every process, except for games that iterate over sets of
strings. Splits differ in seeds: a game with few starts, such as GuessTheNumber, has the same starts in both.

Limits of textarena 0.7.4: Hangman, WordLadder, WordSearch and Wordle read word lists of NLTK, which must be downloaded
(python -m nltk.downloader words averaged_perceptron_tagger_eng); GuessWho and TwentyQuestions ask a model over the
network; Klondike and UltimateTexasHoldem can't be imported.
"""

import io
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from ludic.base import is_installed, name_and_version, require
from ludic.environments import Example, Family, Split, Transition, draw
from ludic.errors import ConfigError
from ludic.records import Message
from ludic.settings.user_code import describe

PREFIX = "textarena/"
_VARIANTS = ("-train", "-raw")


def names() -> tuple[str, ...]:
    """Return the games, without their variants; none if the package is missing."""
    games = _registry() if is_installed("textarena") else ()
    return tuple(sorted(name for name in games if not name.endswith(_VARIANTS)))


@cache
def _is_single(name: str) -> bool:
    """Return whether a game has one player."""
    module = _registry()[name].entry_point.partition(":")[0]
    return "SinglePlayerState(" in _source(module)


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


def make_game(
    name: str, /, *, num_players: int | None = None, seed: int = 0, **options: Any
) -> "TextArena | TextArenaOfSeveral":
    """Make a game. num_players: None is 2, if the game has several. options: of the game's constructor, as max_turns.

    Raises ConfigError if the game can't be played by so many.
    """
    if _is_single(name):
        if num_players not in (None, 1):
            raise ConfigError(f"{PREFIX}{name} is a game of one player, and num_players is {num_players}; leave it out")
        return TextArena(name, num_players=1, seed=seed, **options)
    game = TextArenaOfSeveral(name, num_players=num_players or 2, seed=seed, **options)
    try:
        game.reset(Example(example_id="0", messages=(), data={"seed": 0}))
    except Exception as error:
        raise ConfigError(f"{PREFIX}{name} can't be played by {game.num_players} players: {describe(error)}") from error
    return game


class _Game:
    """A game of textarena, with random numbers of its own.

    Each observation has only what is new, since the conversation holds the rest; so the variants of a name that differ
    in the observation, such as -train and -raw, are alike. An action without brackets gets them, except in -raw.
    `max_steps` is twice the turns of the game, which answers an invalid move by asking again.
    """

    run_in = "loop"  # the random numbers and the standard output are those of the process

    def __init__(self, name: str, /, *, num_players: int, seed: int = 0, **options: Any) -> None:
        self._name, self.num_players, self._seed, self._options = name, num_players, seed, options
        self._random_state = random.getstate()
        self._game = self._make()
        turns = getattr(_unwrapped(self._game), "max_turns", None)
        self.max_steps = 2 * turns if isinstance(turns, int) and turns > 0 else None

    def example(self, index: int, split: Split) -> Example:
        seed = draw(lambda random: random.getrandbits(31), str, index, split, self._seed)
        other = type(self)(self._name, num_players=self.num_players, **self._options)
        other._start(seed)
        return Example(example_id=str(seed), messages=other._first(other._player), data={"seed": seed})

    @property
    def _player(self) -> int:
        """Number of the player whose turn it is."""
        return int(_unwrapped(self._game).state.current_player_id)

    def _play(self, action: str) -> bool:
        """Make a move of the player whose turn it is; returns whether the game is over."""
        with self._own_random():
            is_done, _ = self._game.step(action)
        return bool(is_done)

    def _end(self, player: int) -> Transition:
        state = _unwrapped(self._game).state
        about = state.game_info[player]
        return Transition(
            observation=None,
            reward=float((state.rewards or {}).get(player, 0.0)),
            reward_components={"invalid_move": float(bool(about.get("invalid_move")))},
            terminated=True,
            info={"reason": str(about.get("reason", ""))},
        )

    def _make(self) -> Any:
        import textarena

        with self._own_random():
            return textarena.make(self._name, **self._options)

    def _start(self, seed: int) -> None:
        self._random_state = random.Random(seed).getstate()
        self._game = self._make()
        with self._own_random():
            self._game.reset(num_players=self.num_players, seed=seed)

    def _first(self, player: int) -> tuple[Message, ...]:
        return (Message(role="user", content=self._news(player) or "Go on."),)

    def _news(self, player: int) -> str:
        """Return what a player was told since the last call; its own actions are left out."""
        observations = _unwrapped(self._game).state.observations
        texts = [
            text if sender < 0 else f"[Player {sender}] {text}"
            for sender, text, _ in observations[player]
            if sender != player
        ]
        observations[player] = []
        return "\n".join(texts)

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


class TextArena(_Game):
    """Environment of a game of one player; the game gives its reward at its end, 0 before."""

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._start(example.data["seed"])
        return self._first(0)

    def step(self, action: str) -> Transition:
        if self._play(action):
            return self._end(0)
        return Transition(observation=self._news(0) or "Go on.", reward=0.0, terminated=False)


class TextArenaOfSeveral(_Game):
    """Environment of several agents, player_0 and so on; the game gives its rewards at its end."""

    def reset(self, example: Example) -> Mapping[str, tuple[Message, ...]]:
        self._start(example.data["seed"])
        return {f"player_{player}": self._first(player) for player in range(self.num_players)}

    def next_agents(self) -> Sequence[str]:
        return (f"player_{self._player}",)

    def step(self, actions: Mapping[str, str]) -> Mapping[str, Transition]:
        (action,) = actions.values()
        is_done = self._play(action)
        return {
            f"player_{player}": self._end(player)
            if is_done
            else Transition(observation=self._news(player) or None, reward=0.0, terminated=False)
            for player in range(self.num_players)
        }


def _unwrapped(game: Any) -> Any:
    import textarena

    while isinstance(game, textarena.Wrapper):
        game = game.env
    return game


FAMILY = Family(make=make_game, names=names, is_known=is_known, source=source)
