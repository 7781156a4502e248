"""Roots with stored evaluations of any rewards, and runs over a tiny model that are evaluated."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluations import rows
from tiny_models import make_model

from ludic.records.rollout import AgentStep, RolloutBatch, RolloutGroup, RolloutMetadata, ToolCall, new_id
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

StoreSamples = Callable[..., None]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model="m", env=("addition",)))


@pytest.fixture
def store_samples(root: Root) -> StoreSamples:
    """Stores rewards by example as evaluation rows; options are fields of rows, or functions of (example, index)."""

    def store(
        rewards: Mapping[str, Sequence[float | None]],
        *,
        version: int = 0,
        worker_id: str | None = None,
        to: Root = root,
        **options: Any,
    ) -> None:
        worker_id = worker_id or f"heldout-{new_id()}"
        groups = tuple(
            RolloutGroup(key=example, rollouts=rows(example, number, of_example, version, options))
            for number, (example, of_example) in enumerate(rewards.items())
        )
        with RolloutWriter(to, worker_id, folder="evals") as writer:
            writer.append(RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=worker_id)))

    return store


def says(action: str | None, *errors: str) -> tuple[AgentStep, ...]:
    """Steps of an agent that calls a tool for each error, and then answers; None can't be parsed."""
    calls = tuple(
        ToolCall(id=str(number), name="tool", arguments="{}", error=error) for number, error in enumerate(errors)
    )
    step = {"turn": 0, "start": 0, "end": 3, "finish_reason": "stop", "parse_error": action is None}
    return (AgentStep(action_target="env", action=action, tool_calls=calls, **step),)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that answers sums."""
    return make_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=2)
