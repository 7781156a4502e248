"""Copy the smallest part of a run that trains one step again bit for bit into a local folder, as a root of its own.

Reads the run; writes OUT/, which appears whole, by one rename. It holds run.json, model/, code/, attempts/1.json (the
settings), the newest checkpoint before the step, the batches from there to the step with their rollouts and cached
reference logprobs, the policy that the step started from, cut.json and README.txt. Raises ConfigError, which names what
is missing.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ludic.batches.config import OFFLINE_SETTINGS
from ludic.code.kept import copy_code
from ludic.errors import ConfigError, LudicError
from ludic.masking import SECRET_NAME
from ludic.models.first_model import first_model, is_hub_id
from ludic.store import Attempt, LatestPolicy, Root, point_latest, read_attempt
from ludic.store.attempts import (
    MARKER,
    checkpoint_folder,
    checkpoint_id_to_resume,
    checkpoint_ids,
    newest_attempt_id,
    parse_marker,
)
from ludic.store.catalogue import ATTEMPTS, CUT, POLICIES, README, RUN, WEIGHTS
from ludic.store.local import SCRATCH
from ludic.store.policies import copy_policy, has_weights, policy_folder, read_policy
from ludic.store.records import CUT_ATTEMPT, CheckpointId, CutRecord, decode_json, encode_json, encode_record
from ludic.store.weights import copy_kept, keep_model, read_identity
from ludic.temporary import temporary_folder
from ludic.training.config import TrainConfig
from ludic.what_if.cut_batches import copy_batches, copy_reference
from ludic.what_if.cut_weights import expected_weights
from ludic.what_if.readme import readme_text
from ludic.what_if.steps import check_planned, planned_steps

_REMOVED = "removed by ludic cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut that was written."""

    folder: str
    step: int
    first_step: int
    """First step that a replay trains; earlier than `step` if no checkpoint is stored right before it."""
    policy_version: int | None
    """Policy that the step started from; None if its weights were pruned."""
    num_rollouts: int
    size_bytes: int
    weights_sha256: Mapping[str, str]
    command: str
    """Command that replays the cut, in the folder that holds it."""


def cut(root: Root, step: int, out: str) -> Cut:
    """Write the part of a run that replays `step` to the folder `out`, which must not exist or be empty."""
    planned = planned_steps(root)
    check_planned(step, planned, root.url)
    folder = Path(out).absolute()
    if "://" in out:
        raise ConfigError(f"out is {out}, wanted a folder of this machine")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; cut into a new one")
    start = _start(root, step)
    first_step = start[1] + 1 if start else 1
    attempt = _attempt(root, [planned[number] for number in range(first_step, step + 1)])
    with _appearing(folder) as scratch:
        target = _open_copy(root, scratch)
        num_rollouts, ids, version = copy_batches(root, target, planned, range(first_step, step + 1))
        copy_reference(root, target, ids)
        _copy_model(root, target, attempt, start)
        target.put_if_absent(ATTEMPTS.name_of(attempt), encode_record(attempt))
        if start is not None:
            _copy_checkpoint(root, target, start)
        has_policy = _copy_policies(root, target, version)
        weights = expected_weights(root, attempt, planned[step], step)
        record = CutRecord(step=step, first_step=first_step, weights_sha256=weights.sha256)
        target.put_if_absent(CUT.template, encode_record(record))
        readme, command = readme_text(record, folder.name, weights, attempt, version if has_policy else None)
        target.put_if_absent(README.template, readme.encode())
        size_bytes = sum(file.stat().st_size for file in scratch.rglob("*") if file.is_file())
    return Cut(
        folder=out,
        step=step,
        first_step=first_step,
        policy_version=version if has_policy else None,
        num_rollouts=num_rollouts,
        size_bytes=size_bytes,
        weights_sha256=weights.sha256,
        command=command,
    )


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Give a hidden folder beside `folder`, renamed to it at the end: a process that dies leaves no `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary_folder("cut", beside=folder.parent) as scratch:
            yield scratch
            shutil.rmtree(scratch / SCRATCH, ignore_errors=True)
            scratch.chmod(0o777 & ~_umask())
            scratch.rename(folder)  # replaces an empty folder, and refuses one that was filled meanwhile
    except LudicError:
        raise
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _open_copy(root: Root, scratch: Path) -> Root:
    """Create a root with the run's settings and users' code; options that look like credentials are left out."""
    values = decode_json(root.read(RUN.template))
    values["env_options"] = _without_secrets(values.get("env_options", {}))
    (scratch / RUN.template).write_bytes(encode_json(values))
    target = Root.open(str(scratch))
    copy_code(root, target)
    return target


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _REMOVED if SECRET_NAME.search(str(k)) else _without_secrets(each) for k, each in value.items()}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


def _start(root: Root, step: int) -> CheckpointId | None:
    """Return the newest checkpoint on the chain of attempts before a step; None for the first weights."""
    before = [checkpoint_id for checkpoint_id in checkpoint_ids(root) if checkpoint_id[1] < step]
    return checkpoint_id_to_resume(root, newest_attempt_id(root), before)


def _attempt(root: Root, attempt_ids: list[int]) -> Attempt:
    """Return the attempt of the cut: the settings of the last step's trainer, which those before must share."""
    found = [read_attempt(root, attempt_id) for attempt_id in dict.fromkeys(attempt_ids)]
    settings = [{k: v for k, v in attempt.config.items() if k not in OFFLINE_SETTINGS} for attempt in found]
    for attempt, config in zip(found, settings, strict=True):
        differing = [name for name in config if config[name] != settings[-1].get(name)]
        if differing:
            raise ConfigError(
                f"{root.url}: no checkpoint is left between the step and attempt {attempt.attempt_id}, which trained "
                f"with another {differing[0]}; such steps can't be cut"
            )
    _check_reference(root, settings[-1])
    defaults = {name: value for name, value in TrainConfig().flat().items() if name in OFFLINE_SETTINGS}
    return replace(
        found[-1],
        attempt_id=CUT_ATTEMPT,
        parent_attempt=None,
        parent_step=None,
        owner="cut",
        claim_id=None,
        config=json.loads(json.dumps(settings[-1] | defaults)),
    )


def _check_reference(root: Root, config: Mapping[str, Any]) -> None:
    reference = config.get("reference")
    if reference is not None and reference != root.run.model and not is_hub_id(reference):
        raise ConfigError(
            f"{root.url} trains with the reference {reference}, a folder that another machine lacks; a cut can take "
            "along only the run's first model, or name one of the Hub"
        )


def _copy_model(root: Root, target: Root, attempt: Attempt, start: CheckpointId | None) -> None:
    """Copy the model's configuration and tokenizer, and the first weights if a replay needs them."""
    needs_weights = start is None or attempt.config.get("lora_rank") is not None
    if not (needs_weights or attempt.config.get("reference") == root.run.model):
        copy_kept(root, target)
        return
    identity = read_identity(root)
    if identity is None:
        raise ConfigError(f"{root.url} does not keep its model (model/); start a trainer on it once, then cut again")
    with first_model(root) as found, target.scratch_folder() as scratch:
        for name in (*identity.config, *identity.tokenizer, *identity.weights):
            if (found / name).exists():
                shutil.copyfile(found / name, scratch / name)
        keep_model(target, scratch, identity, with_weights=True)


def _copy_checkpoint(root: Root, target: Root, start: CheckpointId) -> None:
    """Copy a checkpoint as one of the cut's attempt, its marker last."""
    folder = checkpoint_folder((CUT_ATTEMPT, start[1]))
    with target.scratch_folder() as scratch:
        root.download(checkpoint_folder(start), scratch, leave_out=[MARKER])
        target.upload(scratch, folder)
    name = f"{checkpoint_folder(start)}/{MARKER}"
    info = parse_marker(root.read(name), f"{root.url}/{name}")
    target.put_if_absent(f"{folder}/{MARKER}", encode_record(replace(info, attempt_id=CUT_ATTEMPT)))


def _copy_policies(root: Root, target: Root, version: int) -> bool:
    """Copy the record of each version up to `version`, and its weights in full; return whether the run has them."""
    for number in range(version + 1):
        policy = read_policy(root, number)
        if policy is not None:
            policy = replace(policy, attempt_id=min(policy.attempt_id, CUT_ATTEMPT))
            target.put_if_absent(POLICIES.name_of(policy), encode_record(policy))
    if not has_weights(root, version):
        return False
    with target.scratch_folder() as scratch:
        copy_policy(root, version, scratch)
        (scratch / POLICIES.file).unlink(missing_ok=True)
        target.upload(scratch, policy_folder(version), last=WEIGHTS.file)
    point_latest(target, LatestPolicy(version=version, budget=0))
    return True
