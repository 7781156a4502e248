"""Find the runs below a folder or a bucket's prefix, and summarise each with a few small reads.

A summary costs run.json, the newest attempt with its lease, two listings, and at most a few files of metrics: never a
rollout. Runs are read by several threads. A run that can't be read is summarised by its problem. Raises ConfigError for
a place that is no folder, StoreError if its filesystem fails.
"""

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any, Literal, TypeVar

import fsspec

from ludic.base import RECORDED_ENV, is_url, left_out
from ludic.errors import ConfigError, LudicError, MissingRootError, SchemaError, one_line, unknown_name
from ludic.eval import comparable_name, comparable_options
from ludic.records import Row
from ludic.root import (
    ATTEMPTS,
    LEASES,
    RUN,
    WORKERS,
    Attempt,
    Lease,
    Root,
    data_of,
    has_ended,
    is_alive,
    is_questions,
    read_attempt,
    read_lease,
)
from ludic.root.rows import metrics_file_names, read_metrics, steps_that_count
from ludic.root.storage import Storage
from ludic.run import FREE_IF_NONE, RunConfig, find_sampling_diagnostics, run_of
from ludic.settings import settings_of
from ludic.training import TrainConfig

State = Literal["new", "recorded", "training", "stopped", "failed", "finished", "unreadable"]
"""new: no trainer has started. recorded: nor will one, since it keeps what another program did (`ludic gateway`).
stopped: its trainer ended in order before the last step. failed: an error or a kill ended it, or its lease is not
renewed. finished: it has reached its last step."""

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

_THREADS = 16
_MOST_FILES = 3
"""Number of a run's metrics files that are read to add up its tokens; of more files, some are read."""
_COLUMNS = ("created_at", "attempt_id", "step", "num_tokens", "reward_mean")
_COLUMNS_OF_CALLS = (
    *("created_at", "kind", "env_name", "num_rollouts", "num_groups", "num_zero_variance_groups", "num_errors"),
    *("num_parse_errors", "first_error", "reward_mean"),
)
_OTHER = "trainer"
"""Name, among the settings of a recorded run, of the program that trained it."""
_SEED = "seed"
_ENVIRONMENTS = ("env", "env_options")
_OF_BRANCHES = ("replay_batches", "replan_from")
"""Settings that say where a branch left another run."""
_MOST_CHARACTERS = 1000
"""Characters of a problem that are kept."""
_DIGITS = 8
"""Digits of a digest of code that are shown."""
_LEASES_UNTIL_SILENT = 3
"""Lengths of a lease without a renewal, by the clock of its filesystem, after which the trainer counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in one row."""

    url: str
    label: str
    """Short name among the runs that are shown with it: its path below their folder."""
    run_id: str | None = None
    """None if run.json can't be read."""
    state: State = "unreadable"
    step: int = 0
    """Newest gradient step that counts; 0 before the first."""
    num_steps: int | None = None
    """Step at which training ends; None if it is not known."""
    reward: float | None = None
    """Mean reward of the newest step."""
    tokens: int | None = None
    """Tokens of the steps that count; None before the first step."""
    is_tokens_estimated: bool = False
    """Whether only some of the steps' files were read for `tokens`."""
    seconds: float | None = None
    """Seconds from the start of each trainer to its newest step, added up; None before the first step."""
    began_at: datetime | None = None
    """When the run was created, UTC."""
    parent: str | None = None
    """Root that a branch left, as it was typed; None for a run that is none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run and of its newest trainer, by name."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Code of its newest trainer and of a worker: a file or package with the digest of its source, by role and name."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Data sets, each a file's name with the digest of its rows, by the name of its environment."""
    warning: str = ""
    """What is wrong with the newest calls of the engines, such as "equal rewards in ENV"; empty if they show nothing.
    `ludic watch` reads more, and finds more."""
    problem: str = ""
    """What ended the trainer, or what can't be read."""


# --- Find ------------------------------------------------------------------------------------------------------------


def find_runs(location: str | os.PathLike[str], levels: int = 3) -> list[str]:
    """Return the URLs of the runs at a folder or below it, sorted; [] if there are none.

    levels: of folders below it that are searched. A run is not entered, and neither are folders whose names begin with
    a dot. Raises ConfigError if it is no folder.
    """
    storage = Storage.connect(os.fspath(location))
    if storage.is_local and not Path(storage.path).is_dir():
        what = " is a file" if Path(storage.path).exists() else ": there is no such folder"
        raise ConfigError(f"{storage.url}{what}; wanted a run, or a folder with runs")
    runs: list[str] = []
    pending, seen = [""], set[str]()
    with ThreadPoolExecutor(_THREADS) as pool:
        for level in range(levels + 1):
            found = list(pool.map(lambda name: _look_into(storage, name), pending))
            runs += [name for name, (is_run, _) in zip(pending, found, strict=True) if is_run]
            below = [name for is_run, folders in found if not is_run for name in folders]
            pending = _once(storage, below, seen) if level < levels else []
    return sorted(_url_below(storage, name) for name in runs)


def _url_below(storage: Storage, name: str) -> str:
    if not name:
        return storage.url
    return name if storage.url == "." else f"{storage.url}/{name}"


def _once(storage: Storage, names: Sequence[str], seen: set[str]) -> list[str]:
    """Return the folders that links have not led to before."""
    if not storage.is_local:
        return list(names)
    real = {name: os.path.realpath(f"{storage.path}/{name}") for name in names}
    new = {path: name for name, path in reversed(real.items()) if path not in seen}
    seen.update(new)
    return sorted(new.values())


def _look_into(storage: Storage, name: str) -> tuple[bool, list[str]]:
    """Return whether a folder is a run, and the folders directly below it, by one listing."""
    files, folders = _entries(storage, name)
    prefix = f"{name}/" if name else ""
    return RUN.template in files, [f"{prefix}{each}" for each in folders if not each.startswith(".")]


def _entries(storage: Storage, name: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and the folders directly in a folder; none if it can't be listed."""
    if not storage.is_local:
        return storage.entries(name)
    try:
        with os.scandir(f"{storage.path}/{name}") as entries:
            found = [(entry.name, _is_folder(entry)) for entry in entries]
    except FileNotFoundError:  # deleted since its parent was listed
        return [], []
    except OSError as error:
        logger.warning("left out %s, which can't be listed: %s", f"{storage.url}/{name}", error.strerror)
        return [], []
    return [each for each, is_dir in found if not is_dir], [each for each, is_dir in found if is_dir]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that may not be entered
        return False


def open_or_find(url: str) -> Root | list[str]:
    """Return the run at a place, opened, or the URLs of the runs below it. Raises MissingRootError if there is none."""
    try:
        return Root.open(url)
    except MissingRootError:
        storage = Storage.connect(url)
        if storage.is_local and not Path(storage.path).is_dir():
            raise
        if runs := find_runs(url):
            return runs
        raise MissingRootError(
            f"{url} holds no run, and neither do the folders below it; `ludic run` or `ludic.record` starts one"
        ) from None


# --- Summarise -------------------------------------------------------------------------------------------------------


def summarise(urls: Iterable[str], below: str | None = None) -> list[RunSummary]:
    """Return a summary of each run, in the given order; of one that can't be read, its problem.

    below: folder that labels are paths below; None takes the innermost that holds all of them.
    """
    urls = list(urls)
    filesystems = _shared_filesystems(urls)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda url: _summarise(url, filesystems.get(_scheme(url))), urls))
    labels = labels_of(found) if below is None else [_path_below(each.url, below) for each in found]
    return [replace(each, label=label) for each, label in zip(found, labels, strict=True)]


def _path_below(url: str, folder: str) -> str:
    folder = folder.rstrip("/")
    return url.removeprefix(f"{folder}/") if url != folder else url.rpartition("/")[2]


def _scheme(url: str) -> str:
    return url.partition("://")[0] if is_url(url) else ""


def _shared_filesystems(urls: Sequence[str]) -> dict[str, fsspec.AbstractFileSystem]:
    """Return a filesystem for the URLs of each scheme: one of S3 takes 20 ms to make, more than its requests take."""
    found: dict[str, fsspec.AbstractFileSystem] = {}
    for scheme, url in {_scheme(url): url for url in urls}.items():
        with suppress(LudicError):  # the runs name it
            if scheme:
                found[scheme] = Storage.connect(url).fs
    return found


def _summarise(url: str, fs: fsspec.AbstractFileSystem | None) -> RunSummary:
    try:
        return _read(Root.open(url, fs=fs))
    except LudicError as error:
        return RunSummary(url=url, label=url, problem=one_line(error))


def _read(root: Root) -> RunSummary:
    """Summarise an open run. A damaged file beside run.json is named, and the rest is shown."""
    problems: list[str] = []
    lease, attempt = _newest_trainer(root, problems)
    config = attempt.config if attempt else {}
    names = metrics_file_names(root)
    rows, is_complete = _newest_rows(root, names, problems)
    run = _if_sound(lambda: run_of(root), problems)
    steps = steps_that_count({(row["attempt_id"], row["step"]): row for row in rows})
    if attempt and attempt.parent and all(row["attempt_id"] != attempt.attempt_id for row in rows):
        steps = [row for row in steps if row["step"] <= attempt.parent[1]]  # it trains the later ones again
    newest = steps[-1] if steps else {"step": attempt.parent[1] if attempt and attempt.parent else 0}
    tokens = [row["num_tokens"] for row in steps if row["num_tokens"] is not None]
    state, reason = _state(root, lease, attempt, newest["step"])
    if state == "new" and run is not None and RECORDED_ENV in run.env:
        state = "recorded"
    code, data = _source(root, attempt, problems)
    return RunSummary(
        url=root.url,
        label=root.url,
        run_id=root.run_id,
        state=state,
        step=newest["step"],
        num_steps=_num_steps(attempt),
        reward=newest.get("reward_mean"),
        tokens=(sum(tokens) if is_complete else round(fmean(tokens) * newest["step"])) if tokens else None,
        is_tokens_estimated=bool(tokens) and not is_complete,
        seconds=_seconds(root, rows, attempt),
        began_at=root.created_at or (_time(attempt.created_at) if attempt else None),
        parent=str(config["replay_batches"]) if None not in map(config.get, _OF_BRANCHES) else None,
        settings=_settings(run, attempt),
        code=code,
        data=data,
        warning=_warning(root, run, names, problems) if run else "",
        problem=left_out("; ".join(filter(None, [reason, *problems])), _MOST_CHARACTERS),
    )


def _if_sound(read: Callable[[], Found], problems: list[str]) -> Found | None:
    """Return the result of `read`; None for a file that is damaged, which is added to `problems`, or gone."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except (SchemaError, ConfigError) as error:
        problems.append(one_line(error))
        return None


def _newest_trainer(root: Root, problems: list[str]) -> tuple[Lease | None, Attempt | None]:
    """Return the lease of the newest claim, and the newest attempt; a trainer may die between the two."""
    names = root.list(ATTEMPTS.folder)
    attempts = [found.attempt_id for found in ATTEMPTS.parsed(names)]
    claimed = max([*attempts, *(found.attempt_id for found in LEASES.parsed(names))], default=0)
    lease = _if_sound(lambda: read_lease(root, claimed), problems) if claimed else None
    return lease, _if_sound(lambda: read_attempt(root, max(attempts)), problems) if attempts else None


def _newest_rows(root: Root, files: Mapping[str, list[str]], problems: list[str]) -> tuple[list[Row], bool]:
    """Return rows of steps, and whether these are all: from the newest file of each trainer, and a few others."""
    names = [names for writer, names in files.items() if writer.startswith("train-")]
    others = [name for of_writer in names for name in of_writer[:-1]]
    most = max(0, _MOST_FILES - len(names))
    chosen = others if len(others) <= most else others[:: -(-len(others) // most)] if most else []
    wanted = [*chosen, *(of_writer[-1] for of_writer in names)]
    read = [_if_sound(partial(read_metrics, root, name, _COLUMNS), problems) for name in wanted]
    rows = [row for of_file in read for row in of_file or () if None not in (row["attempt_id"], row["step"])]
    return rows, len(chosen) == len(others) and None not in read


def _seconds(root: Root, rows: Sequence[Row], newest: Attempt | None) -> float | None:
    """Return the seconds that the trainers of these rows took to their newest steps, by their own clocks."""
    ends: dict[int, datetime] = {}
    for row in rows:
        ends[row["attempt_id"]] = max(row["created_at"], ends.get(row["attempt_id"], row["created_at"]))
    seconds = []
    for attempt_id, end in ends.items():
        is_known = newest is not None and newest.attempt_id == attempt_id
        attempt = newest if is_known else _if_sound(partial(read_attempt, root, attempt_id), [])
        if attempt is not None and (start := _time(attempt.created_at)) is not None:
            seconds.append(max(0.0, (end - start).total_seconds()))
    return sum(seconds) if seconds else None


def _time(text: str) -> datetime | None:
    """Parse a time in ISO 8601; None if it is none."""
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    return None


def _state(root: Root, lease: Lease | None, attempt: Attempt | None, step: int) -> tuple[State, str]:
    """Return the state of a run, and what ended its trainer if that failed. One look has to do, unlike in `watch`."""
    if lease is None and attempt is None:
        return "new", ""
    if lease is not None and not has_ended(lease):
        if (lease.process and is_alive(lease.process)) or _is_renewed(root, lease):
            return "training", ""
        return "failed", f"{lease.owner} has not renewed its lease: dead or disconnected"
    if lease is not None and lease.error:
        return "failed", lease.error
    num_steps = _num_steps(attempt)
    is_others = attempt is not None and attempt.other_trainer is not None
    if (num_steps is not None and step >= num_steps) or (is_others and (lease is None or lease.released)):
        return "finished", ""
    if lease is not None and not lease.released:
        return "failed", f"{lease.owner}: its process is gone"
    return "stopped", ""


def _num_steps(attempt: Attempt | None) -> int | None:
    found = attempt.config.get("num_steps") if attempt else None
    return found if isinstance(found, int) else None


def _is_renewed(root: Root, lease: Lease) -> bool:
    written = root.modified(LEASES.name_of(lease))
    age_s = 0.0 if written is None else (datetime.now(UTC) - written).total_seconds()
    return age_s < _LEASES_UNTIL_SILENT * lease.lease_s


def _warning(root: Root, run: RunConfig, files: Mapping[str, list[str]], problems: list[str]) -> str:
    """Return the kind of the first diagnostic of the newest calls, which hold a batch, from at most a few files."""
    workers = sorted((name for name in files if name.startswith("worker-")), key=_began, reverse=True)
    newest = [files[name][-back] for back in range(1, _MOST_FILES + 1) for name in workers if len(files[name]) >= back]
    rows: list[Row] = []
    for name in newest[:_MOST_FILES]:
        read = _if_sound(partial(read_metrics, root, name, _COLUMNS_OF_CALLS), problems) or ()
        rows += [row for row in read if row["kind"] == "worker" and row["env_name"] is not None]
        if sum(row["num_groups"] or 0 for row in rows) >= run.groups_per_batch:
            break
    rows.sort(key=lambda row: row["created_at"])
    return next((each.kind for each in find_sampling_diagnostics(rows, run)), "")


def _began(writer: str) -> str:
    """Return the end of a worker's name, which is the time of its start."""
    return writer.rpartition("-")[2]


def _settings(config: RunConfig | None, attempt: Attempt | None) -> dict[str, Any]:
    run = asdict(config) if config else {}
    if attempt is None:
        return run
    if attempt.other_trainer is not None:
        own = {name: run[name] for name in _ENVIRONMENTS if name in run}
        return {**run, **attempt.other_trainer.settings, **own, _OTHER: attempt.other_trainer.name}
    return {**_train_defaults(), **attempt.config, **run}


def _source(root: Root, attempt: Attempt | None, problems: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return code, by role and name, and data, of the newest trainer and of the newest life of the first slot."""
    lives = WORKERS.parsed(root.list(WORKERS.folder))
    newest = min(lives, key=lambda found: (found.slot, -found.life), default=None)
    claim = newest and _if_sound(lambda: WORKERS.read(root, newest.slot, newest.life), problems)
    records = [*(attempt.code if attempt else ()), *(claim.code if claim else ())]
    data = {str(record.get("name")): _data_text(record) for record in records if is_data(record)}
    return dict(item for record in records for item in code_texts(record)), data


def is_data(record: Row) -> bool:
    """Return whether a code record is of a data set."""
    return record.get("role") == "environment" and is_questions(str(record.get("name")))


def digests_of(record: Row) -> dict[str, str | None]:
    """Return the digests of a code record's source, by "", and of its imports, by their names."""
    return {"": record.get("sha256"), **(record.get("imports") or {})}


def home_of(record: Row) -> str:
    """Return the package of a code record's source, or the name of its file."""
    return record.get("package") or PurePath(record.get("path") or "").name


def _data_text(record: Row) -> str:
    """Return the name of a data set's file and the digest of its rows; equal rows have one digest."""
    source, *imports = digests_of(record).values()
    digests = [source, *sorted(imports, key=str)]
    shown = "+".join(str(digest or "unknown")[:_DIGITS] for digest in digests)
    return f"{PurePath(str(record.get('name'))).name} {shown}"


def code_texts(record: Row) -> Iterator[tuple[str, str]]:
    """Yield a code record's source and its imports as texts, by role and name; nothing for a data set."""
    if is_data(record):
        return
    role, named = str(record.get("role")), str(record.get("name"))
    name = f"{role} {comparable_name(named)}"
    for part, digest in digests_of(record).items():
        yield f"{name} {part}".strip(), f"{part or home_of(record)} {str(digest or 'unknown')[:_DIGITS]}".strip()


@cache
def _train_defaults() -> Mapping[str, Any]:
    return {each.name: each.default for each in settings_of(TrainConfig) if each.default is not MISSING}


# --- Tell apart ------------------------------------------------------------------------------------------------------


def labels_of(summaries: Sequence[RunSummary]) -> list[str]:
    """Return a short unique label of each run: its path below the folder that all of them are in."""
    paths = [each.url.split("/") for each in summaries]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    num_shared = sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, folders))
    return ["/".join(path[num_shared:]) for path in paths]


def differing(summaries: Sequence[RunSummary]) -> list[str]:
    """Return the names of the settings in which runs differ, those that change nothing that is learned last.

    Places are left out: paths of a root within its own settings, and what a branch takes from the run that it left. A
    setting that a run has not, such as one of a trainer that has not started, is not compared.
    """
    return sorted(_differing(summaries), key=lambda name: name in _aside())


def _differing(summaries: Sequence[RunSummary]) -> Iterator[str]:
    recorded = [each for each in summaries if _OTHER in each.settings]
    for name in dict.fromkeys(name for each in summaries for name in each.settings if name not in _OF_BRANCHES):
        having = [each for each in summaries if name in each.settings and not (each.parent and name == "model")]
        if name in FREE_IF_NONE:
            having = [each for each in having if each.settings[name] is not None]
        is_left_out = 0 < sum(name in each.settings for each in recorded) < len(recorded)
        if is_left_out or len({comparable(each, name) for each in having}) > 1:
            yield name


def differing_code(summaries: Sequence[RunSummary]) -> list[str]:
    """Return the roles and names of code that is not the same in all runs that have recorded code."""
    having = [each.code for each in summaries if each.code]
    names = dict.fromkeys(name for code in having for name in code)
    return [name for name in names if len({code.get(name) for code in having}) > 1]


def comparable(summary: RunSummary, name: str) -> str:
    """Return the value of a setting as JSON, with ROOT for the run's own place."""
    value = summary.settings[name]
    if name in _ENVIRONMENTS:
        options = summary.settings.get("env_options")
        stored = {each: data_of(each, (options or {}).get(each)) or each for each in summary.settings["env"]}
        value = [stored.get(each, each) for each in value] if name == "env" else _renamed(value, stored)
        if isinstance(value, Mapping):  # rewards of `ludic.fit` have a place that was typed, perhaps in another folder
            value = {env: comparable_options(options) for env, options in value.items()}
    text = json.dumps(value, sort_keys=True, default=str)
    places = {summary.url} if is_url(summary.url) else {summary.url, str(Path(summary.url).absolute())} - {"."}
    for place in sorted(places, key=len, reverse=True):
        text = _place_in(json.dumps(place)[1:-1]).sub("ROOT", text)
    return text


@cache
def _place_in(place: str) -> re.Pattern[str]:
    """Return what finds a place in JSON text: as a whole path or its beginning, and a single word only in a path."""
    found = rf"(?<![\w.-]){re.escape(place)}(?![\w.-])"
    return re.compile(found if "/" in place else rf"(?<=/){found}|{found}(?=/)")


def _renamed(values: Any, names: Mapping[str, str]) -> Any:
    return {names.get(name, name): value for name, value in values.items()} if isinstance(values, Mapping) else values


@cache
def _aside() -> frozenset[str]:
    """Return the names of settings of checkpoints, devices, trackers and the like."""
    free = (each for each in settings_of(TrainConfig) if not each.role.changes_weights)
    return frozenset(each.name for each in free if each.group != "batch")


def group_runs(summaries: Sequence[RunSummary], by: str | None = None) -> dict[str, list[str]]:
    """Return the labels of the runs of each group, by its name: of those that may be averaged, as seeds are.

    The runs of a group have recorded the same code, the same data, and the same settings but the seed: by None all
    others; by a setting this one, and all others that change what is learned. A name has the settings in which groups
    differ, such as learning_rate=1e-06, and after those, of code and data, what is not that of the first such group.
    Runs without settings have no group. Raises ConfigError for an unknown setting.
    """
    having = [each for each in summaries if each.settings]
    if by is not None and all(by not in each.settings for each in having):
        known = dict.fromkeys(name for each in having for name in each.settings)
        message = unknown_name("setting", by, known, listed=differing(having))
        raise ConfigError(f"{message}; of several runs --by is a setting, of one run a column of its rollouts")
    aside = {_SEED, *(() if by is None else (by, *_aside()))}
    names = [name for name in differing(having) if name not in aside]
    found: dict[tuple[Any, ...], list[RunSummary]] = {}
    for each in having:
        value = "" if by is None else f"{by}={setting_text(each, by)}"
        settings = tuple(setting_text(each, name) for name in names)
        source = frozenset(each.code.items()), _digests(each)
        found.setdefault((value, settings, *source), []).append(each)
    alike: dict[str, list[list[RunSummary]]] = {}
    for (value, settings, *_), members in found.items():
        of_value = [others for other, others, *_ in found if other == value]
        shown = [index for index in range(len(names)) if len({others[index] for others in of_value}) > 1]
        parts = [*([value] if value else []), *(f"{names[index]}={settings[index]}" for index in shown)]
        alike.setdefault(", ".join(parts), []).append(members)
    named: dict[str, list[str]] = {}
    for beginning, groups in alike.items():
        for name, members in zip(_names_by_source(beginning, [each[0] for each in groups]), groups, strict=True):
            while name in named:
                name += "'"
            named[name] = [each.label for each in members]
    return named


def _names_by_source(beginning: str, firsts: Sequence[RunSummary]) -> Iterator[str]:
    """Yield the name of each group with equal settings, by how its code and data differ from those of the first one.

    firsts: one run of each group.
    """
    yield beginning or "all runs"
    names = [list(_other_source(each, firsts[0])) for each in firsts[1:]]
    for each, parts in zip(firsts[1:], names, strict=True):
        shown = parts if names.count(parts) == 1 else _other_source(each, firsts[0], with_digests=True)
        yield ", ".join(filter(None, [beginning, *shown]))


def _other_source(summary: RunSummary, first: RunSummary, *, with_digests: bool = False) -> Iterator[str]:
    """Yield what a run has of code and data that another one has not."""
    digests = _digests(first)
    other_data = [text for text in summary.data.values() if text.rpartition(" ")[2] not in digests]
    other_code = [text for name, text in summary.code.items() if first.code.get(name) != text]
    for kind, own, of_first, others in (
        ("code", summary.code, first.code, other_code),
        ("data", summary.data, first.data, other_data),
    ):
        texts = dict.fromkeys(text if with_digests else text.rpartition(" ")[0] for text in others)
        if texts:
            yield f"other {kind} ({', '.join(texts)})"
        elif len(own) != len(of_first):
            yield f"less {kind}" if own else f"no {kind} recorded"


def _digests(summary: RunSummary) -> frozenset[str]:
    """Return the digests of a run's data sets: equal rows are one data set, whatever each run calls them."""
    return frozenset(text.rpartition(" ")[2] for text in summary.data.values())


def lines_of(summaries: Sequence[RunSummary], by: str | None = None) -> dict[str, str]:
    """Return the name of the line of each run that is drawn as one of a group (`group_runs`), by the run's label.

    by: None draws only groups of several runs as one.
    """
    groups = group_runs(summaries, by)
    if by is None:
        groups = {f"{name} ({len(labels)} runs)": labels for name, labels in groups.items() if len(labels) > 1}
    return {label: name for name, labels in groups.items() for label in labels}


def setting_text(summary: RunSummary, name: str) -> str:
    """Return the value of a setting as people read it; a dash if the run has none."""
    if name not in summary.settings:
        return "-"
    value = json.loads(comparable(summary, name))
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return value if isinstance(value, str) else json.dumps(value)
