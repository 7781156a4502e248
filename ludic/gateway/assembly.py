"""Assemble the stored calls of episodes into rows of rollouts, and say of each sampled token where it went.

SQL plans (ludic/root/sql/assembly/plan.sql): which call follows which, which segment it belongs to, and which calls
count. RowBuilder of ludic.agents stitches each segment into a row. Pure; equal calls give equal rows with equal ids. No
token is tokenised or realigned here: a call whose prompt can't be rebuilt is left out, with its reason.
"""

import hashlib
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from msgspec import convert

from ludic.agents import CompletionSpan, RowBuilder, version_columns
from ludic.engines import Completion
from ludic.gateway.episodes import EpisodeFacts, EpisodeResult
from ludic.gateway.matching import beginnings
from ludic.records import (
    AWAITS_SCORE,
    LARGEST_REWARD,
    AgentStep,
    Capture,
    Columns,
    EnvironmentStep,
    Message,
    Rollout,
    ToolCall,
    WeightSpan,
    array_columns,
    column_values,
    plain_rows,
)
from ludic.root.rows import whole_columns, whole_messages, whole_prompts
from ludic.root.sql import CALLS_TO_PLAN, PREFIXES, PlannedCall, plan_calls, table_of

NAMESPACE = uuid.UUID("0b9a2c1e-6f0d-5c36-9a53-2f1f5f2a4a41")
"""Of the ids of rows and groups, which follow from their calls."""
POSTED = "posted"
"""Name of the scorer whose scores are posted after an episode has ended."""
CAPTURES_BY_RANK: Sequence[Capture] = ("text", "ids", "trainer", "sampler")
"""A row has the lowest level of its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedEpisode:
    """What the rows of an episode hold beside its calls."""

    episode_id: str
    attempt: int = 1
    seed: int = 0
    facts: EpisodeFacts = field(default_factory=EpisodeFacts)
    result: EpisodeResult = field(default_factory=EpisodeResult)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of its rows, such as wanted, example_columns and extra."""
    left_behind: Collection[str] = ()
    """call_ids that its claim names: of an earlier run of the agent, which the last one did not repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """Where sampled tokens of a call went, or why a call is in no row."""

    call_id: str
    fate: Literal["trained", "context", "dropped"]
    """trained: in one row, with mask 1; context: in a row, with mask 0; dropped: in none."""
    reason: str | None
    """Why it is not trained on: unfinished, failed, earlier_attempt (also an earlier run of the agent in this attempt),
    quarantined, empty, retry, unresolved, text, unfit or undelivered."""
    num_tokens: int
    """Sampled tokens."""
    parent_call_id: str | None = None
    forked: bool = False
    """True if another call goes on with the segment of its parent."""
    rollout_id: str | None = None
    start: int | None = None
    """First token of its completion in response_tokens of the row."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """Rows of an episode, and the audit of its calls."""

    rollouts: list[Rollout]
    audit: list[AuditRow]


Prompts = Mapping[str, Any]
"""System messages, as JSON values, by their digests in prompts/; of an absent one, rows have no system messages."""


NO_PROMPTS: Prompts = MappingProxyType({})
MakeTokens = Callable[[Sequence["ReadCall"], Prompts], None]
"""Gives prompt and completion to calls of capture `text`; see ludic.gateway.text_calls."""


def assemble(calls: pa.Table, episode: SealedEpisode, prompts: Prompts = NO_PROMPTS) -> list[Rollout]:
    """Return the rows of one episode; see `assemble_episodes`."""
    return assemble_episodes(calls, [episode], prompts)[0].rollouts


def assemble_episodes(
    calls: pa.Table,
    episodes: Sequence[SealedEpisode],
    prompts: Prompts = NO_PROMPTS,
    make_tokens: MakeTokens | None = None,
) -> list[Assembly]:
    """Return the rows and the audit of each episode.

    calls: rows of the table calls, of any attempts of these episodes; those of other attempts than the episode's are
    marked in the audit, and in no row. make_tokens: None leaves calls of capture `text` out of the rows. Raises
    QueryError, SchemaError.
    """
    current = {episode.episode_id: episode.attempt for episode in episodes}
    read = _read_calls(calls, prompts)
    if make_tokens is not None:
        make_tokens(read, prompts)
    left_behind = {call_id for episode in episodes for call_id in episode.left_behind}
    for call in read:
        call.is_left_behind = call.call_id in left_behind
    plan = plan_calls(_calls_to_plan(read, current), _prefixes(read))
    planned: defaultdict[str, list[tuple[PlannedCall, ReadCall]]] = defaultdict(list)
    for row, call in zip(plan, read, strict=True):
        planned[call.episode_id].append((row, call))
    return [_Stitcher(episode, planned[episode.episode_id], read).assembly() for episode in episodes]


# --- Stored calls -----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ReadCall:
    """One stored call: its answer, else its failure, else its intent."""

    number: int
    """Index in the order in which calls began."""
    episode_id: str
    attempt: int
    call_id: str
    event: str
    values: Mapping[str, Any]
    """Scalar columns of its row."""
    messages: tuple[Message, ...] = ()
    """The whole conversation of the request."""
    answer: Message | None = None
    prompt: np.ndarray | None = None
    """(prompt_length,) int32, the whole prompt; None if it is not known."""
    completion: Completion | None = None
    undelivered: int = 0
    """Number of sampled tokens that were not delivered."""
    is_sound: bool = False
    """True if all calls that it extends are there."""
    is_left_behind: bool = False
    """True if it is of an earlier run of the agent, which the last one did not repeat."""

    @property
    def run(self) -> tuple[str, int, bool]:
        """Identifies the run of the agent; calls of different runs are never compared."""
        return self.episode_id, self.attempt, self.is_left_behind

    @property
    def is_text(self) -> bool:
        """True if it has no tokens."""
        return self.values["capture"] == "text" and self.prompt is None

    @property
    def has_whole(self) -> bool:
        """True if its whole prompt is known."""
        return self.is_sound and (self.is_text or self.prompt is not None)

    @property
    def num_sampled(self) -> int:
        """Delivered tokens; 1 for an answer without token ids."""
        if self.completion is not None:
            return len(self.completion.tokens)
        return int(self.answer is not None and self.is_text)


_LISTS = ("messages", "hints", "treated", "stop", "weight_versions", "new_prompt_tokens", "undelivered_tokens")


def _read_calls(table: pa.Table, prompts: Prompts) -> list[ReadCall]:
    """Return the calls of a table, in the order in which they began, with prompts and messages whole."""
    arrays = [name for name in array_columns() if name in table.column_names]
    rows = plain_rows(table.drop_columns([*_LISTS, *arrays]))
    sound = table.filter(pa.array(_are_sound(table, rows), pa.bool_()))
    digests = {row["system_digest"] for row in rows if row["system_digest"] is not None}
    messages = whole_messages(sound, {digest: prompts.get(digest, ()) for digest in digests})
    whole, columns = whole_prompts(sound), whole_columns(sound)
    tokens = int_lists(table["response_tokens"])
    undelivered = table["undelivered_tokens"].combine_chunks().value_lengths().fill_null(0).to_pylist()
    versions = column_values(table, "weight_versions")
    calls = []
    for number, index in enumerate(_one_a_call(rows)):
        row = rows[index]
        call_id, is_call = row["call_id"], row["event"] == "call"
        own = tokens[index] if is_call else None
        calls.append(
            ReadCall(
                number=number,
                **{name: row[name] for name in ("episode_id", "attempt", "call_id", "event")},
                values=row,
                messages=messages.get(call_id, ()),
                answer=convert(row["answer"][0], Message) if row["answer"] else None,
                prompt=whole.get(call_id),
                completion=None if own is None else _completion(row, own, columns.get(call_id, {}), versions[index]),
                undelivered=undelivered[index],
                is_sound=call_id in messages or call_id in whole,
            )
        )
    return calls


def _one_a_call(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the index of the row that counts for each call, in the order in which the calls began."""
    of_call: dict[tuple[str, int, str], int] = {}
    for index in sorted(range(len(rows)), key=lambda index: _EVENTS.index(rows[index]["event"])):
        row = rows[index]
        of_call.setdefault((row["episode_id"], row["attempt"], row["call_id"]), index)
    return sorted(
        of_call.values(),
        key=lambda index: (rows[index]["began_at"] or rows[index]["created_at"], rows[index]["call_id"]),
    )


_EVENTS = ("call", "failed", "intent")


def _are_sound(table: pa.Table, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each row whether all calls that its call extends are there, each as long as needed."""
    lengths = table["response_tokens"].combine_chunks().value_lengths().fill_null(0).to_pylist()
    ends = {
        row["call_id"]: (row["prompt_length"] or 0) + length
        for row, length in zip(rows, lengths, strict=True)
        if row["event"] == "call"
    }
    waiting = sorted((row for row in rows if row["event"] == "call"), key=itemgetter("call_id"))
    sound: set[str] = set()
    num_waiting = len(waiting) + 1
    while len(waiting) < num_waiting:  # once, unless the clocks of two gateways differ
        num_waiting = len(waiting)
        for row in waiting:
            if _extends(row, sound, ends):
                sound.add(row["call_id"])
        waiting = [row for row in waiting if row["call_id"] not in sound]
    return [row["call_id"] in sound for row in rows]


def _extends(row: Mapping[str, Any], sound: Collection[str], ends: Mapping[str, int]) -> bool:
    bases = row["base_call_id"], row["base_messages_call_id"]
    is_long_enough = bases[0] is None or ends.get(bases[0], 0) >= row["base_length"]
    return is_long_enough and all(base is None or base in sound for base in bases)


def int_lists(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    """Return each row's list as (length,) int32; None for a null."""
    return column_values(pa.table({"prompt_tokens": column}), "prompt_tokens")


def _completion(
    row: Mapping[str, Any], tokens: np.ndarray, columns: Columns, spans: Sequence[WeightSpan] | None
) -> Completion:
    only = (WeightSpan(version=row["policy_version"] or 0, start=0, end=len(tokens)),)
    return Completion(
        tokens=tokens,
        finish_reason="length" if row["finish_reason"] == "length" else "stop",
        weight_versions=tuple(spans or only),
        columns=columns,
    )


def _calls_to_plan(calls: Sequence[ReadCall], current: Mapping[str, int]) -> pa.Table:
    """Return CALLS_TO_PLAN. current: the attempt that counts, by episode."""
    scopes = _scopes(calls)
    rows = [
        (
            *(scopes[call.run], call.number, call.call_id, call.event),
            *(call.values[name] for name in ("idempotency_digest", "retry_of", "base_messages_call_id")),
            current.get(call.episode_id) == call.attempt and not call.is_left_behind,
            *(call.has_whole, call.num_sampled),
        )
        for call in calls
    ]
    return table_of(rows, CALLS_TO_PLAN)


def _scopes(calls: Sequence[ReadCall]) -> dict[tuple[str, int, bool], int]:
    """Return a number of each run of an agent."""
    return {run: scope for scope, run in enumerate(dict.fromkeys(call.run for call in calls))}


# --- Digests of beginnings ----------------------------------------------------------------------------------


def _prefixes(calls: Sequence[ReadCall]) -> pa.Table:
    """Return PREFIXES: digests of each call's prompt at each length at which a call of its episode ends."""
    scopes = _scopes(calls)
    of_unit: defaultdict[tuple[int, str], list[ReadCall]] = defaultdict(list)
    for call in calls:
        if call.has_whole:
            of_unit[scopes[call.run], "messages" if call.is_text else "tokens"].append(call)
    rows: list[tuple[Any, ...]] = []
    for (scope, unit), some in of_unit.items():
        parts = [_parts(call) for call in some]
        ends = sorted({len(prompt) + len(rest) for prompt, rest in parts})
        for call, (prompt, rest) in zip(some, parts, strict=True):
            rows += [(scope, call.number, unit, *found) for found in _digests(prompt, rest, ends)]
    return table_of(rows, PREFIXES)


_Units = np.ndarray | list[bytes]


def _parts(call: ReadCall) -> tuple[_Units, _Units]:
    """Return the units of a call's prompt and of its completion: tokens, or digests of all messages so far."""
    if call.is_text:
        answer = () if call.answer is None else (call.answer,)
        _, *digests = beginnings((*call.messages, *answer))
        return digests[: len(call.messages)], digests[len(call.messages) :]
    assert call.prompt is not None
    return call.prompt, np.zeros(0, np.int32) if call.completion is None else call.completion.tokens


def _digests(prompt: _Units, rest: _Units, ends: Sequence[int]) -> Iterator[tuple[int, bytes, bool]]:
    """Yield length, digest and is_whole. rest: the completion. ends: lengths, ascending."""
    hashed, start = hashlib.blake2b(digest_size=16), 0
    for end in ends:
        if end > len(prompt):
            break
        hashed.update(_bytes_of(prompt[start:end]))
        start = end
        yield end, hashed.copy().digest(), False
    hashed.update(_bytes_of(prompt[start:]))
    hashed.update(_bytes_of(rest))
    yield len(prompt) + len(rest), hashed.digest(), True


def _bytes_of(units: _Units) -> bytes:
    if isinstance(units, list):
        return b"".join(units)
    return np.ascontiguousarray(units, "<i4").tobytes()


# --- Rows ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Row:
    """One segment."""

    rollout_id: str
    builder: RowBuilder
    number: int
    """segment_index."""
    parent_segment_index: int | None
    calls: list[ReadCall] = field(default_factory=list)
    spans: list[CompletionSpan] = field(default_factory=list)
    """Of each call."""
    context: list[str] = field(default_factory=list)
    """Calls whose completions it holds with mask 0."""


class _Stitcher:
    """Makes the rows of one episode from its plan."""

    def __init__(
        self, episode: SealedEpisode, planned: Sequence[tuple[PlannedCall, ReadCall]], calls: Sequence[ReadCall]
    ) -> None:
        """planned: the calls of the episode, in order. calls: all calls, by their numbers."""
        self._episode, self._planned, self._calls = episode, planned, calls
        self._rows: dict[int, _Row] = {}
        """By number of the segment's first call."""
        self._row_of: dict[int, _Row] = {}
        """By number of a call."""
        self._audit: list[AuditRow] = []

    def assembly(self) -> Assembly:
        """Return the rows and the audit."""
        for planned, call in self._planned:
            reason = "text" if planned.reason is None and call.is_text else planned.reason
            if reason is not None:
                self._note(planned, call, "dropped", reason)
                continue
            assert planned.segment is not None
            if planned.segment == call.number:
                self._rows[call.number] = self._begin(planned, call)
            row = self._row_of[call.number] = self._rows[planned.segment]
            self._add(planned, call, row)
        rows = _Rows(self._episode, [*self._rows.values()], self._scored_call(), self._known())
        return Assembly(rows.rollouts(), self._audit)

    def _begin(self, planned: PlannedCall, call: ReadCall) -> _Row:
        """Return the row of a segment, for its first call."""
        prompt = call.prompt
        assert prompt is not None
        parent = None if planned.parent is None else self._row_of[planned.parent]
        if parent is None and self._rows:
            parent = max(self._rows.values(), key=lambda row: row.builder.num_common_tokens(prompt))
        rollout_id = _id("rollout", self._episode.episode_id, str(self._episode.attempt), call.call_id)
        number = len(self._rows)
        return _Row(rollout_id, RowBuilder(number), number, None if parent is None else parent.number)

    def _add(self, planned: PlannedCall, call: ReadCall, row: _Row) -> None:
        assert call.prompt is not None
        assert call.completion is not None
        assert row.builder.is_extended_by(call.prompt), f"{call.call_id} does not extend its segment"
        row.builder.add_context(call.prompt[len(row.builder) :])
        try:
            span = row.builder.add_completion(call.completion.tokens, call.completion.columns)
        except ValueError:  # its arrays have another shape than those of the calls before it
            row.builder.add_context(call.completion.tokens)
            row.context.append(call.call_id)
            self._note(planned, call, "context", "unfit", row)
            return
        row.calls.append(call)
        row.spans.append(span)
        self._note(planned, call, "trained", None, row, span.start)

    def _note(
        self,
        planned: PlannedCall,
        call: ReadCall,
        fate: Literal["trained", "context", "dropped"],
        reason: str | None,
        row: _Row | None = None,
        start: int | None = None,
    ) -> None:
        """Add a call to the audit."""
        facts: dict[str, Any] = {
            "call_id": call.call_id,
            "parent_call_id": None if planned.parent is None else self._calls[planned.parent].call_id,
            "forked": planned.parent is not None and planned.segment == planned.number,
        }
        num_tokens = 0 if call.completion is None else len(call.completion.tokens)
        rollout_id = None if row is None else row.rollout_id
        self._audit.append(
            AuditRow(**facts, fate=fate, reason=reason, num_tokens=num_tokens, rollout_id=rollout_id, start=start)
        )
        if call.undelivered:
            self._audit.append(AuditRow(**facts, fate="dropped", reason="undelivered", num_tokens=call.undelivered))

    def _scored_call(self) -> str | None:
        """Return the call whose answer was scored: the one that the scorer named, else the last that was answered."""
        if self._episode.result.scored_call_id is not None:
            return self._episode.result.scored_call_id
        answered = [call for planned, call in self._planned if planned.reason in (None, "unresolved")]
        last = max(
            answered, key=lambda call: (call.values["ended_at"] or call.values["created_at"], call.number), default=None
        )
        return None if last is None else last.call_id

    def _known(self) -> ReadCall | None:
        """Return the first call of the attempt whose prompt is known, for an episode without any other."""
        mine = (call for _, call in self._planned if call.attempt == self._episode.attempt)
        return next((call for call in mine if call.prompt is not None), None)


class _Rows:
    """Makes the rollouts of one episode from its segments."""

    def __init__(
        self, episode: SealedEpisode, rows: Sequence[_Row], scored_call_id: str | None, known: ReadCall | None
    ) -> None:
        """known: a call whose prompt is that of the only row, if nothing can be trained on."""
        self._episode, self._scored = episode, scored_call_id
        self._rows = [row for row in rows if row.calls]
        self._known = known
        result = episode.result
        self._is_cut = result.outcome == "expired" and result.reward is not None
        self._error = None if result.outcome == "complete" or self._is_cut else result.error or _ENDED[result.outcome]
        if self._error is None and not self._rows:
            self._error = "no call of the episode can be trained on; the view call_audit says why"

    def rollouts(self) -> list[Rollout]:
        """Return the rows; one without a response if no call counts; none if no prompt is known either."""
        if self._rows:
            return [self._rollout(row) for row in self._rows]
        if self._known is None or self._known.prompt is None:
            return []
        builder = RowBuilder()
        builder.add_context(self._known.prompt)
        rollout_id = _id("rollout", self._episode.episode_id, str(self._episode.attempt), self._known.call_id)
        return [self._rollout(_Row(rollout_id, builder, 0, None))]

    def _rollout(self, row: _Row) -> Rollout:
        episode, result = self._episode, self._episode.result
        transcript = row.builder.transcript(row.parent_segment_index)
        completions = [(span, _completion_of(call)) for call, span in zip(row.calls, row.spans, strict=True)]
        rewards = self._token_rewards(row, len(transcript.response_tokens))
        steps = _agent_steps(row, self._scored)
        last = row.calls[-1] if row.calls else self._known
        assert last is not None
        first = row.calls[0] if row.calls else last
        messages = (*last.messages, *([last.answer] if row.calls and last.answer else []))
        columns = {
            **self._identity(first),
            **version_columns(completions, first.values["policy_version"] or 0),
            "rollout_id": row.rollout_id,
            "trajectory_id": self._rows[0].rollout_id if self._rows else row.rollout_id,
            "columns": {**transcript.columns, "token_rewards": rewards},
            "capture": min((call.values["capture"] for call in row.calls), key=CAPTURES_BY_RANK.index, default=None),
            "segment_index": row.number,
            "parent_segment_index": row.parent_segment_index,
            "num_turns": len(steps),
            "episode_reward": None if self._error is not None else result.reward,
            "reward_components": result.reward_components,
            "correct": None if self._error is not None else result.correct,
            "terminated": self._error is None and not self._is_cut,
            "truncated": self._is_cut,
            "truncation_reason": "time_limit" if self._is_cut else None,
            "finish_reason": completions[-1][1].finish_reason if completions else None,
            "incomplete_completion": any(completion.finish_reason == "length" for _, completion in completions),
            "error": self._error,
            "agent_steps": steps,
            "environment_steps": self._environment_steps(row, steps),
            "messages": messages,
            "metadata": self._metadata(row),
        }
        return Rollout(**{**columns, **episode.columns})

    def _identity(self, first: ReadCall) -> dict[str, Any]:
        """Return the columns that follow from the episode's facts, and from the sampling of a row's first call."""
        facts, values = self._episode.facts, first.values
        episode_id = self._episode.episode_id
        return {
            "episode_id": episode_id,
            "group_id": facts.group_id or _id("group", episode_id),
            "group_index": facts.group_index,
            "group_size": facts.group_size,
            "request_index": -1 - facts.group_index if facts.request_index is None else facts.request_index,
            "env_name": facts.env_name,
            "env_example_id": facts.env_example_id or episode_id,
            "purpose": facts.purpose,
            "seed": self._episode.seed,
            "model": values["model"],
            "engine": values["engine"],
            "temperature": values["temperature"],
            "top_p": values["top_p"],
            "top_k": values["top_k"],
            "max_tokens": values["max_tokens"],
        }

    def _scored_in(self, row: _Row) -> int | None:
        """Return the index of the scored call in a row; the episode's last call if the scored one is in no row."""
        places = {call.call_id: (each, index) for each in self._rows for index, call in enumerate(each.calls)}
        found = places.get(self._scored or "")
        if found is None and self._rows:
            found = max(places.values(), key=lambda place: place[0].calls[place[1]].call_id)
        return found[1] if found is not None and found[0] is row else None

    def _token_rewards(self, row: _Row, length: int) -> np.ndarray:
        """Return (length,) float32: the reward at the last token of the scored call."""
        rewards = np.zeros(length, np.float32)
        reward, index = self._episode.result.reward, self._scored_in(row)
        if reward is not None and index is not None and self._error is None:
            rewards[row.spans[index].end - 1] = np.clip(reward, -LARGEST_REWARD, LARGEST_REWARD)
        return rewards

    def _environment_steps(self, row: _Row, steps: Sequence[AgentStep]) -> tuple[EnvironmentStep, ...]:
        """Return the step that scores the episode's answer, in the row that has the answer."""
        index = self._scored_in(row)
        if index is None or row.calls[index].call_id != self._scored:
            return ()
        step = EnvironmentStep(
            turn=0,
            agent_steps=(index,),
            observation=None,
            action=steps[index].action,
            next_observation=None,
            reward=None if self._error is not None else self._episode.result.reward,
            terminated=self._error is None and not self._is_cut,
            truncated=self._is_cut,
            info={"truncation_reason": "time_limit"} if self._is_cut else {},
        )
        return (step,)

    def _metadata(self, row: _Row) -> dict[str, str]:
        parents = {call.values["declared_parent"]: None for call in row.calls if call.values["declared_parent"]}
        gateways = {call.values["worker_id"]: None for call in row.calls}
        awaits = self._error is None and self._episode.result.reward is None
        found = {
            "gateway": " ".join(gateways),
            "attempt": str(self._episode.attempt),
            "call_ids": " ".join(call.call_id for call in row.calls),  # one for each agent step
            "context_call_ids": " ".join(row.context),
            "scored_call_id": self._scored or "",
            "declared_parents": " ".join(parents)[:MOST_HINT_CHARACTERS],
            AWAITS_SCORE: POSTED if awaits else "",
        }
        return {name: text for name, text in found.items() if text}


_ENDED = {
    "failed": "the agent failed",
    "given_up": "the episode was given up",
    "expired": "the episode's time was over before it was sealed",
}
"""Error of the rows of an episode that ended so, if no other is known."""
MOST_HINT_CHARACTERS = 400
"""Maximum characters of what clients' headers say, in the metadata of a row."""


def _completion_of(call: ReadCall) -> Completion:
    assert call.completion is not None
    return call.completion


def _agent_steps(row: _Row, scored_call_id: str | None) -> tuple[AgentStep, ...]:
    """Return one step for each call: `env` for the scored answer, `external` for those that the agent itself used."""
    results = {m.tool_call_id: m.content for call in row.calls for m in call.messages if m.tool_call_id is not None}
    steps = []
    for turn, (call, span) in enumerate(zip(row.calls, row.spans, strict=True)):
        answer = call.answer or Message(role="assistant", content="")
        is_scored = call.call_id == scored_call_id
        tools: tuple[ToolCall, ...] = tuple(
            replace(each, result=results.get(each.id, each.result)) for each in answer.tool_calls
        )
        steps.append(
            AgentStep(
                turn=turn,
                action_target="env" if is_scored else "external",
                start=span.start,
                end=span.end,
                finish_reason=_completion_of(call).finish_reason,
                action=answer.content if is_scored else None,
                tool_calls=tools,
            )
        )
    return tuple(steps)


def _id(*parts: str) -> str:
    return str(uuid.uuid5(NAMESPACE, "/".join(part.replace("/", "//") for part in parts)))
