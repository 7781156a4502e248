"""The commands of `ludic`, in the groups of `ludic --help`: each is a function, an operation of ludic.operations."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the operation that it calls, and what its help shows first."""

    operation: str
    """Module below ludic, and function: operations.keep:verify."""
    first: tuple[str, ...] = ()
    """Settings on the first page of --help, of an operation with many."""
    methods: tuple[str, ...] = ()
    """Methods of `Run` that do the same in a script or a notebook, if they are other functions."""
    ends_well: bool = False
    """Whether SIGTERM and Ctrl-C end it with success: they set its parameter `stop`."""

    def load(self) -> Callable[..., Any]:
        """Import the operation."""
        module, _, name = self.operation.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(f"ludic.{module}"), name)
        return function

    @property
    def about(self) -> str:
        """First line of the operation's docstring, without its full stop."""
        return (self.load().__doc__ or "").strip().partition("\n")[0].rstrip(".")


_RUN = Command(
    "operations.start:run",
    (
        "model",
        "env",
        "algorithm",
        "num_steps",
        "learning_rate",
        "group_size",
        "groups_per_batch",
        "max_tokens",
        "num_workers",
        "ranks",
        "engine",
        "eval_every",
        "trust_code",
    ),
    methods=("launch",),
)
_CHECK = Command("operations.start:check", (*_RUN.first, "server_url"))
_PLAN = Command(
    "operations.machines:plan",
    ("model", "gpus", "gpu", "gpu_memory_gb", "num_workers", "ranks", "engine", "dtype", "lora_rank", "max_tokens"),
)
_CREATE = Command(
    "operations.create:create",
    (
        "model",
        "env",
        "env_options",
        "group_size",
        "groups_per_batch",
        "num_workers",
        "temperature",
        "max_tokens",
        "parser",
        "tools",
        "protocol",
        "seed",
    ),
)
_TRAIN = Command(
    "operations.start:trainer",
    (
        "algorithm",
        "num_steps",
        "learning_rate",
        "advantage",
        "filters",
        "objective",
        "max_tokens_per_micro_batch",
        "lora_rank",
        "dtype",
        "device",
        "ranks",
        "checkpoint_every",
        "resume",
    ),
    methods=("train",),
)
_LAUNCH = Command(
    "operations.machines:write_cluster_files",
    (
        "workers",
        "nodes",
        "ranks",
        "gpus",
        "gpu_type",
        "max_hours",
        "setup",
        "image",
        "engine",
        "algorithm",
        "num_steps",
        "learning_rate",
        "out",
    ),
    methods=("cluster_files",),
)
_EVAL = Command(
    "operations.evaluations:evaluate",
    (
        "versions",
        "every",
        "suite",
        "env",
        "num_examples",
        "n",
        "temperature",
        "measures",
        "interval",
        "engine",
        "model",
        "json",
    ),
    methods=("evaluation",),
)

GROUPS: Mapping[str, Mapping[str, Command]] = MappingProxyType(
    {
        "First": {
            "demo": Command("demos.demo:demo"),
            "init": Command("operations.init:init"),
            "run": _RUN,
            "watch": Command("operations.look:watch", methods=("status",)),
            "view": Command("operations.look:view", methods=("label",)),
            "eval": _EVAL,
            "sql": Command("operations.look:write_sql", methods=("sql", "sql_stream")),
        },
        "Start": {
            "plan": _PLAN,
            "check": _CHECK,
            "create": _CREATE,
            "worker": Command("operations.start:worker", methods=("work",)),
            "train": _TRAIN,
            "serve": Command("operations.machines:serve", ends_well=True),
            "launch": _LAUNCH,
        },
        "Look": {
            "stats": Command("operations.look:stats"),
            "show": Command("operations.look:show", methods=("rollout", "group")),
            "sample": Command("operations.look:sample"),
            "report": Command("operations.look:write_report", methods=("report",)),
        },
        "Evaluate": {
            "eval compare": Command("operations.evaluations:compare"),
            "eval contamination": Command("operations.evaluations:contamination"),
            "score": Command("operations.evaluations:score"),
        },
        "Ask again": {
            "what-if": Command("operations.ask_again:what_if"),
            "bisect": Command("operations.ask_again:bisect"),
            "cut": Command("operations.ask_again:cut"),
        },
        "Keep": {
            "verify": Command("operations.keep:verify"),
            "compact": Command("operations.keep:compact"),
            "expire": Command("operations.keep:expire"),
        },
        "Exchange": {
            "export": Command("operations.exchange:export"),
            "import": Command("operations.exchange:import_"),
        },
    }
)
"""The commands by name. The first group has no title in the help."""
COMMANDS: Mapping[str, Command] = MappingProxyType(
    {name: command for group in GROUPS.values() for name, command in group.items()}
)
