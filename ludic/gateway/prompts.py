"""Make the prompts of conversations so that no sampled token is tokenised again.

A conversation that continues an earlier call of its episode has a prompt of the stored tokens of that call, prompt and
completion, and of the tokens of the messages behind them. The chat template decides whether this is right: it renders
the whole conversation with a marker in the place of each answer whose tokens are stored. If the text before the answer
is the one that was rendered for the earlier call, and the answer's thinking, text and calls are all shown behind it,
the prompt extends the earlier call's. If the template shows an earlier part otherwise, such as without the thinking of
old answers, the whole prompt is rendered from the messages.

Pure, except that templates run. Raises ModelError for a conversation that the template refuses.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from ludic.agents import PROBE_SCHEMA, text_after_stop, tokens_of
from ludic.engines import Completion
from ludic.errors import ModelError
from ludic.gateway.calls import CallRequest, Prompt, StoredCall
from ludic.gateway.matching import SentMessages
from ludic.models import ChatRenderer, Tokenizer, render_text
from ludic.records import Message, ToolCall

_Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What the chat template shows of a prompt, with markers in the place of known answers."""

    messages: tuple[Message, ...]
    """Messages of the call, in which known answers are as they were sampled, with their thinking."""
    prepared: Sequence[dict[str, Any]]
    """Messages as the template gets them, with the markers."""
    length: int
    digest: int
    """Length and hash of the text."""
    body_length: int
    body_digest: int
    """The same of the text without empty thinking, and without a beginning of thinking at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """An answer with markers: around its text, and in the place of its thinking and of the arguments of its calls."""

    message: Message
    thinking: str | None
    """Marker of the thinking; None if it has none."""
    content: str | None
    """The text between two markers, or the markers alone; None if it has only calls."""
    arguments: tuple[str, ...]
    """Markers of the calls."""

    @property
    def markers(self) -> Sequence[str]:
        """All in their order, the text too."""
        return [each for each in (self.thinking, self.content, *self.arguments) if each is not None]


class PromptMaker:
    """Makes prompts for one tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: Collection[int], *, keep_thinking: bool) -> None:
        """special_tokens: those that may end an answer. keep_thinking: as for `EngineBackend`."""
        self._tokenizer, self._special, self._keep_thinking = tokenizer, special_tokens, keep_thinking
        self._secret = secrets.token_hex(8)
        """Part of the markers, so that no message contains one."""
        self._shown: WeakKeyDictionary[StoredCall, _Shown] = WeakKeyDictionary()
        """Of calls of earlier lives of the gateway."""
        # The episodes of a group, and their sub-agents, begin alike.
        self._tokens = lru_cache(maxsize=64)(self._tokenise)
        self._closing = lru_cache(maxsize=2)(self._find_closing)

    def whole(self, request: CallRequest, known: StoredCall | None, earlier: Sequence[StoredCall]) -> Prompt:
        """Return the prompt that the template renders of all messages.

        known: the call that they continue, whose answer is taken as it was sampled; so are the answers before it.
        """
        messages = self._restored(request, known, earlier)
        prepared, text = self._render(messages, request.tools)
        tokens = self._tokens(text) if len(text) < _LONG else self._tokenise(text)
        return Prompt(tokens=tokens, made="whole", shown=_shown(messages, prepared, text))

    def _restored(
        self, request: CallRequest, known: StoredCall | None, earlier: Sequence[StoredCall]
    ) -> tuple[Message, ...]:
        """Return the messages of a call, with known answers as they were sampled."""
        if known is None:
            return request.messages
        return (*self._messages_of(known, earlier), known.answer, *_after(request.messages, known))

    def _render(
        self, messages: Sequence[Message], tools: _Tools, before: Sequence[dict[str, Any]] = ()
    ) -> tuple[Sequence[dict[str, Any]], str]:
        """Return messages as the template gets them, and the text of the prompt. before: messages before them."""
        renderer = ChatRenderer(self._tokenizer, self._as_read(messages), tools=tools)
        prepared = [*before, *renderer.prepared(len(messages))]
        return prepared, renderer.text_of(prepared, add_generation_prompt=True)

    def _tokenise(self, text: str) -> np.ndarray:
        tokens = tokens_of(self._tokenizer, text)
        tokens.flags.writeable = False
        return tokens

    def _as_read(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with their thinking where the template reads it: apart, or in the content."""
        where = self._place_of_thinking
        return [*messages] if where == "apart" else [_with_thinking_in(each, where == "content") for each in messages]

    @cached_property
    def _place_of_thinking(self) -> Literal["apart", "content", "nowhere"]:
        """Where the template reads the thinking of an answer."""
        if ChatRenderer(self._tokenizer, ()).reads_reasoning:
            return "apart"
        thinking = f"LUDIC{self._secret}"
        answer = _with_thinking_in(Message(role="assistant", content="answer", reasoning=thinking), True)
        question = Message(role="user", content="question")
        for messages in ([question, answer], [question, answer, question]):
            try:
                text = render_text(self._tokenizer, messages, add_generation_prompt=False)
            except ModelError:
                continue
            if thinking in text:
                return "content"
        return "nowhere"

    # --- Prompts that extend an earlier call's -----------------------------------------------------------

    def extended(
        self,
        request: CallRequest,
        base: StoredCall,
        known: StoredCall | None,
        with_tokens: Sequence[StoredCall],
        earlier: Sequence[StoredCall],
    ) -> Prompt | None:
        """Return the prompt that extends a stored call; None if the template shows an earlier part otherwise.

        known: as for `whole`, a longer one than the base if that had other tools. with_tokens: calls with these tools.
        """
        before = self._shown_of(base, request.tools, with_tokens, earlier)
        if known is base:
            after = _after(request.messages, base)
        else:
            after = [*self._restored(request, known, earlier)[len(base.messages) + 1 :]]
        found = None if before is None else self._show(before, base, after, request.tools)
        if found is None:
            return None
        shown, added = found
        prompt, completion = _sampled(base)
        tokens = np.concatenate([prompt, completion.tokens, tokens_of(self._tokenizer, added)], dtype=np.int32)
        return Prompt(tokens=tokens, extends=base.call_id, made="extended", shown=shown)

    def _show(
        self, before: _Shown, call: StoredCall, after: Sequence[Message], tools: _Tools
    ) -> tuple[_Shown, str] | None:
        """Show the messages behind a stored call; return the text that follows the call's tokens, too.

        None if the template does not show the call's tokens.
        """
        for marked in self._markings(call):
            try:
                prepared, text = self._render([marked.message, *after], tools, before.prepared)
            except ModelError:
                continue  # of several tool calls, for example, which some templates refuse
            if marked.content is not None:  # names of special tokens in it are broken up
                content: str = prepared[len(before.prepared)]["content"]
                marked = replace(marked, content=content[content.find(f"{self._marker(call)}C") :])
            rest = self._rest(before, text, marked)
            added = None if rest is None else self._added(rest, marked, call, bool(tools))
            messages = (*before.messages, call.answer, *after)
            return None if added is None else (_shown(messages, prepared, text), added)
        return None

    def _marker(self, call: StoredCall) -> str:
        return f"LUDIC{self._secret}{call.call_id.replace('-', '')}"

    def _markings(self, call: StoredCall) -> list[_Marked]:
        """Return the ways to mark an answer: with its tool calls apart, or as part of the text."""
        answer = call.answer
        marker = self._marker(call)
        thinking = f"{marker}T" if answer.reasoning is not None and not self._keep_thinking else None
        arguments = tuple(f"{marker}A{index}E" for index in range(len(answer.tool_calls)))
        as_text = _Marked(
            message=Message(role="assistant", content=f"{marker}C{marker}D", reasoning=thinking),
            thinking=thinking,
            content=f"{marker}C{marker}D",
            arguments=(),
        )
        # The text itself shows whether the template leaves a part of it out, such as thinking in markup of its own.
        text = f"{marker}C{marker}D" if self._keep_thinking else f"{marker}C{answer.content}{marker}D"
        if not arguments:
            return [replace(as_text, message=replace(as_text.message, content=text), content=text)]
        calls = [
            replace(each, arguments=json.dumps({"value": text}))
            for each, text in zip(answer.tool_calls, arguments, strict=True)
        ]
        content = text if answer.content.strip() else None
        message = replace(as_text.message, content=content or "", tool_calls=tuple(calls))
        return [_Marked(message=message, thinking=thinking, content=content, arguments=arguments), as_text]

    def _rest(self, before: _Shown, text: str, marked: _Marked) -> str | None:
        """Return the text from an answer on, of a text that begins as an earlier prompt did; None if it begins
        otherwise."""
        if hash(text[: before.length]) == before.digest:
            return text[before.length :]
        if not self._keep_thinking:
            return None
        # The prompt has begun the thinking, or the template shows an empty one, until another question follows.
        at = text.find(marked.markers[0])
        head = _EMPTY_THINKING.sub("", text[:at])
        is_same = at >= 0 and hash(head[: before.body_length]) == before.body_digest
        return head[before.body_length :] + text[at:] if is_same else None

    def _added(self, rest: str, marked: _Marked, call: StoredCall, has_tools: bool) -> str | None:
        """Return the text that follows a call's tokens; None if the template does not show all of its answer.

        rest: the text from the answer on.
        """
        end = 0
        for marker in marked.markers:
            at = rest.find(marker, end)
            if at < 0:
                return None
            end = at + len(marker)
        lead, added = rest[: rest.find(marked.markers[0])], rest[end:]
        if lead.strip() and not self._has_lead(lead, marked, call):
            return None
        if marked.arguments:
            closing = self._closing(has_tools)
            closing = None if closing is None else closing.replace(_PROBE_ID, call.answer.tool_calls[-1].id)
            if closing is None or not added.startswith(closing):
                return None
            added = added[len(closing) :]
        _, completion = _sampled(call)
        last = int(completion.tokens[-1])
        # A client's stop text ends an answer with other tokens.
        has_stopped = completion.finish_reason == "stop" and last in self._special
        added = text_after_stop(self._tokenizer, added, last if has_stopped else None)
        return _END_OF_THINKING + added if not has_stopped and self._is_cut_in_thinking(call) else added

    def _has_lead(self, lead: str, marked: _Marked, call: StoredCall) -> bool:
        """Return whether the text that the template writes before an answer's markers was sampled."""
        said = _squeezed(self._text_of(call))
        if self._keep_thinking and not re.sub(r"</?think>", "", lead).strip():
            return True
        if marked.thinking is None and marked.content is None:  # the markup of a tool call, in the template's spelling
            return "think>" in said or "think>" not in lead
        return said.startswith(_squeezed(lead))

    def _is_cut_in_thinking(self, call: StoredCall) -> bool:
        answer = call.answer
        if answer.reasoning is None or answer.content or answer.tool_calls:
            return False
        return "</think>" not in self._text_of(call)

    def _text_of(self, call: StoredCall) -> str:
        """Return the text of a call's completion, with special tokens."""
        text: str = self._tokenizer.decode(_sampled(call)[1].tokens.tolist())
        return text

    def _find_closing(self, has_tools: bool) -> str | None:
        """Return the text between the arguments of the last tool call and the end of an answer; None if it is not
        known."""
        question, result = Message(role="user", content="question"), Message(role="tool", content="result")
        marker = f"LUDIC{self._secret}"
        call = ToolCall(id=_PROBE_ID, name="probe", arguments=json.dumps({"value": marker}))
        answers = [
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="assistant", content=marker),
        ]
        for after in ([], [result]):  # some templates require a result after a call
            try:
                texts = [
                    render_text(
                        self._tokenizer,
                        [question, answer, *after],
                        tools=[PROBE_SCHEMA] if has_tools else (),
                        add_generation_prompt=False,
                    )
                    for answer in answers
                ]
            except ModelError:
                continue
            with_call, without = (text.rpartition(marker)[2] for text in texts)
            if all(marker in text for text in texts) and with_call.endswith(without):
                return with_call[: len(with_call) - len(without)]
        return None

    # --- Calls of earlier lives of the gateway -----------------------------------------------------------

    def _messages_of(self, call: StoredCall, earlier: Sequence[StoredCall]) -> tuple[Message, ...]:
        """Return the messages of a stored call, with known answers as they were sampled."""
        chain: list[StoredCall] = [call]
        while not isinstance(chain[-1].shown, _Shown) and (base := _base(chain[-1], earlier)) is not None:
            chain.append(base)
        last = chain.pop()
        messages = last.shown.messages if isinstance(last.shown, _Shown) else last.messages
        for each in reversed(chain):
            messages = (*messages, last.answer, *_after(each.messages, last))
            last = each
        return messages

    def _shown_of(
        self, call: StoredCall, tools: _Tools, with_tokens: Sequence[StoredCall], earlier: Sequence[StoredCall]
    ) -> _Shown | None:
        """Return what the template shows of a stored call's prompt; None if it is not what the tokens are."""
        chain: list[StoredCall] = [call]
        while self._kept(chain[-1]) is None and (base := _base(chain[-1], with_tokens)) is not None:
            if not begins(base, _sampled(chain[-1])[0]):
                break
            chain.append(base)
        shown = self._kept(chain[-1])
        for index, each in reversed([*enumerate(chain)]):
            if self._kept(each) is None:
                shown = self._made_again(each, chain[index + 1] if index + 1 < len(chain) else None, tools, earlier)
                if shown is None:
                    return None
                self._shown[each] = shown
            shown = self._kept(each)
        return shown

    def _kept(self, call: StoredCall) -> _Shown | None:
        return call.shown if isinstance(call.shown, _Shown) else self._shown.get(call)

    def _made_again(
        self, call: StoredCall, base: StoredCall | None, tools: _Tools, earlier: Sequence[StoredCall]
    ) -> _Shown | None:
        """Render the prompt of a call of an earlier life of the gateway once more. base: the call that it extends."""
        if base is not None:
            before = self._kept(base)
            found = None if before is None else self._show(before, base, _after(call.messages, base), tools)
            return None if found is None else found[0]
        messages = self._messages_of(call, earlier)
        try:
            prepared, text = self._render(messages, tools)
        except ModelError:  # it was rendered by another template
            return None
        is_same = np.array_equal(self._tokens(text), _sampled(call)[0])
        return _shown(messages, prepared, text) if is_same else None


_LONG = 500_000
"""Characters from which the tokens of a text are not kept."""
_END_OF_THINKING = "\n</think>\n\n"
_PROBE_ID = "call00000"
"""Id of the tool call by which the end of calls is found; nine letters and digits, as Mistral's templates want."""
_EMPTY_THINKING = re.compile(r"<think>\s*(?:</think>\s*|\Z)")


def _shown(messages: tuple[Message, ...], prepared: Sequence[dict[str, Any]], text: str) -> _Shown:
    body = _EMPTY_THINKING.sub("", text)
    return _Shown(
        messages=messages,
        prepared=prepared,
        length=len(text),
        digest=hash(text),
        body_length=len(body),
        body_digest=hash(body),
    )


def _with_thinking_in(message: Message, is_in_content: bool) -> Message:
    """Return a message without thinking apart from its content, which then holds it or not."""
    if message.reasoning is None or message.role != "assistant":
        return message
    content = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}" if is_in_content else message.content
    return replace(message, reasoning=None, content=content)


def _after(messages: Sequence[Message], base: StoredCall) -> list[Message]:
    """Return the messages after a known answer, with its ids of tool calls instead of those that a client made."""
    said, *after = messages[len(base.messages) :]
    ids = {mine.id: call.id for mine, call in zip(said.tool_calls, base.answer.tool_calls, strict=False)}
    return [
        replace(each, tool_call_id=ids[each.tool_call_id])
        if each.tool_call_id is not None and ids.get(each.tool_call_id, each.tool_call_id) != each.tool_call_id
        else each
        for each in after
    ]


def _base(call: StoredCall, earlier: Sequence[StoredCall]) -> StoredCall | None:
    """Return the call that a stored call continues, of those before it."""
    index = next((number for number, each in enumerate(earlier) if each is call), len(earlier))
    return SentMessages(call.messages).longest_known(earlier[:index])


def _sampled(call: StoredCall) -> tuple[np.ndarray, Completion]:
    """Return the prompt, (prompt_length,) int32, and the completion of a call with tokens."""
    assert call.prompt_tokens is not None, "the call has tokens"
    assert call.completion is not None, "the call has tokens"
    return call.prompt_tokens, call.completion


def num_tokens(call: StoredCall) -> int:
    prompt, completion = _sampled(call)
    return len(prompt) + len(completion.tokens)


def begins(call: StoredCall, tokens: np.ndarray) -> bool:
    """Return whether (n,) tokens begin with the prompt and the completion of a call."""
    if call.prompt_tokens is None or call.completion is None:
        return False
    length = len(call.prompt_tokens)
    completion = tokens[length : length + len(call.completion.tokens)]
    return np.array_equal(completion, call.completion.tokens) and np.array_equal(tokens[:length], call.prompt_tokens)


def _squeezed(text: str) -> str:
    return "".join(text.split())
