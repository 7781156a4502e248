"""Follow a run while it trains: which of its versions are to be evaluated next, as they are published.

Reads names in policies/ and evals/, and policies/LATEST. Nothing is written, and nobody waits for this: a version that
is published while an older one is evaluated takes the place of those between them, and a version whose weights are gone
is left out. A process that is started again first finishes the versions that it had begun.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from ludic.errors import SchemaError, StoreError
from ludic.store import Root, latest_policy
from ludic.store.files import list_versions

logger = logging.getLogger(__name__)

_POLL_S, _RETRY_S = 0.5, 5.0


def due_versions(root: Root, every: int, is_over: Callable[[], bool], stop: threading.Event) -> Iterator[int]:
    """Yield version 0, multiples of `every` as they are published, and the last version once training is over.

    is_over: returns whether no version will be published any more. Ends after the last version, or when `stop` is set.
    Versions that are passed over are logged.
    """
    taken: int | None = None
    while not stop.is_set():
        try:
            over = is_over()  # before the newest version is read, which is then the last one
            newest = _newest(root)
            if taken is None and newest >= 0:
                begun = _begun(root, newest, every)
                taken = begun[-1]
                yield from begun
                continue
        except (SchemaError, StoreError) as error:
            logger.warning("looking again for new versions: %s", error)
            stop.wait(_RETRY_S)
            continue
        due = newest if over else newest - newest % every
        if taken is not None and due > taken:
            if skipped := range(taken - taken % every + every, due, every):
                logger.warning("skipped %s, since version %d is newer", describe_versions(skipped), due)
            taken = due
            yield due
        elif over:
            return
        else:
            stop.wait(_POLL_S)


def _newest(root: Root) -> int:
    """Return the newest version; -1 before the first."""
    latest = latest_policy(root)
    return latest.version if latest else -1


def _begun(root: Root, newest: int, every: int) -> list[int]:
    """Return version 0 and the versions that have samples, which may be complete, in order."""
    return sorted({0, *(version for version in _sampled(root) if version <= newest and version % every == 0)})


def _sampled(root: Root) -> list[int]:
    """Return the versions with samples, of any evaluation."""
    return list_versions(root, "evals")


def missed_versions(root: Root, every: int) -> list[int]:
    """Return the multiples of `every` below the newest version that have no samples."""
    stored = set(_sampled(root))
    return [version for version in range(0, _newest(root), every) if version not in stored]


def describe_versions(versions: Sequence[int]) -> str:
    """Return text such as: version 10; versions 10, 20 and 30; 37 versions from 10 to 370."""
    if len(versions) == 1:
        return f"version {versions[0]}"
    if len(versions) > 4:
        return f"{len(versions)} versions from {versions[0]} to {versions[-1]}"
    return f"versions {', '.join(map(str, versions[:-1]))} and {versions[-1]}"
