"""Write the data set and the rewards of `ludic.fit` as files that workers and `ludic import` read.

The files are in inputs/ of a local root, else in a folder of this user's cache, and questions then also in the root:

    questions-{digest}.jsonl    the data set, if it was given as values: questions for the environment qa/FILE; values
                                that JSON does not have are spelled (ludic.environments.column_values)
    rows-{digest}.jsonl         conversations or pairs, in the format jsonl of `ludic import`
    reward.py                   the rewards as a scorer, with the modules beside it that they import
    settings.json               the settings of processes in the background

A file of data is named by its content, so a run never reads other rows than those that it began with. Raises
ConfigError; StoreError if a file can't be written; SchemaError if a link leads out of the root.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import msgspec

from ludic.base import LISTED as DATA_FILES
from ludic.base import cache_folder, is_data_file, is_url, table_rows
from ludic.environments import (
    ANSWER_COLUMN,
    QUESTION_COLUMNS,
    QuestionSource,
    columns_of,
    is_of_trl,
    sees_group,
    spelled,
)
from ludic.errors import ConfigError, LudicError, MissingRootError, one_line
from ludic.root import DATA, INPUTS, STORED, DataName, Root, cache_name, check_scheme, data_of
from ludic.root.storage import SCRATCH, Storage
from ludic.run import run_of, sampling_uses
from ludic.settings import ORIGIN, extract, file_of
from ludic.settings.user_files import QUESTIONS

DatasetRow = Mapping[str, Any]
Rewards = Mapping[str, tuple[Callable[..., Any] | str, float]]
"""Functions, or names of scorers such as exact, with their weights; by the names of the components."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A file that this call has written."""

    storage: Storage
    name: str
    """Path below the storage."""
    data: bytes
    is_new: bool
    """Whether there was no such file before."""


REWARDS = "reward.py"
_OF_CONTENT = ("questions-", "rows-")
"""Beginnings of the names of data, which are the digest of the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The folder of the files."""

    url: str
    """The root's."""
    storage: Storage
    """The local root, else the user's cache folder."""
    folder: str
    """Name of the folder there."""
    written: list[_Written] = field(default_factory=list, compare=False, repr=False)
    """Files that this call has written."""

    @classmethod
    def of(cls, url: str) -> "Inputs":
        """Return the folder for a root, which need not exist.

        Raises SchemaError if the folder of a local root is a link that leads out of it.
        """
        check_scheme(url)
        storage = Storage.connect(url)
        if not storage.is_local:
            return cls(url=url, storage=Storage.connect(str(cache_folder())), folder=cache_name(storage))
        storage.at(f"{INPUTS.folder}/reward.py")
        return cls(url=url, storage=storage, folder=INPUTS.folder)

    @contextmanager
    def kept_if_run(self, existing: Root | None = None) -> Iterator[None]:
        """If the block fails, delete the files that this call has created and that the root, if there is one, lacks.

        Files of another call stay, which may be about to start the same root. existing: the root, if it was there
        before.
        """
        try:
            yield
        except BaseException:
            with suppress(LudicError):
                self._delete_unused(was_there=existing is not None)
            raise

    def _delete_unused(self, *, was_there: bool) -> None:
        try:
            self.delete_unused(Root.open(self.url), was_there=was_there)
        except MissingRootError:
            self.delete_unused(None)
            with suppress(OSError):  # the folders, if this made them
                Path(self.storage.path, self.folder).rmdir()
                Path(self.storage.path, SCRATCH).rmdir()
                Path(self.storage.path).rmdir()

    def delete_unused(self, root: Root | None, *, was_there: bool = True) -> None:
        """Delete the files that this call has created and that the root does not name.

        was_there: False for a root that another call has made meanwhile, perhaps to import the same rows.
        """
        used: set[str] = set()
        if root is not None:
            names = (data_of(env, root.record.env_options.get(env)) for env in root.record.env)
            used = {Path(name).name for name in names if name is not None}
            codes = {Path(file_of(use.setting) or "").name for use in sampling_uses(run_of(root))}
            if REWARDS in codes:
                used |= {Path(each.name).name for each in self.written if each.name.endswith(".py")}
            if not was_there:
                used |= {Path(each.name).name for each in self.written if Path(each.name).name.startswith("rows-")}
        for each in [*self.written]:
            if Path(each.name).name in used:
                continue
            self.written.remove(each)
            with suppress(FileNotFoundError):
                if each.is_new and each.storage.read(each.name) == each.data:
                    each.storage.delete(each.name)

    def put_data_again(self) -> None:
        """Write the data that another call, which failed, has deleted; call it once the root is made."""
        for each in self.written:
            if Path(each.name).name.startswith(_OF_CONTENT):
                each.storage.put_if_absent(each.name, each.data)

    def put(self, name: str, data: bytes) -> Path:
        """Write a file, whole or not at all. Raises SchemaError for a link that leads out, StoreError."""
        stored = f"{self.folder}/{name}"
        try:
            before = self.storage.read(stored)
        except FileNotFoundError:
            before = None
        if before != data:
            self.storage.put(stored, data)
        self._note(self.storage, stored, data, is_new=before is None)
        return self._path(stored)

    def _note(self, storage: Storage, name: str, data: bytes, *, is_new: bool) -> None:
        self.written.append(_Written(storage=storage, name=name, data=data, is_new=is_new))

    def delete_code(self) -> None:
        """Delete the modules that an earlier call, or another user, left: rewards would import them."""
        for path in [*Path(self.storage.at(self.folder)).glob("*.py")]:  # links, too
            self.storage.delete(f"{self.folder}/{path.name}")

    def path_of(self, name: str) -> Path:
        """Return the path of one of these files."""
        return self._path(f"{self.folder}/{name}")

    def _path(self, stored: str) -> Path:
        return Path(self.storage.path if is_url(self.storage.url) else self.storage.url, stored)

    def put_rows(self, rows: Iterable[DatasetRow], what: str) -> Path:
        """Write rows as JSON Lines; the name has the digest of the content. Raises ConfigError for other values."""
        data = _lines(rows, what)
        return self.put(f"rows-{sha256(data).hexdigest()[:16]}.jsonl", data)

    def put_questions(self, rows: Iterable[DatasetRow], what: str) -> dict[str, str]:
        """Write questions, also into a root that is not local; return the options of the environment that name them.

        Raises ConfigError for values that JSON can't hold, StoreError.
        """
        return self._put_questions(_lines(map(spelled, rows), what))

    def put_older(self, data: bytes) -> None:
        """Write questions as a run of an older ludic has them."""
        self._put_questions(data)

    def _put_questions(self, data: bytes) -> dict[str, str]:
        digest = sha256(data).hexdigest()
        name = _data_name(data)
        stored = name.removeprefix(f"{DATA.folder}/")
        self.put(stored, data)
        root = Storage.connect(self.url)
        if not root.is_local:
            is_new = not root.exists(name)
            root.put_if_absent(name, data)
            self._note(root, name, data, is_new=is_new)
        return dict(zip(STORED, (stored, digest), strict=True))


def _data_name(data: bytes) -> str:
    """Return the path of questions below a root."""
    return DATA.name(DataName(sha256(data).hexdigest()[:16]))


def _lines(rows: Iterable[DatasetRow], what: str) -> bytes:
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(msgspec.json.encode(row))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise ConfigError(f"{what}, row {number}: {one_line(error)}; wanted what JSON can hold") from error
    return b"\n".join([*lines, b""])


# --- The data set ----------------------------------------------------------------------------------------------------


def named_source(dataset: Any) -> str | None:
    """Return a data set given by a path or a name; None for values."""
    return fspath(dataset) if isinstance(dataset, str | PathLike) else None


def _as_table(dataset: Any) -> Any:
    """Return a table of Arrow, Polars or pandas, without the index of pandas. Raises ConfigError."""
    import pyarrow as pa

    try:
        if hasattr(dataset, "iloc"):
            return pa.Table.from_pandas(dataset, preserve_index=False)
        return pa.table(dataset)
    except (pa.ArrowException, ValueError, TypeError) as error:  # values of several types, names that come twice
        reason = f"dataset is no table that Arrow can hold ({one_line(error)})"
        raise ConfigError(f'{reason}; give a list of dicts, as of DataFrame.to_dict("records")') from error


def rows_of(dataset: Any) -> list[DatasetRow]:
    """Return the rows of a data set: a list of dicts, a table of pandas, Polars or Arrow, or a datasets.Dataset.

    Every row gets all columns, None where it has none.
    """
    if hasattr(dataset, "__arrow_c_stream__"):
        rows = table_rows(_as_table(dataset))
    elif isinstance(dataset, Mapping) and all(hasattr(each, "to_list") for each in dataset.values()):
        raise ConfigError(
            f"dataset has the splits {', '.join(map(str, dataset))}; give one, such as dataset[{next(iter(dataset))!r}]"
        )
    elif hasattr(dataset, "with_format") and not hasattr(dataset, "__len__"):
        raise ConfigError("dataset is streamed, and its length is not known; load it without streaming")
    elif hasattr(dataset, "to_list") and hasattr(dataset, "with_format"):
        rows = table_rows(dataset.with_format("arrow")[:])
    elif hasattr(dataset, "to_list"):
        rows = dataset.to_list()
    elif hasattr(dataset, "to_dicts"):
        rows = dataset.to_dicts()
    elif hasattr(dataset, "to_dict") and hasattr(dataset, "columns"):
        rows = dataset.to_dict(orient="records")
    else:
        rows = _listed(dataset)
    if not rows:
        raise ConfigError("dataset has no rows, wanted at least one")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise ConfigError(f"dataset, row {number} is {_shown(row)}, wanted a dict with the columns as keys")
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _listed(dataset: Any) -> list[Any]:
    if isinstance(dataset, Iterable) and not isinstance(dataset, Mapping | bytes):
        return [*dataset]
    raise ConfigError(
        f"dataset is {_shown(dataset)}, wanted a file {DATA_FILES}, a list of dicts, a table of pandas "
        "or Polars, or a dataset of the package datasets"
    )


def read_rows(dataset: Any, options: Mapping[str, Any]) -> tuple[list[DatasetRow], str]:
    """Return all rows of any data set, and what to call it in errors. options: those of Source."""
    source = named_source(dataset)
    if source is None:
        return rows_of(dataset), "dataset"
    found = QuestionSource(name=source, **options)
    return [*found.all_rows()], found.label


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """A data set of questions, as an environment."""

    env: str
    stored: Mapping[str, str]
    """Options that name rows given as values, which the root holds; {} for a file or a data set of the Hub."""
    older: Callable[[], tuple[str, bytes]] | None = None
    """Returns path and content of the same rows as an older ludic has written them; None for a file or the Hub."""
    columns: tuple[str, ...]
    where: str
    """Names it in errors."""
    question: str
    answer: str | None


def write_questions(inputs: Inputs, dataset: Any, options: Mapping[str, Any]) -> QuestionSet:
    """Return a data set as an environment qa/SOURCE; values are written to a file first.

    options: those of the environment that the user gives.
    """
    source, stored, older = named_source(dataset), {}, None
    if "stored" in options:
        raise ConfigError("dataset_options has stored, which ludic sets; give the rows themselves as dataset")
    if source is None:
        rows = rows_of(dataset)
        first, where = rows[0], "the data set"
        question = _question(first, options, where)
        stored = inputs.put_questions(rows, where)
        if (wanted := options.get("sha256", stored["sha256"])) != stored["sha256"]:
            raise ConfigError(
                f"dataset_options has sha256={wanted!r}, and the rows have {stored['sha256']}; leave it out for rows "
                "given as values, or give the rows that it is of"
            )
        older = partial(_older_questions, dataset, rows)
        source = _name_of_data(dataset, options.get("name"), stored["sha256"])
    elif "name" in options:
        raise ConfigError(f"dataset_options has name, which is for rows given as values; {source} is its own name")
    else:
        of_source = {name: options[name] for name in ("split", "config", "revision") if name in options}
        first, where = QuestionSource(name=source, **of_source).first_row(), source
        question = _question(first, options, where)
    named = options.get(ANSWER_COLUMN, ANSWER_COLUMN)
    value = first.get(named) if named == ANSWER_COLUMN else None
    has_answer = named != ANSWER_COLUMN or (isinstance(value, str | int | float) and not isinstance(value, bool))
    answer = named if has_answer else None
    return QuestionSet(
        env=QUESTIONS + source,
        stored=stored,
        older=older,
        columns=tuple(first),
        where=where,
        question=question,
        answer=answer,
    )


def _older_questions(dataset: Any, rows: Sequence[DatasetRow]) -> tuple[str, bytes]:
    """Return path and content of rows as ludic wrote them before it spelled values that JSON does not have.

    NaN became null, a date its text, bytes Base64, a tuple a list; structs kept fields that are null. Raises
    ConfigError for values that no ludic could write then.
    """
    if hasattr(dataset, "__arrow_c_stream__"):
        import pyarrow as pa

        rows = pa.table(dataset).to_pylist()
    elif hasattr(dataset, "to_list"):
        rows = dataset.to_list()
    names = dict.fromkeys(name for row in rows for name in row)
    data = _lines(({name: row.get(name) for name in names} for row in rows), "the data set")
    return _data_name(data), data


_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_SHOWN_DIGITS = 8


def _name_of_data(dataset: Any, given: Any, digest: str) -> str:
    """Return the name of rows that were given as values: the user's, else their own with their digest."""
    if given is None:
        return f"{_own_name(dataset) or 'questions'}-{digest[:_SHOWN_DIGITS]}"
    is_file = isinstance(given, str) and (is_data_file(given) or given.endswith((".py", ".sql")))
    if not isinstance(given, str) or not _NAME.fullmatch(given) or is_file:
        raise ConfigError(
            f"dataset_options has name={given!r}, wanted at most 64 letters, digits, '.', '_' and '-', without the "
            "suffix of a file"
        )
    return given


def _own_name(dataset: Any) -> str | None:
    """Return the name that a datasets.Dataset has, with its split; None for the name of a mere format, as of a file."""
    info = getattr(dataset, "info", None)
    name, builder = getattr(info, "dataset_name", None), getattr(info, "builder_name", None)
    if not isinstance(name, str) or name == builder:
        return None
    split = str(getattr(dataset, "split", None) or "").partition("[")[0]
    found = f"{name}-{split}" if split else name
    return found if _NAME.fullmatch(found) else None


def _question(row: DatasetRow, options: Mapping[str, Any], where: str) -> str:
    if "question" in options:
        return str(options["question"])
    found = next((name for name in QUESTION_COLUMNS if name in row), None)
    if found is None:
        raise ConfigError(
            f"{where} has the columns {', '.join(row)}, and none of {', '.join(QUESTION_COLUMNS)}, which hold the "
            'question; name its column: dataset_options={"question": "..."}'
        )
    return found


# --- Rewards ---------------------------------------------------------------------------------------------------------


def named_rewards(reward: Any) -> Rewards:
    """Return functions, or names of scorers, and weights by name.

    reward: a function; a list of functions and names of scorers, or of pairs of one and its weight; or such values by
    names of the user's own, and weights by the names of scorers. Raises ConfigError.
    """
    if callable(reward):
        return {_name_of(reward): (reward, 1.0)}
    if isinstance(reward, Mapping):
        return {str(name): _weighted(str(name), each) for name, each in reward.items()}
    is_list = isinstance(reward, Sequence) and not isinstance(reward, str)
    if is_list and reward and not any(isinstance(each, int | float) for each in reward):
        values = [_weighted(str(number), each) for number, each in enumerate(reward)]
        named = {each if isinstance(each, str) else _name_of(each): (each, weight) for each, weight in values}
        if len(named) == len(reward):
            return named
        raise ConfigError("two rewards have the same name; give a dict of names to functions")
    raise ConfigError(
        f"reward is {_shown(reward)}, wanted a function, a list of functions, a dict of names to functions or to "
        "(function, weight), or the name of a scorer such as exact"
    )


def _weighted(name: str, value: Any) -> tuple[Callable[..., Any] | str, float]:
    function, weight = value if isinstance(value, tuple | list) and len(value) == 2 else (value, 1.0)
    if isinstance(value, int | float):
        function, weight = name, value
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and weight - weight == 0
    if not (callable(function) or isinstance(function, str)) or not is_number:
        raise ConfigError(
            f"reward {name} is {_shown(value)}, wanted a function, the name of a scorer, or a pair of one and its "
            "weight; for the name of a scorer also its weight alone"
        )
    return function, float(weight)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


SCORER, GROUP_SCORER = "ludic_score", "ludic_score_group"
"""Names of the scorers in reward.py."""


def write_rewards(inputs: Inputs, rewards: Rewards, questions: QuestionSet) -> dict[str, Any]:
    """Write the functions to a file; return the options of the environment that name all rewards and their columns."""
    if not rewards:
        raise ConfigError("reward is empty, wanted at least one function")
    functions = {name: (each, weight) for name, (each, weight) in rewards.items() if not isinstance(each, str)}
    scorers = {
        name: weight if name == each else [each, weight]
        for name, (each, weight) in rewards.items()
        if isinstance(each, str)
    }
    if not functions:
        return {"scorer": scorers}
    written = _write_functions(inputs, functions, questions)
    # The functions take the place of the first one: the order decides which reward says what is correct.
    first = [*rewards].index(next(iter(functions)))
    before, after = [*scorers][:first], [*scorers][first:]
    all_of = {name: scorers.get(name, 1.0) for name in (*before, written["scorer"], *after)}
    return written | ({"scorer": all_of} if scorers else {})


def _write_functions(
    inputs: Inputs, rewards: Mapping[str, tuple[Callable[..., Any], float]], questions: QuestionSet
) -> dict[str, Any]:
    for name, (function, _) in rewards.items():
        if callable(function) and hasattr(function, "__code__"):
            columns_of(name, function, questions.columns, questions.where)  # refuses others
    text = extract({f"reward {name}": function for name, (function, _) in rewards.items()})
    of_trl = {name for name, (function, _) in rewards.items() if is_of_trl(function)}
    parts = ", ".join(
        f"_Trl.part({name!r}, {text.names[f'reward {name}']}, {weight!r}, {questions.question!r})"
        if name in of_trl
        else f"_part({name!r}, {text.names[f'reward {name}']}, {weight!r})"
        for name, (_, weight) in rewards.items()
    )
    lines = [
        text.source,
        "",
        "# Written by ludic.fit: these functions as a scorer.",
        *(["from ludic.adapters.scorers import Trl as _Trl"] if of_trl else []),
        "from ludic.environments.rewards import Rubric as _Rubric, part_of as _part",
        "",
        f"_rubric = _Rubric([{parts}])",
        f"{SCORER} = _rubric.score",
        f"{GROUP_SCORER} = _rubric.score_group",
        *([] if text.origin is None else [f"{ORIGIN}{text.origin}"]),
        "",
    ]
    inputs.delete_code()
    for module, source in text.modules.items():
        inputs.put(f"{module}.py", source)
    file = inputs.put(REWARDS, "\n".join(lines).encode())
    has_group = any(sees_group(function) for function, _ in rewards.values())
    return {
        "scorer": f"{file}:{SCORER}",
        **({"group_scorer": f"{file}:{GROUP_SCORER}"} if has_group else {}),
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
