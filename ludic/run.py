"""Run: every verb of ludic on one root. The command line, notebooks and pipelines all use it.

Each method imports what it needs when it is called, so that `import ludic` stays light.
"""

from ludic.store import Root, RunConfig


class Run:
    """A run, by its root; `ludic.open` and `ludic.create` return one."""

    def __init__(self, root: Root) -> None:
        self.root = root

    @property
    def url(self) -> str:
        """URL or path of the root."""
        return self.root.url

    @property
    def config(self) -> RunConfig:
        """Settings that workers and trainers share, from run.json."""
        return self.root.run

    def __repr__(self) -> str:
        return f"ludic.open({self.url!r})"


def open_run(url: str) -> Run:
    """Open the run at a folder or URL. Raises MissingRootError if there is none, SchemaError if run.json is damaged."""
    return Run(Root.open(url))
