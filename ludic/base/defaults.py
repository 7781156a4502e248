"""Define defaults that a command's help shows and that a module with slow imports uses."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

LEASE_S = 12.0
"""Default length of a lease, in seconds. Costs a put and two gets every 4 s: 13 cents a day on S3."""
MOST_LEASE_S = 86_400
"""Maximum lease, in seconds. After a trainer dies, the next one waits this long before it takes over."""
ENV_TIMEOUT_S = 60.0
"""Default limit of one call of an environment, in seconds."""
TARGET_BYTES = 128 << 20
"""Default target size of a compacted file, counted as the bytes of its sources."""
STOP_WITHIN_S = 120
"""Default time to stop cleanly, in seconds. A checkpoint of 3 billion weights, 36 GB, takes 72 s at 0.5 GB/s."""
ENGINE = "auto"
"""Default inference engine of workers: vllm on a GPU where it is installed, else transformers."""
MAX_OBSERVATION_CHARACTERS = 1_000_000
"""About 250,000 tokens, more than most models read."""
RECORDED_ENV = "recorded"
"""Environment of rollouts that another program sampled, unless the recorder names one."""
Longrope = Literal["short", "long"]
"""Factors of a longrope model, such as Phi-3-128k."""
ExampleIds = Literal["row", "question"]
"""Identity of a question of qa/SOURCE: a unique column such as id, else all columns; or its question and answer, as in
roots whose run.json has no value."""
EXAMPLE_IDS: tuple[ExampleIds, ...] = get_args(ExampleIds)
"""Possible values; the first is the default of a new root."""

Track = Callable[[Iterable[Any], int | None, str], Iterable[Any]]
"""Shows the progress of slow work: yields the items of an iterable, and shows their count with a description. The
length is None if unknown. Functions with slow work take one from a caller that has a terminal."""


def untracked(items: Iterable[Any], total: int | None, description: str) -> Iterable[Any]:
    """A Track that shows nothing."""
    return items
