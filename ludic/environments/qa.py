"""Questions and answers from a file or a dataset, `qa/SOURCE`.

SOURCE is a file *.jsonl or *.parquet, a folder of Dataset.save_to_disk, or a dataset's name on the Hugging Face Hub.
A process reads it once, when it starts. Example number i depends only on the seed and the rows, so it is the same on
every worker that reads the same rows. ludic does not copy the data into the root: each worker reads its own file. Its
SHA-256 is recorded at each start, a change is logged, and the option sha256 refuses any other content.
"""

import logging
import re
from array import array
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256 as sha256_of
from typing import Any

from ludic.code.files import Files
from ludic.environments.environment import RUN_IN, Example, Score, Split
from ludic.environments.qa_rows import Columns, Row, Rows, Source
from ludic.environments.qa_scorers import QuestionScorers, problem_of
from ludic.environments.splits import is_heldout, nth
from ludic.errors import ConfigError
from ludic.records import Message

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
        question: str = "question",
        answer: str = "answer",
        answer_pattern: str | None = None,
        columns: Sequence[str] = (),
        system_prompt: str | None = None,
        scorer: str = "exact",
        group_scorer: str | None = None,
        run_in: str = RUN_IN[0],
        tolerance: float = 0.0,
        heldout_share: float | None = None,
        heldout: str | None = None,
        split: str | None = None,
        config: str | None = None,
        revision: str | None = None,
        sha256: str | None = None,
    ) -> None:
        """Read and check the source.

        files: users' files to run instead of those on disk. question, answer: columns; a dot leads into a struct.
        answer_pattern: regular expression; its first group in the answer's column is the answer. columns: further
        columns, for a scorer of your own. scorer: exact, numeric, math, regex, or path/to/file.py:function.
        group_scorer: path/to/file.py:function, which then scores all answers to a question together. run_in: where the
        scorers run: loop, thread or process. tolerance: of numeric. heldout_share: share of held-out questions, from 0
        to 1; None is a quarter, and 1 leaves none to train on. heldout: instead, a split of the dataset, or another
        file, that holds them. split, config, revision: of a dataset. sha256: the only content that is accepted. Raises
        ConfigError.
        """
        self._seed = seed
        self._system = () if system_prompt is None else (Message(role="system", content=system_prompt),)
        self.run_in = run_in
        self._scorers = QuestionScorers(files, scorer=scorer, group_scorer=group_scorer, tolerance=tolerance)
        if group_scorer is not None:
            self.score_group = self._scorers.score_group
        chosen = Columns(
            question=question,
            answer=answer,
            answer_pattern=_pattern(answer_pattern),
            problem_of=partial(problem_of, scorer),
            others=_names(columns),
        )
        here = Source(name=source, split=split, config=config, revision=revision)
        _check_digest(here, sha256)
        self._rows: dict[Split, tuple[Rows, Sequence[int]]] = (
            _divide(here.read(chosen), heldout_share)
            if heldout is None
            else _join(here.read(chosen), _heldout_source(here, heldout, heldout_share).read(chosen))
        )
        if heldout_share != 1:  # who holds out every question only evaluates
            self._numbers_of("train")

    def example(self, index: int, split: Split) -> Example:
        rows, numbers = self._numbers_of(split)
        row = rows[nth(numbers, index, self._seed)]
        return Example(
            example_id=_id(row),
            messages=(*self._system, *row.messages),
            data={**row.others, "question": row.question, "answer": row.answer},
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


def _id(row: Row) -> str:
    # Two rows with the same question and other answers are two examples.
    return sha256_of(f"{row.question}\0{row.answer}".encode()).hexdigest()[:16]


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


def heldout_sha256(source: str, options: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 of the file that the option `heldout` names; None if it is absent, or a split of a dataset."""
    heldout = options.get("heldout")
    return None if heldout is None or Source(name=source).has_splits else Source(name=heldout).sha256()


def _heldout_source(here: Source, heldout: str, share: float | None) -> Source:
    """Return the source of held-out questions: another file, or another split of the same dataset."""
    if share is not None:
        raise ConfigError(f"heldout_share is {share!r} and heldout is {heldout!r}; give one of them")
    if here.has_splits:
        return Source(name=here.name, split=heldout, config=here.config, revision=here.revision)
    return Source(name=heldout)


def _check_digest(source: Source, wanted: str | None) -> None:
    if wanted is None:
        return
    found = source.sha256()
    if found is None:
        raise ConfigError(f"sha256 does not apply to {source.name}, a dataset on the Hub; use revision")
    if found != wanted:
        raise ConfigError(f"{source.name} has sha256 {found}, wanted {wanted}: it is another file, or was changed")


def _pattern(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"answer_pattern {pattern!r} is not a regular expression: {error}") from error


def _names(columns: Iterable[Any]) -> tuple[str, ...]:
    if isinstance(columns, str):
        raise ConfigError(f"columns is {columns!r}, wanted a list of names")
    return tuple(str(name) for name in columns)
