"""The present functions in the shape of the oracles: all that the comparisons with them know of the present code.

A change of how arrays flow changes the bodies here, and nothing else of the comparisons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from oracles import packing_before, transcript_before

from ludic.agents.transcript import RowBuilder, Span, Transcript, TranscriptBuilder
from ludic.batches.packing import KeptTokens, MicroBatch, Sequences, TrainingSequence
from ludic.records import Rollout

# --- Assembly ------------------------------------------------------------------------------------------


def add_call(
    builder: TranscriptBuilder,
    prompt_tokens: np.ndarray,
    tokens: np.ndarray,
    logprobs: np.ndarray | None,
    kept_tokens: Sequence[np.ndarray] | None,
    experts: np.ndarray | None,
) -> transcript_before.Span:
    return _span(builder.add_call(prompt_tokens, tokens, logprobs, kept_tokens, experts))


def add_completion(
    builder: RowBuilder,
    tokens: np.ndarray,
    logprobs: np.ndarray | None,
    kept_tokens: Sequence[np.ndarray] | None,
    experts: np.ndarray | None,
) -> transcript_before.Span:
    return _span(builder.add_completion(tokens, logprobs, kept_tokens, experts))


def _span(span: Span) -> transcript_before.Span:
    return transcript_before.Span(segment_index=span.segment_index, start=span.start, end=span.end)


def plain_transcript(transcript: Transcript) -> transcript_before.Transcript:
    names = [field.name for field in fields(transcript_before.Transcript)]
    return transcript_before.Transcript(**{name: getattr(transcript, name) for name in names})


# --- Cuts and packs ------------------------------------------------------------------------------------


def sequences_of(rows: Sequence[packing_before.TrainingSequence]) -> Sequences:
    return Sequences.of(TrainingSequence(**_values(row, kept_tokens=_kept_tokens(row.kept_tokens))) for row in rows)


def _kept_tokens(kept: packing_before.KeptTokens | None) -> KeptTokens | None:
    return None if kept is None else KeptTokens(kept.ids, kept.bounds)


def plain_sequences(sequences: Sequences) -> packing_before.Sequences:
    kept = [None if one is None else packing_before.KeptTokens(one.ids, one.bounds) for one in sequences.kept_tokens]
    return packing_before.Sequences(**_values(sequences, kept_tokens=kept))


def plain_micro_batch(micro_batch: MicroBatch) -> packing_before.MicroBatch:
    kept = micro_batch.kept_tokens
    packed = None if kept is None else packing_before.PackedKeptTokens(kept.ids, kept.rows, kept.is_cut, kept.bounds)
    return packing_before.MicroBatch(**_values(micro_batch, kept_tokens=packed))


# --- Records -------------------------------------------------------------------------------------------


def rollout_of(**columns: Any) -> Rollout:
    """Return the record with these columns; an array that is left out is null."""
    return Rollout(**columns)


def _values(record: Any, **others: Any) -> Mapping[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)} | others
