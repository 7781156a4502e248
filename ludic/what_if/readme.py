"""The README.txt of a cut: what it holds, the command that replays it, and the weights that must come out."""

import shlex

from ludic.printable import printable
from ludic.store import Attempt
from ludic.store.attempts import checkpoint_folder
from ludic.store.policies import policy_folder
from ludic.store.records import CutRecord
from ludic.training.config import TrainConfig
from ludic.what_if.cut_weights import ExpectedWeights

_NEW_ROOT = "again"
_SHARD_SIZE = TrainConfig().checkpoint.max_shard_size


def readme_text(
    record: CutRecord, name: str, weights: ExpectedWeights, attempt: Attempt, version: int | None
) -> tuple[str, str]:
    """Return the text and the command. name: of the cut's folder. version: policy in the cut; None if it was pruned."""
    size = attempt.config.get("max_shard_size", _SHARD_SIZE)
    shards = "" if size == _SHARD_SIZE else f" --max-shard-size {shlex.quote(str(size))}"
    command = f"ludic train {_NEW_ROOT} --replay-batches {shlex.quote(name)}{shards}"
    folder = checkpoint_folder((2 if record.start else 1, record.step))
    steps = f"step {record.step}" if record.first_step == record.step else f"steps {record.first_step} to {record.step}"
    begins = f"the checkpoint of step {record.first_step - 1}" if record.start else "the first weights of the run"
    policy = "was pruned and is not here" if version is None else f"is {policy_folder(version)}"
    lines = [
        f"Step {record.step} of a ludic run, cut out by `ludic cut`.",
        "",
        f"This folder is a root of ludic. It holds {begins}, the batches of {steps} with their rollouts,",
        f"the settings and the users' code. The policy that the step started from {policy}.",
        "",
        "Replay, in the folder that holds this one; the new root `again` must not exist:",
        "",
        f"    {command}",
        "",
        *_expected(weights, f"{_NEW_ROOT}/{folder}"),
        "",
        "The last bits also depend on library versions and the processor; `ludic train` warns if they differ.",
    ]
    return "\n".join(printable(line) for line in lines) + "\n", command


def _expected(weights: ExpectedWeights, folder: str) -> list[str]:
    if not weights.sha256:
        return [f"The run no longer holds the exact weights after the step: {weights.found_in}."]
    lines = [f"{digest}  {folder}/{name}" for name, digest in weights.sha256.items()]
    return [f"The weights after the step must have this SHA-256 (from {weights.found_in}; `sha256sum -c`):", "", *lines]
