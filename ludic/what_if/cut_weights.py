"""Find the weights that a run had after a step, for a comparison with a replay. Reads checkpoints/ and policies/."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ludic.store import Attempt, Root
from ludic.store.attempts import chain, checkpoint_folder, checkpoint_ids, newest_attempt_id, read_parent
from ludic.store.policies import copy_policy, has_weights, policy_folder, policy_versions, read_policy
from ludic.temporary import temporary_folder

_OTHERS = ("optimizer.safetensors", "random.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWeights:
    """SHA-256 of the weight files of the step's checkpoint, which a replay writes too."""

    sha256: Mapping[str, str]
    """By file name; empty if the run did not keep these weights exactly."""
    found_in: str
    """Folder of the run that holds them, or the reason why there is none."""


def expected_weights(root: Root, attempt: Attempt, attempt_id: int, step: int) -> ExpectedWeights:
    """Return the weights after a step, from its checkpoint, or from the policy that it published.

    attempt: settings of the step. attempt_id: attempt that trained it. A policy counts if it holds the trained weights
    as they are: whole, in float32, without LoRA.
    """
    for link in chain(newest_attempt_id(root), partial(read_parent, root)):
        checkpoint_id = (link.attempt_id, step)
        if (link.last_step is None or step <= link.last_step) and checkpoint_id in checkpoint_ids(root):
            with _temporary() as folder:
                root.download(checkpoint_folder(checkpoint_id), folder)
                return ExpectedWeights(sha256=_digests(folder), found_in=checkpoint_folder(checkpoint_id))
    if not _publishes_exactly(attempt.config):
        return ExpectedWeights(
            sha256={}, found_in="no checkpoint of this step is left, and policies hold other numbers"
        )
    for version in policy_versions(root):
        policy = read_policy(root, version)
        if policy and (policy.step, policy.attempt_id) == (step, attempt_id) and has_weights(root, version):
            with _temporary() as folder:
                copy_policy(root, version, folder)
                return ExpectedWeights(sha256=_digests(folder), found_in=policy_folder(version))
    return ExpectedWeights(sha256={}, found_in="neither a checkpoint nor a policy of this step is left")


def _publishes_exactly(config: Mapping[str, Any]) -> bool:
    dtype = config.get("publish_dtype") or config.get("dtype", "float32")
    return dtype == "float32" and config.get("lora_rank") is None


@contextmanager
def _temporary() -> Iterator[Path]:
    with temporary_folder("cut") as folder:
        yield folder


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.glob("*.safetensors") if file.name not in _OTHERS)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
