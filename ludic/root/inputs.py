"""Store the data set that a run was given as Python values in inputs/ of its root, and find it from any machine.

    inputs/questions-{digest}.jsonl    its rows; the digest is of the content, so the file never changes

Environments know nothing of the store, so `located_options` passes them the path of this file, and how this root
identifies an example, as options. If the root is not on a disk of this machine, the file is copied to the user's cache.
Raises StoreError if the file is missing or damaged.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from ludic.base import EXAMPLE_IDS, cache_folder
from ludic.errors import ConfigError, StoreError
from ludic.root.catalogue import DATA, INPUTS, DataName
from ludic.root.root import Root
from ludic.root.storage.filesystem import Storage
from ludic.settings import python_file_of
from ludic.settings.user_files import QUESTIONS

STORED = ("stored", "sha256")
"""Options of an environment whose data the root holds: the file's name in inputs/, and its SHA-256."""
_OLD_NAME = re.compile(rf"{QUESTIONS}(?:.*/)?inputs/(?:[0-9a-f]{{16}}/)?questions-([0-9a-f]{{16}})\.jsonl")
"""Environment of an older ludic, which named such data by its path on the machine that began the run."""


def is_questions(env: str) -> bool:
    """Return whether an environment is qa/SOURCE, not a class in a folder of that name."""
    return env.startswith(QUESTIONS) and python_file_of(env) is None


def data_of(env: str, options: Any) -> str | None:
    """Return the path below the root of an environment's data; None if the root was not given it."""
    stored = options.get("stored") if isinstance(options, Mapping) and is_questions(env) else None
    if stored is not None:
        path = f"{INPUTS.folder}/{stored}"
        return path if DATA.parse(path) is not None else None
    found = _OLD_NAME.fullmatch(env)
    return DATA.name(DataName(found[1])) if found else None


def stored_options(options: Any) -> dict[str, Any]:
    """Return those options of an environment that name data of the root; {} if there are none."""
    has_any = isinstance(options, Mapping) and "stored" in options
    return {name: options[name] for name in STORED if name in options} if has_any else {}


def located_options(env: Iterable[str], env_options: Mapping[str, Any], root: Storage) -> dict[str, Any]:
    """Return options with the path of the root's data on this machine, and with the identification of examples.

    They are for making environments, not for storing. root: a Root, or the storage of a root that is about to be
    created. Raises ConfigError for a name that is not data of the root, StoreError if the data is gone or damaged,
    SchemaError for a link that leads out.
    """
    example_ids = root.example_ids if isinstance(root, Root) else EXAMPLE_IDS[0]
    options = dict(env_options)
    for name in filter(is_questions, env):
        given = options.get(name, {})
        if not isinstance(given, Mapping):
            continue  # make_environment reports the error
        data = data_of(name, given)
        if data is None and "stored" in given:
            raise ConfigError(
                f"environment {name}: stored is {given['stored']!r}, wanted the name of a file in inputs/ of the root, "
                "such as questions-0123456789abcdef.jsonl"
            )
        path = None if data is None else _local_path(root, data, must_exist="stored" in given)
        found = {} if path is None else {"stored": str(path)}
        of_root = {} if example_ids == EXAMPLE_IDS[0] else {"example_ids": example_ids}
        options[name] = {**of_root, **given, **found}
    return options


def _local_path(root: Storage, name: str, *, must_exist: bool) -> Path | None:
    """Return the path of data on this machine; None if the root does not hold it and need not."""
    if root.is_local:
        path = Path(root.at(name)).absolute()
        if path.is_file():
            with path.open("rb") as file:
                _check(root, name, file_digest(file, "sha256").hexdigest())
            return path
    else:
        cache = Storage.connect(str(cache_folder()))
        copy = f"{cache_name(root)}/{name.rpartition('/')[2]}"
        is_whole = cache.exists(copy) and _holds(cache.read(copy), name)
        if not is_whole and root.exists(name):
            data = root.read(name)
            _check(root, name, sha256(data).hexdigest())
            cache.put(copy, data)
            is_whole = True
        if is_whole:
            return Path(cache.at(copy)).absolute()
    if must_exist:
        raise StoreError(
            f"{root.url}/{name}, the rows of the run's data set, is missing; copy it back from where it was"
        )
    return None


def _check(root: Storage, name: str, digest: str) -> None:
    if not _is_of(digest, name):
        raise StoreError(f"{root.url}/{name} {_OTHER_ROWS}")


_OTHER_ROWS = "is damaged: its rows do not match the digest in its name; copy it back from where it was"


def _holds(data: bytes, name: str) -> bool:
    """Return whether data matches the digest in its name."""
    return _is_of(sha256(data).hexdigest(), name)


def _is_of(digest: str, name: str) -> bool:
    of = DATA.parse(name)
    return of is not None and digest[:16] == of.digest


def cache_name(root: Storage) -> str:
    """Return the folder below the user's cache for inputs of a root that is not on a disk of this machine."""
    return f"{INPUTS.folder}/{sha256(root.url.encode()).hexdigest()[:16]}"


def copy_data(source: Root, target: Storage) -> None:
    """Copy the data of a run into a new root, which has its settings."""
    for env in dict.fromkeys(source.record.env):
        name = data_of(env, source.record.env_options.get(env))
        if name is not None and source.exists(name):
            target.put_if_absent(name, source.read(name))


def check_data(root: Root) -> Iterator[tuple[str, str]]:
    """Yield the path and the problem of each file of data that is damaged or gone."""
    for of in DATA.listed(root):
        name = DATA.name(of)
        if not _holds(root.read(name), name):
            yield name, _OTHER_ROWS
    for env in dict.fromkeys(root.record.env):
        options = root.record.env_options.get(env)
        data = data_of(env, options)
        # An older ludic left the data of some roots on the machine that began the run.
        if data is not None and stored_options(options) and not root.exists(data):
            yield data, f"is missing, the rows of {env}; copy it back from where it was"
