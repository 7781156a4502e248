"""Find start and end of the model's turns in the text that a chat template renders.

A turn is the text that the model would have to sample after the prompt that a worker would send. It begins after
everything that the template writes to request an answer, such as <think>, and ends with the end-of-turn token. That
token is found by rendering an answer of one word with and without a next message, not by a search in answers. For a
template that writes none, the tokenizer's end token is used, which is not part of the text.

Pure, except that templates run. Raises RefusedRecordError, with the behaviour of the template, if a turn can't be
determined; ModelError if the template fails or refuses a conversation.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ludic.errors import ModelError, RefusedRecordError
from ludic.models.chat import QUOTE, ChatRenderer, Names, Recorded, as_template_input
from ludic.models.tokenizer import NAMED, Tokenizer
from ludic.records import REASONING, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the model, as text."""

    prompt: str
    """Prompt that a worker would send."""
    said: str
    """Text that the model samples after the prompt."""
    end_token: int | None
    """Token that is sampled after `said` and that the template does not write; None if there is none."""
    trained: Sequence[tuple[int, int]]
    """Start and end of the parts of `said` to train on: those in {% generation %}, or all of it without such marks."""
    hides_reasoning: bool
    """True if `said` lacks the thinking that the message holds beside its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """The text that a template writes after an answer."""

    tail: str
    """Everything that the template writes after the last message's text."""
    sampled: str
    """The part of it, or of the text before a next message, that the model samples; may be empty."""
    token: int | None
    """The token that ends a turn, the last of `sampled` if that is not empty; None if the tokenizer has none."""


_SYNTHETIC_ANSWER = "LUDICANSWER"
"""The answer of one word."""
_NO_TOOLS: Sequence[Mapping[str, Any]] = ()


class TurnFinder:
    """Finds turns with one tokenizer; conversations share the facts about its template."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int] = ()) -> None:
        """stop_tokens: those of the model's generation_config.json, besides the tokenizer's eos_token."""
        self.tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token_id
        added = tokenizer.added_tokens_decoder
        self._special = {str(each) for each in added.values() if each.special} | {*tokenizer.all_special_tokens}
        self._ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(name) for name in self._special}
        self._ids |= {str(each): token for token, each in added.items()}
        self._added = Names(self._ids)
        stops = {*stop_tokens, self.eos_token_id}
        self._stops = {name for name, token in self._ids.items() if token in stops}
        self._endings: dict[tuple[str, bool], _Ending] = {}
        self._recorded: Recorded | None = None

    def of(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = _NO_TOOLS) -> "TurnsOfConversation":
        """Return the turns of one conversation. tools: schemas for the chat template."""
        return TurnsOfConversation(self, messages, tools)

    def end_token(self, messages: Sequence[Message]) -> int | None:
        """Return the token that ends an answer to messages; None if the tokenizer has no end token."""
        return self.ending("user", messages, _NO_TOOLS).token

    def beginning_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return (0 or 1,) int32: the token that the tokenizer puts before a text, unless the tokens begin with it."""
        bos = self.tokenizer.bos_token_id
        is_added = bos is not None and self.tokenizer("")["input_ids"][:1] == [bos]
        return np.array([bos] if is_added and tokens[:1].tolist() != [bos] else [], np.int32)

    def recorded(self) -> Recorded:
        """Return how recorded answers are prepared: tokens with which the template separates turns are plain text in
        them."""
        if self._recorded is None:
            said = [("user", "question"), ("assistant", _SYNTHETIC_ANSWER), ("user", "more")]
            messages = [Message(role=role, content=content) for role, content in said]
            try:
                text = ChatRenderer(self.tokenizer, messages).text(len(messages), add_generation_prompt=False)
            except ModelError:  # the template needs other messages; at least the end tokens are plain text
                text = ""
            of_turns = {text[start:end] for start, end in self._added.spans(text)} & self._special
            # Tokens with such a role never mark a tool call.
            named = {name for use, name in self.tokenizer.special_tokens_map.items() if use in NAMED}
            ends = set(self._stops)
            with suppress(ModelError):
                ending = self.ending("user", messages[:1], _NO_TOOLS).token
                ends |= {name for name, token in self._ids.items() if token == ending}
            self._recorded = Recorded(Names(of_turns | named | ends), tuple(sorted(ends)))
        return self._recorded

    def ending(self, follower: str, before: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Ending:
        """Return the text that the template writes after an answer. follower: role of the next message, user or tool.

        before: messages before an answer, for templates that refuse a conversation of one question and one answer.
        """
        key = follower, bool(tools)
        if key not in self._endings:
            try:
                self._endings[key] = self._ending(follower, [Message(role="user", content="question")], tools)
            except ModelError:
                return self._ending(follower, before, tools)
        return self._endings[key]

    def _ending(self, follower: str, before: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Ending:
        answered = [*before, Message(role="assistant", content=_SYNTHETIC_ANSWER)]
        last = self._tail(answered, tools)
        try:
            followed = self._tail([*answered, Message(role=follower, content="more")], tools)
        except ModelError:  # the template needs a tool call before the result
            followed = last
        found = [last[:end] for start, end in self._added.spans(last)]
        if chosen := self._end_of([text for text in found if followed.startswith(text)] or found):
            return _Ending(tail=last, sampled=chosen, token=self._ids[self.name_at_end(chosen) or ""])
        start, end = next(self._added.spans(followed), (0, 0))
        if followed[start:end] in self._stops and not followed[:start].strip():
            return _Ending(tail=last, sampled=followed[:end], token=self._ids[followed[start:end]])
        return _Ending(tail=last, sampled="", token=self.eos_token_id)

    def _tail(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        text = ChatRenderer(self.tokenizer, messages, tools=tools).text(len(messages), add_generation_prompt=False)
        _, found, tail = text.rpartition(_SYNTHETIC_ANSWER)
        return tail if found else ""

    def _end_of(self, texts: Sequence[str]) -> str | None:
        """Return the text that ends with the token of an end: the first with a stop token, else the first."""
        stops = (text for text in texts if self.name_at_end(text) in self._stops)
        return next(stops, texts[0] if texts else None)

    def name_at_end(self, text: str) -> str | None:
        """Return the added token whose name ends a text, trailing blanks aside; None if there is none."""
        text = text.rstrip()
        start, end = next(iter([*self._added.spans(text)][-1:]), (0, 0))
        return text[start:] if end == len(text) and start < end else None

    def is_special(self, name: str) -> bool:
        """Return whether the name of an added token is that of a special or of a stop token."""
        return name in self._special or name in self._stops

    def common(self, one: str, other: str) -> str:
        """Return the common beginning of two texts, up to a whole name of an added token."""
        length = _num_common(one, other)
        return one[: next((start for start, end in self._added.spans(one) if start < length < end), length)]


_OPENING = re.compile(r"<think>(\s*)\Z")
_CLOSING = "</think>"


class TurnsOfConversation:
    """The turns of one conversation."""

    def __init__(self, turns: TurnFinder, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self._turns, self._messages, self._tools = turns, messages, tools
        self._renderer = ChatRenderer(turns.tokenizer, messages, tools=tools, recorded=turns.recorded())

    def prompt(self, end: int) -> str:
        """Return the prompt that a worker would send after the first `end` messages."""
        return self._renderer.text(end, add_generation_prompt=True)

    def said(self, prompt: str, completion: str) -> str:
        """Return the model's text after a prompt, from a recorded completion, without its end token.

        Names of tokens that separate turns are plain text in it. A completion does not repeat the opening of the
        thinking if the prompt has it.
        """
        text: str = self._turns.recorded().prepared({"content": completion})["content"]
        opening = _OPENING.search(prompt)
        return _without_opening(text, opening[1]) if opening else text

    def of_last(self, end: int, *, is_cut: bool = False) -> Turn:
        """Return the turn of the last of the first `end` messages. is_cut: cut by a limit, so it has no end."""
        index = end - 1
        prompt = self.prompt(index)
        text = self._text(end)
        if text.startswith(prompt):
            start, lead, stored = len(prompt), "", text
        else:
            start, lead, stored = self._stored_start(index, prompt, text)
        body, sampled, token = self._ended(stored[start:], index)
        said = lead + body + ("" if is_cut else sampled)
        self._check_shown(index, said)
        if not self._renderer.has_marks:
            trained = [(0, len(said))]
        elif stored is text and not lead:
            trained = _marked(self._marks(end, text[: start + len(body)]), start, len(body), len(said))
        else:
            is_marked = any(until > _num_common(prompt, text) for _, until in self._marks(end, text))
            trained = [(0, len(said))] if is_marked else []
        end_token = None if is_cut or sampled else token
        reasoning = self._renderer.prepared(end)[index].get("reasoning_content") or ""
        hides = reasoning.strip() not in said
        return Turn(prompt=prompt, said=said, end_token=end_token, trained=trained, hides_reasoning=hides)

    def _text(self, end: int) -> str:
        if self._renderer.has_marks and end == len(self._messages):
            return self._whole[0]
        return self._renderer.text(end, add_generation_prompt=False)

    @cached_property
    def _whole(self) -> tuple[str, list[tuple[int, int]]]:
        """The text of the whole conversation, and the parts in {% generation %}."""
        return self._renderer.marked_text(len(self._messages))

    def _marks(self, end: int, text: str) -> list[tuple[int, int]]:
        """Return the marked parts of the first `end` messages: of the whole conversation if it shows them as `text`."""
        whole, marks = self._whole
        return marks if whole.startswith(text) else self._renderer.marked_text(end)[1]

    def _ended(self, rest: str, index: int) -> tuple[str, str, int | None]:
        """Return an answer's text, the sampled part of its ending, and the token that ends it.

        rest: the text that the template writes from the answer on.
        """
        follower = "tool" if self._messages[index].tool_calls else "user"
        ending = self._turns.ending(follower, self._messages[:index], self._tools)
        if rest.endswith(ending.tail):
            return rest[: len(rest) - len(ending.tail)], ending.sampled, ending.token
        # A template may end tool calls with another token than answers.
        name = self._turns.name_at_end(rest)
        if name is not None and self._turns.is_special(name):
            body = rest.rstrip()[: -len(name)]
            return body, name, None
        if not ending.sampled:
            return rest, "", ending.token
        raise RefusedRecordError(
            f"the chat template ends message {index} with {rest[-20:]!r}, and other answers with {ending.tail!r}, so "
            "which token ends it can't be determined; leave it out, or give tokens"
        )

    def _stored_start(self, index: int, prompt: str, text: str) -> tuple[int, str, str]:
        """Return the start of an answer in a text, the model's text before it, and the text.

        For a template that shows a stored answer differently than after the prompt for it.
        """
        before = self._renderer.prepared(index)
        made_up = self._renderer.text_of(
            [*before, as_template_input(Message(role="assistant", content=_SYNTHETIC_ANSWER))]
        )
        head, found, _ = made_up.rpartition(_SYNTHETIC_ANSWER)
        if not found:
            raise RefusedRecordError(f"the chat template leaves out the text of message {index}")
        asking = prompt[len(self._turns.common(prompt, self._renderer.text_of(before))) :]
        shown = next(length for length in range(len(asking), -1, -1) if head.endswith(asking[:length]))
        prefilled = asking[shown:]
        if not prefilled.strip() and text.startswith(head):
            return len(head), "", text
        if shown and (opening := _OPENING.search(prefilled)):
            return self._after_thinking(index, before, head, opening[1])
        at = text.rfind(asking, 0, _num_common(made_up, text)) if asking.strip() else -1
        if not shown and at >= 0:  # the answer changes how the messages before it are shown
            return at + len(asking), "", text
        raise RefusedRecordError(
            f"the chat template asks for an answer with {asking[-40:]!r} and shows message {index} without that, so "
            "what the model said after it can't be determined; give tokens, or take a template that shows both alike"
        )

    def _after_thinking(
        self, index: int, before: Sequence[dict[str, Any]], head: str, blank: str
    ) -> tuple[int, str, str]:
        """Return the same for a template whose prompts begin the thinking, and that leaves it out of stored answers.

        The thinking is put before the answer as such models write it. blank: the prompt's text after <think>.
        """
        answer = {**self._renderer.prepared(index + 1)[index]}
        content, reasoning = answer["content"], answer.get("reasoning_content")
        for name in REASONING:
            answer.pop(name, None)
        thought, closing, rest = content.rpartition(_CLOSING)
        if reasoning:
            text = reasoning.strip("\n")
            lead = f"{text}{blank}{_CLOSING}{blank}{blank}"
        elif closing:
            content = rest.lstrip("\n")
            lead = _without_opening(thought, blank) + closing + rest[: len(rest) - len(content)]
        elif content.lstrip().startswith("<think>"):
            lead, content = _without_opening(content, blank), ""
        else:
            lead = ""
        text = self._renderer.text_of([*before, {**answer, "content": content}])
        if not text.startswith(head):
            raise RefusedRecordError(
                f"the chat template begins thinking in prompts and shows message {index} as "
                f"{text[_num_common(head, text) :][:40]!r}, so what the model said can't be determined; give tokens"
            )
        return len(head), lead, text

    def _check_shown(self, index: int, said: str) -> None:
        """Refuse an answer if the template omits its text or a tool call, or refuses its text."""
        message, prepared, text = self._messages[index], self._renderer.prepared(index + 1), said.replace(QUOTE, "")
        calls, spoken = message.tool_calls, message.content + (message.reasoning or "")
        names = Counter(call.name for call in calls)
        if any(name in spoken or text.count(name) < number for name, number in names.items()):
            # The first and the last call of each tool: a template that omits one of them omits it for all tools.
            first = {call.name: number for number, call in reversed([*enumerate(calls)])}
            last = {call.name: number for number, call in enumerate(calls)}
            for left_out in sorted({*first.values(), *last.values()}):
                others = as_template_input(replace(message, tool_calls=(*calls[:left_out], *calls[left_out + 1 :])))
                if self._is_same(prepared, self._renderer.prepare(others)):
                    raise RefusedRecordError(
                        f"the chat template does not show the call of {calls[left_out].name} in message {index}, so it "
                        "can't be trained on; take a model whose template shows all tool calls"
                    )
        answer = prepared[index]
        content = answer["content"].rpartition(_CLOSING)[2].strip()
        if content and content not in said and self._is_same(prepared, {**answer, "content": ""}):
            raise RefusedRecordError(
                f"the chat template leaves out the text of message {index}, {content[:40]!r}"
                + (", beside its tool calls; leave it out, or" if calls else ";")
                + " take a model whose template shows it"
            )
        if QUOTE in answer["content"]:
            try:
                self._renderer.text_of([*prepared[:-1], {**answer, "content": answer["content"].replace(QUOTE, "")}])
            except ModelError as error:  # a template may refuse names of tokens in an answer
                raise RefusedRecordError(f"message {index}: {error}") from error

    def _is_same(self, prepared: Sequence[dict[str, Any]], variant: dict[str, Any]) -> bool:
        """Return whether the template shows a variant of the last message like the message itself."""
        try:
            return self._renderer.text_of(prepared) == self._renderer.text_of([*prepared[:-1], variant])
        except ModelError:
            return False


def _without_opening(thought: str, blank: str) -> str:
    """Return the text of thinking without its <think>, which the prompt holds."""
    opened = thought.lstrip()
    return opened.removeprefix("<think>").removeprefix(blank) if opened.startswith("<think>") else thought


def _num_common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda length: not one.startswith(other[: length + 1]))


def _marked(marks: Sequence[tuple[int, int]], start: int, body: int, length: int) -> list[tuple[int, int]]:
    """Return the marked parts of the model's text; one that reaches the end of the answer's text includes its end
    token.

    start: index of the model's text in the text. body: length of the answer's text. length: with its end.
    """
    parts = [(max(first - start, 0), min(until - start, length)) for first, until in marks]
    parts = [(first, until) for first, until in parts if first < until]
    return [(first, length if until >= body else until) for first, until in parts]
