"""Show one rollout with its conversation, tokens, steps, tools and training, or two rollouts side by side."""

from dataclasses import replace
from typing import Any, ClassVar, cast, get_args

from rich.console import Group, RenderableType
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from ludic.app.show.data import RolloutTable, rollouts
from ludic.app.show.terminal.list_screen import ROLLOUT_KEYS, LabelForm, ListScreen, Viewer
from ludic.app.show.transcript import Color, Lookup, PrintOptions, label_lines, rollout_parts
from ludic.base.printable import printable
from ludic.errors import LudicError, one_line

COLORS: tuple[Color, ...] = get_args(Color)


class RolloutPane(VerticalScroll):
    """Everything about one rollout, to scroll through."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__()
        self.rollout_id = rollout_id
        self.options = PrintOptions(to_see_all="f shows them")
        self.found: Lookup | None = None
        self._labels: list[dict[str, Any]] = []

    @property
    def _view(self) -> Viewer:
        return cast(Viewer, self.app)

    def compose(self) -> ComposeResult:
        yield Static(id="body")

    def on_mount(self) -> None:
        self.load()

    def load(self, rollout_id: str | None = None) -> None:
        """Read the rollout again, or another one."""
        self.rollout_id = rollout_id or self.rollout_id
        if self.found is None:
            self._update(Text(f"reading {printable(self.rollout_id)} ...", style="dim"))
        self._load(self.rollout_id)

    @work(thread=True, exclusive=True, group="load")
    def _load(self, rollout_id: str) -> None:
        worker, data = get_current_worker(), self._view.data
        try:
            found, labels = data.find(rollout_id), data.labels(rollout_id)
            data.token_reader  # noqa: B018  # read here, since it may come over a network
        except LudicError as error:
            if not worker.is_cancelled:
                problem = Text(printable(one_line(error)), style="bold red")
                self.app.call_from_thread(self._update, problem)
            return
        if not worker.is_cancelled:
            self.app.call_from_thread(self._accept, found, labels)

    def _accept(self, found: Lookup, labels: list[dict[str, Any]]) -> None:
        is_other = self.found is None or self.found.record.rollout_id != found.record.rollout_id
        self.found, self._labels = found, labels
        self.show()
        if is_other:
            self.scroll_home(animate=False)

    def show(self, **options: Any) -> None:
        """Draw the rollout, after changes to how it looks."""
        self.options = replace(self.options, **options)
        if self.found is not None:
            parts = rollout_parts(self.found, self.options, self._view.data.token_reader)
            self._update(Group(*parts, *label_lines(self._labels)))

    def _update(self, content: RenderableType) -> None:
        if self.is_mounted:
            self.query_one("#body", Static).update(content)


class _PaneScreen(Screen[None]):
    """A screen of one or two panes that look alike."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "back"),
        Binding("c", "color", "colour", tooltip="colour tokens by logprob, advantage, ratio, mask, or not"),
        Binding("k", "tokens", "tokens", tooltip="list the tokens, one per line"),
        Binding("f", "full", "full", tooltip="long texts whole, or without their middle"),
        Binding("r", "reload", "reload", show=False, tooltip="read again"),
    ]

    def panes(self) -> list[RolloutPane]:
        return list(self.query(RolloutPane))

    def on_mount(self) -> None:
        self.panes()[0].focus()

    def _show(self, **options: Any) -> None:
        for pane in self.panes():
            pane.show(**options)

    @property
    def _look(self) -> PrintOptions:
        return self.panes()[0].options

    def action_color(self) -> None:
        """Colour the tokens by the next of logprob, advantage, ratio, mask and nothing."""
        color = COLORS[(COLORS.index(self._look.color) + 1) % len(COLORS)]
        self._show(color=color)
        self.notify(f"tokens by {color}", timeout=2, markup=False)

    def action_tokens(self) -> None:
        self._show(tokens=not self._look.tokens)

    def action_full(self) -> None:
        self._show(full=not self._look.full)

    def action_reload(self) -> None:
        for pane in self.panes():
            pane.load()


class RolloutScreen(_PaneScreen):
    """One rollout; n and p go through the list that it was opened from."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "turn(1)", "next", tooltip="next rollout of the list"),
        Binding("p", "turn(-1)", "previous", tooltip="previous rollout of the list"),
        *ROLLOUT_KEYS,
        Binding("g", "group", "group", tooltip="rollouts of its group"),
        Binding("a", "episode", "agents", tooltip="rows of its episode: agents, their children, rewritten contexts"),
    ]

    def __init__(self, rollout_id: str, opened_from: ListScreen | None = None) -> None:
        super().__init__()
        self._rollout_id, self._list = rollout_id, opened_from

    def compose(self) -> ComposeResult:
        yield RolloutPane(self._rollout_id)
        yield Footer(show_command_palette=False, compact=True)

    @property
    def pane(self) -> RolloutPane:
        return self.query_one(RolloutPane)

    @property
    def _view(self) -> Viewer:
        return cast(Viewer, self.app)

    @property
    def _row(self) -> dict[str, Any] | None:
        return self.pane.found.rows[0] if self.pane.found else None

    def action_turn(self, step: int) -> None:
        if self._list is None:
            return
        table = self._list.table
        row = table.row(table.position + step)
        if row is not None:
            table.go_to(table.position + step)
            self.pane.load(row["rollout_id"])

    def action_label(self) -> None:
        self.app.push_screen(LabelForm(self.pane.rollout_id), self._after_label)

    def _after_label(self, is_stored: bool | None) -> None:
        if is_stored:
            self.pane.load()
            if self._list is not None:
                self._list.load()

    def action_compare(self) -> None:
        if self._row is not None:
            self._view.choose_other(self._row["env_name"], self._row["env_example_id"], self._row["rollout_id"])

    def action_group(self) -> None:
        self._open_list("group_id", "group")

    def action_episode(self) -> None:
        """List the rows of the episode: agents and their sub-agents."""
        self._open_list("episode_id", "episode")

    def _open_list(self, column: str, title: str) -> None:
        if self._row is not None and self.pane.found is not None:
            value = self._row[column]
            table: RolloutTable = "evals" if self._row["file"].startswith("evals/") else "rollouts"
            self.app.push_screen(ListScreen(rollouts(table, title=f"{title} {value}", **{column: value})))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self._list is not None if action == "turn" else True


class SideBySide(_PaneScreen):
    """Two rollouts of one example, side by side; Tab moves between them."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "app.focus_next", "other side")]

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self._ids = (first, second)

    def compose(self) -> ComposeResult:
        with Horizontal():
            for rollout_id in self._ids:
                yield RolloutPane(rollout_id)
        yield Footer(show_command_palette=False, compact=True)
