"""Questions and answers from a file or a dataset, `qa/SOURCE`.

SOURCE is a data file (ludic.data_files), a folder of Dataset.save_to_disk, or a dataset's name on the Hugging Face Hub.
A process reads it once, when it starts. Example number i depends only on the seed and the rows, so it is the same on
every worker that reads the same rows. ludic does not copy the data into the root: each worker reads its own file. Its
SHA-256 is recorded at each start, a change is logged, and the option sha256 refuses any other content. Rows that
ludic.fit was given as values are in the root, by the option `stored`; SOURCE is then a name.
"""

import inspect
import logging
import re
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import sha256 as sha256_of
from math import isfinite
from typing import Any, Protocol

import pyarrow as pa

from ludic.code.kinds import GROUP_SCORER, SCORER, Kind, find, is_made_with_own, scorer_names, takes_settings
from ludic.code.run import misfit_of_call, place_of_function
from ludic.defaults import EXAMPLE_IDS, ExampleIds
from ludic.environments import environment
from ludic.environments.environment import RUN_IN, Example, GroupAnswer, Score, Split, arguments_of
from ludic.environments.limits import TimeLimit
from ludic.environments.qa_rows import Columns, Rows, Source, choose_identity
from ludic.environments.rewards import Part, Rubric, rubric_of, score_of
from ludic.environments.splits import is_heldout, nth
from ludic.errors import ConfigError, ScorerError, TimeLimitError
from ludic.installed import require
from ludic.records import Message
from ludic.user_files import Files

logger = logging.getLogger(__name__)


class Questions:
    """Single-turn environment of stored questions; reward = what the scorer returns, 0 or 1 for the built-in ones.

    A question decides by its text whether it is held out, so no question is in both splits.
    """

    def __init__(
        self,
        source: str,
        files: Files,
        /,
        *,
        seed: int = 0,
        question: str | None = None,
        answer: str | None = "",
        answer_pattern: str | None = None,
        columns: Sequence[str] = (),
        system_prompt: str | None = None,
        scorer: str | Sequence[str] | Mapping[str, float | tuple[str, float]] = "exact",
        scorer_options: Mapping[str, Mapping[str, Any]] | None = None,
        group_scorer: str | None = None,
        run_in: str = RUN_IN[0],
        tolerance: float = 0.0,
        heldout_share: float | None = None,
        heldout: str | None = None,
        split: str | None = None,
        config: str | None = None,
        revision: str | None = None,
        sha256: str | None = None,
        stored: str | None = None,
        example_ids: ExampleIds = EXAMPLE_IDS[0],
    ) -> None:
        """Read and check the source.

        files: users' files to run instead of those on disk. question, answer: columns; a dot leads into a struct.
        Unless given, the question is in question, prompt or messages and the answer in answer, or they are those of
        the program whose scorer is named. An answer of None is for questions without one, which need a scorer of your
        own. answer_pattern: regular expression; its first group in the answer's column is the answer. columns: names
        of columns that a scorer of your own gets, as they are, in example.data["columns"]. scorer: exact, numeric,
        math, regex, path/to/file.py:function, or trl: or verl: before it, model:PATH or pooling:URL; or several, as a
        list, or as a mapping of scorers to weights or of names of your own to pairs of scorer and weight.
        scorer_options: settings of each reward model, model:PATH or pooling:URL. group_scorer:
        path/to/file.py:function, or trl: before it, which then scores all answers to a question together. run_in:
        where the scorers run: auto, loop, thread or process. tolerance: of numeric. heldout_share: share of held-out
        questions, from 0 to 1; None is a quarter, and 1 leaves none to train on. heldout: instead, a split of the
        dataset, or another file, that holds them. split, config, revision: of a dataset. sha256: the only content that
        is accepted. stored: absolute path of the file with the rows, of which the source is only the name; a root
        finds it (ludic.store.inputs). example_ids: what identifies an example: row is a unique column of ID_COLUMNS,
        else all columns; question is the question and the answer. Raises ConfigError.
        """
        self._seed = seed
        self._system = () if system_prompt is None else (Message(role="system", content=system_prompt),)
        self._scorers = QuestionScorers(
            files,
            scorer=scorer,
            scorer_options=scorer_options,
            group_scorer=group_scorer,
            tolerance=tolerance,
            question=question,
            answer=answer,
            run_in=run_in,
        )
        self.is_pure = self._scorers.is_pure
        """Whether all scorers are ludic's own, which give the same score in any process."""
        self.run_in = "loop" if run_in == RUN_IN[0] and self._scorers.need_main_thread else run_in
        if group_scorer is not None:
            self.score_group = self._scorers.score_group
        if example_ids not in EXAMPLE_IDS:
            raise ConfigError(f"example_ids is {example_ids!r}, wanted {' or '.join(map(repr, EXAMPLE_IDS))}")
        here = Source(name=source, split=split, config=config, revision=revision, stored=stored)
        _check_digest(here, sha256)
        is_open = question is None and not self._scorers.want_rows
        chosen = Columns(
            question=here.question_column() if is_open else self._scorers.question,
            answer=self._scorers.answer,
            answer_pattern=_pattern(answer_pattern),
            problem_of=self._scorers.problem_of,
            others=_names(columns),
            optional=self._scorers.columns,
            with_row=self._scorers.want_rows,
            any_answer=self._scorers.is_foreign,
            with_ids=example_ids == "row",
        )
        self._rows: dict[Split, tuple[Rows, Sequence[int]]] = (
            _divide(here.read(chosen), heldout_share)
            if heldout is None
            else _join(here.read(chosen), _heldout_source(here, heldout, heldout_share).read(chosen))
        )
        self.notes = _notes([*{id(rows): rows for rows, _ in self._rows.values()}.values()])
        """What a person should know of the rows, as sentences: copies, and columns that do not identify them."""
        if heldout_share != 1:  # who holds out every question only evaluates
            self._numbers_of("train")

    def example(self, index: int, split: Split) -> Example:
        rows, numbers = self._numbers_of(split)
        row = rows[nth(numbers, index, self._seed)]
        return Example(
            example_id=question_id(row.question, row.answer) if row.id is None else row.id,
            messages=(*self._system, *row.messages),
            data={"question": row.question, "answer": row.answer, "columns": row.columns},
            wanted=row.answer or None,
        )

    def score(self, example: Example, answer: str) -> Score | Awaitable[Score]:
        return self._scorers.score(example, answer)

    def _numbers_of(self, split: Split) -> tuple[Rows, Sequence[int]]:
        """Return a split's source and the numbers of its rows. Raises ConfigError if there are none."""
        rows, numbers = self._rows[split]
        if not numbers:
            raise ConfigError(f"{rows.name} has {len(rows)} questions, none of them {_WHICH[split]}")
        return rows, numbers


_WHICH = {"train": "to train on; lower heldout_share", "heldout": "held out; raise heldout_share"}


def question_id(question: str, answer: str) -> str:
    """Return the identity of an example by its question, as of question_key, and its answer: 16 hexadecimal digits.

    Roots of before example_ids was in run.json have no other, and two sides with other identities share this one.
    """
    return sha256_of(f"{question}\0{answer}".encode()).hexdigest()[:16]


def _notes(sources: Sequence[Rows]) -> list[str]:
    """Set the ids of the rows of one or two sources; return what a person should know of them, as sentences."""
    notes = _identify(sources)
    for rows in sources:
        if rows.unread:
            named = ", ".join(f"{name} ({number:,})" for name, number in rows.unread.items())
            notes.append(f"{rows.name}: fields of messages that are not used: {named}")
    return notes


def _identify(sources: Iterable[Rows]) -> list[str]:
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


def _divide(rows: Rows, share: float | None) -> dict[Split, tuple[Rows, Sequence[int]]]:
    """Divide the numbers of the rows into the two splits, by the text of the questions."""
    if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
        raise ConfigError(f"heldout_share is {share!r}, wanted a number from 0 to 1")
    numbers: dict[Split, array[int]] = {"train": array("q"), "heldout": array("q")}
    for number, question in enumerate(rows.questions()):
        numbers["heldout" if is_heldout(question, share) else "train"].append(number)
    return {split: (rows, found) for split, found in numbers.items()}


def _join(train: Rows, heldout: Rows) -> dict[Split, tuple[Rows, Sequence[int]]]:
    """Return all held-out rows, and those rows to train on whose question is not held out."""
    refused = set(heldout.questions())
    kept = array("q", (number for number, question in enumerate(train.questions()) if question not in refused))
    if len(kept) < len(train):
        logger.warning(
            "%s: %d of %d questions are not trained on, since %s holds them out",
            *(train.name, len(train) - len(kept), len(train), heldout.name),
        )
    return {"train": (train, kept), "heldout": (heldout, range(len(heldout)))}


def heldout_sha256(source: Source, options: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 of the file that the option `heldout` names; None if it is absent, or a split of a dataset."""
    heldout = options.get("heldout")
    return None if heldout is None or source.has_splits else Source(name=heldout).sha256()


def _heldout_source(here: Source, heldout: str, share: float | None) -> Source:
    """Return the source of held-out questions: another file, or another split of the same dataset."""
    if share is not None:
        raise ConfigError(f"heldout_share is {share!r} and heldout is {heldout!r}; give one of them")
    if here.has_splits:
        return replace(here, split=heldout)
    return Source(name=heldout)


def _check_digest(source: Source, wanted: str | None) -> None:
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

Scorer = Callable[[Example, str], Any]
"""Returns the score of an answer, a Score or a number, or a coroutine that does; None leaves the answer unscored.
example.data["answer"] is the right answer."""

GroupScorer = Callable[[Example, Sequence[GroupAnswer]], Any]
"""Returns the scores of all answers to a question, or a coroutine that does; see environment.GroupScorer."""


class ForeignScorer(Protocol):
    """Users' function with the signature of another program, as a scorer: `PROGRAM:path/to/file.py:function`.

    Made from path/to/file.py:function, the users' files, and the columns of question and answer. It finds all columns
    of the row in example.data["columns"].
    """

    question: str
    """Column of the question unless the option names another."""
    answer: str | None
    """Column of the right answer unless the option names another; None if the program has no such column."""
    function: Callable[..., Any]
    """The user's function."""

    def score(self, example: Example, answer: str) -> Any:
        """As Scorer."""
        ...


class RewardModelScorer(Protocol):
    """A reward model as a scorer: `model:PATH_OR_ID` or `pooling:URL`, made from this name's argument and settings."""

    name: str
    """Component of the reward."""
    loads_model: bool
    """Whether the process that scores loads the model."""

    def score(self, example: Example, answer: str) -> Awaitable[Score]:
        """As Scorer."""
        ...


class ForeignGroupScorer(ForeignScorer, Protocol):
    """One that also scores all answers to a question in one call."""

    def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> Any:
        """As GroupScorer."""
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

    def __init__(
        self,
        files: Files,
        /,
        *,
        scorer: str | Sequence[str] | Mapping[str, float | tuple[str, float]] = "exact",
        scorer_options: Mapping[str, Mapping[str, Any]] | None = None,
        group_scorer: str | None = None,
        tolerance: float = 0.0,
        question: str | None = None,
        answer: str | None = "",
        run_in: str = RUN_IN[0],
        **others: Any,
    ) -> None:
        """The options of Questions; others are not for scorers. Raises ConfigError."""
        weights, components = _weights(scorer), _components(scorer)
        self._names = [*weights]
        if tolerance != 0 and "numeric" not in weights:
            named = ", ".join(weights)
            raise ConfigError(f"tolerance is {tolerance!r}, which the scorer {named} does not take; numeric does")
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
            raise ConfigError(f"tolerance is {tolerance!r}, wanted a number of at least 0")
        if group_scorer is not None and not isinstance(group_scorer, str):
            raise ConfigError(f"group_scorer is {group_scorer!r}, wanted path/to/file.py:function")
        models = _reward_models(weights, scorer_options or {}, run_in)
        foreign = {name: _foreign(SCORER, name) for name in weights if name not in models}
        of_group = None if group_scorer is None else _foreign(GROUP_SCORER, group_scorer)
        first = next((each for each in (*foreign.values(), of_group) if each is not None), None)
        own = weights.keys() & _OF_LUDIC
        self.is_pure = own == weights.keys() and group_scorer is None
        """Whether all scorers are ludic's own, which give the same score in any process."""
        self.need_main_thread = not self.is_pure and bool(own & _INTERRUPTED)
        """Whether they can't move: only the main thread can interrupt some of them, and others are not ludic's."""
        self.is_foreign = first is not None
        """Whether a scorer has the signature of another program."""
        self.question: str = question or ("question" if first is None else first.func.question)
        self.answer: str | None = answer if answer != "" else "answer" if first is None else first.func.answer
        comparing = (name for name in foreign if name in _OF_LUDIC)
        if self.answer is None and (needing := next(comparing, None)):
            raise ConfigError(f"the scorer {needing} needs a right answer; name its column with the option answer")
        scorers: dict[str, Scorer] = {
            name: make(files, self.question, self.answer).score if make else _own_scorer(name, tolerance, files)
            for name, make in foreign.items()
        }
        scorers |= {name: model.score for name, model in models.items()}
        components = {name: model.name for name, model in models.items()} | components
        rubric = Rubric(_parts(scorers, weights, components))
        self.columns = tuple(dict.fromkeys(name for part in rubric.parts for name in part.columns))
        """Columns of a row that functions of columns take by name."""
        self.want_rows = self.is_foreign or any(part.takes_row for part in rubric.parts)
        """Whether a scorer needs all columns of a row."""
        self.score: Callable[[Example, str], Score | Awaitable[Score]]
        # A scorer named alone is no rubric: its Score is that of the answer.
        self.score = partial(_score_alone, scorers[scorer], scorer) if isinstance(scorer, str) else rubric.score
        if group_scorer is not None:
            score_group: GroupScorer = (
                find(GROUP_SCORER, group_scorer, files)
                if of_group is None
                else of_group(files, self.question, self.answer).score_group
            )
            _check_arguments(GROUP_SCORER, group_scorer, score_group, environment.GroupScorer, "score_group")
            is_part = rubric_of(score_group) is not None and any(part.score_group for part in rubric.parts)
            self.score_group = rubric.score_group if is_part else score_group

    def problem_of(self, answer: str) -> str | None:
        """Return what is wrong with a right answer for one of these scorers; None if nothing is."""
        if "numeric" in self._names and _whole_number(answer) is None:
            return "the scorer numeric wants a number, which answer_pattern can cut out of a text"
        return _problem_of_pattern(answer) if "regex" in self._names else None


def _check_arguments(kind: Kind, name: str, function: Callable[..., Any], protocol: type, method: str) -> None:
    """Raise ConfigError if a scorer that is not ludic's takes other arguments than that method of the protocol."""
    if name not in kind.built_in and (problem := misfit_of_call(function, arguments_of(protocol, method))):
        raise ConfigError(f"{kind.role} {name} {problem}")


def _own_scorer(name: str, tolerance: float, files: Files) -> Scorer:
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
            raise ConfigError(f"scorer_options has {name!r}, which is no reward model among {', '.join(names)}")
    return found


def _foreign(kind: Kind, name: str) -> Any:
    """Return the maker of a ForeignScorer, a partial of its class; None if the name is of no such scorer."""
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


def _parts(scorers: Mapping[str, Scorer], weights: Mapping[str, float], named: Mapping[str, str]) -> Iterator[Part]:
    """Yield scorers as parts of a rubric; one that is a rubric itself, as of ludic.fit, by its parts.

    named: components of scorers that name them themselves.
    """
    for name, weight in weights.items():
        score = scorers[name]
        rubric = rubric_of(score)
        if rubric is None:
            yield Part(
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


def _score_alone(scorer: Scorer, name: str, example: Example, answer: str) -> Score | Awaitable[Score]:
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


def _function_of(scorer: Scorer) -> Callable[..., Any]:
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
    # A time limit of math-verify's own would end the one of ludic, which uses the same signal.
    return any(verify(list(gold), _parse(text), timeout_seconds=None) for text in texts)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def _quiet_math_verify() -> None:
    """Drop the warning of math-verify that its time limits are off; ludic's are on."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Timeout is disabled")

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(is_other)


def _correct(is_right: bool) -> Score:
    return Score(reward=float(is_right), components={"correct": float(is_right)}, correct=is_right)


def _whole_number(text: str) -> float | None:
    """Return the number that a text is; None if it is anything else."""
    stripped = text.strip().removeprefix("$").removesuffix("%").strip()
    return _to_float(stripped) if _NUMBER.fullmatch(stripped) else None


def _to_float(number: str) -> float | None:
    value = float(number.replace(",", ""))
    return value if isfinite(value) else None
