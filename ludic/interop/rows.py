"""Turn peers' episodes into rows of the rollouts table. Pure; raises RefusedRecordError if a reward is out of range."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludic.interop.episodes import Episode
from ludic.interop.record import RefusedRecordError
from ludic.interop.transcripts import Transcript
from ludic.records import Rollout
from ludic.store import RunConfig

LOGPROBS_ABSENT: Mapping[str, str] = {"logprobs": "absent"}
"""Metadata of rollouts whose response_logprobs are zeros because the peer wrote none."""

_NAMESPACE = uuid.UUID("6d0f4a2e-9c1b-5e57-8a43-0f6c1f2b7d90")
_LARGEST_REWARD = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMaker:
    """Makes the rows of one file, from the values that they share."""

    sha256: str
    """Digest of the import; all ids follow from it and from the number of an episode in the file."""
    run: RunConfig
    """Sampling settings of rollouts for which the peer gives none."""
    env_name: str
    """Environment of records that name none."""

    def rows(self, episode: Episode, number: int) -> list[Rollout]:
        """Return a row for each transcript, as if the episode were a group of one. number: its index in the file."""
        return [self._row(episode, number, segment) for segment in range(len(episode.transcripts))]

    def _row(self, episode: Episode, number: int, segment: int) -> Rollout:
        transcript = episode.transcripts[segment]
        is_last = segment == len(episode.transcripts) - 1
        absent = {} if transcript.response_logprobs is not None else LOGPROBS_ABSENT
        return Rollout(
            rollout_id=self._id("rollout", number, segment),
            group_id=self._id("group", number),
            episode_id=self._id("episode", number),
            group_index=0,
            group_size=1,
            request_index=-1 - number,
            env_name=episode.env_name or self.env_name,
            env_example_id=episode.example,
            purpose=episode.purpose,
            agent_id=episode.agent_id,
            segment_index=segment,
            policy_version=episode.policy_version,
            policy_version_last=episode.policy_version_last,
            **self._sampling(episode),
            prompt_tokens=transcript.prompt_tokens,
            response_tokens=transcript.response_tokens,
            response_logprobs=_logprobs(transcript),
            token_rewards=_token_rewards(transcript, episode.reward if is_last else None),
            action_mask=transcript.action_mask,
            num_turns=max(1, len(transcript.agent_steps)),
            episode_reward=episode.reward,
            reward_components=episode.reward_components,
            terminated=episode.truncation_reason is None and episode.error is None,
            truncated=episode.truncation_reason is not None,
            truncation_reason=episode.truncation_reason,
            finish_reason=episode.finish_reason,
            incomplete_completion=episode.finish_reason == "length",
            error=episode.error,
            agent_steps=transcript.agent_steps,
            messages=transcript.messages,
            metadata={**episode.metadata, **absent},
            extra=episode.extra,
        )

    def _sampling(self, episode: Episode) -> dict[str, Any]:
        of_run = {name: getattr(self.run, name) for name in ("model", "temperature", "top_p", "top_k", "max_tokens")}
        return {**of_run, "seed": 0, **episode.sampling}

    def _id(self, kind: str, *numbers: int) -> str:
        """Return a uuid5, which is the same for the same content."""
        return str(uuid.uuid5(_NAMESPACE, "/".join([self.sha256, kind, *map(str, numbers)])))


def _logprobs(transcript: Transcript) -> np.ndarray:
    """Return logprobs, (response_length,) float32; 0 where the peer wrote none, and for tokens not sampled."""
    if transcript.response_logprobs is None:
        return np.zeros(len(transcript.response_tokens), np.float32)
    mask, logprobs = transcript.action_mask, transcript.response_logprobs
    return logprobs if mask is None or len(mask) != len(logprobs) else np.where(mask, logprobs, np.float32(0))


def _token_rewards(transcript: Transcript, reward: float | None) -> np.ndarray:
    """Return token rewards, (response_length,) float32: the peer's, else the reward at the last token."""
    if transcript.token_rewards is not None:
        return transcript.token_rewards
    if reward is not None and not abs(reward) <= _LARGEST_REWARD:
        raise RefusedRecordError(f"the reward is {reward}, wanted a finite float32")
    rewards = np.zeros(len(transcript.response_tokens), np.float32)
    rewards[-1:] = reward or 0.0
    return rewards
