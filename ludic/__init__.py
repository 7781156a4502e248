"""Post-training of language models by reinforcement learning, with storage as the spine.

`import ludic` is light: each name below is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ludic.base.moved import explain_moved_modules

if TYPE_CHECKING:
    from ludic.app import Run, create, dpo, fit, grpo, runs, sft
    from ludic.app import compare_runs as compare
    from ludic.app import open_run as open
    from ludic.app import plot_runs as plot
    from ludic.records import (
        AgentStep,
        EnvironmentStep,
        Message,
        Rollout,
        RolloutBatch,
        RolloutGroup,
        RolloutMetadata,
        ToolCall,
    )
    from ludic.root import Root
    from ludic.root.sql import connect, refresh, scan
    from ludic.run import RunConfig, record

_HOMES = {
    "Run": "ludic.app.operations.run",
    "AgentStep": "ludic.records",
    "EnvironmentStep": "ludic.records",
    "Message": "ludic.records",
    "Rollout": "ludic.records",
    "RolloutBatch": "ludic.records",
    "RolloutGroup": "ludic.records",
    "RolloutMetadata": "ludic.records",
    "ToolCall": "ludic.records",
    "compare": "ludic.app.operations.evaluations",
    "connect": "ludic.root.sql.connection",
    "create": "ludic.app.operations.create",
    "dpo": "ludic.app.operations.fit",
    "fit": "ludic.app.operations.fit",
    "grpo": "ludic.app.operations.fit",
    "open": "ludic.app.operations.run",
    "plot": "ludic.app.operations.plots",
    "record": "ludic.run.recording.recorder",
    "refresh": "ludic.root.sql.connection",
    "runs": "ludic.app.operations.runs",
    "scan": "ludic.root.sql.lazy_frames",
    "sft": "ludic.app.operations.fit",
    "Root": "ludic.root.root",
    "RunConfig": "ludic.run.config",
}

_MODULES = {
    "openrlhf": "ludic.adapters.openrlhf",
    "skyrl": "ludic.adapters.skyrl",
    "trl": "ludic.adapters.trl",
    "verl": "ludic.adapters.verl",
}
"""Modules that are reached by a short name; each needs the package that it is named after."""

_OWN_NAMES = {"compare": "compare_runs", "open": "open_run", "plot": "plot_runs"}
"""Names there that would hide a built-in function, or the method of a run."""

__all__ = [
    "AgentStep",
    "EnvironmentStep",
    "Message",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "RolloutMetadata",
    "Root",
    "Run",
    "RunConfig",
    "ToolCall",
    "compare",
    "connect",
    "create",
    "dpo",
    "fit",
    "grpo",
    "open",
    "plot",
    "record",
    "refresh",
    "runs",
    "scan",
    "sft",
]


explain_moved_modules()


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in _MODULES:
            return import_module(_MODULES[name])
        return getattr(import_module(_HOMES[name]), _OWN_NAMES.get(name, name))
    except ModuleNotFoundError as error:
        from ludic.base import missing_extra

        if (missing := missing_extra(error)) is None:
            raise
        raise missing from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
