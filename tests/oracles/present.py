"""The present functions in the shape of the oracles: all that the comparisons with them know of the present code.

A change of how arrays flow changes the bodies here, and nothing else of the comparisons.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from oracles import packing_before, transcript_before

from ludic.agents.transcript import CompletionSpan, RowBuilder, Transcript, TranscriptBuilder
from ludic.batches.packing import MicroBatch, Sequences, TrainingSequence
from ludic.records import Rollout
from ludic.schema import Columns, Ragged

# --- Assembly ------------------------------------------------------------------------------------------


def add_call(
    builder: TranscriptBuilder,
    prompt_tokens: np.ndarray,
    tokens: np.ndarray,
    logprobs: np.ndarray | None,
    kept_tokens: Sequence[np.ndarray] | None,
    experts: np.ndarray | None,
) -> transcript_before.Span:
    columns = _columns(response_logprobs=logprobs, kept_tokens=_ragged(kept_tokens), experts=experts)
    return _span(builder.add_call(prompt_tokens, tokens, columns))


def add_completion(
    builder: RowBuilder,
    tokens: np.ndarray,
    logprobs: np.ndarray | None,
    kept_tokens: Sequence[np.ndarray] | None,
    experts: np.ndarray | None,
) -> transcript_before.Span:
    columns = _columns(response_logprobs=logprobs, kept_tokens=_ragged(kept_tokens), experts=experts)
    return _span(builder.add_completion(tokens, columns))


def _span(span: CompletionSpan) -> transcript_before.Span:
    return transcript_before.Span(segment_index=span.segment_index, start=span.start, end=span.end)


def plain_transcript(transcript: Transcript) -> transcript_before.Transcript:
    logprobs, kept_tokens = (transcript.columns.get(name) for name in ("response_logprobs", "kept_tokens"))
    nothing = np.zeros(len(transcript.response_tokens), np.float32)
    return transcript_before.Transcript(
        prompt_tokens=transcript.prompt_tokens,
        response_tokens=transcript.response_tokens,
        response_logprobs=nothing if logprobs is None else logprobs,
        has_logprobs=logprobs is not None,
        action_mask=transcript.action_mask,
        kept_tokens=None if kept_tokens is None else tuple(kept_tokens),
        experts=transcript.columns.get("experts"),
        segment_index=transcript.segment_index,
        parent_segment_index=transcript.parent_segment_index,
    )


# --- Cuts and packs ------------------------------------------------------------------------------------


def sequences_of(rows: Sequence[packing_before.TrainingSequence]) -> Sequences:
    return Sequences.of(map(_sequence_of, rows))


def _sequence_of(row: packing_before.TrainingSequence) -> TrainingSequence:
    kept = None if row.kept_tokens is None else Ragged(row.kept_tokens.ids, row.kept_tokens.bounds)
    return TrainingSequence(
        **{field.name: getattr(row, field.name) for field in fields(TrainingSequence) if field.name != "columns"},
        columns=_columns(
            response_logprobs=row.sampler_logprobs,
            action_mask=row.action_mask,
            kept_tokens=kept,
            experts=row.experts,
        ),
    )


def plain_sequences(sequences: Sequences) -> packing_before.Sequences:
    kept = [
        None if one is None else packing_before.KeptTokens(one.values, one.bounds)
        for one in sequences.column("kept_tokens")
    ]
    return packing_before.Sequences(
        **{field.name: getattr(sequences, field.name) for field in fields(sequences) if field.name != "columns"},
        sampler_logprobs=sequences.column("response_logprobs"),
        action_mask=sequences.column("action_mask"),
        kept_tokens=kept,
        experts=sequences.column("experts"),
    )


def plain_micro_batch(micro_batch: MicroBatch) -> packing_before.MicroBatch:
    kept = micro_batch.kept_tokens
    packed = (
        None if kept is None else packing_before.PackedKeptTokens(kept.values, kept.rows, kept.has_any, kept.bounds)
    )
    return packing_before.MicroBatch(
        **{
            field.name: getattr(micro_batch, field.name)
            for field in fields(micro_batch)
            if field.name not in ("columns", "absent")
        },
        sampler_logprobs=micro_batch.sampler_logprobs,
        action_mask=micro_batch.action_mask,
        kept_tokens=packed,
        experts=micro_batch.experts,
    )


# --- Records -------------------------------------------------------------------------------------------


def rollout_of(**columns: Any) -> Rollout:
    """Return the record with these columns; an array that is left out is null."""
    return Rollout.of(**{**columns, "kept_tokens": _ragged(columns.get("kept_tokens"))})


def _ragged(lists: Any) -> Any:
    """Return lists of int32 as they are held; what is no such lists stays as it is."""
    is_sound = isinstance(lists, list | tuple) and all(
        isinstance(ids, np.ndarray) and (ids.dtype, ids.ndim) == (np.int32, 1) for ids in lists
    )
    return Ragged.of(lists, np.int32) if is_sound else lists


def _columns(**arrays: Any) -> Columns:
    return {name: values for name, values in arrays.items() if values is not None}
