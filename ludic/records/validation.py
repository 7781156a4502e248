"""Validate a batch before it is stored, and stored rows before training.

The schema gives types, nullability and ranges; the rules below check the meaning. Pure: no I/O. Raises
InvalidBatchError, which refuses the whole batch and lists the reasons. Runs at every append, so it checks whole columns
first, and searches for bad rows only if there are any.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, get_args
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import InvalidBatchError
from ludic.records.arrays import join, values_of
from ludic.records.columns import NUM_TOKEN_IDS, ArrayColumn, array_columns, select
from ludic.records.conversion import TokenColumns
from ludic.records.example_columns import is_json_object
from ludic.records.rollout import (
    AWAITS_SCORE,
    WITHOUT_LOGPROBS,
    ActionTarget,
    Capture,
    FinishReason,
    Purpose,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
)
from ludic.records.tables import NO_COLUMNS, type_name
from ludic.records.type_checks import RowProblem, find_misfits, shown

MAX_LISTED = 20
"""Number of problems that an error lists; it counts the rest."""

LOWEST_LOGPROB, LOGPROB_TOLERANCE = array_columns()["response_logprobs"].bounds()
"""Nats. A float32 log-softmax may round the logprob of a token with probability 1 to slightly above 0. exp(-104) is 0
in float32, so no sampler draws such a token; vLLM writes -9999 for NaN and minus infinity."""

UNKNOWN_EXPERT: int = array_columns()["experts"].null
"""Value in a batch for a token without experts: the model's own router chooses."""

PURPOSES: tuple[str, ...] = get_args(Purpose)
ACTION_TARGETS: tuple[str, ...] = get_args(ActionTarget)
FINISH_REASONS = (*get_args(FinishReason), None)
CAPTURES = (*get_args(Capture), None)
TRUNCATION_REASONS = ("max_steps", "env", "max_seq_len", "context_length", "time_limit", "budget", None)

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""Value in a folder name, env=VALUE, that readers of hive partitions read as null."""
_LONGEST_ENV = 255 - len("env=")
"""Maximum bytes of that VALUE, percent-encoded: filesystems refuse a folder with a longer name."""


def _is_flat(column: ArrayColumn) -> bool:
    return column.is_number_a_token and not column.is_nullable and column.dtype.kind != "b"


def _is_other(column: ArrayColumn) -> bool:
    return not _is_flat(column) and (column.dtype.kind != "b" or column.fill is not None)


_FLAT = select(_is_flat)
"""Arrays that every row has, with one number a token: all rows are checked at once."""
_OTHERS = select(_is_other)
"""All other arrays whose values can be wrong: each row is checked separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One reason to refuse a batch."""

    where: str
    """The row, as `rollout ID`; else the group or the batch."""
    column: str
    """Column as in docs/schemas.md, for example agent_steps[].start."""
    reason: str
    """Text with the found and the wanted value."""

    def __str__(self) -> str:
        return f"{self.where}: {self.column} {self.reason}"


def validate(
    batch: RolloutBatch, extra_columns: Mapping[str, str] = NO_COLUMNS, *, vocab_size: int | None = None
) -> TokenColumns:
    """Raise InvalidBatchError, with up to MAX_LISTED problems, unless every row may be stored.

    extra_columns: type by name, as in run.json. vocab_size: rows of the model's embedding; None if it is not known.
    Returns joined token columns, which to_table can use.
    """
    problems, tokens = _examine(batch, extra_columns, vocab_size)
    if not problems:
        return {column: flat.array for column, flat in tokens.items()}
    listed = [str(problem) for problem in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        listed.append(f"and {len(problems) - MAX_LISTED} more")
    raise InvalidBatchError(
        f"the batch of worker {batch.metadata.worker_id} was refused whole, nothing was written:\n  "
        + "\n  ".join(listed)
    )


def find_problems(
    batch: RolloutBatch, extra_columns: Mapping[str, str] = NO_COLUMNS, *, vocab_size: int | None = None
) -> list[Problem]:
    """Return every reason to refuse the batch, reasons of rows first; empty if the batch is valid.

    vocab_size: rows of the model's embedding; None if it is not known. A row with a wrong type, shape or range, and its
    group, are not examined further.
    """
    return _examine(batch, extra_columns, vocab_size)[0]


def _examine(
    batch: RolloutBatch, extra_columns: Mapping[str, str], vocab_size: int | None = None
) -> "tuple[list[Problem], dict[str, FlatTokens]]":
    """Return the problems, and the token columns of rows without misfits."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    misfits = list(find_misfits(rollouts, extra_columns))
    unfit = {id(rollouts[row]) for row, _, _ in misfits}
    fit = [rollout for rollout in rollouts if id(rollout) not in unfit]
    fit_groups = [group for group in batch.groups if not any(id(rollout) in unfit for rollout in group.rollouts)]
    tokens = {column.name: FlatTokens.of(column, fit) for column in _FLAT}
    most = vocab_size or NUM_TOKEN_IDS
    findings = chain(
        _broken_rules(fit),
        *(bad_numbers(flat, most) for flat in tokens.values()),
        _bad_unsampled(fit),
        _pretended_logprobs(fit),
        _bad_others(fit, most),
    )
    problems = [
        *(_problem(rollouts[row], column, reason) for row, column, reason in misfits),
        *(_problem(fit[row], column, reason) for row, column, reason in findings),
        *_group_problems(fit_groups),
        *_batch_problems(batch, fit, fit_groups),
    ]
    return problems, tokens


def _problem(rollout: Rollout, column: str, reason: str) -> Problem:
    return Problem(where=f"rollout {rollout.rollout_id}", column=column, reason=reason)


# --- Rules of one row ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    columns: tuple[str, ...]
    """Columns that the rule reads; a problem names the first."""
    holds: Callable[..., bool]
    """Returns whether the columns' values are valid; called once per distinct combination of values."""
    wanted: str


def _one_of(column: str, choices: tuple[str | None, ...]) -> _Rule:
    return _Rule((column,), lambda value: value in choices, f"wanted {_either(choices)}")


def _either(choices: tuple[str | None, ...]) -> str:
    return " or ".join("null" if choice is None else choice for choice in choices)


def _not_empty(column: str) -> _Rule:
    return _Rule((column,), lambda value: value != "", "wanted a text that is not empty")


def _not_negative(column: str) -> _Rule:
    return _Rule((column,), lambda value: value >= 0, "wanted at least 0")


_RULES = (
    _Rule(("env_name",), lambda name: name != NULL_PARTITION, "wanted another: pandas reads this folder name as null"),
    _Rule(
        ("env_name",), lambda name: len(quote(name, safe="")) <= _LONGEST_ENV, f"wanted {_LONGEST_ENV} bytes at most"
    ),
    _Rule(("policy_version",), lambda version: version < 10**18, "wanted below 10**18, the limit of file names"),
    *map(_not_empty, ("rollout_id", "group_id", "episode_id", "env_name", "env_example_id")),
    *map(_not_empty, ("agent_id", "parent_rollout_id", "trajectory_id")),
    *map(_not_negative, ("depth", "segment_index", "policy_version", "num_turns", "temperature")),
    _one_of("purpose", PURPOSES),
    _one_of("finish_reason", FINISH_REASONS),
    _one_of("capture", CAPTURES),
    _Rule(
        ("example_columns",),
        lambda columns: columns is None or is_json_object(columns),
        "wanted the text of a JSON object, or null",
    ),
    _one_of("truncation_reason", TRUNCATION_REASONS),
    _Rule(
        ("truncation_reason", "truncated"),
        lambda reason, truncated: truncated == (reason is not None),
        "wanted a reason when truncated is true, and only then",
    ),
    _Rule(
        ("policy_version_last", "policy_version"), lambda last, first: last >= first, "wanted at least policy_version"
    ),
    _Rule(
        ("parent_segment_index", "segment_index"),
        lambda parent, index: parent is None or 0 <= parent < index,
        "wanted the segment_index of an earlier row, or null",
    ),
    _Rule(("prompt_length",), lambda length: length > 0, "wanted at least one prompt token"),
    _Rule(
        ("response_length", "error"),
        lambda length, error: length > 0 or error is not None,
        "wanted at least one response token, since no error is set",
    ),
)


def _broken_rules(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    names = {name for rule in _RULES for name in rule.columns}
    columns = {name: list(map(attrgetter(name), rollouts)) for name in names}
    for rule in _RULES:
        values_of_rule = [columns[name] for name in rule.columns]
        broken = {values for values in set(zip(*values_of_rule, strict=True)) if not rule.holds(*values)}
        if broken:
            rows = enumerate(zip(*values_of_rule, strict=True))
            found = ((row, values[0]) for row, values in rows if values in broken)
            yield from ((row, rule.columns[0], f"is {shown(value)}, {rule.wanted}") for row, value in found)
    for row, rollout in enumerate(rollouts):
        checks = (_bad_reward(rollout), _bad_agent_steps(rollout), _bad_links(rollout), _bad_versions(rollout))
        for column, reason in chain.from_iterable(checks):
            yield row, column, reason


def _bad_reward(rollout: Rollout) -> Iterator[tuple[str, str]]:
    if rollout.episode_reward is None and rollout.error is None and AWAITS_SCORE not in rollout.metadata:
        yield "episode_reward", f"is null, wanted a reward, since no error is set, and no metadata[{AWAITS_SCORE!r}]"


def _bad_agent_steps(rollout: Rollout) -> Iterator[tuple[str, str]]:
    num_tokens = rollout.response_length
    for step in rollout.agent_steps:
        if step.action_target not in ACTION_TARGETS:
            wanted = _either(ACTION_TARGETS)
            yield "agent_steps[].action_target", f"is {shown(step.action_target)}, wanted {wanted}"
        if step.finish_reason not in FINISH_REASONS:
            wanted = _either(FINISH_REASONS)
            yield "agent_steps[].finish_reason", f"is {shown(step.finish_reason)}, wanted {wanted}"
        if not 0 <= step.start <= step.end:
            yield "agent_steps[].start", f"is {step.start} in turn {step.turn}, wanted 0 to end, which is {step.end}"
        if step.end > num_tokens:
            wanted = f"at most response_length, which is {num_tokens}"
            yield "agent_steps[].end", f"is {step.end} in turn {step.turn}, wanted {wanted}"


def _bad_links(rollout: Rollout) -> Iterator[tuple[str, str]]:
    num_agent_steps = len(rollout.agent_steps)
    for step in rollout.environment_steps:
        for index in step.agent_steps:
            if not 0 <= index < num_agent_steps:
                wanted = f"an index of the rollout's {num_agent_steps} agent_steps"
                yield "environment_steps[].agent_steps", f"is {index} in turn {step.turn}, wanted {wanted}"


def _bad_versions(rollout: Rollout) -> Iterator[tuple[str, str]]:
    end = 0
    for span in rollout.weight_versions or ():
        if span.version < 0:
            yield "weight_versions[].version", f"is {span.version}, wanted at least 0"
        if not end <= span.start < span.end <= rollout.response_length:
            wanted = f"a span after token {end} and within response_length, which is {rollout.response_length}"
            yield "weight_versions[].start", f"is {span.start} with end {span.end}, wanted {wanted}"
        end = max(end, span.end)


# --- Arrays ----------------------------------------------------------------------------------------------


def bad_numbers(numbers: "FlatTokens", num_ids: int, *, is_any_finite: bool = False) -> Iterator[RowProblem]:
    """Yield numbers that are not finite or out of the column's range. is_any_finite: accept each finite number."""
    column, values = numbers.column, numbers.values
    lowest, highest = (-np.inf, np.inf) if is_any_finite else column.bounds(num_ids)
    is_float = column.dtype.kind == "f"
    # The minimum and the maximum show, in one pass each, whether there is a bad value to search for. If there is a NaN,
    # it is both, and compares as false.
    least, most = values.min(initial=0), values.max(initial=0)
    if least >= lowest and most <= highest and np.isfinite(least) and np.isfinite(most):
        return
    is_finite = np.isfinite(values) if is_float else np.ones(len(values), bool)
    yield from numbers.findings(~is_finite, "wanted a finite number")
    yield from numbers.findings(is_finite & ((values < lowest) | (values > highest)), column.wanted_number(num_ids))


def _bad_unsampled(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    """Yield rows with a number other than `fill` for a token that was not sampled."""
    filled = [column for column in _FLAT if column.fill is not None]
    for row, rollout in enumerate(rollouts):
        if (mask := rollout.action_mask) is None:
            continue
        for column in filled:
            if reason := column.not_filled(rollout.columns[column.name], mask):
                yield row, column.name, reason


def _pretended_logprobs(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    """Yield rows that have logprobs although their `capture` says that none were stored."""
    for row, rollout in enumerate(rollouts):
        if rollout.capture in WITHOUT_LOGPROBS and (num_other := np.count_nonzero(rollout.response_logprobs)):
            wanted = f"wanted zeros, since capture is {rollout.capture}: no logprobs were stored"
            yield row, "response_logprobs", f"has {num_other} that are not 0, {wanted}"


def _bad_others(rollouts: Sequence[Rollout], num_ids: int) -> Iterator[RowProblem]:
    """Yield rows whose lists of numbers, or optional numbers, do not fit their tokens."""
    for row, rollout in enumerate(rollouts):
        for column in _OTHERS:
            values = rollout.columns.get(column.name)
            if values is None:
                continue
            for reason in reasons_of_row(column, values, rollout.response_tokens, rollout.action_mask, num_ids):
                yield row, column.name, reason


def reasons_of_row(
    column: ArrayColumn, values: Any, tokens: np.ndarray, mask: np.ndarray | None, num_ids: int = NUM_TOKEN_IDS
) -> Iterator[str]:
    """Yield the reasons why values whose type and length fit are invalid in a row.

    tokens: (response_length,) int32. mask: (response_length,) bool, its action_mask; None if all tokens were sampled.
    """
    is_sampled = np.ones(len(tokens), bool) if mask is None else mask
    checks = (
        column.lacks_token(values, tokens, is_sampled),
        column.not_filled(values, is_sampled),
        column.bad_numbers(values, num_ids),
    )
    yield from (reason for reason in checks if reason is not None)


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """Concatenated numbers of a column of all rows, one a token."""

    column: ArrayColumn
    array: pa.Array
    values: np.ndarray
    """(all tokens,), the values of `array`."""
    ends: np.ndarray
    """(rows,) int64: index after each row's last token."""

    @classmethod
    def of(cls, column: ArrayColumn, rollouts: Iterable[Rollout]) -> "FlatTokens":
        arrays = [rollout.columns[column.name] for rollout in rollouts]
        array = join(column, arrays)
        values = array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type))
        return cls(column, array, values, np.cumsum([len(array) for array in arrays]))

    def findings(self, bad: np.ndarray, wanted: str) -> Iterator[RowProblem]:
        """Yield one finding for each row with a bad token. bad: (all tokens,) bool."""
        if not bad.any():
            return
        positions = np.flatnonzero(bad)
        owners = np.searchsorted(self.ends, positions, side="right")
        rows, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
        for row, position, count in zip(rows.tolist(), positions[firsts].tolist(), counts.tolist(), strict=True):
            token = position - (int(self.ends[row - 1]) if row else 0)
            others = f", and {count - 1} more" if count > 1 else ""
            yield row, self.column.name, f"is {self.values[position]} at token {token}{others}, {wanted}"


# --- Groups and the batch --------------------------------------------------------------------------------


def _group_problems(groups: Iterable[RolloutGroup]) -> Iterator[Problem]:
    for group in groups:
        if not isinstance(group.key, str):
            yield Problem(where=f"group {group.key!r}", column="group_key", reason="is not a text, wanted str")
        if not group.rollouts:
            yield Problem(where=f"group {group.key!r}", column="rollouts", reason="is empty, wanted at least one")
            continue
        yield from _differences(group)
        yield from _bad_group_indexes(group)


def _differences(group: RolloutGroup) -> Iterator[Problem]:
    """Yield rows that differ from the first row of their group in group_id, env_name or purpose."""
    first = group.rollouts[0]
    for column in ("group_id", "env_name", "purpose"):
        value = attrgetter(column)
        for rollout in group.rollouts:
            if value(rollout) != value(first):
                reason = f"is {value(rollout)!r}, the first row of its group has {value(first)!r}"
                yield _problem(rollout, column, reason)


def _bad_group_indexes(group: RolloutGroup) -> Iterator[Problem]:
    """Yield rows whose group_size or group_index contradicts the episodes of the group."""
    num_episodes = len({rollout.episode_id for rollout in group.rollouts})
    index_of: dict[str, int] = {}
    episode_at: dict[int, str] = {}
    for rollout in group.rollouts:
        episode, index = rollout.episode_id, rollout.group_index
        if rollout.group_size != num_episodes:
            yield _problem(rollout, "group_size", f"is {rollout.group_size}, the group has {num_episodes} episodes")
        if not 0 <= index < rollout.group_size:
            yield _problem(rollout, "group_index", f"is {index}, wanted 0 to group_size - 1 ({rollout.group_size - 1})")
        elif index_of.setdefault(episode, index) != index:
            yield _problem(rollout, "group_index", f"is {index}, another row of its episode has {index_of[episode]}")
        elif episode_at.setdefault(index, episode) != episode:
            yield _problem(rollout, "group_index", f"is {index}, as in the group's episode {episode_at[index]}")


def _batch_problems(
    batch: RolloutBatch, rollouts: Iterable[Rollout], groups: Iterable[RolloutGroup]
) -> Iterator[Problem]:
    yield from _metadata_problems(batch.metadata)
    if not batch.groups:
        yield Problem(where="batch", column="groups", reason="is empty, wanted at least one group")
    yield from _repeated("rollout_id", (rollout.rollout_id for rollout in rollouts), "rows of the batch")
    yield from _repeated("group_id", (group.rollouts[0].group_id for group in groups if group.rollouts), "groups")


def _metadata_problems(metadata: RolloutMetadata) -> Iterator[Problem]:
    if not isinstance(metadata.worker_id, str) or not metadata.worker_id:
        reason = f"is {shown(metadata.worker_id)}, wanted a text that is not empty"
        yield Problem(where="batch", column="worker_id", reason=reason)
    if metadata.timestamp.utcoffset() is None:
        reason = f"is {metadata.timestamp}, wanted a time zone, for example datetime.now(UTC)"
        yield Problem(where="batch", column="created_at", reason=reason)


def _repeated(column: str, values: Iterable[str], of_what: str) -> Iterator[Problem]:
    for value, count in Counter(values).items():
        if count > 1:
            where = f"rollout {value}" if column == "rollout_id" else f"group {value}"
            yield Problem(where=where, column=column, reason=f"is that of {count} {of_what}, wanted unique")


# --- Experts chosen by the sampler's router, to which the trainer sends the same tokens ------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Layers and experts that the routers of a model choose from."""

    layers: tuple[int, ...]
    """Numbers of the decoder layers with experts."""
    chosen: int
    """Number of experts that a token is sent to."""
    num_experts: int
    """Number of experts of a layer."""


def reason_against_experts(experts: np.ndarray, num_read: int, routing: Routing | None = None) -> str | None:
    """Return what is wrong with the experts of one row or completion; None if nothing is.

    experts: three dimensions of int16. num_read: tokens that the sampler read. routing: of the model; None if it is not
    known.
    """
    if len(experts) != num_read or 0 in experts.shape:
        return f"has shape {experts.shape}, wanted experts for each of the {num_read} tokens that the sampler read"
    if routing is not None and experts.shape[1:] != (len(routing.layers), routing.chosen):
        return (
            f"has {experts.shape[2]} experts in each of {experts.shape[1]} layers, the model sends a token to "
            f"{routing.chosen} in each of {len(routing.layers)}"
        )
    if routing is not None and experts.max() >= routing.num_experts:
        return f"holds numbers up to {experts.max()}, wanted 0 to {routing.num_experts - 1}"
    return array_columns()["experts"].bad_numbers(experts)


# --- Stored rows that can't be trained on, from the columns that training reads ------------------------
# The writer refuses such rows, so they come from an older ludic, from another program, or from a model with more
# tokens. One of them would end a step with an index beyond the embedding, or with a loss that is not finite.

TRAINED = select(lambda column: column.trained == "always")
"""Arrays that training always reads."""
TRAINED_COLUMNS = ("temperature", *(column.name for column in TRAINED))
"""Columns of rollouts that training reads."""


def find_untrainable(rows: pa.Table, vocab_size: int | None, *, any_logprob: bool = False) -> Mapping[int, str]:
    """Return the first reason against each row that can't be trained on, by its index.

    rows: TRAINED_COLUMNS, with prompt_length and response_length, which the arrays should have. vocab_size: rows of the
    model's embedding; None if no model is known. any_logprob: accept each finite logprob.
    """
    num_ids, problems = vocab_size or NUM_TOKEN_IDS, dict[int, str]()

    def note(found: Iterator[RowProblem]) -> None:
        for row, column, reason in found:
            problems.setdefault(row, f"{column} {reason}")

    note(_bad_temperatures(rows["temperature"]))
    note(_bad_lengths(rows))
    for column in TRAINED:
        note(_bad_shapes(rows[column.name], column, problems))
    for column in (each for each in TRAINED if each in _FLAT):
        is_any_finite = any_logprob and not column.is_token_ids
        for first, flat in _flat(rows, column):
            found = bad_numbers(flat, num_ids, is_any_finite=is_any_finite)
            note((first + row, name, reason) for row, name, reason in found)
    for column in (each for each in TRAINED if each in _OTHERS):
        if rows[column.name].null_count < rows.num_rows:
            note(_bad_rows(rows, column, num_ids, problems))
    return problems


def _flat(rows: pa.Table, column: ArrayColumn) -> Iterator[tuple[int, FlatTokens]]:
    """Yield the lists of each chunk of a column, with the index of its first row; a chunk is not copied."""
    first = 0
    for chunk in rows[column.name].chunks:
        flat, counts = chunk.flatten(), pc.fill_null(pc.list_value_length(chunk), 0).to_numpy()
        yield first, FlatTokens(column, flat, flat.to_numpy(zero_copy_only=False), np.cumsum(counts))
        first += len(chunk)


def _bad_temperatures(column: pa.ChunkedArray) -> Iterator[RowProblem]:
    values = column.to_numpy()
    for row in np.flatnonzero(~((values > 0) & (values < np.inf))).tolist():
        yield row, "temperature", f"is {values[row]:g}, wanted above 0; greedy samples can't be trained on"


def _bad_lengths(rows: pa.Table) -> Iterator[RowProblem]:
    """Yield lists whose length differs from the row's; a null list has no length."""
    prompts, responses = (rows[name].to_numpy() for name in ("prompt_length", "response_length"))
    for row in np.flatnonzero(prompts < 1).tolist():
        yield row, "prompt_tokens", "is empty, wanted at least one token"
    for column in TRAINED:
        if column.along == "row":
            continue
        wanted = column.lengths(prompts, responses)
        found = pc.list_value_length(rows[column.name]).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero((found != wanted) & ~np.isnan(found)).tolist():
            yield row, column.name, f"has {found[row]:g} tokens, the row says {wanted[row]}"


def _bad_shapes(found: pa.ChunkedArray, column: ArrayColumn, known: Mapping[int, str]) -> Iterator[RowProblem]:
    """Yield rows with a null, with lists of unequal lengths, or of another shape than most rows. known: bad rows."""
    if _is_regular(found, column):
        return
    shapes = dict[int, tuple[int, ...]]()
    for row, value in enumerate(found):
        if row in known:
            continue
        shape = _shape_of_tokens(value, column)
        if isinstance(shape, str):
            yield row, column.name, shape
        elif shape is not None:
            shapes[row] = shape
    if shapes:
        [(usual, _)] = Counter(shapes.values()).most_common(1)
        of_what = "in the row" if column.along == "row" else "a token"
        for row, shape in shapes.items():
            if shape != usual:
                yield row, column.name, f"has {_times(shape)} numbers {of_what}, most rows have {_times(usual)}"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _is_regular(found: pa.ChunkedArray, column: ArrayColumn) -> bool:
    """Return whether no list or number is null, and all rows have one shape; may be False where they are all sound."""
    if found.null_count and not column.is_nullable:
        return False
    lengths: list[set[int]] = [set() for _ in range(column.num_dimensions)]
    for chunk in found.chunks if column.num_dimensions else ():
        level = chunk
        for known in lengths:
            if not column.ragged and (level is not chunk or column.along == "row"):
                known.update(np.unique(np.diff(level.offsets.to_numpy())).tolist())
            level = level.values
            if level.null_count:
                return False
    return all(len(known) <= 1 and 0 not in known for known in lengths)


def _shape_of_tokens(value: pa.Scalar, column: ArrayColumn) -> tuple[int, ...] | str | None:
    """Return the shape of a row's array beyond the tokens, or what is wrong with it; None if it has none to compare."""
    if not value.is_valid:
        return None if column.is_nullable else f"is null, wanted {type_name(column.arrow_type)}"
    if not column.num_dimensions:
        return None
    level, shape = value.values, [len(value.values)]
    while pa.types.is_list(level.type):
        if level.null_count:
            return "holds null, wanted lists of numbers"
        if not column.ragged:
            lengths = set(pc.unique(pc.list_value_length(level)).to_pylist())
            if len(lengths) > 1 or 0 in lengths:
                return "has lists of unequal lengths, or empty ones, wanted as many numbers for each token"
            shape += lengths
        level = level.flatten()
    if level.null_count:
        return "holds null, wanted numbers"
    if column.ragged:
        return None
    if column.along == "row":
        return tuple(shape) if shape[0] else "is empty, wanted numbers"
    return tuple(shape[1:]) if shape[0] else None  # without tokens there are no lists to measure


def _bad_rows(rows: pa.Table, column: ArrayColumn, num_ids: int, known: Mapping[int, str]) -> Iterator[RowProblem]:
    """Yield rows whose values of a column that may be absent are not sound. known: rows that are bad anyway.

    An empty list means that its token was drawn from the whole vocabulary.
    """
    indexes, found = list(range(rows.num_rows)), rows[column.name]
    if known:  # NumPy may not be able to represent their arrays
        indexes = [row for row in indexes if row not in known]
        found = found.take(pa.array(indexes, pa.int64()))
    for row, values in zip(indexes, values_of(column, found), strict=True):
        if values is None:
            continue
        tokens, mask = (rows[name][row].values for name in ("response_tokens", "action_mask"))
        is_sampled = np.ones(len(tokens), bool) if mask is None else mask.to_numpy(zero_copy_only=False)
        if column.holds_token:
            is_sampled = is_sampled & (values.counts > 0)
        for reason in reasons_of_row(column, values, tokens.to_numpy(), is_sampled, num_ids):
            yield row, column.name, reason
