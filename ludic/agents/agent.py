"""An agent: a model with its tokenizer, and how its completions are read and its prompts are made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ludic.agents.contexts import Context, make_context
from ludic.agents.parsers import Parser, make_parser
from ludic.agents.prompts import Render, make_render
from ludic.agents.tools.formats import ToolFormat, make_tool_format
from ludic.agents.tools.toolbox import Toolbox
from ludic.engines.engine import Engine

if TYPE_CHECKING:
    from ludic.agents.delegation import SubAgent


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A model that continues a conversation."""

    engine: Engine
    tokenizer: Any
    """Tokenizer of transformers with a chat template."""
    model: str
    """Model name, stored with each rollout."""
    vocab_size: int | None = None
    """Tokens that the model knows, the rows of its embedding; no engine may answer with others. None if not known."""
    parser: Parser = field(default_factory=partial(make_parser, "whole"))
    """Reads the action in a completion."""
    make_context: Callable[[], Context] = field(default_factory=partial(make_context, "full"))
    """Makes the context of an episode, which decides what of the dialogue the model sees."""
    toolbox: Toolbox = field(default_factory=partial(Toolbox, ()))
    """Tools that the agent runs itself."""
    tool_format: ToolFormat = field(default_factory=partial(make_tool_format, "hermes"))
    """How the model writes tool calls."""
    sub_agents: "tuple[SubAgent, ...]" = ()
    """Agents to which it can hand tasks."""
    render: Render = field(init=False, repr=False, compare=False)
    """Renders whole prompts; shared by all episodes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "render", make_render(self.tokenizer, self.toolbox.schemas))
