"""The environment `qa/SOURCE`: ask questions from a file or a dataset, and score the answers.

SOURCE is a data file (ludic.base.data_files), a folder of Dataset.save_to_disk, or a dataset's name on the Hugging Face
Hub. A process reads it once, when it starts. Example number i depends only on the seed and the rows, so it is the same
on every worker that reads the same rows. ludic does not copy the data into the root: each worker reads its own file.
Its SHA-256 is recorded at each start, a change is logged, and the option sha256 refuses any other content. Rows that
were
passed to ludic.fit as values are in the root, at the option `stored`; SOURCE is then only a name. Raises ConfigError,
which names the source and the row.
"""

import inspect
import logging
import re
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256 as sha256_of
from math import isfinite
from typing import Any, Protocol

import pyarrow as pa

from ludic.base import EXAMPLE_IDS, ExampleIds, require
from ludic.environments import environment
from ludic.environments.environment import RUN_IN, Example, GroupAnswer, Score, Split, arguments_of
from ludic.environments.limits import TimeLimit
from ludic.environments.qa_rows import QuestionColumns, QuestionRows, QuestionSource, choose_identity
from ludic.environments.rewards import RewardPart, Rubric, rubric_of, score_of
from ludic.environments.splits import is_heldout, nth
from ludic.errors import ConfigError, ScorerError, TimeLimitError
from ludic.records import Message
from ludic.settings import (
    GROUP_SCORER,
    SCORER,
    Files,
    Kind,
    find,
    is_made_with_own,
    misfit_of_call,
    place_of_function,
    scorer_names,
    takes_settings,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """Options of `qa/SOURCE`, by their names in env_options."""

    seed: int = 0
    question: str | None = None
    """Column of the question; a dot leads into a struct. None: question, prompt or messages, or that of the program
    whose scorer is named."""
    answer: str | None = ""
    """Column of the right answer; "": answer, or that of the program whose scorer is named. None is for questions
    without one, which need a scorer of your own."""
    answer_pattern: str | None = None
    """Regular expression; its first group in the answer's column is the answer."""
    columns: Sequence[str] = ()
    """Columns that a scorer of your own gets, as they are, in example.data["columns"]."""
    system_prompt: str | None = None
    scorer: str | Sequence[str] | Mapping[str, float | tuple[str, float]] = "exact"
    """exact, numeric, math, regex, path/to/file.py:function, or trl: or verl: before it, model:PATH or pooling:URL; or
    several, as a list, or as a mapping of scorers to weights or of names of your own to pairs of scorer and weight."""
    scorer_options: Mapping[str, Mapping[str, Any]] | None = None
    """Settings of each reward model, model:PATH or pooling:URL."""
    group_scorer: str | None = None
    """path/to/file.py:function, or trl: before it, which then scores all answers to a question together."""
    run_in: str = RUN_IN[0]
    """Where the scorers run: auto, loop, thread or process."""
    tolerance: float = 0.0
    """Of the scorer numeric."""
    heldout_share: float | None = None
    """Share of held-out questions, from 0 to 1; None is a quarter, and 1 leaves none to train on."""
    heldout: str | None = None
    """Instead, a split of the dataset, or another file, that holds them."""
    split: str | None = None
    """Of a dataset, as config and revision."""
    config: str | None = None
    revision: str | None = None
    sha256: str | None = None
    """The only content that is accepted."""
    stored: str | None = None
    """Absolute path of the file with the rows, of which SOURCE is only the name; a root finds it
    (ludic.root.inputs)."""
    example_ids: ExampleIds = EXAMPLE_IDS[0]
    """What identifies an example: row is a unique column of ID_COLUMNS, else all columns; question is the question and
    the answer."""


class Questions:
    """Single-turn environment of stored questions; the reward is the scorer's result, 0 or 1 for the built-in ones.

    A question decides by its text whether it is held out, so no question is in both splits.
    """

    def __init__(self, source: str, files: Files, options: QuestionOptions) -> None:
        """Read and check the source. files: users' files to run instead of those on disk. Raises ConfigError."""
        self._seed, system = options.seed, options.system_prompt
        self._system = () if system is None else (Message(role="system", content=system),)
        self._scorers = scorers = QuestionScorers(files, options)
        self.is_pure = scorers.is_pure
        """Whether all scorers are ludic's own, which give the same score in any process."""
        self.run_in = "loop" if options.run_in == RUN_IN[0] and scorers.need_main_thread else options.run_in
        if options.group_scorer is not None:
            self.score_group = scorers.score_group
        if options.example_ids not in EXAMPLE_IDS:
            wanted = " or ".join(map(repr, EXAMPLE_IDS))
            raise ConfigError(f"example_ids is {options.example_ids!r}, wanted {wanted}")
        of_source = {name: getattr(options, name) for name in ("split", "config", "revision", "stored")}
        here = QuestionSource(name=source, **of_source)
        _check_digest(here, options.sha256)
        is_open = options.question is None and not scorers.want_rows
        chosen = QuestionColumns(
            question=here.question_column() if is_open else scorers.question,
            answer=scorers.answer,
            answer_pattern=_pattern(options.answer_pattern),
            problem_of=scorers.problem_of,
            others=_names(options.columns),
            optional=scorers.columns,
            with_row=scorers.want_rows,
            any_answer=scorers.is_foreign,
            with_ids=options.example_ids == "row",
        )
        self._rows: dict[Split, tuple[QuestionRows, Sequence[int]]] = (
            _divide(here.read(chosen), options.heldout_share)
            if options.heldout is None
            else _join(here.read(chosen), _heldout_source(here, options.heldout, options.heldout_share).read(chosen))
        )
        self.notes = _notes([*{id(rows): rows for rows, _ in self._rows.values()}.values()])
        """What a person should know of the rows, as sentences: copies, and columns that do not identify them."""
        if options.heldout_share != 1:  # who holds out every question only evaluates
            self._numbers_of("train")

    def example(self, index: int, split: Split) -> Example:
        rows, numbers = self._numbers_of(split)
        row = rows[nth(numbers, index, self._seed)]
        return Example(
            example_id=question_id(row.question, row.answer) if row.id is None else row.id,
            messages=(*self._system, *row.messages),
            data={"question": row.question, "answer": row.answer, "columns": row.columns},
            wanted=row.answer or None,
            columns=row.stored,
        )

    def score(self, example: Example, answer: str) -> Score | Awaitable[Score]:
        return self._scorers.score(example, answer)

    def _numbers_of(self, split: Split) -> tuple[QuestionRows, Sequence[int]]:
        """Return a split's source and the numbers of its rows. Raises ConfigError if there are none."""
        rows, numbers = self._rows[split]
        if not numbers:
            raise ConfigError(f"{rows.name} has {len(rows)} questions, none of them {_WHICH[split]}")
        return rows, numbers


_WHICH = {"train": "to train on; lower heldout_share", "heldout": "held out; raise heldout_share"}


def question_id(question: str, answer: str) -> str:
    """Return the identity of an example by its question, as of question_key, and its answer: 16 hexadecimal digits.

    Roots from before example_ids was in run.json have only this identity; two sides with different identities share it.
    """
    return sha256_of(f"{question}\0{answer}".encode()).hexdigest()[:16]


def _notes(sources: Sequence[QuestionRows]) -> list[str]:
    """Set the ids of the rows of one or two sources; return what a person should know of them, as sentences."""
    notes = _identify(sources)
    for rows in sources:
        if rows.unread:
            named = ", ".join(f"{name} ({number:,})" for name, number in rows.unread.items())
            notes.append(f"{rows.name}: fields of messages that are not used: {named}")
    return notes


def _identify(sources: Iterable[QuestionRows]) -> list[str]:
    """Set the ids of the rows of one or two sources; return what a person should know, as sentences."""
    named = [(rows, rows.identities) for rows in sources if rows.identities is not None]
    column, refused = choose_identity([each for _, each in named])
    notes = []
    for rows, each in named:
        rows.ids = pa.array(each.digests if column is None else each.columns[column], pa.large_string())
        rows.identities = None
        if each.num_copies:
            copies = f"{each.num_copies} of {len(rows)} rows"
            notes.append(f"{rows.name}: {copies} are copies of an earlier row, and count as the same example")
    if refused:
        by = "all columns identify an example" if column is None else f"column {column!r} identifies an example"
        notes.append(f"{by}; {'; '.join(refused)}")
    return notes


def _divide(rows: QuestionRows, share: float | None) -> dict[Split, tuple[QuestionRows, Sequence[int]]]:
    """Divide the numbers of the rows into the two splits, by the text of the questions."""
    if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
        raise ConfigError(f"heldout_share is {share!r}, wanted a number from 0 to 1")
    numbers: dict[Split, array[int]] = {"train": array("q"), "heldout": array("q")}
    for number, question in enumerate(rows.questions()):
        numbers["heldout" if is_heldout(question, share) else "train"].append(number)
    return {split: (rows, found) for split, found in numbers.items()}


def _join(train: QuestionRows, heldout: QuestionRows) -> dict[Split, tuple[QuestionRows, Sequence[int]]]:
    """Return all held-out rows, and those rows to train on whose question is not held out."""
    refused = set(heldout.questions())
    kept = array("q", (number for number, question in enumerate(train.questions()) if question not in refused))
    if len(kept) < len(train):
        logger.warning(
            "%s: %d of %d questions are not trained on, since %s holds them out",
            *(train.name, len(train) - len(kept), len(train), heldout.name),
        )
    return {"train": (train, kept), "heldout": (heldout, range(len(heldout)))}


def heldout_sha256(source: QuestionSource, options: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 of the file that the option `heldout` names; None if it is absent, or a split of a dataset."""
    heldout = options.get("heldout")
    return None if heldout is None or source.has_splits else QuestionSource(name=heldout).sha256()


def _heldout_source(here: QuestionSource, heldout: str, share: float | None) -> QuestionSource:
    """Return the source of held-out questions: another file, or another split of the same dataset."""
    if share is not None:
        raise ConfigError(f"heldout_share is {share!r} and heldout is {heldout!r}; give one of them")
    if here.has_splits:
        return replace(here, split=heldout)
    return QuestionSource(name=heldout)


def _check_digest(source: QuestionSource, wanted: str | None) -> None:
    if wanted is None:
        return
    found = source.sha256()
    if found is None:
        raise ConfigError(f"sha256 does not apply to {source.name}, a dataset on the Hub; use revision")
    if found != wanted:
        raise ConfigError(f"{source.path} has sha256 {found}, wanted {wanted}: it is another file, or was changed")


def _pattern(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"answer_pattern {pattern!r} is not a regular expression: {error}") from error


def _names(columns: Iterable[Any]) -> tuple[str, ...]:
    if isinstance(columns, str):
        raise ConfigError(f"columns is {columns!r}, wanted a list of names")
    return tuple(str(name) for name in columns)


# --- Scorers ---------------------------------------------------------------------------------------------
# Scorers of `qa/SOURCE`: exact, numeric, math (the package math-verify), regex, or a user's function, which may have
# the signature of another program (ludic/adapters/scorers.py). Several are a rubric.
#
# An answer may be any text; a useless one scores 0. The run's parser cuts the final answer out of a completion
# (--parser boxed, tag:answer); `numeric` takes the last number of a text, and `math` looks for the answer itself.

ScoreFunction = Callable[[Example, str], Any]
"""Returns the score of an answer, a Score or a number, or a coroutine that does; None leaves the answer unscored.
example.data["answer"] is the right answer."""

GroupScoreFunction = Callable[[Example, Sequence[GroupAnswer]], Any]
"""Returns the scores of all answers to a question, or a coroutine that does; see environment.GroupScorer."""


class ForeignScorer(Protocol):
    """Users' function with the signature of another program, as a scorer: `PROGRAM:path/to/file.py:function`.

    Made from path/to/file.py:function, the users' files, and the columns of question and answer. It finds all columns
    of the row in example.data["columns"].
    """

    question: str
    """Default column of the question."""
    answer: str | None
    """Default column of the right answer; None if the program has no such column."""
    function: Callable[..., Any]
    """The user's function."""

    def score(self, example: Example, answer: str) -> Any:
        """Return the score of an answer; see Scorer."""
        ...


class RewardModelScorer(Protocol):
    """A reward model as a scorer: `model:PATH_OR_ID` or `pooling:URL`, made from this name's argument and settings."""

    name: str
    """Component of the reward."""
    loads_model: bool
    """True if the process that scores loads the model."""

    def score(self, example: Example, answer: str) -> Awaitable[Score]:
        """Return the score of an answer; see Scorer."""
        ...


class ForeignGroupScorer(ForeignScorer, Protocol):
    """Foreign scorer that also scores all answers to a question in one call."""

    def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> Any:
        """Return the scores of all answers to a question; see GroupScorer."""
        ...


MATH_TIMEOUT_S = 5.0
"""Seconds for one comparison of math-verify; an answer that needs longer, such as 9**9**9**9, scores 0."""
MATH_CHARACTERS = 4000
"""Characters at the end of an answer in which math-verify looks for the result."""
_BARE_CHARACTERS = 200

_OF_LUDIC = {name for name in SCORER.built_in if ":" not in name}
_INTERRUPTED = {"math", "regex"}
"""Scorers whose code in C a time limit can interrupt in the main thread only."""

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|(?<![\w.])[-+]?\.\d+"
)


class QuestionScorers:
    """The scorers of an environment of questions; `score_group` is there only if one is named."""

    def __init__(self, files: Files, options: QuestionOptions) -> None:
        """Raises ConfigError."""
        scorer, group_scorer, tolerance = options.scorer, options.group_scorer, options.tolerance
        weights, components = _weights(scorer), _components(scorer)
        self._names = [*weights]
        _check_options(options, weights)
        models = _reward_models(weights, options.scorer_options or {}, options.run_in)
        foreign = {name: _foreign(SCORER, name) for name in weights if name not in models}
        of_group = None if group_scorer is None else _foreign(GROUP_SCORER, group_scorer)
        first = next((each for each in (*foreign.values(), of_group) if each is not None), None)
        own = weights.keys() & _OF_LUDIC
        self.is_pure = own == weights.keys() and group_scorer is None
        """True if all scorers are ludic's own, which return the same score in any process."""
        self.need_main_thread = not self.is_pure and bool(own & _INTERRUPTED)
        """True if the scorers can't move to a process: only the main thread can interrupt some, and others are not
        ludic's."""
        self.is_foreign = first is not None
        """Whether a scorer has the signature of another program."""
        self.question: str = options.question or ("question" if first is None else first.func.question)
        of_program = "answer" if first is None else first.func.answer
        self.answer: str | None = options.answer if options.answer != "" else of_program
        comparing = (name for name in foreign if name in _OF_LUDIC)
        if self.answer is None and (needing := next(comparing, None)):
            raise ConfigError(f"the scorer {needing} needs a right answer; name its column with the option answer")
        scorers: dict[str, ScoreFunction] = {
            name: make(files, self.question, self.answer).score if make else _own_scorer(name, tolerance, files)
            for name, make in foreign.items()
        }
        scorers |= {name: model.score for name, model in models.items()}
        components = {name: model.name for name, model in models.items()} | components
        rubric = Rubric(_parts(scorers, weights, components))
        self.columns = tuple(dict.fromkeys(name for part in rubric.parts for name in part.columns))
        """Columns of a row that functions of columns take by name."""
        self.want_rows = self.is_foreign or any(part.takes_row for part in rubric.parts)
        """True if a scorer needs all columns of a row."""
        self.score: Callable[[Example, str], Score | Awaitable[Score]]
        # A single scorer needs no rubric: its Score is that of the answer.
        self.score = partial(_score_alone, scorers[scorer], scorer) if isinstance(scorer, str) else rubric.score
        if group_scorer is not None:
            score_group: GroupScoreFunction = (
                find(GROUP_SCORER, group_scorer, files)
                if of_group is None
                else of_group(files, self.question, self.answer).score_group
            )
            _check_arguments(GROUP_SCORER, group_scorer, score_group, environment.GroupScorer, "score_group")
            is_part = rubric_of(score_group) is not None and any(part.score_group for part in rubric.parts)
            self.score_group = rubric.score_group if is_part else score_group

    def problem_of(self, answer: str) -> str | None:
        """Return the problem of a right answer for one of these scorers; None if there is none."""
        if "numeric" in self._names and _whole_number(answer) is None:
            return "the scorer numeric wants a number, which answer_pattern can cut out of a text"
        return _problem_of_pattern(answer) if "regex" in self._names else None


def _check_options(options: QuestionOptions, scorers: Collection[str]) -> None:
    tolerance, group_scorer = options.tolerance, options.group_scorer
    if tolerance != 0 and "numeric" not in scorers:
        named = ", ".join(scorers)
        raise ConfigError(f"tolerance is {tolerance!r}, which the scorer {named} does not take; numeric does")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise ConfigError(f"tolerance is {tolerance!r}, wanted a number of at least 0")
    if group_scorer is not None and not isinstance(group_scorer, str):
        raise ConfigError(f"group_scorer is {group_scorer!r}, wanted path/to/file.py:function")


def _check_arguments(kind: Kind, name: str, function: Callable[..., Any], protocol: type, method: str) -> None:
    """Raise ConfigError if a scorer that is not ludic's takes other arguments than that method of the protocol."""
    if name not in kind.built_in and (problem := misfit_of_call(function, arguments_of(protocol, method))):
        raise ConfigError(f"{kind.role} {name} {problem}")


def _own_scorer(name: str, tolerance: float, files: Files) -> ScoreFunction:
    """Return a scorer of ludic, of a package or of the user by its name. Raises ConfigError."""
    score: Callable[..., Any] = find(SCORER, name, files)
    _check_arguments(SCORER, name, score, environment.SingleTurnEnvironment, "score")
    if name == "math":
        require("math_verify", "math", "scorer math")
        _quiet_math_verify()
    return partial(score, tolerance=tolerance) if name == "numeric" else score


def _reward_models(
    names: Collection[str], settings: Mapping[str, Mapping[str, Any]], run_in: str
) -> dict[str, RewardModelScorer]:
    """Return the reward models among scorers, by name. Raises ConfigError, ModelError."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"scorer_options is {settings!r}, wanted settings by the names of scorers")
    found: dict[str, RewardModelScorer] = {}
    for name in names:
        if takes_settings(SCORER, name):
            found[name] = find(SCORER, name)(settings.get(name, {}))
            if found[name].loads_model and run_in == "process":
                raise ConfigError(
                    f"run_in is 'process', and each process would load the scorer {name}; leave it out: the "
                    "model runs in a thread beside"
                )
    for name in settings:
        if name not in found:
            raise ConfigError(f"scorer_options has {name!r}, which is not a reward model among {', '.join(names)}")
    return found


def _foreign(kind: Kind, name: str) -> Any:
    """Return the factory of a ForeignScorer, a partial of its class; None if the name is not that of one."""
    return find(kind, name) if is_made_with_own(kind, name) else None


def _weights(option: Any) -> dict[str, float]:
    """Return the weights of the scorers in the option `scorer`, by name. Raises ConfigError."""
    names = scorer_names(option)
    weights = dict.fromkeys(names, 1.0)
    if isinstance(option, Mapping):
        given = [each[1] if _is_pair(each) else each for each in option.values()]
        weights = dict(zip(names, given, strict=True))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"scorer {twice} is named twice; give it once, with the sum of the weights")
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"scorer is {option!r}, wanted a name, a list of names, or names with their weights, such as "
            '{"rewards.py:accuracy": 1.0, "rewards.py:length": 0.1}'
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
            raise ConfigError(f"the weight of scorer {name} is {weight!r}, wanted a number; 0 only measures")
    return weights


def _components(option: Any) -> dict[str, str]:
    """Return the components of scorers whose names the option gives, by scorer."""
    pairs = option.items() if isinstance(option, Mapping) else ()
    return {each[0]: name for name, each in pairs if _is_pair(each)}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _parts(
    scorers: Mapping[str, ScoreFunction], weights: Mapping[str, float], named: Mapping[str, str]
) -> Iterator[RewardPart]:
    """Yield scorers as parts of a rubric; one that is a rubric itself, as of ludic.fit, by its parts.

    named: components of scorers that name them themselves.
    """
    for name, weight in weights.items():
        score = scorers[name]
        rubric = rubric_of(score)
        if rubric is None:
            yield RewardPart(
                name=named.get(name) or _short_name(name),
                weight=weight,
                what=f"scorer {name}",
                score=score,
                function=_function_of(score),
            )
        else:
            yield from (replace(part, weight=weight * part.weight) for part in rubric.parts)


def _short_name(name: str) -> str:
    """Return the name of a scorer as a component of the reward: accuracy of trl:rewards.py:accuracy."""
    return name.rpartition(":")[2]


def _score_alone(scorer: ScoreFunction, name: str, example: Example, answer: str) -> Score | Awaitable[Score]:
    found = scorer(example, answer)
    function = _function_of(scorer)
    return _awaited(found, name, function) if inspect.isawaitable(found) else _one_score(found, name, function)


async def _awaited(found: Awaitable[Any], name: str, function: Callable[..., Any]) -> Score:
    return _one_score(await found, name, function)


def _one_score(found: Any, name: str, function: Callable[..., Any]) -> Score:
    if found is None:
        raise ScorerError(
            f"scorer {name} returned None, so the answer is not scored; wanted a number or a Score"
            f"{place_of_function(function)}"
        )
    return score_of(found, f"scorer {name}", function)


def _function_of(scorer: ScoreFunction) -> Callable[..., Any]:
    """Return the user's function behind a scorer, which is a method of a ForeignScorer if it has another signature."""
    function: Callable[..., Any] = getattr(getattr(scorer, "__self__", None), "function", scorer)
    return function


def _problem_of_pattern(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"the scorer regex wants a regular expression: {error}"
    return None


def score_exact(example: Example, answer: str) -> Score:
    """Reward 1 for the right answer, blanks around it aside; else 0."""
    return _correct(answer.strip() == example.data["answer"].strip())


def score_numeric(example: Example, answer: str, tolerance: float = 0.0) -> Score:
    """Reward 1 if the last number of the answer is right.

    tolerance: largest difference, as a share of the right number, or absolute if that is between -1 and 1.
    """
    right = _whole_number(example.data["answer"])
    assert right is not None, "problem_of was not asked"
    numbers = _NUMBER.findall(answer)
    found = _to_float(numbers[-1]) if numbers else None
    is_right = found is not None and abs(found - right) <= tolerance * max(1.0, abs(right))
    return _correct(is_right or found == right)


def score_regex(example: Example, answer: str) -> Score:
    """Reward 1 if the right answer, a regular expression, matches anywhere in the answer; else 0."""
    return _correct(re.search(example.data["answer"], answer) is not None)


def score_math(example: Example, answer: str) -> Score:
    """Reward 1 if math-verify finds the answer equal to the right one, such as 1/2 to 0.5; else 0.

    Raises ValueError if math-verify can't read the right answer.
    """
    gold = _gold(example.data["answer"])
    if not gold:
        raise ValueError(f"math-verify can't read the right answer {example.data['answer'][:80]!r}")
    limit = TimeLimit(timeout_s=MATH_TIMEOUT_S)
    try:
        return _correct(limit.call("math-verify", partial(_is_equal, gold, answer[-MATH_CHARACTERS:])))
    except TimeLimitError:
        return Score(
            reward=0.0,
            components={"correct": 0.0},
            correct=False,
            info={"scorer_error": f"math-verify did not end within {MATH_TIMEOUT_S:g} s"},
        )


@lru_cache(maxsize=256)
def _gold(answer: str) -> tuple[Any, ...]:
    has_latex = "$" in answer or "\\boxed" in answer
    limit = TimeLimit(timeout_s=MATH_TIMEOUT_S)
    return limit.call("math-verify", lambda: tuple(_parse(answer if has_latex else f"\\boxed{{{answer}}}")))


def _is_equal(gold: tuple[Any, ...], answer: str) -> bool:
    """Compare with the result that math-verify finds in the text, and with the text itself if it is short."""
    from math_verify import verify

    texts = [answer]
    if len(answer) <= _BARE_CHARACTERS and "\\boxed" not in answer:
        texts.append(f"\\boxed{{{answer.strip().strip('$')}}}")
    # A time limit of math-verify would cancel ludic's, which uses the same signal.
    return any(verify(list(gold), _parse(text), timeout_seconds=None) for text in texts)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def _quiet_math_verify() -> None:
    """Drop math-verify's warning that its time limits are off, since ludic's are on."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Timeout is disabled")

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(is_other)


def _correct(is_right: bool) -> Score:
    return Score(reward=float(is_right), components={"correct": float(is_right)}, correct=is_right)


def _whole_number(text: str) -> float | None:
    """Return the whole number in a text; None if the text is anything else."""
    stripped = text.strip().removeprefix("$").removesuffix("%").strip()
    return _to_float(stripped) if _NUMBER.fullmatch(stripped) else None


def _to_float(number: str) -> float | None:
    value = float(number.replace(",", ""))
    return value if isfinite(value) else None
