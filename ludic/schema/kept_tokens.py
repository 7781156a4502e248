"""Check the tokens that a sampler kept at each response token, which the trainer renormalises over. Pure."""

from collections.abc import Iterator, Sequence

import numpy as np

from ludic.records import Rollout
from ludic.schema.type_checks import RowProblem


def find_bad_kept_tokens(rollouts: Sequence[Rollout], vocab_size: int) -> Iterator[RowProblem]:
    """Yield rows whose kept_tokens are not ascending, lack the sampled token, or are of tokens that were not sampled.

    The types and lengths of the rows must fit the schema. vocab_size: ids are below it.
    """
    for row, rollout in enumerate(rollouts):
        if rollout.kept_tokens is not None:
            counts = np.array([len(ids) for ids in rollout.kept_tokens], np.int64)
            ids = np.concatenate([np.zeros(0, np.int32), *rollout.kept_tokens])
            mask = np.ones(len(counts), bool) if rollout.action_mask is None else rollout.action_mask
            for reason in reasons_against(ids, counts, rollout.response_tokens, mask, vocab_size):
                yield row, "kept_tokens", reason


def reasons_against(
    ids: np.ndarray, counts: np.ndarray, tokens: np.ndarray, is_sampled: np.ndarray, vocab_size: int
) -> Iterator[str]:
    """Yield what is wrong with the kept tokens of one row.

    ids: (K,) kept at all response tokens. counts: (n,), how many at each. tokens: (n,). is_sampled: (n,) bool.
    """
    owners = np.repeat(np.arange(len(counts)), counts)
    has_token = np.bincount(owners[ids == tokens[owners]], minlength=len(counts)) > 0
    falls = owners[1:][(np.diff(ids) <= 0) & (np.diff(owners) == 0)]
    outside = owners[(ids < 0) | (ids >= vocab_size)]
    yield from _at(np.flatnonzero(is_sampled & ~has_token), "lacks the sampled token, wanted it among the kept ones")
    yield from _at(np.flatnonzero(~is_sampled & (counts > 0)), "is not empty, wanted no ids, since action_mask is 0")
    yield from _at(falls, "does not ascend, wanted sorted ids, each once")
    yield from _at(outside, f"holds a number that is no token id, wanted 0 to {vocab_size - 1}")


def _at(tokens: np.ndarray, reason: str) -> Iterator[str]:
    if len(tokens):
        others = f", and {len(set(tokens.tolist())) - 1} more" if len(set(tokens.tolist())) > 1 else ""
        yield f"at token {tokens[0]}{others} {reason}"
