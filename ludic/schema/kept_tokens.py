"""Check the tokens that a sampler kept at each response token, which the trainer renormalises over. Pure."""

from collections.abc import Iterator, Sequence

import numpy as np

from ludic.records import Rollout
from ludic.schema.type_checks import RowProblem


def find_bad_kept_tokens(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    """Yield rows whose kept_tokens are not ascending, lack the sampled token, or are of tokens that were not sampled.

    The types and lengths of the rows must fit the schema.
    """
    for row, rollout in enumerate(rollouts):
        if rollout.kept_tokens is not None:
            for reason in _reasons(rollout, rollout.kept_tokens):
                yield row, "kept_tokens", reason


def _reasons(rollout: Rollout, kept_tokens: Sequence[np.ndarray]) -> Iterator[str]:
    counts = np.array([len(ids) for ids in kept_tokens], np.int64)
    ids = np.concatenate([np.zeros(0, np.int32), *kept_tokens])
    owners = np.repeat(np.arange(len(counts)), counts)
    is_sampled = np.ones(len(counts), bool) if rollout.action_mask is None else rollout.action_mask
    has_token = np.bincount(owners[ids == rollout.response_tokens[owners]], minlength=len(counts)) > 0
    falls = owners[1:][(np.diff(ids) <= 0) & (np.diff(owners) == 0)]
    negative = owners[ids < 0]
    yield from _at(np.flatnonzero(is_sampled & ~has_token), "lacks the sampled token, wanted it among the kept ones")
    yield from _at(np.flatnonzero(~is_sampled & (counts > 0)), "is not empty, wanted no ids, since action_mask is 0")
    yield from _at(falls, "does not ascend, wanted sorted ids, each once")
    yield from _at(negative, "holds a negative number, wanted token ids of at least 0")


def _at(tokens: np.ndarray, reason: str) -> Iterator[str]:
    if len(tokens):
        others = f", and {len(set(tokens.tolist())) - 1} more" if len(set(tokens.tolist())) > 1 else ""
        yield f"at token {tokens[0]}{others} {reason}"
