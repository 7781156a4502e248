"""Read questions and answers from a data file or a Hugging Face dataset.

Every row is checked when it is read. Raises ConfigError, which names the source, the line or row, the column, the value
found and the value wanted. Questions and answers are kept as Arrow text, about as large in memory as in a JSONL file.

A row is identified by an id column (ID_COLUMNS) if its values are unique, else by all its columns.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pyarrow as pa

from ludic.base import LISTED as DATA_FILES
from ludic.base import is_data_file, local_path, read_rows, require, table_rows
from ludic.environments.column_values import read_back, spelled
from ludic.errors import ConfigError, RefusedRecordError, one_line, unknown_name
from ludic.records import MOST_COLUMN_CHARACTERS, Message, example_columns, read_messages

QUESTION_COLUMNS = ("question", "prompt", "messages")
"""Default columns of the question; the first present one is used."""
ANSWER_COLUMN = "answer"
"""Default column of the right answer."""
ID_COLUMNS = ("id", "example_id", "task_id", "uid")
"""Columns that identify a row; the first present one with unique values in all rows is used."""

LONGEST_ID = 256
"""Maximum characters of a value that identifies a row."""

SourceKind = Literal["file", "folder", "hub"]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_ROWS_PER_READ = 1000
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionColumns:
    """Names of the columns; a dot leads into a struct or an object, as in reward_model.ground_truth."""

    question: str
    answer: str | None
    """None for questions without a right answer, which only a user's scorer can score."""
    answer_pattern: re.Pattern[str] | None
    """Its first group, or else the whole match, is the answer; its last match counts. None takes the whole column."""
    problem_of: Callable[[str], str | None]
    """Returns the problem of a right answer; None if there is none."""
    others: tuple[str, ...] = ()
    """Columns that a scorer gets unchanged."""
    optional: tuple[str, ...] = ()
    """Further columns that a scorer gets from rows that have them."""
    with_row: bool = False
    """True if a scorer gets all columns of the row."""
    any_answer: bool = False
    """True if a right answer may have any type."""
    with_ids: bool = False
    """True if rows are identified, for which all columns are read."""

    @property
    def needed(self) -> list[str]:
        """Columns that each row must have, each once."""
        return list(dict.fromkeys(name for name in (self.question, self.answer, *self.others) if name is not None))

    @property
    def names(self) -> list[str]:
        """Every column that is named, each once."""
        return list(dict.fromkeys((*self.needed, *self.optional)))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRow:
    """A question with its answer."""

    messages: tuple[Message, ...]
    answer: str
    """The right answer; empty if there is no column of answers."""
    columns: Mapping[str, Any]
    """Columns for a scorer, by name, as they are in the source."""
    stored: Mapping[str, Any]
    """Columns other than those of question and answer, which rollouts store, as JSON values; long ones are cut."""
    id: str | None = None
    """Identity of the row, if the rows are identified."""

    @property
    def question(self) -> str:
        """The question as one text, which identifies it."""
        return question_key(self.messages)


class Identities:
    """Possible identities of the rows of a source: the columns of ID_COLUMNS, and a digest of all columns."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        """16 hexadecimal digits of each row."""
        self.columns: dict[str, list[str]] = {}
        """Values of a column of ID_COLUMNS, one per row, all different."""
        self.refused: dict[str, str] = {}
        """Reason why a column of ID_COLUMNS is not an identity, by its name."""
        self._first: dict[str, dict[str, str]] = {name: {} for name in ID_COLUMNS}
        """First row with each value of a column."""

    def add(self, row: Mapping[str, Any], where: str) -> None:
        """Take the next row. where: names it in texts, such as line 3."""
        num_before = len(self.digests)
        self.digests.append(row_digest(row))
        for name, first in list(self._first.items()):
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
                if name in row or first:
                    self._refuse(name, f"{where} has {_show(value)}, wanted a text or a whole number")
            elif len(str(value)) > LONGEST_ID:
                self._refuse(name, f"{where} has a value of {len(str(value))} characters, wanted at most {LONGEST_ID}")
            elif len(first) < num_before:
                self._refuse(name, f"{where} is the first to have it")
            elif (text := str(value)) in first:
                self._refuse(name, f"{first[text]} and {where} both have {_show(value)}")
            else:
                first[text] = where

    def _refuse(self, name: str, why: str) -> None:
        self.refused[name] = why
        del self._first[name]

    def end(self) -> "Identities":
        """Return this, after the last row."""
        self.columns = {name: [*first] for name, first in self._first.items() if first}
        self._first = {}
        return self

    @property
    def num_copies(self) -> int:
        """Number of rows that are equal to an earlier one."""
        return len(self.digests) - len(Counter(self.digests))


def choose_identity(sources: Sequence[Identities]) -> tuple[str | None, list[str]]:
    """Return the column that identifies the rows of all sources, None for all columns, and why other columns do not."""
    why = [f"column {name!r}: {text}" for each in sources for name, text in each.refused.items()]
    for name in ID_COLUMNS:
        values = [value for each in sources for value in each.columns.get(name, ())]
        if all(name in each.columns for each in sources):
            if len(Counter(values)) == len(values):
                return name, why
            why.append(f"column {name!r}: held-out rows have values of the rows to train on")
    return None, why


def row_digest(row: Mapping[str, Any]) -> str:
    """Return a digest of all columns, 16 hexadecimal digits, whatever their order.

    Equal values give the same digest in all formats; in CSV all values are texts. Null counts as an absent column,
    since tables fill columns up with null.
    """
    text = json.dumps(_without_nulls(row), sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:16]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


class QuestionRows:
    """All rows of a source, in its order."""

    def __init__(
        self,
        name: str,
        texts: Sequence["RowTexts"],
        columns: Sequence[str] = (),
        identities: Identities | None = None,
        unread: Mapping[str, int] | None = None,
    ) -> None:
        """columns: those of any row; None in a row that lacks them, as in a dataset.

        identities: of the rows, if they are to be identified. unread: number of messages with an unknown field, by its
        name.
        """
        self.name = name
        self.unread = unread or {}
        self.identities = identities
        self.ids: pa.Array | None = None
        """Identity of each row, chosen from `identities`."""
        self._names = columns
        questions, answers, others, stored = zip(*texts, strict=True)
        self._questions = pa.array(questions, pa.large_string())
        self._answers = pa.array(answers, pa.large_string())
        self._columns = pa.array(others, pa.large_string())
        self._stored = pa.array(stored, pa.large_string())

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, number: int) -> QuestionRow:
        messages = _decoded(self._questions[number].as_py())
        columns = {**dict.fromkeys(self._names), **read_back(msgspec.json.decode(self._columns[number].as_py()))}
        own_id = None if self.ids is None else self.ids[number].as_py()
        stored = self._stored[number].as_py()
        return QuestionRow(
            messages=messages,
            answer=self._answers[number].as_py(),
            columns=columns,
            stored={} if stored is None else msgspec.json.decode(stored),
            id=own_id,
        )

    def questions(self) -> Iterator[str]:
        """Yield each row's question as one text."""
        for batch in range(0, len(self), _ROWS_PER_READ):
            for text in self._questions[batch : batch + _ROWS_PER_READ].to_pylist():
                yield question_key(_decoded(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSource:
    """QuestionSource of rows: a file, a folder or a dataset."""

    name: str
    """Path of a file or a folder, or name of a dataset on the Hub."""
    split: str | None = None
    """Split of a dataset; None takes its only split, or else train."""
    config: str | None = None
    """Configuration of a dataset on the Hub, also called its subset."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the Hub."""
    stored: str | None = None
    """Absolute path of the file with the rows, of which `name` is only the name."""

    @property
    def path(self) -> str:
        """Path of the file or the folder, or name of a dataset on the Hub."""
        return self.name if self.stored is None else self.stored

    @property
    def kind(self) -> SourceKind:
        """The format, from the suffix and the disk. Raises ConfigError."""
        if self.stored is not None and not Path(self.stored).is_absolute():
            raise ConfigError(f"stored is {self.stored!r}, a file in inputs/ of a root; only with its root is it found")
        path = local_path(self.path, "the path of questions")
        if is_data_file(path.name):
            return "file"
        if self.name and path.is_dir():
            return "folder"
        if _HUB_NAME.fullmatch(self.name) and not path.exists():
            return "hub"
        raise ConfigError(
            f"{self.name!r} is not a source of questions; wanted a file {DATA_FILES}, a folder of "
            "Dataset.save_to_disk, or the name of a dataset on the Hugging Face Hub, such as openai/gsm8k"
        )

    @property
    def has_splits(self) -> bool:
        """True for a dataset that may have several splits."""
        return self.kind == "hub" or (self.kind == "folder" and (Path(self.path) / "dataset_dict.json").is_file())

    @property
    def label(self) -> str:
        """The name with its split, for messages."""
        return self.name if self.split is None else f"{self.name}, split {self.split}"

    def sha256(self) -> str | None:
        """Return the SHA-256 of a file, or of a folder's files with their names; None for a dataset on the Hub."""
        kind = self.kind
        if kind == "hub":
            return None
        path = Path(self.path)
        with _readable(self.path):
            if kind != "folder":
                return _digest(path)
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("cache-"))
            lines = [f"{file.relative_to(path).as_posix()} {_digest(file)}\n" for file in files]
        return sha256("".join(lines).encode()).hexdigest()

    def read(self, columns: QuestionColumns) -> QuestionRows:
        """Read and check all rows. Raises ConfigError, which names the row at fault."""
        self._check_options()
        texts: list[RowTexts] = []
        present: dict[str, None] = {}
        identities = Identities() if columns.with_ids else None
        unread: Counter[str] = Counter()
        with _readable(self.path):
            for where, row in self._rows(columns):
                texts.append(_texts(row, columns, f"{self.label}, {where}", unread))
                if identities is not None:
                    identities.add(row, where)
                present.update(dict.fromkeys(row) if columns.with_row else ())
        if not texts:
            raise ConfigError(f"{self.label} has no rows, wanted at least one question")
        return QuestionRows(self.label, texts, [*present], None if identities is None else identities.end(), unread)

    def first_row(self) -> Mapping[str, Any]:
        """Return the first row with all its columns. Raises ConfigError if there is none, or as `read`."""
        return next(self.all_rows())

    def question_column(self) -> str:
        """Return the default column of the question. Raises ConfigError as `read`."""
        row = self.first_row()
        return next((name for name in QUESTION_COLUMNS if name in row), QUESTION_COLUMNS[0])

    def all_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows with all their columns, unchecked. Raises ConfigError if there is none, or as `read`."""
        self._check_options()
        is_empty = True
        with _readable(self.path):
            for _, row in self._rows(None):
                is_empty = False
                yield row
        if is_empty:
            raise ConfigError(f"{self.label} has no rows, wanted at least one")

    def _rows(self, columns: QuestionColumns | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each row, and where it is. columns: those to read; None reads all."""
        if self.kind == "file":
            rows = _file_rows(self.label, Path(self.path), columns)
            return rows if self.stored is None else ((where, read_back(row)) for where, row in rows)
        return self._dataset_rows(columns)

    def _check_options(self) -> None:
        kind = self.kind
        for option in ("config", "revision") if kind == "folder" else ("split", "config", "revision"):
            value = getattr(self, option)
            if kind != "hub" and value is not None:
                raise ConfigError(
                    f"{option} is {value!r}, which does not apply to {self.name}; "
                    + ("it is for a dataset on the Hub" if option != "split" else "a file has no splits")
                )

    def _dataset_rows(self, columns: QuestionColumns | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        require("datasets", "datasets", f"questions of {self.name}")
        dataset = _choose_split(self._load_dataset(), self.split, self.name)
        present = _roots(columns, dataset.column_names, self.label)
        table = dataset.select_columns(present).with_format("arrow")
        for start in range(0, len(dataset), _ROWS_PER_READ):
            rows = table_rows(table[start : start + _ROWS_PER_READ])
            yield from ((f"row {start + number}", row) for number, row in enumerate(rows))

    def _load_dataset(self) -> Any:
        import datasets

        try:
            if self.kind == "folder":
                return datasets.load_from_disk(self.path)
            return datasets.load_dataset(self.name, name=self.config, revision=self.revision)
        except Exception as error:  # the package raises many kinds of errors: disk, network, format
            where = "a folder of Dataset.save_to_disk" if self.kind == "folder" else "a dataset on the Hugging Face Hub"
            hint = "" if self.kind == "folder" else "; there is no such file or folder here either"
            raise ConfigError(
                f"{self.name!r} can't be loaded as {where}: {type(error).__name__}: {one_line(error)}{hint}"
            ) from error


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn an error of the disk into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{name} can't be read: {error.strerror or error}") from error


def _digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _file_rows(label: str, path: Path, columns: QuestionColumns | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for found in read_rows(file, str(path), columns=lambda present: _roots(columns, present, label)):
            if isinstance(found.value, str):
                raise ConfigError(f"{path}, {found.where} {found.value}")
            yield found.where, found.value


def _roots(columns: QuestionColumns | None, present: Sequence[str], where: str) -> list[str]:
    """Return those columns of a table that the names need, by name or by the begin of a dotted name; or all.

    Raises ConfigError for a name that the table lacks: its rows are read without the other columns.
    """
    if columns is None:
        return [*present]

    def leads_to(name: str, wanted: str) -> bool:
        return wanted == name or wanted.startswith(f"{name}.")

    for wanted in columns.needed:
        if not any(leads_to(name, wanted) for name in present):
            raise ConfigError(f"{where}: {unknown_name('column', wanted, present)}")
    is_all = columns.with_row or columns.with_ids
    return [name for name in present if is_all or any(leads_to(name, wanted) for wanted in columns.names)]


def _choose_split(loaded: Any, split: str | None, name: str) -> Any:
    """Return one split of a datasets.DatasetDict, or a datasets.Dataset itself."""
    import datasets

    if isinstance(loaded, datasets.Dataset):
        if split is not None:
            raise ConfigError(f"split is {split!r}, but {name} is one dataset without splits")
        return loaded
    wanted = split or (next(iter(loaded)) if len(loaded) == 1 else "train")
    if wanted not in loaded:
        raise ConfigError(f"{name} has no split {wanted!r}; it has {', '.join(map(str, loaded))}")
    return loaded[wanted]


class RowTexts(NamedTuple):
    """A row of a source as texts."""

    messages: str
    """JSON."""
    answer: str
    columns: str
    """JSON of the columns for a scorer, by name."""
    stored: str | None
    """JSON of the columns that rollouts store, by name; None if there are none."""


def _texts(row: Mapping[str, Any], columns: QuestionColumns, where: str, unread: Counter[str]) -> RowTexts:
    """Check a row, and return its texts. unread: counts unknown fields of messages."""
    messages = _messages(value_in(row, columns.question, where), f"{where}, column {columns.question!r}", unread)
    others = {name: value_in(row, name, where) for name in columns.others}
    others |= {name: row[name] for name in columns.optional if name in row}
    others |= row if columns.with_row else {}
    try:
        name = columns.answer
        if name is None and columns.with_row and str(row.get(ANSWER_COLUMN) or "").strip():
            name = ANSWER_COLUMN  # no scorer needs it, but people want to see it
        answer = "" if name is None else _answer(value_in(row, name, where), columns, f"{where}, column {name!r}")
        stored = row if columns.with_ids or columns.with_row else others
        for said in (columns.question, name):
            stored = stored if said is None else _without(stored, said)
        return RowTexts(
            messages=_encoded(messages),
            answer=answer,
            columns=_encoded(spelled(others)),
            stored=example_columns(stored, MOST_COLUMN_CHARACTERS),
        )
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        names = [*row] if columns.with_row else [*others]
        raise ConfigError(
            f"{where}: the columns {', '.join(names)} hold {one_line(error)}; wanted JSON values"
        ) from error


def _without(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a row without a column, or without what a dotted path leads to."""
    first, _, rest = name.partition(".")
    if name in row or not rest:
        return {column: value for column, value in row.items() if column != name}
    if not isinstance(row.get(first), Mapping):
        return row
    inner = _without(row[first], rest)
    return {**row, first: inner} if inner else _without(row, first)


def value_in(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value of a column, or of a dotted path below one. Raises ConfigError if there is none."""
    if name in row:
        return row[name]
    value: Any = row
    path = ""
    for part in name.split("."):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: column {name!r} is unknown; {path.rstrip('.')} is {_show(value)}")
        if part not in value:
            raise ConfigError(f"{where}: {unknown_name('column', name, [f'{path}{each}' for each in value])}")
        value, path = value[part], f"{path}{part}."
    return value


def _messages(value: Any, where: str, unread: Counter[str]) -> list[list[Any]]:
    """Return a question, which is a text or a list of messages, as [[role, content], ...].

    Other fields of a message are a third element, by their names. unread: counts the unknown ones.
    """
    if isinstance(value, str):
        return [["user", _checked_text(value, where)]]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} is {_show(value)}, wanted a text, or a list of messages with role and content")
    try:
        read = read_messages(value, "messages")
    except RefusedRecordError as error:
        raise ConfigError(f"{where}: {error}") from error
    unread.update(read.unread)
    for number, message in enumerate(read.messages):
        if not message.content.strip() and not (message.tool_calls or message.reasoning):
            raise ConfigError(f"{where}: messages[{number}].content is empty, wanted a text")
    return [_listed(message) for message in read.messages]


def _listed(message: Message) -> list[Any]:
    others = {name: getattr(message, name) for name in _OTHERS}
    others = {name: value for name, value in others.items() if value}
    return [message.role, message.content, *([msgspec.to_builtins(others)] if others else [])]


_OTHERS = ("name", "tool_calls", "reasoning", "tool_call_id")
"""Fields of a message beside role and content."""


def _answer(value: Any, columns: QuestionColumns, where: str) -> str:
    if columns.any_answer and not isinstance(value, str):
        value = _encoded(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{where} is {_show(value)}, wanted a text or a number")
    text = _checked_text(str(value), where)
    answer = text if columns.answer_pattern is None else _last_match(columns.answer_pattern, text, where)
    problem = columns.problem_of(answer)
    if problem is not None:
        raise ConfigError(f"{where} is {_show(answer)}; {problem}")
    return answer


def _last_match(pattern: re.Pattern[str], text: str, where: str) -> str:
    matches = list(pattern.finditer(text))
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    if not found or not found.strip():
        raise ConfigError(f"{where} is {_show(text)}, in which answer_pattern finds no answer")
    return found.strip()


def _checked_text(text: str, where: str) -> str:
    if not text.strip():
        raise ConfigError(f"{where} is empty, wanted a text")
    return text


def question_key(messages: Sequence[Message]) -> str:
    """Return messages as one text; a single message of the user is its own text."""
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return _encoded([_listed(each) for each in messages])


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(messages: str) -> tuple[Message, ...]:
    return tuple(
        msgspec.convert({"role": role, "content": content, **dict(*others)}, Message)
        for role, content, *others in msgspec.json.decode(messages)
    )


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
