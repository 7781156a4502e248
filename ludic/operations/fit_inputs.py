"""Write the data set and the rewards of `ludic.fit` as files that workers and `ludic import` read.

The files are in inputs/ of a local root, else in a folder of this user's cache:

    questions-{digest}.jsonl    the data set, if it was given as values: questions for the environment qa/FILE; values
                                that JSON does not have are spelled (ludic.environments.column_values)
    rows-{digest}.jsonl         conversations or pairs, in the format jsonl of `ludic import`
    reward.py                   the rewards as a scorer, with the modules beside it that they import
    settings.json               the settings of processes in the background

A file of data is named by its content, so a run never reads other rows than those that it began with. Raises
ConfigError; StoreError if a file can't be written; SchemaError if a link leads out of the root.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import msgspec

from ludic.code.files import ORIGIN
from ludic.code.kinds import QUESTIONS
from ludic.code.taken import take
from ludic.environments.column_values import spelled
from ludic.environments.qa_rows import ANSWER_COLUMN, QUESTION_COLUMNS, Source
from ludic.environments.rewards import columns_of, is_of_trl, sees_group
from ludic.errors import ConfigError, LudicError, one_line
from ludic.launch.roots import is_there
from ludic.paths import cache_folder, is_url
from ludic.store.catalogue import INPUTS
from ludic.store.filesystem import Storage
from ludic.store.local import SCRATCH

Row = Mapping[str, Any]
Rewards = Mapping[str, tuple[Callable[..., Any] | str, float]]
"""Functions, or names of scorers such as exact, with their weights; by the names of the components."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The folder of the files."""

    url: str
    """The root's."""
    storage: Storage
    """The local root, else the user's cache folder."""
    folder: str
    """Name of the folder there."""

    @classmethod
    def of(cls, url: str) -> "Inputs":
        """Return the folder for a root, which need not exist.

        Raises SchemaError if the folder of a local root is a link that leads out of it.
        """
        storage = Storage.connect(url)
        if not storage.is_local or is_url(url):
            digest = sha256(storage.url.encode()).hexdigest()[:16]
            return cls(url=url, storage=Storage.connect(str(cache_folder())), folder=f"{INPUTS.folder}/{digest}")
        storage.at(f"{INPUTS.folder}/reward.py")
        return cls(url=url, storage=storage, folder=INPUTS.folder)

    @contextmanager
    def kept_if_run(self) -> Iterator[None]:
        """Delete the files at the end of the block if no run came of it."""
        try:
            yield
        except BaseException:
            if not is_there(self.url):
                with suppress(LudicError):
                    self.storage.delete(self.folder)
                with suppress(OSError):  # the root's folder, if this made it
                    Path(self.storage.path, SCRATCH).rmdir()
                    Path(self.storage.path).rmdir()
            raise

    def put(self, name: str, data: bytes) -> Path:
        """Write a file, whole or not at all. Raises SchemaError for a link that leads out, StoreError."""
        stored = f"{self.folder}/{name}"
        with suppress(FileNotFoundError):
            if self.storage.read(stored) == data:
                return self._path(stored)
        self.storage.put(stored, data)
        return self._path(stored)

    def delete_code(self) -> None:
        """Delete the modules that an earlier call, or another user, left: rewards would import them."""
        for path in [*Path(self.storage.at(self.folder)).glob("*.py")]:  # links, too
            self.storage.delete(f"{self.folder}/{path.name}")

    def _path(self, stored: str) -> Path:
        return Path(self.storage.url, stored)

    def put_rows(self, kind: str, rows: Iterable[Row], what: str) -> Path:
        """Write rows as JSON Lines; the name has the digest of the content. Raises ConfigError for other values."""
        lines = []
        for number, row in enumerate(rows):
            try:
                lines.append(msgspec.json.encode(spelled(row) if kind == "questions" else row))
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                raise ConfigError(f"{what}, row {number}: {one_line(error)}; wanted what JSON can hold") from error
        data = b"\n".join([*lines, b""])
        return self.put(f"{kind}-{sha256(data).hexdigest()[:16]}.jsonl", data)


# --- The data set ----------------------------------------------------------------------------------------------------


def named_source(dataset: Any) -> str | None:
    """Return a data set given by a path or a name; None for values."""
    return fspath(dataset) if isinstance(dataset, str | PathLike) else None


def rows_of(dataset: Any) -> list[Row]:
    """Return the rows of a data set: a list of dicts, a table of pandas, Polars or Arrow, or a datasets.Dataset.

    Every row gets all columns, None where it has none.
    """
    if hasattr(dataset, "__arrow_c_stream__"):
        import pyarrow as pa

        rows = pa.table(dataset).to_pylist()
    elif isinstance(dataset, Mapping) and all(hasattr(each, "to_list") for each in dataset.values()):
        raise ConfigError(
            f"dataset has the splits {', '.join(map(str, dataset))}; give one, such as dataset[{next(iter(dataset))!r}]"
        )
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
        f"dataset is {_shown(dataset)}, wanted a file *.jsonl or *.parquet, a list of dicts, a table of pandas or "
        "Polars, or a dataset of the package datasets"
    )


def read_rows(dataset: Any, options: Mapping[str, Any]) -> tuple[list[Row], str]:
    """Return all rows of any data set, and what to call it in errors. options: those of Source."""
    source = named_source(dataset)
    if source is None:
        return rows_of(dataset), "dataset"
    found = Source(name=source, **options)
    return [*found.all_rows()], found.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """A data set of questions, as an environment."""

    env: str
    columns: tuple[str, ...]
    where: str
    """Names it in errors."""
    question: str
    answer: str | None


def write_questions(inputs: Inputs, dataset: Any, options: Mapping[str, Any]) -> Questions:
    """Return a data set as an environment qa/SOURCE; values are written to a file first.

    options: those of the environment that the user gives.
    """
    source = named_source(dataset)
    if source is None:
        rows = rows_of(dataset)
        first, where = rows[0], "the data set"
        question = _question(first, options, where)
        source = str(inputs.put_rows("questions", rows, where))
    else:
        of_source = {name: options[name] for name in ("split", "config", "revision") if name in options}
        first, where = Source(name=source, **of_source).first_row(), source
        question = _question(first, options, where)
    named = options.get(ANSWER_COLUMN, ANSWER_COLUMN)
    value = first.get(named) if named == ANSWER_COLUMN else None
    has_answer = named != ANSWER_COLUMN or (isinstance(value, str | int | float) and not isinstance(value, bool))
    answer = named if has_answer else None
    return Questions(env=QUESTIONS + source, columns=tuple(first), where=where, question=question, answer=answer)


def _question(row: Row, options: Mapping[str, Any], where: str) -> str:
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


def write_rewards(inputs: Inputs, rewards: Rewards, questions: Questions) -> dict[str, Any]:
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
    inputs: Inputs, rewards: Mapping[str, tuple[Callable[..., Any], float]], questions: Questions
) -> dict[str, Any]:
    for name, (function, _) in rewards.items():
        if callable(function) and hasattr(function, "__code__"):
            columns_of(name, function, questions.columns, questions.where)  # refuses others
    text = take({f"reward {name}": function for name, (function, _) in rewards.items()})
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
    file = inputs.put("reward.py", "\n".join(lines).encode())
    has_group = any(sees_group(function) for function, _ in rewards.values())
    return {
        "scorer": f"{file}:{SCORER}",
        **({"group_scorer": f"{file}:{GROUP_SCORER}"} if has_group else {}),
    }


# --- Conversations and pairs -----------------------------------------------------------------------------------------


def conversations(rows: Iterable[Row], where: str) -> Iterator[Row]:
    """Yield rows of supervised training as records: `messages`, or `prompt` and `completion`.

    Trained on are all answers in messages, or the completion alone.
    """
    for number, row in enumerate(rows):
        at = f"{where}, row {number}"
        if row.get("messages") is not None:
            yield _record(number, _messages(row["messages"], f"{at}, messages", "user"), row, 1.0)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            yield _record(number, _exchange(row, "completion", at), row, 1.0)
        else:
            raise ConfigError(f"{at} has the columns {', '.join(row)}; wanted messages, or prompt and completion")


def pairs(rows: Iterable[Row], where: str) -> Iterator[Row]:
    """Yield rows of preferences as two records each, a group: `prompt`, `chosen` and `rejected`.

    Without a prompt, chosen and rejected are conversations that begin with it.
    """
    for number, row in enumerate(rows):
        at = f"{where}, row {number}"
        if row.get("chosen") is None or row.get("rejected") is None:
            raise ConfigError(f"{at} has the columns {', '.join(row)}; wanted prompt, chosen and rejected")
        if row.get("prompt") is None:
            row = _with_prompt(row, at)
        for side, reward in (("chosen", 1.0), ("rejected", 0.0)):
            yield _record(number, _exchange(row, side, at), row, reward)


def _with_prompt(row: Row, at: str) -> Row:
    chosen, rejected = (_messages(row[side], f"{at}, {side}", "assistant") for side in ("chosen", "rejected"))
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    if not same:
        raise ConfigError(f"{at} has no prompt, and chosen and rejected do not begin with the same message")
    return {**row, "prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def _exchange(row: Row, side: str, at: str) -> list[Row]:
    """Return a prompt and an answer as messages, of which the answer is trained on."""
    prompt = _messages(row["prompt"], f"{at}, prompt", "user")
    answer = _messages(row[side], f"{at}, {side}", "assistant")
    marked = [{**each, "trainable": each["role"] == "assistant"} for each in answer]
    return [*({**each, "trainable": False} for each in prompt), *marked]


def _messages(value: Any, at: str, role: str) -> list[dict[str, Any]]:
    """Return a text as one message of a role, or messages as they are."""
    if isinstance(value, str) and value.strip():
        return [{"role": role, "content": value}]
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if listed and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in listed):
        return [{name: part for name, part in each.items() if part is not None} for each in listed]
    raise ConfigError(f"{at} is {_shown(value)}, wanted a text, or messages with role and content")


def _record(number: int, messages: Sequence[Row], row: Row, reward: float) -> Row:
    tools = {} if row.get("tools") is None else {"tools": row["tools"]}
    return {"messages": messages, "group_id": str(number), "episode_reward": reward, **tools}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
