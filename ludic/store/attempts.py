"""attempts/N.json: one a trainer start. The newest owns the root; an older one stops at its next write.

An attempt names its parent, the attempt and step of the checkpoint that it resumed from. The chain
of parents from the newest attempt is the effective ledger; what lies off the chain is superseded.
"""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from ludic.errors import FencedError
from ludic.store.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a trainer."""

    attempt_id: int
    parent_attempt: int | None
    """None: started from the run's first weights."""
    parent_step: int | None
    """The parent's steps up to this one count; later ones are superseded."""
    owner: str
    """host-pid, for people."""
    created_at: str
    config: Mapping[str, Any]
    """The trainer's settings; the next start takes them over unless told otherwise."""

    @property
    def name(self) -> str:
        return f"attempts/{self.attempt_id}.json"


def start_attempt(
    root: Root,
    *,
    parent_attempt: int | None = None,
    parent_step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Attempt:
    """Take ownership of the root; fences every earlier attempt."""
    attempt_id = newest_attempt_id(root) + 1
    while True:
        attempt = Attempt(
            attempt_id=attempt_id,
            parent_attempt=parent_attempt,
            parent_step=parent_step,
            owner=f"{socket.gethostname()}-{os.getpid()}",
            created_at=datetime.now(UTC).isoformat(),
            config=dict(config or {}),
        )
        if root.put_if_absent(attempt.name, (json.dumps(asdict(attempt), indent=2) + "\n").encode()):
            return attempt
        attempt_id += 1


def newest_attempt_id(root: Root) -> int:
    """0 when no trainer ever started."""
    return max((_attempt_id(name) for name in root.list("attempts")), default=0)


def read_attempt(root: Root, attempt_id: int) -> Attempt:
    """An attempt that is there."""
    return Attempt(**json.loads(root.read(f"attempts/{attempt_id}.json")))


def check_not_fenced(root: Root, attempt: Attempt) -> None:
    """Raises FencedError when a newer trainer has started."""
    newest = newest_attempt_id(root)
    if newest > attempt.attempt_id:
        owner = read_attempt(root, newest).owner
        raise FencedError(
            f"{root.url}: attempt {attempt.attempt_id} was replaced by attempt {newest} of {owner}; this trainer stops"
        )


def _attempt_id(name: str) -> int:
    stem = name.removeprefix("attempts/").removesuffix(".json")
    return int(stem) if stem.isdigit() else 0
