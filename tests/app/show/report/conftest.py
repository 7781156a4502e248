"""Roots with rollouts and evaluations of any text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval.conftest import StoreSamples, store_samples
from strategies import make_batch

from ludic.records.rollout import Message, RolloutBatch
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

__all__ = ["store_samples"]

HOSTILE = (
    "<script>document.title = 'hacked'</script></pre></details></style></title><!--"
    '<img src="http://127.0.0.1:9/x.png" onerror="document.title = \'hacked\'"><svg onload=alert(1)>'
    '<a href="javascript:alert(1)">a link</a><style>* { display: none }</style> {{ 7 * 7 }} &lt; \x00\x1b[31m\u202eabc'
)
HOSTILE_ENV = "<img src=x onerror=alert(1)>\x1b\u202e"
"""Shorter, since it becomes the name of a folder."""
SPELT = HOSTILE.replace("\x00\x1b[31m\u202e", r"\x00\x1b[31m\u202e")
"""What a reader sees of it."""

StoreRollouts = Callable[..., None]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model="m", env=("addition",)))


@pytest.fixture
def store_rollouts(root: Root) -> StoreRollouts:
    """Stores groups of rollouts by their rewards; options are fields of each rollout."""

    def store(rewards: list[list[float | None]], *, seed: int = 0, version: int = 0, **options: Any) -> None:
        batch = make_batch(worker_id=f"w{seed}-test", rewards=rewards, seed=seed, policy_version=version)
        groups = [
            replace(group, rollouts=tuple(replace(each, **options) for each in group.rollouts))
            for group in batch.groups
        ]
        with RolloutWriter(root, f"w{seed}-test") as writer:
            writer.append(RolloutBatch(groups=tuple(groups), metadata=batch.metadata))

    return store


def says(*contents: str) -> tuple[Message, ...]:
    """A question, its answer, and so on."""
    roles = ("user", "assistant") * len(contents)
    return tuple(Message(role=role, content=text) for role, text in zip(roles, contents, strict=False))


@pytest.fixture
def hostile(tmp_path: Path, root: Root, store_rollouts: StoreRollouts, store_samples: StoreSamples) -> Root:
    """A run in which every text tries to get out of the page."""
    texts = {"env_name": HOSTILE_ENV, "messages": says(HOSTILE, HOSTILE)}
    store_rollouts([[1.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]], **texts)
    store_rollouts([[None, 1.0]], seed=1, error=HOSTILE, **texts)
    for version, rewards in ((0, [0.0, 1.0]), (1, [1.0, 0.0])):
        examples = {f"{HOSTILE} {number}": [reward] for number, reward in enumerate(rewards)}
        store_samples(examples, version=version, **texts)
    return root
