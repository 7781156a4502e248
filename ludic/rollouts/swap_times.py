"""Measure how long a new version takes from its publish to the first token that a worker samples with it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Literal

from ludic.engines.engine import Engine
from ludic.errors import SchemaError, StoreError
from ludic.rollouts.pump import EngineCalls
from ludic.store import Root
from ludic.store.policies import read_policy


class SwapTimes:
    """The times of a worker's newest version; taken once, with the first rollouts of the version."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._seconds: dict[str, float] = {}
        self._engine: EngineCalls | None = None

    def watch(self, engine: Engine) -> EngineCalls:
        """Return the engine to sample with: the same one, with the time of each version's first token noted."""
        self._engine = EngineCalls(engine)
        return self._engine

    @contextmanager
    def measured(self, part: Literal["fetch", "load"]) -> Iterator[None]:
        """Measure a part of a swap; a part that fails is not counted, and is measured again."""
        began = time.monotonic()
        yield
        self._seconds[f"{part}_s"] = time.monotonic() - began

    def take(self, version: int) -> dict[str, Any]:
        """Return fetch_s, load_s and first_token_s, named as in schemas/metrics.v1.json.

        Empty if taken before, or while no completion that began with the version has ended.
        """
        if self._engine is None or version not in self._engine.first_tokens:
            return {}
        seconds, self._seconds = self._seconds, {}
        return {**seconds, "first_token_s": self._since_publish(version)} if seconds else {}

    def _since_publish(self, version: int) -> float | None:
        """Return the seconds from the trainer's clock at the claim to this machine's clock at the first token."""
        first = self._engine.first_tokens.get(version) if self._engine else None
        try:
            policy = read_policy(self._root, version)
        except (SchemaError, StoreError):  # the weights are sound; only the measurement is lost
            return None
        if first is None or policy is None:
            return None
        since = first - datetime.fromisoformat(policy.created_at).timestamp()
        return since if since >= 0 else None
