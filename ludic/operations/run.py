"""Run: every operation of ludic on one root, as a method. The command line, notebooks and pipelines all use them."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from html import escape
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ludic.operations import ask_again, evaluations, exchange, keep, look, machines, start
from ludic.results import Part, Result
from ludic.run_config import RunConfig
from ludic.run_json import run_of
from ludic.store import Root

if TYPE_CHECKING:
    from ludic.show.watch import Watcher


class Run(Result):
    """A run, by its root; `ludic.open` and `ludic.create` return one.

    Each method is a function of ludic.operations, which imports what it needs when it is called, so that `import ludic`
    stays light. A method that may take long has an argument `track` that shows progress (ludic.defaults.Track); by
    default it is silent. Any method raises StoreError if the root's filesystem fails.
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

    work = start.work
    train = start.train
    launch = start.launch
    check = start.check
    serve = machines.serve
    scale = machines.scale
    cluster_files = machines.cluster_files

    stats = look.stats
    status = look.status
    watch = look.watch
    sql = look.sql
    sql_stream = look.sql_stream
    show = look.show
    rollout = look.rollout
    group = look.group
    label = look.label
    view = look.view
    report = look.report
    sample = look.sample

    evaluate = evaluations.evaluate
    evaluation = evaluations.evaluation
    compare = evaluations.compare
    contamination = evaluations.contamination
    score = evaluations.score

    what_if = ask_again.what_if
    bisect = ask_again.bisect
    cut = ask_again.cut

    verify = keep.verify
    compact = keep.compact
    expire = keep.expire
    export = exchange.export
    import_ = exchange.import_

    # --- As a result, and for the operations ------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the place, the id and the settings of the run."""
        return {"root": self.url, "run_id": self.root.run_id, "run": asdict(self.config)}

    def parts(self) -> Iterator[Part]:
        """What to do with the run."""
        yield f"{self.url} is ready; `ludic worker {self.url}` samples for it, `ludic train {self.url}` trains"

    def __repr__(self) -> str:
        return f"ludic.open({self.url!r})"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    @cached_property
    def watcher(self) -> "Watcher":
        """Follows the state of the run; remembers what it saw before."""
        from ludic.show.watch import Watcher

        return Watcher(self.url)


def open_run(url: str | PathLike[str]) -> Run:
    """Open the run at a folder or URL. Raises MissingRootError if there is none, ConfigError if run.json is damaged."""
    return Run(Root.open(fspath(url)))
