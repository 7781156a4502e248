"""Fill in missing values of rows of other programs, for imports and for recorded rows. Pure."""

import hashlib
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from ludic.base import left_out, shortened
from ludic.errors import RefusedRecordError
from ludic.records import LARGEST_REWARD, MOST_WANTED_CHARACTERS, cut_columns
from ludic.run.config import SAMPLING

UNSCORED = "the peer's record has no reward"
"""The error of a rollout without a reward, which is stored and counted but never trained on."""

_SHOWN = 60
"""Characters of a wrong value in a message."""
SAMPLED_WITH = ("model", *SAMPLING)
"""Columns of a row that are settings of its run."""


def example_id(prompt: str) -> str:
    """Return the id of an example without its own id: a digest of the prompt, given as JSON text, also in older
    rows."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def episode_columns(
    given: Mapping[str, Any], sampled_with: Mapping[str, Any], *, max_column_characters: int
) -> dict[str, Any]:
    """Return the columns that the rows of an episode share, as if it were a group of one.

    given: known columns, at least env_name and env_example_id; None is the same as leaving one out. sampled_with: value
    of each of SAMPLED_WITH, for rows that leave it out. max_column_characters: of the run.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(given.get("wanted"), str):
        given["wanted"] = shortened(given["wanted"], MOST_WANTED_CHARACTERS)[0]
    if "example_columns" in given:
        given["example_columns"] = cut_columns(given["example_columns"], max_column_characters)
    columns = {
        **sampled_with,
        **dict.fromkeys(("episode_reward", "finish_reason")),
        **dict.fromkeys(("policy_version", "seed", "group_index"), 0),
        "group_size": 1,
        "purpose": "train",
        "agent_id": "agent",
        **given,
    }
    if columns["episode_reward"] is None:
        columns.setdefault("error", UNSCORED)
    truncated = columns.get("truncation_reason") is not None
    return {
        "policy_version_last": columns["policy_version"],
        "truncated": truncated,
        "terminated": not truncated and columns.get("error") is None,
        "incomplete_completion": columns["finish_reason"] == "length",
        **columns,
    }


def row_arrays(arrays: Mapping[str, Any], reward: float | None) -> dict[str, Any]:
    """Return the arrays of a row: logprobs of 0 where none are known, and the reward at the last token.

    arrays: by column, at least response_tokens. reward: the episode's, in its last row; None in others. A mask of
    another length stays, so that the validation of the row reports it. Raises RefusedRecordError for a reward that is
    not a number, or does not fit float32.
    """
    zeros = np.zeros(len(arrays["response_tokens"]), np.float32)
    columns = {"response_logprobs": zeros, **arrays}
    mask, logprobs = columns.get("action_mask"), columns["response_logprobs"]
    if mask is not None and len(mask) == len(logprobs):
        columns["response_logprobs"] = np.where(mask, logprobs, 0)
    if mask is not None and len(mask) == len(zeros) and mask.all():
        del columns["action_mask"]
    if "token_rewards" not in columns:
        columns["token_rewards"] = zeros.copy()
        if reward is not None:
            if not isinstance(reward, numbers.Real):
                raise RefusedRecordError(f"episode_reward is {left_out(repr(reward), _SHOWN)}, wanted a number")
            if not abs(reward) <= LARGEST_REWARD:
                raise RefusedRecordError(f"the reward is {reward}, wanted a finite float32")
            columns["token_rewards"][-1:] = reward
    return columns
