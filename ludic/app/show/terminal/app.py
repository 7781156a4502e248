"""Define the viewer's textual app: its first screen, its keys, and the transitions between screens."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from ludic.app.show.data import MOST_ROWS, RunData, versions
from ludic.app.show.stats import describe_sampling
from ludic.app.show.terminal.list_screen import CompareList, ListScreen
from ludic.app.show.terminal.rollout_screen import RolloutScreen, SideBySide
from ludic.base import pairs
from ludic.base.printable import printable
from ludic.root import Root, other_trainer_of
from ludic.root.weights import latest_policy
from ludic.run import is_recorded_run, run_of

_MOVES = {
    "arrows, page up, page down": "move, also to the next page",
    "home, end": "first and last row",
}


class ViewApp(App[None]):
    """The viewer of one run."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "help", key_display="?"),
        Binding("q", "quit", "quit"),
    ]
    CSS = """
    #facts { padding: 0 1; color: $text-muted; }
    #warnings { padding: 0 1; height: auto; max-height: 50%; }
    #title { padding: 0 1; height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #problem { padding: 0 1; display: none; }
    #entry { border: round $accent; }
    PagedTable { height: 1fr; }
    RolloutPane { padding: 0 1; height: 1fr; width: 1fr; }
    SideBySide RolloutPane { border: round $surface-lighten-2; }
    SideBySide RolloutPane:focus { border: round $accent; }
    Help, LabelForm { align: center middle; }
    .dialog { width: 80; max-width: 90%; height: auto; max-height: 90%; padding: 1 2; border: round $accent;
              background: $surface; }
    """

    most_rows = MOST_ROWS

    def __init__(self, root: Root, *, rollout_id: str | None = None, author: str | None = None) -> None:
        super().__init__()
        self.data = RunData(root, author)
        self._rollout_id = rollout_id

    def on_mount(self) -> None:
        self.push_screen(ListScreen(versions("rollouts")))
        if self._rollout_id is not None:
            self.open_rollout(self._rollout_id)

    def facts(self) -> Text:
        """Return the run's settings in two lines."""
        root, run = self.data.root, run_of(self.data.root)
        latest = latest_policy(root)
        other = other_trainer_of(root)
        without = "no policy yet" if other is None else f"trained by {other.name}"
        newest = without if latest is None else f"newest policy version {latest.version}"
        is_recorded = is_recorded_run(root)
        batch = "" if is_recorded else f"{run.groups_per_batch} groups of {run.group_size} a batch"
        sampling = describe_sampling(asdict(run), is_recorded=is_recorded)
        about = (f"environments {', '.join(run.env)}", batch, sampling)
        lines = (f"{root.url}  {root.run_id}  model {run.model}  {newest}", "; ".join(filter(None, about)))
        return Text(printable("\n".join(lines)))

    def open_rollout(self, rollout_id: str, opened_from: ListScreen | None = None) -> None:
        self.push_screen(RolloutScreen(rollout_id, opened_from))

    def choose_other(self, env_name: str, example_id: str, rollout_id: str) -> None:
        """List the other answers to an example; the chosen one is shown beside this rollout."""
        self.push_screen(CompareList(env_name, example_id, rollout_id))

    def open_beside(self, first: str, second: str) -> None:
        self.push_screen(SideBySide(first, second))

    def action_keys(self) -> None:
        """Show the keys of this screen."""
        screen = self.screen
        bindings = [binding for cls in type(screen).__mro__ for binding in own_bindings(cls)] + own_bindings(ViewApp)
        keys = {
            binding.key_display or binding.key: binding.tooltip or binding.description
            for binding in bindings
            if screen.check_action(binding.action.partition("(")[0], ()) is not False
        }
        self.push_screen(Help(keys))

    @contextmanager
    def showing_warnings(self) -> Iterator[None]:
        """Show logged warnings as notices, while the terminal belongs to the app."""
        logger, handler = logging.getLogger(), _Notices(self)
        before, logger.handlers = logger.handlers, [handler]
        try:
            yield
        finally:
            logger.handlers = before


def own_bindings(cls: type) -> list[Binding]:
    """Return the keys that a class of ludic defines itself, without those of textual."""
    found = vars(cls).get("BINDINGS", []) if cls.__module__.startswith("ludic.") else []
    return [binding for binding in found if isinstance(binding, Binding)]


class Help(ModalScreen[None]):
    """The keys of the screen below."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter", "dismiss", "close")]

    def __init__(self, keys: dict[str, str]) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(Text("keys of this screen\n", style="bold"))
            yield Static(pairs(_MOVES | self._keys))


class _Notices(logging.Handler):
    def __init__(self, app: ViewApp) -> None:
        super().__init__(logging.WARNING)
        self._app = app

    def emit(self, record: logging.LogRecord) -> None:
        if self._app.is_running:
            self._app.notify(printable(record.getMessage()), severity="warning", markup=False)
