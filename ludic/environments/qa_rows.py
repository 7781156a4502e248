"""Read questions and answers from JSONL, Parquet or a Hugging Face dataset.

Every row is checked when it is read; an error names the source, the line or row, the column, what was found and what
was wanted. Questions and answers are kept as Arrow text, about as large in memory as in a JSONL file.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.environments.column_values import MARK, read_back, spelled
from ludic.errors import ConfigError, one_line, unknown_name
from ludic.installed import require
from ludic.paths import local_path
from ludic.records import Message

QUESTION_COLUMNS = ("question", "prompt", "messages")
"""Columns that hold the question where no option names one; the first that is there."""
ANSWER_COLUMN = "answer"
"""Column of the right answer where no option names one."""

Kind = Literal["jsonl", "parquet", "folder", "hub"]

ROLES = ("system", "user", "assistant")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_ROWS_PER_READ = 1000
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the columns; a dot leads into a struct or an object, as in reward_model.ground_truth."""

    question: str
    answer: str | None
    """None for questions without a right answer, which only a scorer of one's own can score."""
    answer_pattern: re.Pattern[str] | None
    """Its first group, or else the whole match, is the answer; its last match counts. None takes the whole column."""
    problem_of: Callable[[str], str | None]
    """Returns what is wrong with a right answer; None if nothing is."""
    others: tuple[str, ...] = ()
    """Columns that a scorer gets as they are."""
    optional: tuple[str, ...] = ()
    """More columns that a scorer gets, of rows that have them."""
    with_row: bool = False
    """Whether a scorer gets all columns of the row."""
    any_answer: bool = False
    """Whether a right answer may have any type."""

    @property
    def names(self) -> list[str]:
        """Every column that is named, each once."""
        return list(
            dict.fromkeys(
                name for name in (self.question, self.answer, *self.others, *self.optional) if name is not None
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A question with its answer."""

    messages: tuple[Message, ...]
    answer: str
    """The right answer; empty if there is no column of answers."""
    columns: Mapping[str, Any]
    """Columns for a scorer, by name, as they are in the source."""

    @property
    def question(self) -> str:
        """The question as one text, which identifies it."""
        return _key(self.messages)


class Rows:
    """All rows of a source, in its order."""

    def __init__(self, name: str, texts: Sequence[tuple[str, str, str]], columns: Sequence[str] = ()) -> None:
        """texts: of each row its messages and its columns for a scorer as JSON, and its answer between them.

        columns: those of any row, which are None in a row that lacks them, as a dataset has it.
        """
        self.name = name
        self._names = columns
        questions, answers, others = zip(*texts, strict=True)
        self._questions = pa.array(questions, pa.large_string())
        self._answers = pa.array(answers, pa.large_string())
        self._columns = pa.array(others, pa.large_string())

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, number: int) -> Row:
        messages = _decoded(self._questions[number].as_py())
        columns = {**dict.fromkeys(self._names), **read_back(msgspec.json.decode(self._columns[number].as_py()))}
        return Row(messages=messages, answer=self._answers[number].as_py(), columns=columns)

    def questions(self) -> Iterator[str]:
        """Yield each row's question as one text."""
        for batch in range(0, len(self), _ROWS_PER_READ):
            for text in self._questions[batch : batch + _ROWS_PER_READ].to_pylist():
                yield _key(_decoded(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from."""

    name: str
    """Path of a file or a folder, or name of a dataset on the Hub."""
    split: str | None = None
    """Split of a dataset; None takes its only split, or else train."""
    config: str | None = None
    """Configuration of a dataset on the Hub, also called its subset."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the Hub."""

    @property
    def kind(self) -> Kind:
        """The format, from the suffix and the disk. Raises ConfigError."""
        path = local_path(self.name, "the path of questions")
        if path.suffix == ".jsonl":
            return "jsonl"
        if path.suffix == ".parquet":
            return "parquet"
        if self.name and path.is_dir():
            return "folder"
        if _HUB_NAME.fullmatch(self.name) and not path.exists():
            return "hub"
        raise ConfigError(
            f"{self.name!r} is no source of questions; wanted a file *.jsonl or *.parquet, a folder of "
            "Dataset.save_to_disk, or the name of a dataset on the Hugging Face Hub, such as openai/gsm8k"
        )

    @property
    def has_splits(self) -> bool:
        """True for a dataset that may have several splits."""
        return self.kind == "hub" or (self.kind == "folder" and (Path(self.name) / "dataset_dict.json").is_file())

    @property
    def label(self) -> str:
        """The name with its split, for messages."""
        return self.name if self.split is None else f"{self.name}, split {self.split}"

    def sha256(self) -> str | None:
        """Return the SHA-256 of a file, or of a folder's files with their names; None for a dataset on the Hub."""
        kind = self.kind
        if kind == "hub":
            return None
        path = Path(self.name)
        with _readable(self.name):
            if kind != "folder":
                return _digest(path)
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("cache-"))
            lines = [f"{file.relative_to(path).as_posix()} {_digest(file)}\n" for file in files]
        return sha256("".join(lines).encode()).hexdigest()

    def read(self, columns: Columns) -> Rows:
        """Read and check all rows. Raises ConfigError, which names the row at fault."""
        self._check_options()
        texts = []
        present: dict[str, None] = {}
        with _readable(self.name):
            for where, row in self._rows(columns):
                texts.append(_texts(row, columns, f"{self.label}, {where}"))
                present.update(dict.fromkeys(row) if columns.with_row else ())
        if not texts:
            raise ConfigError(f"{self.label} has no rows, wanted at least one question")
        return Rows(self.label, texts, [*present])

    def first_row(self) -> Mapping[str, Any]:
        """Return the first row with all its columns. Raises ConfigError if there is none, or as `read`."""
        return next(self.all_rows())

    def question_column(self) -> str:
        """Return the column that holds the question where no option names one. Raises ConfigError as `read`."""
        row = self.first_row()
        return next((name for name in QUESTION_COLUMNS if name in row), QUESTION_COLUMNS[0])

    def all_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows with all their columns, unchecked. Raises ConfigError if there is none, or as `read`."""
        self._check_options()
        is_empty = True
        with _readable(self.name):
            for _, row in self._rows(None):
                is_empty = False
                yield row
        if is_empty:
            raise ConfigError(f"{self.label} has no rows, wanted at least one")

    def _rows(self, columns: Columns | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each row, and where it is. columns: those to read; None reads all."""
        if self.kind == "jsonl":
            return _jsonl_rows(Path(self.name))
        if self.kind == "parquet":
            return _parquet_rows(Path(self.name), columns)
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

    def _dataset_rows(self, columns: Columns | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        require("datasets", "datasets", f"questions of {self.name}")
        dataset = _choose_split(self._load_dataset(), self.split, self.name)
        present = _roots(columns, dataset.column_names)
        table = dataset.select_columns(present).with_format("arrow")
        for start in range(0, len(dataset), _ROWS_PER_READ):
            rows = table[start : start + _ROWS_PER_READ].to_pylist()
            yield from ((f"row {start + number}", row) for number, row in enumerate(rows))

    def _load_dataset(self) -> Any:
        import datasets

        try:
            if self.kind == "folder":
                return datasets.load_from_disk(self.name)
            return datasets.load_dataset(self.name, name=self.config, revision=self.revision)
        except Exception as error:  # the package raises errors of many kinds: of the disk, the network, the format
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


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also a UnicodeDecodeError
                raise ConfigError(f"{where} is not JSON: {one_line(error)}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where} is {_show(row)}, wanted an object with the columns as keys")
            yield f"line {number}", read_back(row) if MARK.encode() in line else row


def _parquet_rows(path: Path, columns: Columns | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            present = _roots(columns, file.schema_arrow.names)
            start = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_READ, columns=present):
                yield from ((f"row {start + number}", row) for number, row in enumerate(batch.to_pylist()))
                start += len(batch)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not a Parquet file that can be read: {one_line(error)}") from error


def _roots(columns: Columns | None, present: Sequence[str]) -> list[str]:
    """Return those columns of a table that the names need, by name or by the begin of a dotted name; or all."""
    if columns is None or columns.with_row:
        return [*present]
    return [name for name in present if any(each == name or each.startswith(f"{name}.") for each in columns.names)]


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


def _texts(row: Mapping[str, Any], columns: Columns, where: str) -> tuple[str, str, str]:
    """Check a row; return its messages as JSON, its answer, and its columns for a scorer as JSON."""
    messages = _messages(value_in(row, columns.question, where), f"{where}, column {columns.question!r}")
    others = {name: value_in(row, name, where) for name in columns.others}
    others |= {name: row[name] for name in columns.optional if name in row}
    others |= row if columns.with_row else {}
    try:
        name = columns.answer
        if name is None and columns.with_row and str(row.get(ANSWER_COLUMN) or "").strip():
            name = ANSWER_COLUMN  # no scorer needs it, and people want to see it
        answer = "" if name is None else _answer(value_in(row, name, where), columns, f"{where}, column {name!r}")
        return _encoded(messages), answer, _encoded(spelled(others))
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        names = [*row] if columns.with_row else [*others]
        raise ConfigError(
            f"{where}: the columns {', '.join(names)} hold {one_line(error)}; wanted what JSON can hold"
        ) from error


def value_in(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value of a column, or of a dotted path below one. Raises ConfigError if there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"{where}: {unknown_name('column', name, [*row])}")
        value = value[part]
    return value


def _messages(value: Any, where: str) -> list[list[str]]:
    """Return a question, which is a text or a list of messages, as [[role, content], ...]."""
    if isinstance(value, str):
        return [["user", _checked_text(value, where)]]
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return [_message(each, f"{where}, message {number}") for number, each in enumerate(value)]
    raise ConfigError(f"{where} is {_show(value)}, wanted a text, or a list of messages with role and content")


def _message(value: Mapping[str, Any], where: str) -> list[str]:
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise ConfigError(f"{where} has the role {_show(role)}, wanted one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ConfigError(f"{where} has the content {_show(content)}, wanted a text")
    return [str(role), _checked_text(content, where)]


def _answer(value: Any, columns: Columns, where: str) -> str:
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


def _key(messages: Sequence[Message]) -> str:
    """Return messages as one text; a single message of the user is its own text."""
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return _encoded([[each.role, each.content] for each in messages])


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(messages: str) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in msgspec.json.decode(messages))


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
