"""Find a model by folder, Hugging Face id or URL, and find the first model of a run.

The first weights are searched for under the root's model/, at the location in run.json, at their location when the run
began, and in a policy of step 0; --model names another location. Except for that policy, a folder is used only if its
fingerprints equal those of model/identity.json, so no other model is used by mistake. Imports no torch. Raises
ModelError, which names the locations that were tried.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

from ludic.base import TRAIN, find_by_name, is_url, require, temporary_folder
from ludic.errors import ModelError, one_line
from ludic.root.catalogue import MODEL
from ludic.root.json_records import ModelIdentity
from ludic.root.root import Root
from ludic.root.storage.filesystem import Storage
from ludic.root.weights.policies import policy_folder, read_policy, stored_versions
from ludic.root.weights.weight_folders import (
    CONFIG_FILES,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    check_same,
    identify,
    keep_model,
    matching,
    read_identity,
    read_snapshot,
    snapshot_files,
)

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_ADVICE = "go where the path is right, or give the model as an absolute path"
_SMALL_FILES = (*CONFIG_FILES, *TOKENIZER_FILES)


def is_hub_id(source: str) -> bool:
    """Return whether a text can be a Hugging Face id and is not a local folder."""
    return _HUB_ID.fullmatch(source) is not None and not Path(source).is_dir()


# --- Models by folder, Hugging Face id or URL ----------------------------------------------------------


@contextmanager
def local_folder(source: str, *, revision: str | None = None, with_weights: bool = True) -> Iterator[Path]:
    """Yield a local folder with a model, given by folder, Hugging Face id or URL.

    A copy from a URL is deleted at the end. revision: of a model from the Hub. with_weights: whether to download the
    weights. Raises ModelError if there is no such model.
    """
    patterns = (*_SMALL_FILES, *WEIGHT_FILES) if with_weights else _SMALL_FILES
    if is_url(source):
        with temporary_folder("model") as copy:
            _fetch(source, copy, patterns)
            yield copy
        return
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if not is_hub_id(source):
            raise ModelError(f"{_absent(source)}, and it is not a Hugging Face id; {_ADVICE}")
        folder = _snapshot(source, revision, with_weights)
    yield folder


def _fetch(url: str, folder: Path, patterns: Sequence[str]) -> None:
    storage = Storage.connect(url)
    paths = {name: PurePosixPath(name.lstrip("/")) for name in storage.list("")}
    wanted = {name: path for name, path in paths.items() if any(_matches(path, pattern) for pattern in patterns)}
    if PurePosixPath("config.json") not in wanted.values():
        raise ModelError(f"{url}: holds no config.json; wanted a Hugging Face folder of a model")
    storage.copy_all(wanted, folder)


def _matches(path: PurePosixPath, pattern: str) -> bool:
    """Match as Path.glob does: path and pattern must have the same depth."""
    return path.match(pattern) and len(path.parts) == len(PurePosixPath(pattern).parts)


def _snapshot(model_id: str, revision: str | None, with_weights: bool) -> Path:
    """Download a model into the Hub's cache and return its folder; pickled weights only if there are no others."""
    from huggingface_hub import snapshot_download  # takes half a second, not needed for folders

    try:
        folder = Path(snapshot_download(model_id, revision=revision, allow_patterns=list(_SMALL_FILES)))
        for pattern in WEIGHT_FILES if with_weights else ():
            snapshot_download(model_id, revision=folder.name, allow_patterns=[pattern])
            if any(folder.glob(pattern)):
                break
        return folder
    except (OSError, ValueError) as error:  # all errors of the Hub's client derive from these
        raise ModelError(f"{_absent(model_id)}, and {_why_not_from_hub(model_id, error)}") from error


def _why_not_from_hub(model_id: str, error: Exception) -> str:
    """Describe why the Hub returned no model, and the remedy."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"the Hub wants your consent to its terms: agree at https://huggingface.co/{model_id}, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hub has no such model, or it is private; {_ADVICE}, or set HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"the Hub's cache lacks it while the Hub can't be reached; run `hf download {model_id}` where there is a "
            "network, or give the model as an absolute path"
        )
    return f"the Hub did not give such a model ({one_line(error)}); {_ADVICE}"


def _absent(source: str) -> str:
    return f"{source}: there is no such folder, seen from {Path.cwd()}"


def identify_at(folder: Path, source: str) -> ModelIdentity:
    """Return the identity of a model that `local_folder` found."""
    is_own = not is_url(source) and Path(source).expanduser().is_dir()
    revision = folder.name if folder.parent.name == "snapshots" and not is_own else None
    return identify(folder, source, at=str(folder.resolve()) if is_own else None, revision=revision)


def remember_model(root: Root, given: str | None = None) -> None:
    """Write model/ if the root has none and its model is found, and check `given`, another location of the model.

    Raises ModelError if `given` is another model or can't be compared.
    """
    identity = read_identity(root)
    if identity is None:
        try:
            with local_folder(root.record.model) as folder:
                keep_model(root, folder, identify_at(folder, root.record.model))
        except ModelError as error:
            if given is not None:
                raise ModelError(
                    f"{root.url} does not say which model it began with, so that {given} can't be compared with it: "
                    f"{error}; put the model at the location in run.json, once"
                ) from error
            logger.debug("%s keeps no model: %s", root.url, error)
            return
    if given is not None:
        with local_folder(given) as folder:
            check_same(root, identify_at(folder, given))


# --- The first weights of a run ------------------------------------------------------------------------


@contextmanager
def first_model(root: Root, given: str | None = None) -> Iterator[Path]:
    """Yield a local folder with the first weights of a run, unchanged since the run began.

    given: the only location to search, instead of all. Raises ModelError if the weights are not found.
    """
    identity = read_identity(root)
    if identity is None:  # written by an older ludic, whose model was not found later
        with local_folder(given or root.record.model) as folder:
            yield folder
        return
    with ExitStack() as stack:
        yield _find(root, identity, given, stack)


@contextmanager
def base_of_run(root: Root, given: str | None = None) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the folder of `first_model`, which is searched for at the first call."""
    with ExitStack() as stack:
        yield cache(lambda: str(stack.enter_context(first_model(root, given))))


def _find(root: Root, identity: ModelIdentity, given: str | None, stack: ExitStack) -> Path:
    problems: list[str] = []
    for name, open_location in _locations(root, identity, given).items():
        try:
            folder = stack.enter_context(open_location())
            differences = identity.differences(identify(folder, name))
        except ModelError as error:
            problems.append(str(error))
            continue
        if not differences:
            return folder
        problems.append(f"{name}: {differences}")
    version = _version_of_step_0(root)
    if given is not None or version is None:
        raise ModelError(
            f"{root.url} began with {identity.source}, whose first weights are needed and are nowhere: "
            f"{'; '.join(problems)}; give its location with --model PATH"
        )
    logger.warning(
        "%s: the first weights are those of policies/version=%d, in the dtype that it was published in (%s)",
        *(root.url, version, "; ".join(problems)),
    )
    return stack.enter_context(_folder_of(root, policy_folder(version)))


def _locations(
    root: Root, identity: ModelIdentity, given: str | None
) -> Mapping[str, Callable[[], AbstractContextManager[Path]]]:
    """Return the locations of the first weights, without duplicates, in the order of the search."""
    if given is not None:
        return {given: partial(local_folder, given)}
    kept = (
        {f"{root.url}/{MODEL.folder}": partial(_folder_of, root, MODEL.folder)}
        if set(identity.weights) & set(snapshot_files(root))
        else {}
    )
    names = dict.fromkeys(name for name in (root.record.model, identity.source, identity.folder) if name)
    return kept | {name: partial(local_folder, name, revision=identity.revision) for name in names}


def _version_of_step_0(root: Root) -> int | None:
    """Return the version of a policy with whole weights that was published before training; None if there is none."""
    for version in stored_versions(root):
        policy, folder = read_policy(root, version), policy_folder(version)
        if policy and policy.step == 0 and _holds_whole_weights(root, folder):
            return version
    return None


def _holds_whole_weights(root: Root, folder: str) -> bool:
    """Return whether a policy's folder holds neither adapters nor differences to another version."""
    return root.exists(f"{folder}/config.json") and not root.exists(f"{folder}/adapter_config.json")


@contextmanager
def _folder_of(root: Root, name: str) -> Iterator[Path]:
    """Yield a local path of a folder of the root: the folder itself if the root is local, else a copy."""
    if root.is_local:
        yield root.folder_for_others(name)
        return
    with temporary_folder("model") as copy:
        root.download(name, copy)
        yield copy


# --- Its configuration and tokenizer -------------------------------------------------------------------


@contextmanager
def first_config(root: Root) -> Iterator[Path]:
    """Yield a local folder with the configuration of a run's first model; weights may be absent."""
    identity = read_identity(root)
    if identity is None:
        with local_folder(root.record.model, with_weights=False) as folder:
            yield folder
        return
    with temporary_folder("model") as copy:
        write_files(read_snapshot(root, identity.config), copy)
        yield copy


@contextmanager
def first_small_files(root: Root) -> Iterator[Path]:
    """Yield a local folder with the configuration and the tokenizer of a run's first model; weights may be absent."""
    with first_config(root) as folder:
        if read_identity(root) is not None:  # then the folder is a copy, with the configuration alone
            write_files(first_tokenizer(root), folder)
        yield folder


def stop_tokens_of(folder: Path) -> tuple[int, ...]:
    """Return the tokens at which a folder's model stops, by its generation_config.json or else its config.json.

    Raises ModelError if the files are damaged or missing.
    """
    try:
        texts = {name: (folder / name).read_bytes() for name in CONFIG_FILES if (folder / name).is_file()}
        found = {name: json.loads(text) for name, text in texts.items()}
        config = found["config.json"]
        ids = found.get("generation_config.json", {}).get("eos_token_id")
        # As get_text_config of transformers, as below.
        own = config.get("text_config") or config
        if ids is None and "eos_token_id" in own:
            ids = own["eos_token_id"]
        elif ids is None:  # transformers leaves out the defaults of the model's family
            require("transformers", TRAIN, f"{folder}: config.json leaves out its eos_token_id")
            ids = _load_config(folder).get_text_config().eos_token_id
    except (OSError, KeyError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder}: its configuration names no stop tokens that can be used: {error!r}") from error
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _load_config(folder: Path) -> Any:
    """Return the configuration of a folder, as transformers reads it; found by name, since the store needs no torch."""
    return find_by_name("ludic.models.weight_files:load_config")(str(folder))


def vocabulary_of(root: Root) -> int | None:
    """Return the number of token ids that a run's model knows, the rows of its embedding; None if it keeps no model.

    Raises ModelError if the kept config.json is damaged, or names no number.
    """
    identity = read_identity(root)
    if identity is None:
        return None
    files = read_snapshot(root, identity.config)
    try:
        config = json.loads(files["config.json"])
        # As get_text_config of transformers, which takes seconds to import: a model of several kinds of input has two.
        size = (config.get("text_config") or config).get("vocab_size")
        if size is None:  # transformers leaves out the defaults of the model's family
            require("transformers", TRAIN, f"{root.url}: the model's config.json leaves out its vocab_size")
            with first_config(root) as folder:
                size = _load_config(folder).get_text_config().vocab_size
        if not isinstance(size, int) or size < 1:
            raise TypeError(f"it is {size!r}, wanted a number of tokens")
        return size
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{root.url}/{MODEL.folder}/config.json names no vocab_size that can be used: {error}"
        ) from error


def first_tokenizer(root: Root) -> dict[str, bytes]:
    """Return the tokenizer files of a run's first model by name, with chat templates; empty if it has no tokenizer."""
    identity = read_identity(root)
    if identity is not None:
        return read_snapshot(root, identity.tokenizer)
    with local_folder(root.record.model, with_weights=False) as folder:
        return tokenizer_files(folder)


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in matching(folder, TOKENIZER_FILES)}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files, given as bytes by name, into a local folder."""
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def same_model(root: Root, other: Root) -> str:
    """Return how two runs' first models differ, in a sentence; empty if equal.

    Compares the models' names if a root has no identity.json.
    """
    mine, theirs = read_identity(root), read_identity(other)
    if mine is not None and theirs is not None:
        return theirs.differences(mine)
    same = root.record.model == other.record.model
    return "" if same else f"model is {other.record.model!r} there and {root.record.model!r} here"


def same_tokenizer(root: Root, other: Root) -> bool:
    """Return whether two runs have the same tokenizer. Compares the models' names if a root has no identity.json."""
    mine, theirs = read_identity(root), read_identity(other)
    if mine is not None and theirs is not None:
        return mine.tokenizer == theirs.tokenizer
    return root.record.model == other.record.model
