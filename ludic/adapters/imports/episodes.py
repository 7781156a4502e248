"""Define the episodes that an import format returns, and turn their texts into tokens.

Pure except for the tokenizer. Many episodes are turned at once: each asks for the tokens of its next texts, and these
are encoded together. Raises RefusedRecordError if an episode can't be used, ModelError if the tokenizer has no usable
chat template.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ludic.agents import NO_ARRAYS, Transcript, TranscriptBuilder
from ludic.errors import LudicError, RefusedRecordError, renamed
from ludic.models import Tokenizer, Turn, TurnFinder, encode, encode_all
from ludic.records import AgentStep, Columns, FinishReason, HasTokens, Message, ReadMessages, check_text, read_messages

GetTokenizer = Callable[[], Tokenizer]
"""Loads the tokenizer; called when the first text must be encoded."""
GetStopTokens = Callable[[], Sequence[int]]
"""Returns the tokens at which the model's sampler stops, as its generation_config.json names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A prompt and its completion, to be tokenized."""

    prompt: Any
    """Text, encoded unchanged, or a list of messages, rendered with the chat template."""
    completion: str
    """What the model said then, with or without its end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation, to be tokenized with the chat template. It has several rows if the template rewrites history."""

    messages: Any
    """List of messages of OpenAI's or Anthropic's chat format."""
    sampled: Sequence[int] | None = None
    """Indexes of the model's messages; None takes all of role assistant that are not marked as turns without loss."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the model was shown, as in OpenAI's chat format."""


@dataclass(frozen=True, slots=True, init=False)
class ImportedRow(HasTokens):
    """Tokens that the model saw and sampled."""

    columns: Columns
    """Arrays by the name of their column, at least prompt_tokens and response_tokens. Without response_logprobs they
    are not known; without token_rewards, the reward of the episode is at the end of its last row."""
    messages: Sequence[Any]
    agent_steps: Sequence[AgentStep] | None
    """None makes the whole response one step, or makes no steps if there is an action_mask."""
    unread: Mapping[str, int]
    """Number of messages with a field that is not known, by the field's name."""
    is_from_text: bool
    """Whether the tokens were made from texts by the import, so that nobody sampled them."""

    def __init__(
        self,
        *,
        columns: Columns = NO_ARRAYS,
        messages: Sequence[Any] = (),
        agent_steps: Sequence[AgentStep] | None = None,
        unread: Mapping[str, int] = MappingProxyType({}),
        is_from_text: bool = False,
        **arrays: Any,
    ) -> None:
        """arrays: more columns, by name; None leaves one out."""
        given = {name: values for name, values in arrays.items() if values is not None}
        values = {"columns": {**columns, **given}, "messages": messages, "agent_steps": agent_steps, "unread": unread}
        for name, value in {**values, "is_from_text": is_from_text}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedEpisode:
    """One episode of one agent."""

    rows: Sequence[ImportedRow | Conversation | Texts]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of all its rollouts, such as episode_reward and policy_version; None takes the run's setting."""
    group: Any = None
    """Key shared by the episodes of one group; None groups by policy_version, env_name, agent_id and prompt."""
    prompt: Any = None
    """Identifies the example if there is no group or env_example_id; None takes the prompt of the first row."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""
    """Form of the record, of which a file has one; empty for a format of one form."""
    unused: Mapping[str, Any] = field(default_factory=dict)
    """Values that are kept as metadata if they are small, and else counted as not kept."""


def wanted_text(value: Any) -> str | None:
    """Return a right answer as text; None for null and an empty list. A list of one is its answer; others are JSON."""
    if isinstance(value, list | tuple) and len(value) <= 1:
        return wanted_text(value[0]) if value else None
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


_Result = TypeVar("_Result")
Encoding = Generator[Sequence[str], Sequence[np.ndarray], _Result]
"""Work that needs tokens: yields texts, is sent the tokens of each, (length,) int32, and returns its result."""


def rows_of(
    episodes: Sequence[ImportedEpisode], get_tokenizer: GetTokenizer, get_stop_tokens: GetStopTokens = tuple
) -> list[list[ImportedRow] | Exception]:
    """Return the rows of each episode, with tokens, messages and agent steps; or the reason why it can't be used.

    The texts of all episodes are encoded together, on all cores. get_stop_tokens: called once, when the first text is
    encoded. Raises LudicErrors other than RefusedRecordError.
    """
    found: list[list[ImportedRow] | Exception] = [[] for _ in episodes]
    get_turns = cache(lambda: TurnFinder(get_tokenizer(), get_stop_tokens()))
    works = [_episode_rows(episode, get_turns) for episode in episodes]
    answers: dict[int, Any] = dict.fromkeys(range(len(works)))
    while answers:
        asked: dict[int, Sequence[str]] = {}
        for index, answer in answers.items():
            work = works[index]
            try:
                asked[index] = work.throw(answer) if isinstance(answer, Exception) else work.send(answer)
            except StopIteration as end:
                found[index] = end.value
            except Exception as error:
                if isinstance(error, LudicError) and not isinstance(error, RefusedRecordError):
                    raise
                found[index] = error
        answers = _encode_all(get_turns().tokenizer, asked) if asked else {}
    return found


def _encode_all(tokenizer: Tokenizer, asked: Mapping[int, Sequence[str]]) -> dict[int, list[np.ndarray] | Exception]:
    """Return the tokens of the texts of each work; or, for a work with a text that can't be encoded, the error."""
    texts = list(chain.from_iterable(asked.values()))
    with suppress(Exception):  # each is then encoded alone, to find out whose text it is
        if all(isinstance(text, str) for text in texts):
            tokens = iter(encode_all(tokenizer, texts))
            return {index: list(islice(tokens, len(of_work))) for index, of_work in asked.items()}
    return {index: _encode_alone(tokenizer, of_work) for index, of_work in asked.items()}


def _encode_alone(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray] | Exception:
    try:
        return [encode(tokenizer, text) for text in texts]
    except Exception as error:
        return error


def _episode_rows(episode: ImportedEpisode, get_turns: Callable[[], TurnFinder]) -> Encoding[list[ImportedRow]]:
    rows: list[ImportedRow] = []
    is_cut = episode.columns.get("finish_reason") == "length"
    for part in episode.rows:
        if isinstance(part, Conversation):
            rows += yield from _conversation_rows(part, get_turns(), is_cut and part is episode.rows[-1])
            continue
        if isinstance(part, Texts):
            row = yield from _texts_row(part, get_turns(), is_cut or episode.columns.get("error") is not None)
        else:
            row = part
        read = read_messages(row.messages, has_tokens=True)
        messages, steps = read.messages, row.agent_steps
        if steps is None and row.action_mask is None:
            action = messages[-1].content if messages and messages[-1].role == "assistant" else None
            end, reason = len(row.response_tokens), episode.columns.get("finish_reason")
            steps = [AgentStep(turn=0, action_target="env", start=0, end=end, finish_reason=reason, action=action)]
        unread = row.unread or read.unread
        rows.append(replace(row, messages=messages, agent_steps=steps or (), unread=unread))
    return rows


def row_of(transcript: Transcript, messages: Sequence[Message], steps: Sequence[AgentStep]) -> ImportedRow:
    """Return the row of a transcript."""
    return ImportedRow(columns=transcript.columns, messages=messages, agent_steps=steps)


def _texts_row(texts: Texts, turns: TurnFinder, is_open: bool) -> Encoding[ImportedRow]:
    """Return the row of two texts. The completion ends with an end token, also an empty one.

    is_open: whether the model did not end it: it was cut off, or the episode failed.
    """
    unread: Mapping[str, int] = {}
    check_text("completion", texts.completion)
    if isinstance(texts.prompt, str):
        check_text("prompt", texts.prompt)
        messages: tuple[Message, ...] = (Message(role="user", content=texts.prompt),)
        prompt, said, end_token = texts.prompt, texts.completion, turns.eos_token_id
    else:
        read = read_messages(texts.prompt, "prompt")
        messages, unread = read.messages, read.unread
        conversation = turns.of(messages)
        prompt, end_token = conversation.prompt(len(messages)), turns.end_token(messages)
        said = conversation.said(prompt, texts.completion)
    prompt_tokens, completion = yield [prompt, said]
    if isinstance(texts.prompt, str):
        prompt_tokens = np.concatenate([turns.beginning_of(prompt_tokens), prompt_tokens])
    if not is_open and end_token is not None and completion[-1:].tolist() != [end_token]:
        completion = np.append(completion, np.int32(end_token))
    answer = (Message(role="assistant", content=texts.completion),) if len(completion) else ()
    return ImportedRow(
        prompt_tokens=prompt_tokens,
        response_tokens=completion,
        messages=(*messages, *answer),
        agent_steps=None if answer else (),
        unread=unread,
        is_from_text=True,
    )


def _conversation_rows(conversation: Conversation, turns: TurnFinder, is_open: bool) -> Encoding[list[ImportedRow]]:
    """Return the rows of a conversation; each of the model's messages is a call with the messages before it.

    is_open: whether the model did not end the last one.
    """
    read = read_messages(conversation.messages)
    messages, sampled = read.messages, _sampled(conversation, read)
    builder, calls = TranscriptBuilder(), _Calls(turns, messages, conversation.tools)
    steps: defaultdict[int, list[AgentStep]] = defaultdict(list)
    ends: dict[int, int] = {}
    for turn, index in enumerate(sampled):
        if not index:
            raise RefusedRecordError("messages begins with an answer of the model, wanted what it answers before that")
        is_last = turn == len(sampled) - 1
        prompt, completion, trained = yield from calls.next(index + 1, is_cut=is_open and is_last)
        spans = [
            builder.add_call(np.concatenate([prompt, completion[:start]]), completion[start:end])
            for start, end in trained
        ]
        if spans:
            segment = spans[0].segment_index
            steps[segment].append(agent_step(turn, messages[index], spans[0].start, spans[-1].end))
            ends[segment] = index + 1
    if not steps:
        raise RefusedRecordError(
            "messages has no turn of the assistant to train on"
            + (", in the chat template's {% generation %}" if sampled else "")
        )
    transcripts = enumerate(builder.transcripts())
    rows = [
        replace(row_of(transcript, messages[: ends[segment]], steps[segment]), is_from_text=True)
        for segment, transcript in transcripts
    ]
    hidden = {HIDDEN_REASONING: calls.num_without_reasoning} if calls.num_without_reasoning else {}
    return [replace(rows[0], unread={**read.unread, **hidden}), *rows[1:]]


HIDDEN_REASONING = "messages[].reasoning, which the chat template does not show"


def agent_step(turn: int, said: Message, start: int, end: int, finish_reason: FinishReason | None = None) -> AgentStep:
    """Return the step of a message that the model sampled as response tokens start to end."""
    return AgentStep(
        turn=turn,
        action_target="internal" if said.tool_calls else "env",
        start=start,
        end=end,
        finish_reason=finish_reason,
        action=said.content,
        tool_calls=said.tool_calls,
    )


def _sampled(conversation: Conversation, read: ReadMessages) -> Sequence[int]:
    """Return the indexes of the messages that are trained on."""
    if conversation.sampled is None:
        return [index for index, is_trained in enumerate(read.trained) if is_trained]
    # A message of the model is one message; those of users may become several.
    return [read.sources.index(source) for source in conversation.sampled]


class _Calls:
    """The calls of one conversation, as tokens.

    Rendered as one text, tokens may merge across the border of a message. Where they would, the texts on both sides are
    encoded alone, as they are when a model is sampled.
    """

    def __init__(self, turns: TurnFinder, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self._turns = turns.of(messages, tools)
        self.num_without_reasoning = 0
        """Number of calls so far whose thinking the template leaves out."""
        self._text = ""
        """Text of the last call's prompt and completion, without an end token that the template does not write."""
        self._tokens = np.zeros(0, np.int32)
        """(length,) int32: its tokens."""

    def next(self, end: int, *, is_cut: bool) -> Encoding[tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]]:
        """Return the prompt of the call that said the last of the first `end` messages, and its completion.

        Each is (length,) int32. Also returns where the parts of the completion to train on begin and end. is_cut:
        whether it was cut off, so that it has no end token.
        """
        turn = self._turns.of_last(end, is_cut=is_cut)
        self.num_without_reasoning += turn.hides_reasoning
        prompt, whole = yield [turn.prompt, turn.prompt + turn.said]
        if turn.prompt.startswith(self._text) and not _begins(prompt, self._tokens):
            (rest,) = yield [turn.prompt[len(self._text) :]]
            prompt = np.concatenate([self._tokens, rest])
        if _begins(whole, prompt):
            completion = whole[len(prompt) :]
        else:
            (completion,) = yield [turn.said]
        trained = yield from _token_spans(turn, completion)
        if turn.end_token is not None:
            completion = np.append(completion, np.int32(turn.end_token))
        self._text, self._tokens = turn.prompt + turn.said, np.concatenate([prompt, completion])
        return prompt, completion, trained


def _token_spans(turn: Turn, completion: np.ndarray) -> Encoding[list[tuple[int, int]]]:
    """Return where the trained parts begin and end in the tokens of what was said, (length,), and its end token.

    A token of which a part is trained is trained.
    """
    length, has_end = len(turn.said), turn.end_token is not None
    if [*turn.trained] == [(0, length)]:
        return [(0, len(completion) + has_end)]
    borders = sorted({border for span in turn.trained for border in span if 0 < border < length})
    beginnings = yield [turn.said[:border] for border in borders]
    same = {0: 0, length: len(completion)}
    merged = set()
    for border, tokens in zip(borders, beginnings, strict=True):
        both = min(len(tokens), len(completion))
        differs = np.flatnonzero(tokens[:both] != completion[:both])
        same[border] = int(differs[0]) if len(differs) else both
        if same[border] < len(tokens):
            merged.add(border)
    spans = [(same[start], same[end] + (end in merged) + (end == length and has_end)) for start, end in turn.trained]
    return [(start, end) for start, end in spans if start < end]


def _begins(tokens: np.ndarray, beginning: np.ndarray) -> bool:
    """Return whether tokens, (length,), begin with others."""
    return np.array_equal(tokens[: len(beginning)], beginning)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise renamed(__name__, name, {"Episode": "ImportedEpisode", "Row": "ImportedRow"})
