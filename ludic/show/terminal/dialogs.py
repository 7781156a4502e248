"""Dialogs over a screen: the keys, and the form of a label."""

from typing import TYPE_CHECKING, ClassVar, cast

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ludic.errors import LudicError, one_line
from ludic.printable import printable
from ludic.results import pairs
from ludic.store.tables import LABEL

if TYPE_CHECKING:
    from ludic.show.terminal.app import ViewApp

_MOVES = {
    "arrows, page up, page down": "move, and go on to the next page",
    "home, end": "first and last row",
}


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


class LabelForm(ModalScreen[bool]):
    """Asks for a mark and a note, and stores them. Gives True if it stored a label."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, rollout_id: str) -> None:
        super().__init__()
        self._rollout_id = rollout_id

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(f"label of {printable(self._rollout_id)}", style="bold"))
            yield Input(placeholder="mark: a number such as 1 or 0.5, or a text such as good", id="mark")
            yield Input(placeholder="note", id="note")
            yield Input(LABEL, placeholder="name of the label", id="name")
            yield Static(Text("enter stores, tab moves, escape cancels; without mark and note it withdraws", "dim"))
            yield Static(id="refused")

    def on_input_submitted(self) -> None:
        self._store(*(self.query_one(f"#{name}", Input).value for name in ("mark", "note", "name")))

    @work(thread=True, exclusive=True)
    def _store(self, mark: str, note: str, name: str) -> None:
        try:
            cast("ViewApp", self.app).data.label(self._rollout_id, mark, note, name)
        except LudicError as error:
            self.app.call_from_thread(self._refuse, one_line(error))
        else:
            self.app.call_from_thread(self.dismiss, True)

    def _refuse(self, problem: str) -> None:
        self.query_one("#refused", Static).update(Text(printable(problem), style="bold red"))

    def action_cancel(self) -> None:
        self.dismiss(False)
