"""Operations: what people do with a run. Each is one function.

Its signature and docstring give the method of `ludic.Run`, the flags of the command, their help and docs/api.md. A
parameter with a type that a flag can give is a flag; `run` is an opened run, or ROOT. The function returns a Result
(ludic.base.results), which prints as text, in a notebook, and with --json. To add an operation, write the function
below `@operation` (ludic.app.operations.operation), with the group of its command in `ludic --help`.

The modules import nothing slow, since `ludic --help` reads their docstrings; a function imports what it needs.
"""

from importlib import import_module

MODULES = (
    *("counterfactual", "evaluations", "exchange", "gateway", "init", "inspect_run", "machines"),
    *("maintain", "plots", "runs", "start"),
)
"""Modules with commands and methods of `Run`."""


def import_operations() -> None:
    """Import the modules of operations, which registers their commands and methods."""
    for name in MODULES:
        import_module(f"{__name__}.{name}")
