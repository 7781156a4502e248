"""Copy the smallest part of a run that repeats one training step bit for bit into a local folder, as a new root.

Reads the run; writes OUT/, which appears complete, by one rename. It holds run.json, model/, code/, attempts/1.json
(the settings), the newest checkpoint before the step, the batches from there to the step with their rollouts and cached
reference logprobs, the policy that the step started from, cut.json and README.txt. Raises ConfigError, which names what
is missing.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import SECRET_NAME, temporary_folder
from ludic.base.printable import printable
from ludic.errors import ConfigError, LudicError
from ludic.eval.what_if.rerun import check_planned, planned_steps, read_considered, read_step
from ludic.records import rollouts_schema
from ludic.root import (
    ATTEMPTS,
    CUT,
    CUT_ATTEMPT,
    MARKER,
    POLICIES,
    README,
    REFERENCE,
    RUN,
    WEIGHTS,
    Attempt,
    CheckpointId,
    CutRecord,
    LatestPolicy,
    Root,
    chain,
    checkpoint_folder,
    checkpoint_id_to_resume,
    checkpoint_ids,
    copy_code,
    decode_json,
    encode_json,
    encode_record,
    newest_attempt_id,
    parse_marker,
    read_attempt,
    read_parent,
)
from ludic.root.rows import RolloutFile, encode_plain, ledger_name, open_writer, read_reference_index
from ludic.root.storage import SCRATCH, Storage
from ludic.root.weights import (
    copy_policy,
    copy_snapshot,
    first_model,
    has_weights,
    is_hub_id,
    keep_model,
    point_latest,
    policy_folder,
    policy_versions,
    read_identity,
    read_policy,
)
from ludic.training import TrainConfig
from ludic.training.batches import OFFLINE_SETTINGS

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
    """Yield a hidden folder beside `folder`, renamed to it at the end: a process that dies leaves no `folder`."""
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
    Storage.connect(str(scratch)).put_if_absent(RUN.template, encode_json(values))
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
    """Return the attempt of the cut: the settings of the last step's trainer, which earlier ones must share."""
    found = [read_attempt(root, attempt_id) for attempt_id in dict.fromkeys(attempt_ids)]
    for attempt in found:
        if attempt.other_trainer is not None:
            raise ConfigError(
                f"{root.url}: {attempt.other_trainer.name} trained attempt {attempt.attempt_id}, and only ludic's own "
                "steps can be replayed; `ludic export --format jsonl --sql` writes the rollouts of a step"
            )
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
    if reference is not None and reference != root.record.model and not is_hub_id(reference):
        raise ConfigError(
            f"{root.url} trains with the reference {reference}, a folder that another machine lacks; a cut can take "
            "along only the run's first model, or name one of the Hub"
        )


def _copy_model(root: Root, target: Root, attempt: Attempt, start: CheckpointId | None) -> None:
    """Copy the model's configuration and tokenizer, and the first weights if a replay needs them."""
    needs_weights = start is None or attempt.config.get("lora_rank") is not None
    if not (needs_weights or attempt.config.get("reference") == root.record.model):
        copy_snapshot(root, target)
        return
    identity = read_identity(root)
    if identity is None:
        raise ConfigError(f"{root.url} does not keep its model (model/); start a trainer on it once, then cut again")
    with first_model(root) as found, target.scratch_folder() as scratch:
        for name in (*identity.config, *identity.tokenizer, *identity.weights):
            if (found / name).exists():
                (scratch / name).parent.mkdir(exist_ok=True)  # subfolder additional_chat_templates/
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


# --- Batches: ledger files, the considered rollouts, and their reference logprobs ----------------------
# Rows keep their order and their row groups, so that ranks get the same shares; the ledger gets the new addresses. A
# file has the name that its worker gave it, also if compaction has moved its rows.

_Address = tuple[str, int, int]
"""File, row group and row of a rollout."""


def copy_batches(
    root: Root, target: Root, planned: Mapping[int, int], steps: Sequence[int]
) -> tuple[int, set[str], int]:
    """Copy the batches of steps; return the number of rollouts, their ids, and the policy version of the last step."""
    ledgers = [read_step(root, planned, step) for step in steps]
    versions = ledgers[-1]["trainer_version"]
    if not len(versions):
        raise ConfigError(f"{root.url}: step {steps[-1]} considered no rollouts, so there is nothing to cut")
    rows = pa.concat_tables(ledgers)
    first = rows.take(pa.array(_first_of_each(rows["rollout_id"].to_pylist())))
    moved = _copy_rollouts(root, target, first)
    for step, ledger in zip(steps, ledgers, strict=True):
        target.put_if_absent(ledger_name(CUT_ATTEMPT, step), encode_plain(_readdress(ledger, moved)))
    return first.num_rows, set(moved), versions[0].as_py()


def copy_reference(root: Root, target: Root, rollout_ids: set[str]) -> None:
    """Copy the files of cached reference logprobs that hold any of these rollouts."""
    for model in REFERENCE.first_fields(root):
        index = read_reference_index(root, model)
        names = index.filter(pc.is_in(index["rollout_id"], pa.array(rollout_ids, pa.string())))["file"].unique()
        for name in names.to_pylist():
            target.put_if_absent(name, root.read(name))


def _first_of_each(rollout_ids: list[str]) -> list[int]:
    """Return the index of each rollout's first row; a group may be in several steps."""
    found: dict[str, int] = {}
    for index, rollout_id in enumerate(rollout_ids):
        found.setdefault(rollout_id, index)
    return list(found.values())


def _copy_rollouts(root: Root, target: Root, rows: pa.Table) -> dict[str, _Address]:
    """Write the rows to files of the names that their workers gave; return the new address of each rollout_id."""
    schema = rollouts_schema(root.extra_columns)
    homes = _homes(rows, read_considered(root, rows, ["worker_id", "sequence"]))
    old = list(zip(*(rows[name].to_pylist() for name in ("root", "file", "row_group", "row")), strict=True))
    files: dict[str, dict[tuple[str, str, int], list[int]]] = {}
    for index in sorted(range(len(old)), key=lambda index: (old[index][0] or "", *old[index][1:])):
        url, file, row_group, _ = old[index]
        files.setdefault(homes[index], {}).setdefault((url or "", file, row_group), []).append(index)
    moved: dict[str, _Address] = {}
    for name, row_groups in files.items():
        with target.scratch_folder() as scratch:
            with open_writer(scratch / "rows.parquet", schema) as writer:
                for number, indexes in enumerate(row_groups.values()):
                    chosen = rows.take(pa.array(indexes))
                    table = read_considered(root, chosen, schema.names).cast(schema)
                    writer.write_table(table, row_group_size=table.num_rows)
                    ids = chosen["rollout_id"].to_pylist()
                    moved |= {rollout_id: (name, number, row) for row, rollout_id in enumerate(ids)}
            target.move_in(scratch / "rows.parquet", name)
    return moved


def _homes(rows: pa.Table, sources: pa.Table) -> list[str]:
    """Return the file that a worker committed each row to: a group is stored under its oldest version."""
    groups, versions = rows["group_id"].to_pylist(), rows["policy_version"].to_pylist()
    oldest: dict[str, int] = {}
    for group_id, version in zip(groups, versions, strict=True):
        oldest[group_id] = min(version, oldest.get(group_id, version))
    facts = (rows["env_name"], sources["worker_id"], sources["sequence"])
    columns = (column.to_pylist() for column in facts)
    return [RolloutFile(oldest[group], *values).name for group, *values in zip(groups, *columns, strict=True)]


def _readdress(ledger: pa.Table, moved: Mapping[str, _Address]) -> pa.Table:
    """Return ledger rows of the cut's attempt, with the addresses of its files."""
    files, row_groups, numbers = zip(
        *(moved[rollout_id] for rollout_id in ledger["rollout_id"].to_pylist()), strict=True
    )
    values = {
        "attempt_id": [CUT_ATTEMPT] * ledger.num_rows,
        "file": files,
        "row_group": row_groups,
        "row": numbers,
        "root": [None] * ledger.num_rows,
    }
    for name, column in values.items():
        index = ledger.schema.get_field_index(name)
        ledger = ledger.set_column(index, ledger.schema.field(index), pa.array(column, ledger.schema.field(index).type))
    return ledger


# --- Weights after the step, for a comparison with a replay --------------------------------------------

_OTHERS = ("optimizer.safetensors", "random.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWeights:
    """SHA-256 of the weight files of the step's checkpoint, which a replay writes too."""

    sha256: Mapping[str, str]
    """Digests by file name; empty if the run did not keep these weights exactly."""
    found_in: str
    """Folder of the run that holds them, or the reason why there is none."""


def expected_weights(root: Root, attempt: Attempt, attempt_id: int, step: int) -> ExpectedWeights:
    """Return the weights after a step, from its checkpoint, or from the policy that it published.

    attempt: settings of the step. attempt_id: attempt that trained it. A policy counts if it holds the trained weights
    unchanged: whole, in float32, without LoRA.
    """
    for link in chain(newest_attempt_id(root), partial(read_parent, root)):
        checkpoint_id = (link.attempt_id, step)
        if (link.last_step is None or step <= link.last_step) and checkpoint_id in checkpoint_ids(root):
            with temporary_folder("cut") as folder:
                root.download(checkpoint_folder(checkpoint_id), folder)
                return ExpectedWeights(sha256=_digests(folder), found_in=checkpoint_folder(checkpoint_id))
    if not _publishes_exactly(attempt.config):
        return ExpectedWeights(
            sha256={}, found_in="no checkpoint of this step is left, and policies hold other numbers"
        )
    for version in policy_versions(root):
        policy = read_policy(root, version)
        if policy and (policy.step, policy.attempt_id) == (step, attempt_id) and has_weights(root, version):
            with temporary_folder("cut") as folder:
                copy_policy(root, version, folder)
                return ExpectedWeights(sha256=_digests(folder), found_in=policy_folder(version))
    return ExpectedWeights(sha256={}, found_in="neither a checkpoint nor a policy of this step is left")


def _publishes_exactly(config: Mapping[str, Any]) -> bool:
    dtype = config.get("publish_dtype") or config.get("dtype") or "float32"
    return dtype == "float32" and config.get("lora_rank") is None


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.glob("*.safetensors") if file.name not in _OTHERS)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# --- README.txt: contents of a cut, the command that replays it, and digests of the expected weights -----

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
