"""Run: every operation of ludic on one root, as a method. The command line, notebooks and pipelines all use them."""

from collections.abc import Mapping
from functools import cached_property
from html import escape
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ludic.app.operations import import_operations
from ludic.app.operations.methods import Methods
from ludic.root import Root
from ludic.run import RunConfig, run_of

if TYPE_CHECKING:
    from ludic.app.show.watch import Watcher


class Run(Methods):
    """A run, by its root; `ludic.open` and `ludic.create` return one.

    Each method is a function of ludic.app.operations, which imports what it needs when it is called, so that `import
    ludic` stays light. A method that may take long has an argument `track` that shows progress
    (ludic.base.defaults.Track); by default it is silent. Any method raises StoreError if the root's filesystem fails.
    """

    def __init__(self, root: Root) -> None:
        self.root = root

    @property
    def url(self) -> str:
        """URL or path of the root."""
        return self.root.url

    @property
    def config(self) -> RunConfig:
        """Settings that workers and trainers share, from run.json."""
        return run_of(self.root)

    if not TYPE_CHECKING:  # for a type checker, an unknown name is an error

        def __getattr__(self, name: str) -> Any:
            gone = f"; it is now {_GONE[name]}" if name in _GONE else ""
            raise AttributeError(f"'Run' has no attribute {name!r}{gone}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"ludic.open({self.url!r})"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    @cached_property
    def watcher(self) -> "Watcher":
        """Follows the state of the run; remembers what it saw before."""
        from ludic.app.show.watch import Watcher

        return Watcher(self.url)


_GONE: Mapping[str, str] = {
    "work": "Run.worker",
    "launch": "Run.run",
    "cluster_files": "Run.cluster(...).files",
    "status": "Run.watch(once=True)",
    "stats": "Run.watch(once=True).totals",
    "show": "Run.view(ID, text=True)",
    "rollout": "Run.view(ID, text=True)",
    "group": "Run.view(ID, text=True)",
    "sql_stream": "ludic.connect, whose result gives a stream",
    "evaluate": "Run.eval",
    "evaluation": "Run.eval(stored=True)",
}
"""What methods of older versions are now."""


def open_run(url: str | PathLike[str]) -> Run:
    """Open the run at a folder or URL. Raises MissingRootError if there is none, ConfigError if run.json is damaged."""
    return Run(Root.open(fspath(url)))


import_operations()  # which gives `Run` its methods
