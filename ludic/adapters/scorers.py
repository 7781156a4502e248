"""Reward functions of TRL and verl as scorers of questions: `trl:path/to/file.py:function`, `verl:...`.

A function is called as its program calls it (TRL 1.16, GRPOTrainer._calculate_rewards; verl 0.9, NaiveRewardManager),
with every column of the row by its name. It may be a coroutine. Two things can't be given, since environments know
nothing of tokens and training: the ids of the tokens, and the state of the trainer; a function that needs them is
refused when the run is created.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from math import isnan
from typing import Any, SupportsFloat

from ludic.environments import Example, GroupAnswer, RewardPart, Score, value_in
from ludic.errors import ConfigError, ScorerError
from ludic.settings import SCORER, Files, find_own, misfit_of_call, own_code_of, place_of_function
from ludic.settings.kinds import unknown

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass to reward functions."""
_ABSENT = {
    "completion_ids": "environments see no tokens; ludic punishes length by --advantage overlong, or count characters",
    "trainer_state": "workers know no step of the trainer; leave it out",
    "environments": "this is for environments of TRL; write an environment of several steps (docs/agents.md)",
}
"""Arguments of TRL that ludic does not have, and what to do."""


class Trl:
    """A reward function of TRL: `function(prompts, completions, **columns)` returns a number or None for each.

    Prompts are texts or lists of messages, as the column of questions has them, and completions are like them.
    `log_metric` adds a component, `log_extra` a text. None, or NaN, leaves an answer unscored.
    """

    question = "prompt"
    answer = None

    def __init__(self, name: str, files: Files, question: str, answer: str | None) -> None:
        """name: path/to/file.py:function. question: column. Raises ConfigError."""
        self._take(f"trl:{name}", _find(f"trl:{name}", name, files), question)

    @classmethod
    def part(cls, name: str, function: Callable[..., Any], weight: float, question: str) -> RewardPart:
        """Return a function as a reward of ludic.fit. question: column. Raises ConfigError."""
        scorer = cls.__new__(cls)
        scorer._take(name, function, question)
        what = f"reward {name}"
        return RewardPart(name=name, weight=weight, what=what, score=scorer.score, function=function, takes_row=True)

    def _take(self, name: str, function: Callable[..., Any], question: str) -> None:
        self._name, self.function, self._question = name, function, question
        parameters = inspect.signature(self.function).parameters.values()
        self._takes = {each.name for each in parameters}
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        for each in parameters:
            if each.name in _ABSENT and each.default is each.empty:
                raise ConfigError(f"scorer {self._name} wants {each.name}: {_ABSENT[each.name]}")

    def score(self, example: Example, answer: str) -> Score | Awaitable[Score | None] | None:
        """Return the score of one answer, None if it is not scored. Raises ScorerError."""
        found, notes = self._call(example, [answer])
        return self._one_later(found, notes) if inspect.isawaitable(found) else self._scores(found, notes, 1)[0]

    def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> list[Score] | Awaitable[list[Score]]:
        """Return the scores of all answers to a question, by one call. Raises ScorerError, also for None."""
        found, notes = self._call(example, [each.text for each in answers])
        if inspect.isawaitable(found):
            return self._all_later(found, notes, len(answers))
        return self._all(found, notes, len(answers))

    def _call(self, example: Example, texts: Sequence[str]) -> "tuple[Any, _Notes]":
        row = deepcopy(example.data["columns"])
        prompt = value_in(row, self._question, f"example {example.example_id}")
        is_chat = isinstance(prompt, list)
        notes = _Notes()
        arguments: dict[str, Any] = {
            name: [value] * len(texts) for name, value in row.items() if name not in _NOT_COLUMNS
        }
        arguments |= {
            "prompts": [prompt] * len(texts),
            "completions": [[{"role": "assistant", "content": text}] if is_chat else text for text in texts],
            "log_metric": notes.log_metric,
            "log_extra": notes.log_extra,
        }
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._takes}
        return self.function(**arguments), notes

    async def _one_later(self, found: Awaitable[Any], notes: "_Notes") -> Score | None:
        return self._scores(await found, notes, 1)[0]

    async def _all_later(self, found: Awaitable[Any], notes: "_Notes", num_answers: int) -> list[Score]:
        return self._all(await found, notes, num_answers)

    def _all(self, found: Any, notes: "_Notes", num_answers: int) -> list[Score]:
        scores = [score for score in self._scores(found, notes, num_answers) if score is not None]
        if len(scores) < num_answers:
            raise ScorerError(
                f"group_scorer {self._name} returned None for {num_answers - len(scores)} of {num_answers} answers, "
                "wanted a number for each"
            )
        return scores

    def _scores(self, found: Any, notes: "_Notes", num_answers: int) -> list[Score | None]:
        try:
            rewards = [_number(each) for each in found]
        except TypeError:
            raise ScorerError(
                f"scorer {self._name} returned {found!r}, wanted a list with a number or None for each completion"
                f"{place_of_function(self.function)}"
            ) from None
        if len(rewards) != num_answers:
            raise ScorerError(
                f"scorer {self._name} returned {len(rewards)} rewards, wanted one for each of {num_answers} completions"
                f"{place_of_function(self.function)}"
            )
        return [
            None if reward is None else Score(reward=reward, components=notes.metrics, info=notes.texts_of(index))
            for index, reward in enumerate(rewards)
        ]


class _Notes:
    """What a function of TRL logs beside its rewards."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._columns: dict[str, Sequence[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self._columns[column] = values

    def texts_of(self, index: int) -> dict[str, str]:
        return {name: str(values[index]) for name, values in self._columns.items() if index < len(values)}


class Verl:
    """A `compute_score(data_source, solution_str, ground_truth, extra_info)` of verl.

    It returns a number, or a mapping with `score`: its other numbers are components of the reward, its texts are info.
    """

    question = "prompt"
    answer = "reward_model.ground_truth"

    def __init__(self, name: str, files: Files, question: str, answer: str | None) -> None:
        """name: path/to/file.py:function. answer: column of the ground truth. Raises ConfigError."""
        self._name, self._truth = f"verl:{name}", answer or self.answer
        self.function = _find(self._name, name, files)
        names = ["data_source", "solution_str", "ground_truth", "extra_info"]
        if problem := misfit_of_call(self.function, names, by_name=True):
            raise ConfigError(f"scorer {self._name} {problem}")

    def score(self, example: Example, answer: str) -> Score | Awaitable[Score]:
        """Return the score of one answer. Raises ScorerError."""
        row = deepcopy(example.data["columns"])
        found = self.function(
            data_source=row.get("data_source"),
            solution_str=answer,
            ground_truth=value_in(row, self._truth, f"example {example.example_id}"),
            # verl adds these two for a single turn: a question and an answer.
            extra_info={**(row.get("extra_info") or {}), "num_turns": 2, "rollout_reward_scores": {}},
        )
        return self._later(found) if inspect.isawaitable(found) else self._score(found)

    async def _later(self, found: Awaitable[Any]) -> Score:
        return self._score(await found)

    def _score(self, found: Any) -> Score:
        values = found if isinstance(found, Mapping) else {"score": found}
        score = values.get("score")
        if not isinstance(score, SupportsFloat):
            raise ScorerError(
                f"scorer {self._name} returned {found!r}, wanted a number, or a dict with a number 'score'"
            )
        others = {str(name): value for name, value in values.items() if name != "score"}
        numbers = {name: float(value) for name, value in others.items() if isinstance(value, SupportsFloat)}
        texts = {name: str(value) for name, value in others.items() if name not in numbers}
        return Score(reward=float(score), components=numbers, info=texts)


def _find(setting: str, name: str, files: Files) -> Callable[..., Any]:
    if own_code_of(SCORER, name) != name:
        raise unknown(SCORER, setting)
    function: Callable[..., Any] = find_own(SCORER, name, files).value
    return function


def _number(value: Any) -> float | None:
    """Return a reward, None if it is none. Raises TypeError for what is no number."""
    if value is None:
        return None
    if not isinstance(value, SupportsFloat):
        raise TypeError
    number = float(value)
    return None if isnan(number) else number
