"""Rewards that are plain functions of a completion and of columns of the data set, as the scorers of questions.

    def reward(completion: str, answer: str) -> float          one answer, and columns of its row by name
    async def judge(completion, **columns) -> float            all columns; awaited
    def rank(completions: list[str], answer: str) -> list      all answers to a question

Each has a weight, and is a component of the reward under its name; with weight 0 it is only measured. `ludic.fit`
writes the file in which workers find them.
"""

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ludic.environments.environment import Example, GroupAnswer, Score, to_score
from ludic.environments.event_loops import call_all, wait_all
from ludic.errors import ConfigError, unknown_name

COMPLETION, COMPLETIONS = "completion", "completions"
"""Parameter for one answer, and for all answers to a question."""

Reward = Callable[..., Any]
"""Returns a number or a Score, or of a group a list of them; or a coroutine that does."""


class Rubric:
    """Named rewards with weights; `score` and `score_group` are scorers of questions.

    The reward is the sum of the values times their weights, and the components are the values. An answer is correct if
    all rewards that say so, by True or False or a Score, say that it is.
    """

    def __init__(self, rewards: Mapping[str, tuple[Reward, float]]) -> None:
        """rewards: function and weight by name. Each was checked by `columns_of`."""
        parts = [_Part(name, function, weight) for name, (function, weight) in rewards.items()]
        self._alone = [part for part in parts if not part.sees_group]
        self._of_groups = [part for part in parts if part.sees_group]

    def score(self, example: Example, answer: str) -> Score | Awaitable[Score]:
        """Score one answer by the rewards that look at one; to be awaited if one of them is a coroutine."""
        columns = example.data["columns"]
        found = call_all(
            partial(part.function, **{COMPLETION: answer}, **part.arguments(columns)) for part in self._alone
        )
        if any(map(inspect.isawaitable, found)):
            return self._awaited(found)
        return self._sum(found)

    async def _awaited(self, found: Sequence[Any]) -> Score:
        return self._sum(await wait_all(found))

    def _sum(self, found: Sequence[Any]) -> Score:
        scores = [to_score(value, part.what) for part, value in zip(self._alone, found, strict=True)]
        weighted = [(part, score) for part, score in zip(self._alone, scores, strict=True) if part.weight]
        components = {part.name: score.reward for part, score in zip(self._alone, scores, strict=True)}
        known = [score.correct for score in scores if score.correct is not None]
        return Score(
            reward=sum(part.weight * score.reward for part, score in weighted),
            correct=all(known) if known else None,
            components={name: value for score in scores for name, value in score.components.items()} | components,
            info={name: text for score in scores for name, text in score.info.items()},
            extra={name: value for score in scores for name, value in score.extra.items()},
        )

    def score_group(
        self, example: Example, answers: Sequence[GroupAnswer]
    ) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """Add the rewards that look at all answers to a question; to be awaited if one of them is a coroutine."""
        columns, texts = example.data["columns"], [answer.text for answer in answers]
        given = {COMPLETIONS: texts}
        found = call_all(partial(part.function, **given, **part.arguments(columns)) for part in self._of_groups)
        if any(map(inspect.isawaitable, found)):
            return self._awaited_group(found, answers)
        return self._add(found, answers)

    async def _awaited_group(self, found: Sequence[Any], answers: Sequence[GroupAnswer]) -> Sequence[Score]:
        return self._add(await wait_all(found), answers)

    def _add(self, found: Sequence[Any], answers: Sequence[GroupAnswer]) -> Sequence[Score]:
        rewards = [answer.reward for answer in answers]
        components = [dict(answer.components) for answer in answers]
        for part, values in zip(self._of_groups, found, strict=True):
            if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(answers):
                raise TypeError(
                    f"{part.what} returned {values!r}, wanted a list of {len(answers)} numbers, one an answer"
                )
            for number, value in enumerate(values):
                reward = to_score(value, part.what).reward
                rewards[number] += part.weight * reward if part.weight else 0.0
                components[number][part.name] = reward
        return [Score(reward=reward, components=named) for reward, named in zip(rewards, components, strict=True)]


class _Part:
    """One reward."""

    def __init__(self, name: str, function: Reward, weight: float) -> None:
        self.name, self.function, self.weight = name, function, weight
        self.sees_group, self._names, self._takes_all = _parameters(function)

    @property
    def what(self) -> str:
        return f"reward {self.name}"

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that the function takes. Those that a row lacks keep their defaults."""
        own = (COMPLETION, COMPLETIONS)
        return {
            name: value
            for name, value in columns.items()
            if name not in own and (self._takes_all or name in self._names)
        }


def _parameters(function: Reward) -> tuple[bool, dict[str, bool], bool]:
    """Return whether a function sees a group, whether each other parameter is needed, and whether it takes all."""
    names: dict[str, bool] = {}
    takes_all = False
    parameters = inspect.signature(function).parameters
    for name, each in parameters.items():
        if each.kind is each.VAR_KEYWORD:
            takes_all = True
        elif each.kind is not each.VAR_POSITIONAL and name not in (COMPLETION, COMPLETIONS):
            names[name] = each.default is each.empty
    return COMPLETIONS in parameters, names, takes_all


def sees_group(function: Reward) -> bool:
    """Return whether a reward looks at all answers to a question."""
    return _parameters(function)[0]


def columns_of(name: str, function: Reward, present: Collection[str], where: str) -> list[str]:
    """Return the columns that a reward takes. present: those of the data set `where`.

    Raises ConfigError for a parameter that is no column, and for a function that takes no completion.
    """
    parameters = inspect.signature(function).parameters
    if (COMPLETION in parameters) == (COMPLETIONS in parameters):
        raise ConfigError(
            f"reward {name} takes ({', '.join(parameters)}), wanted {COMPLETION}, the answer, or {COMPLETIONS}, all "
            "answers to a question, and columns of the data set by name"
        )
    if positional := [each for each, one in parameters.items() if one.kind is one.POSITIONAL_ONLY]:
        raise ConfigError(f"reward {name} takes {positional[0]} by position only; leave out the /")
    _, names, takes_all = _parameters(function)
    for each, is_needed in names.items():
        if is_needed and each not in present:
            raise ConfigError(f"reward {name}: {unknown_name('column', each, present)} ({where})")
    return [each for each in present if takes_all or each in names]
