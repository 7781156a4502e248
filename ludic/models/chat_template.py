"""Render chat templates exactly as transformers does, but without importing it.

Jinja has the same settings, filters, functions and tags. Templates are other people's programs, so they run in Jinja's
sandbox, as in transformers. Raises jinja2.TemplateError if a template refuses a conversation, and any Python error of
its expressions.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes, pass_eval_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_rendering: ContextVar[tuple[list[str], list[tuple[int, int]]]] = ContextVar("rendering")
"""The text rendered so far, and its marked parts. A template is compiled once, and may run in several threads."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and where the parts in {% generation %} begin and end in it.

    tools: schemas of tools. special_tokens: names of tokens by the names that the template knows, such as eos_token.
    """
    blocks: list[str] = []
    marks: list[tuple[int, int]] = []
    values = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    reset = _rendering.set((blocks, marks))
    try:
        for block in _compiled(template).generate(**values):
            blocks.append(block)
    finally:
        _rendering.reset(reset)
    return "".join(blocks), marks


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


class _GenerationTag(Extension):
    """The tag {% generation %}, which marks the model's own text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _mark(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        text = caller()
        blocks, marks = _rendering.get()
        start = sum(map(len, blocks))
        marks.append((start, start + len(text)))
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
