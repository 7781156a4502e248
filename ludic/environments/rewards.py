"""Combine several named and weighted rewards of a question, and call rewards that are plain functions of columns.

    def reward(completion: str, answer: str) -> float          one answer, and columns of its row by name
    async def judge(completion, **columns) -> float            all columns; awaited
    def rank(completions: list[str], answer: str) -> list      all answers to a question
    def accuracy(completions, **kwargs) -> list                TRL's signature (ludic/adapters/scorers.py)

`Rubric` adds them up, for `ludic.fit` and for the option `scorer` of questions. `ludic.fit` writes the file in which
workers find its functions. Raises ScorerError for a wrong result, ConfigError for a wrong signature.
"""

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from reprlib import repr as shown
from typing import Any

from ludic.base import storable
from ludic.environments.environment import NUMBERS, Example, GroupAnswer, Score, to_score
from ludic.environments.event_loops import call_all, wait_all
from ludic.errors import ConfigError, ScorerError, unknown_name
from ludic.records import LARGEST_REWARD, add_rewards
from ludic.settings import place_of_function

COMPLETION, COMPLETIONS = "completion", "completions"
"""Parameter for one answer, and for all answers to a question."""

RewardFunction = Callable[..., Any]
"""Returns a number, a bool, a Score or None, for a group a list of these; or a coroutine that does."""


# --- Several rewards -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One reward of a rubric. It scores single answers, or all answers to a question together."""

    name: str
    weight: float
    """Factor of the value in the sum; 0 only measures."""
    what: str
    """Name of the reward in errors."""
    score: Callable[[Example, str], Any] | None = None
    """Returns the value of one answer, None if it has none; or a coroutine that does."""
    score_group: Callable[[Example, Sequence[GroupAnswer]], Any] | None = None
    """Instead of `score`: returns the values of all answers to a question, in their order."""
    function: Callable[..., Any] | None = None
    """The user's function, whose file and line errors name."""
    columns: tuple[str, ...] = ()
    """Columns of the data set that it takes, if the data set has them."""
    takes_row: bool = False
    """True if the reward takes all columns."""


class Rubric:
    """Named rewards with weights; `score` and `score_group` are scorers of questions.

    The reward is the sum of the values times their weights; weight 0 only measures. Each value, without its weight, is
    a component under the name of its part; the components of a Score are named NAME.PART. A value of None is left out,
    as in TRL; an answer for which no weighted part has a value is not scored. The first part that returns True, False
    or a Score with `correct` decides whether an answer is correct; parts that see the group come last.
    """

    def __init__(self, rewards: Mapping[str, tuple[RewardFunction, float]] | Iterable[RewardPart]) -> None:
        """rewards: parts; or functions of columns by name, checked by `columns_of`, with weights.

        Raises ConfigError if two parts have the same name.
        """
        if isinstance(rewards, Mapping):
            rewards = [part_of(name, function, weight) for name, (function, weight) in rewards.items()]
        self.parts = (*rewards,)
        names = [part.name for part in self.parts]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(
                f"two scorers are called {twice}; each is a component of the reward, so rename one of them"
            )
        self._single = [part for part in self.parts if part.score is not None]
        self._of_groups = [part for part in self.parts if part.score_group is not None]

    def score(self, example: Example, answer: str) -> Score | Awaitable[Score]:
        """Score one answer by the parts that look at single answers; await the result if one of them is a coroutine.

        Raises ScorerError, with the values of the other parts, if a part returns anything but a finite number, and if
        no part scores the answer and none sees the group.
        """
        found = call_all(partial(part.score, example, answer) for part in self._single if part.score is not None)
        return self._later(found) if any(map(inspect.isawaitable, found)) else self._sum(found)

    async def _later(self, found: Sequence[Any]) -> Score:
        return self._sum(await wait_all(found))

    def _sum(self, found: Sequence[Any]) -> Score:
        scored: list[_Scored] = []
        failure = None
        for part, value in zip(self._single, found, strict=True):
            try:
                scored += _scored(part, value)
            except ScorerError as error:
                failure = failure or error
        whole = _with(Score(reward=0.0), scored)
        if failure is not None:
            failure.components = {storable(name): float(value) for name, value in whole.components.items()}
            raise failure
        if not self._of_groups:
            self._check_scored(whole, "the answer")
        return whole

    def score_group(
        self, example: Example, answers: Sequence[GroupAnswer]
    ) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """Add the parts that look at all answers to a question; await the result if one of them is a coroutine.

        Raises ScorerError if no part scores one of the answers, or if a part returns anything but a list of finite
        numbers.
        """
        found = call_all(
            partial(part.score_group, example, answers) for part in self._of_groups if part.score_group is not None
        )
        if any(map(inspect.isawaitable, found)):
            return self._later_group(found, answers)
        return self._add(found, answers)

    async def _later_group(self, found: Sequence[Any], answers: Sequence[GroupAnswer]) -> Sequence[Score]:
        return self._add(await wait_all(found), answers)

    def _add(self, found: Sequence[Any], answers: Sequence[GroupAnswer]) -> Sequence[Score]:
        of_answers: list[list[_Scored]] = [[] for _ in answers]
        for part, values in zip(self._of_groups, found, strict=True):
            if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(answers):
                raise ScorerError(
                    f"{part.what} returned {shown(values)}, wanted a list of {len(answers)} numbers, one an answer"
                    f"{_place(part.function)}"
                )
            for of_answer, value in zip(of_answers, values, strict=True):
                of_answer += _scored(part, value)
        scores = [
            _with(Score(reward=each.reward, correct=each.correct, components=each.components), of_answer)
            for each, of_answer in zip(answers, of_answers, strict=True)
        ]
        for number, score in enumerate(scores):
            self._check_scored(score, f"answer {number} of {len(scores)}")
        return scores

    def _check_scored(self, score: Score, which: str) -> None:
        """Raise ScorerError if no part with a weight has a value."""
        weighted = [part for part in self.parts if part.weight]
        if weighted and not any(part.name in score.components for part in weighted):
            raise ScorerError(
                f"{which} is not scored: {', '.join(part.what for part in weighted)} returned None"
                f"{_place(weighted[0].function)}"
            )


_Scored = tuple[RewardPart, Score]
"""A part with its result for an answer."""


def _scored(part: RewardPart, value: Any) -> list[_Scored]:
    """Return a part with its value; nothing if it has none. Raises ScorerError for anything but a finite number."""
    return [] if value is None else [(part, score_of(value, part.what, part.function))]


def _with(whole: Score, scored: Sequence[_Scored]) -> Score:
    """Return a score with the values of more parts."""
    weighted = [(part.weight, score) for part, score in scored if part.weight]
    components, info, extra = dict(whole.components), dict(whole.info), dict(whole.extra)
    for part, score in scored:
        components[part.name] = score.reward
        components |= {f"{part.name}.{each}": number for each, number in score.components.items()}
        info |= {f"{part.name}.{key}": text for key, text in score.info.items()}
        extra |= score.extra
    spans = [replace(span, reward=weight * span.reward) for weight, score in weighted for span in score.span_rewards]
    return Score(
        reward=add_rewards([whole.reward, *(weight * score.reward for weight, score in weighted)]),
        correct=next(
            (each.correct for each in (whole, *(score for _, score in scored)) if each.correct is not None), None
        ),
        span_rewards=(*whole.span_rewards, *spans),
        components=components,
        info=info,
        extra=extra,
    )


def score_of(found: Any, what: str, function: Callable[..., Any] | None) -> Score:
    """Return what a scorer returned as a Score of finite numbers. what: names it in errors. function: the user's.

    Raises ScorerError, with the file and the line of the function.
    """
    try:
        score = to_score(found, what)
    except TypeError as error:
        raise ScorerError(f"{error}{_place(function)}") from None
    values = {"": score.reward, **{f" as the component {name}": each for name, each in score.components.items()}}
    for which, value in values.items():
        if not _is_reward(value):
            is_large = isinstance(value, NUMBERS) and isfinite(float(value))
            wanted = f"a number up to {LARGEST_REWARD:.2g}" if is_large else "a finite number"
            raise ScorerError(f"{what} returned {shown(value)}{which}, wanted {wanted}{_place(function)}")
    return score


def _is_reward(value: object) -> bool:
    # NaN fails the comparison.
    return isinstance(value, NUMBERS) and abs(float(value)) <= LARGEST_REWARD


def _place(function: Callable[..., Any] | None) -> str:
    return "" if function is None else place_of_function(function)


def rubric_of(scorer: Any) -> Rubric | None:
    """Return the rubric whose method `score` or `score_group` a scorer is; None for any other scorer."""
    owner = getattr(scorer, "__self__", None)
    return owner if isinstance(owner, Rubric) else None


# --- Functions of columns --------------------------------------------------------------------------------------------


def part_of(name: str, function: RewardFunction, weight: float) -> RewardPart:
    """Return a function of a completion, or of completions, and of columns as a part."""
    sees_all, names, takes_all = _parameters(function)

    def arguments(example: Example) -> dict[str, Any]:
        # Parameters whose columns a row lacks keep their defaults.
        columns = example.data["columns"].items()
        own = (COMPLETION, COMPLETIONS)
        return {each: value for each, value in columns if each not in own and (takes_all or each in names)}

    def score(example: Example, answer: str) -> Any:
        return function(**{COMPLETION: answer}, **arguments(example))

    def score_group(example: Example, answers: Sequence[GroupAnswer]) -> Any:
        return function(**{COMPLETIONS: [answer.text for answer in answers]}, **arguments(example))

    what = f"reward {name}"
    scorer: dict[str, Any] = {"score_group": score_group} if sees_all else {"score": score}
    return RewardPart(
        name=name,
        weight=weight,
        what=what,
        function=function,
        columns=tuple(names),
        takes_row=takes_all,
        **scorer,
    )


def _parameters(function: RewardFunction) -> tuple[bool, dict[str, bool], bool]:
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


_OF_TRL = ("prompts", "completion_ids", "trainer_state", "environments", "log_metric", "log_extra")
"""Parameters that TRL gives to a reward function beside completions and columns."""


def is_of_trl(function: RewardFunction) -> bool:
    """Return whether a reward has TRL's signature: `completions` with **kwargs, or with another argument of TRL."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return (COMPLETIONS in parameters and takes_all) or any(each in parameters for each in _OF_TRL)


def sees_group(function: RewardFunction) -> bool:
    """Return whether a reward looks at all answers to a question; TRL's get them one by one."""
    return _parameters(function)[0] and not is_of_trl(function)


def columns_of(name: str, function: RewardFunction, present: Collection[str], where: str) -> list[str]:
    """Return the columns that a reward takes. present: those of the data set `where`.

    Raises ConfigError for a parameter that is not a column, and for a function without a completion.
    """
    parameters = inspect.signature(function).parameters
    own = _OF_TRL if is_of_trl(function) else ()
    if (COMPLETION in parameters) == (COMPLETIONS in parameters):
        raise ConfigError(
            f"reward {name} takes ({', '.join(parameters)}), wanted {COMPLETION}, the answer, or {COMPLETIONS}, all "
            "answers to a question, and columns of the data set by name"
        )
    if positional := [each for each, one in parameters.items() if one.kind is one.POSITIONAL_ONLY]:
        raise ConfigError(f"reward {name} takes {positional[0]} by position only; leave out the /")
    _, names, takes_all = _parameters(function)
    for each, is_needed in names.items():
        if is_needed and each not in present and each not in own:
            raise ConfigError(f"reward {name}: {unknown_name('column', each, present)} ({where})")
    return [each for each in present if takes_all or each in names]
