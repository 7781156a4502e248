"""Requests: the inputs of an episode. One request is one episode."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

from ludic.engines.engine import SamplingParams
from ludic.environments.environment import Example
from ludic.records import Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """Request for one episode of one example."""

    env_name: str
    example: Example
    params: SamplingParams
    seed: int
    group_id: str
    group_index: int = 0
    group_size: int = 1
    request_index: int
    """Position of the episode in the run's schedule."""
    purpose: Purpose = "train"
    error: str | None = None
    """Why the environment gave no example; the episode fails with it, and `example` is empty."""


def repeat(request: EpisodeRequest, n: int, seed: int) -> tuple[EpisodeRequest, ...]:
    """Return the requests of a group: the same example n times, each with its own seed.

    request_index counts up from the one of `request`.
    """
    return tuple(
        replace(
            request,
            group_index=index,
            group_size=n,
            request_index=request.request_index + index,
            seed=derive_seed(seed, index),
        )
        for index in range(n)
    )


def sweep(requests: Sequence[EpisodeRequest], settings: Mapping[str, Sequence[Any]]) -> tuple[EpisodeRequest, ...]:
    """Return the requests with sampling settings in turn: each combination of the values of all settings.

    settings: fields of SamplingParams. Seeds stay as they are. Raises ConfigError for a value out of range.
    """
    if not settings:
        return tuple(requests)
    combinations = cycle([dict(zip(settings, values, strict=True)) for values in product(*settings.values())])
    return tuple(
        replace(request, params=replace(request.params, **values))
        for request, values in zip(requests, combinations, strict=False)
    )


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits from integers: the same on every machine, and unrelated for neighbouring integers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
