"""The commands of `ludic`, in the groups of `ludic --help`: each is a function, an operation of ludic.operations."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the operation that it calls."""

    operation: str
    """Module below ludic, and function: operations.keep:verify."""
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


GROUPS: Mapping[str, Mapping[str, Command]] = MappingProxyType(
    {
        "First": {
            "demo": Command("demos.demo:demo"),
            "init": Command("operations.init:init"),
            "run": Command("operations.start:run", methods=("launch",)),
            "watch": Command("operations.look:watch", methods=("status",)),
            "view": Command("operations.look:view", methods=("label",)),
            "eval": Command("operations.evaluations:evaluate", methods=("evaluation",)),
            "sql": Command("operations.look:write_sql", methods=("sql", "sql_stream")),
        },
        "Start": {
            "plan": Command("operations.machines:plan"),
            "check": Command("operations.start:check"),
            "create": Command("operations.create:create"),
            "worker": Command("operations.start:worker", methods=("work",)),
            "train": Command("operations.start:trainer", methods=("train",)),
            "serve": Command("operations.machines:serve", ends_well=True),
            "launch": Command("operations.machines:write_cluster_files", methods=("cluster_files",)),
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
