"""Find models: folders, Hugging Face ids, URLs; and the model that a run began with, wherever it is now.

The first weights are looked for under the root's model/, where run.json says, where they were when the run began, and
in a policy of step 0; --model names another place. What is found counts only with the fingerprints of
model/identity.json, so that no other model takes its place. Imports no torch. Raises ModelError, which names the
places that were tried.
"""

import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

from ludic.errors import ModelError, in_a_line
from ludic.paths import is_url
from ludic.store import Root
from ludic.store.filesystem import Storage
from ludic.store.model import (
    CONFIG_FILES,
    MODEL,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    ModelIdentity,
    check_same,
    identify,
    keep_model,
    kept_files,
    matching,
    read_identity,
    read_kept,
)
from ludic.store.policies import policy_folder, read_policy, stored_versions

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_ADVICE = "go where the path is right, or give the model as an absolute path"
_SMALL_FILES = (*CONFIG_FILES, *TOKENIZER_FILES)


def is_hub_id(source: str) -> bool:
    """Whether a text can be a Hugging Face id; a folder of that name comes first."""
    return _HUB_ID.fullmatch(source) is not None and not Path(source).is_dir()


@contextmanager
def local_folder(source: str, *, revision: str | None = None, with_weights: bool = True) -> Iterator[Path]:
    """A local folder with the model of a folder, a Hugging Face id or a URL; a copy of the last is gone at the end.

    revision: of a model from the Hub. with_weights: whether to download them.
    """
    patterns = (*_SMALL_FILES, *WEIGHT_FILES) if with_weights else _SMALL_FILES
    if is_url(source):
        with tempfile.TemporaryDirectory(prefix="ludic-model-") as copy:
            _fetch(source, Path(copy), patterns)
            yield Path(copy)
        return
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if not is_hub_id(source):
            raise ModelError(f"{_absent(source)}, and it is no Hugging Face id; {_ADVICE}")
        folder = _snapshot(source, revision, with_weights)
    yield folder


def _fetch(url: str, folder: Path, patterns: Sequence[str]) -> None:
    storage = Storage.at(url)
    paths = {name: PurePosixPath(name.lstrip("/")) for name in storage.list("")}
    wanted = {name: path for name, path in paths.items() if any(_matches(path, pattern) for pattern in patterns)}
    if PurePosixPath("config.json") not in wanted.values():
        raise ModelError(f"{url}: holds no config.json; wanted a Hugging Face folder of a model")
    storage.download(wanted, folder)


def _matches(path: PurePosixPath, pattern: str) -> bool:
    """As Path.glob has it: a pattern says how deep a file lies."""
    return path.match(pattern) and len(path.parts) == len(PurePosixPath(pattern).parts)


def _snapshot(model_id: str, revision: str | None, with_weights: bool) -> Path:
    """The Hub's files in its cache on this machine; pickled weights only where there are no others."""
    from huggingface_hub import snapshot_download  # half a second, which folders need not wait for

    try:
        folder = Path(snapshot_download(model_id, revision=revision, allow_patterns=list(_SMALL_FILES)))
        for pattern in WEIGHT_FILES if with_weights else ():
            snapshot_download(model_id, revision=folder.name, allow_patterns=[pattern])
            if any(folder.glob(pattern)):
                break
        return folder
    except (OSError, ValueError) as error:  # what the Hub's client raises derives from one of them
        raise ModelError(f"{_absent(model_id)}, nor such a model on the Hub ({in_a_line(error)}); {_ADVICE}") from error


def _absent(source: str) -> str:
    return f"{source}: there is no such folder, seen from {Path.cwd()}"


def identify_at(folder: Path, source: str) -> ModelIdentity:
    """The identity of a model that `local_folder` found."""
    is_own = not is_url(source) and Path(source).expanduser().is_dir()
    revision = folder.name if folder.parent.name == "snapshots" and not is_own else None
    return identify(folder, source, at=str(folder.resolve()) if is_own else None, revision=revision)


def remember_model(root: Root, given: str | None = None) -> None:
    """Put model/ under a root that has none, if its model is found; and check `given`, another place of the same.

    Raises ModelError for a `given` that is another model, or that can't be compared.
    """
    identity = read_identity(root)
    if identity is None:
        try:
            with local_folder(root.run.model) as folder:
                keep_model(root, folder, identify_at(folder, root.run.model))
        except ModelError as error:
            if given is not None:
                raise ModelError(
                    f"{root.url} does not say which model it began with, so that {given} can't be compared with it: "
                    f"{error}; put the model where run.json says, once"
                ) from error
            logger.debug("%s keeps no model: %s", root.url, error)
            return
    if given is not None:
        with local_folder(given) as folder:
            check_same(root, identify_at(folder, given))


@contextmanager
def first_model(root: Root, given: str | None = None) -> Iterator[Path]:
    """A local folder with the first weights of a run, the same as they were when it began.

    given: a place of the same model, which is looked at alone.
    """
    identity = read_identity(root)
    if identity is None:  # a root of an older ludic, whose model was not found since
        with local_folder(given or root.run.model) as folder:
            yield folder
        return
    with ExitStack() as stack:
        yield _find(root, identity, given, stack)


def _find(root: Root, identity: ModelIdentity, given: str | None, stack: ExitStack) -> Path:
    problems: list[str] = []
    for name, open_place in _places(root, identity, given).items():
        try:
            folder = stack.enter_context(open_place())
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
            f"{'; '.join(problems)}; --model PATH says where the same model is"
        )
    logger.warning(
        "%s: the first weights are those of policies/version=%d, in the dtype that it was published in (%s)",
        *(root.url, version, "; ".join(problems)),
    )
    return stack.enter_context(_folder_of(root, policy_folder(version)))


def _places(
    root: Root, identity: ModelIdentity, given: str | None
) -> Mapping[str, Callable[[], AbstractContextManager[Path]]]:
    """Where the first weights may be, each once, in the order in which they are looked for."""
    if given is not None:
        return {given: partial(local_folder, given)}
    kept = (
        {f"{root.url}/{MODEL}": partial(_folder_of, root, MODEL)}
        if set(identity.weights) & set(kept_files(root))
        else {}
    )
    names = dict.fromkeys(name for name in (root.run.model, identity.source, identity.folder) if name)
    return kept | {name: partial(local_folder, name, revision=identity.revision) for name in names}


def _version_of_step_0(root: Root) -> int | None:
    """A stored policy that is the first model, with its own weights: what a trainer publishes before it trains."""
    for version in stored_versions(root):
        policy = read_policy(root, version)
        if policy and policy.step == 0 and not root.exists(f"{policy_folder(version)}/adapter_config.json"):
            return version
    return None


@contextmanager
def _folder_of(root: Root, name: str) -> Iterator[Path]:
    """A folder of the root: itself where the root is local, else a copy."""
    if root.is_local:
        yield Path(root.at(name))
        return
    with tempfile.TemporaryDirectory(prefix="ludic-model-") as copy:
        root.download(name, copy)
        yield Path(copy)


@contextmanager
def first_config(root: Root) -> Iterator[Path]:
    """A local folder with the configuration of a run's first model; weights may be absent."""
    identity = read_identity(root)
    if identity is None:
        with local_folder(root.run.model, with_weights=False) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ludic-model-") as copy:
        write_files(read_kept(root, identity.config), Path(copy))
        yield Path(copy)


def first_tokenizer(root: Root) -> dict[str, bytes]:
    """The tokenizer files of a run's first model, chat templates included, by name; none of a model without one."""
    identity = read_identity(root)
    if identity is not None:
        return read_kept(root, identity.tokenizer)
    with local_folder(root.run.model, with_weights=False) as folder:
        return tokenizer_files(folder)


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in matching(folder, TOKENIZER_FILES)}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files that were read into a local folder, byte for byte."""
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def same_model(root: Root, other: Root) -> str:
    """How two runs' first models differ, in a sentence; empty for the same. Compares names where one keeps none."""
    mine, theirs = read_identity(root), read_identity(other)
    if mine is not None and theirs is not None:
        return theirs.differences(mine)
    same = root.run.model == other.run.model
    return "" if same else f"model is {other.run.model!r} there and {root.run.model!r} here"


def same_tokenizer(root: Root, other: Root) -> bool:
    """Whether tokens of two runs mean the same. Compares names of models where a root keeps none."""
    mine, theirs = read_identity(root), read_identity(other)
    if mine is not None and theirs is not None:
        return mine.tokenizer == theirs.tokenizer
    return root.run.model == other.run.model
