"""Check all files except tables: records, users' code, weights of policies and checkpoints, and the first model."""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ludic.base import ADAPTER_CONFIG
from ludic.errors import SchemaError, StoreError
from ludic.root.attempts import MARKER, checkpoint_folder, find_cut, read_parent
from ludic.root.catalogue import (
    ATTEMPTS,
    CHECKPOINTS,
    CODE,
    COMPACTIONS,
    DELTAS,
    EPISODES,
    FILE_KINDS,
    GATEWAYS,
    IDENTITY,
    LATEST,
    LEASES,
    MODEL,
    POLICIES,
    RUN,
    STATE_FILES,
    WEIGHT_FILES,
    WEIGHTS,
    WORKERS,
    FileName,
    Records,
    file_kind_of,
)
from ludic.root.code import check_list, parse_name
from ludic.root.inputs import check_data
from ludic.root.json_records import ModelIdentity, decode_json
from ludic.root.maintenance.verify.checks import Finding, reason_of
from ludic.root.maintenance.verify.tables import FOREIGN_NAME, TABLES
from ludic.root.root import Root
from ludic.root.rows.ledger import ledger_name
from ludic.root.rows.tombstones import is_quarantined
from ludic.root.weights.policies import latest_policy, read_delta, versions_with_weights
from ludic.root.weights.weight_folders import digest_file, folder_problems, read_identity, snapshot_files
from ludic.settings import digest

# --- Records and code -----------------------------------------------------------------------------------------
# Check that each record can be read, is unchanged since it was written, and is in its own file; and find foreign names.
#
# ludic.root.catalogue says which files hold records, and of which type. Files that vanish while they are checked are
# ignored. Raises StoreError if the filesystem fails.


_WITH_THEIR_FILES = (RUN, LATEST, DELTAS, CHECKPOINTS, IDENTITY, CODE, COMPACTIONS)
"""Records that other checks read, since they determine which other files must exist."""
_CHECKS = {
    ATTEMPTS.kind: "attempt",
    LEASES.kind: "attempt",
    WORKERS.kind: "worker",
    GATEWAYS.kind: "gateway",
    EPISODES.kind: "gateway",
    POLICIES.kind: "policy",
}
"""Name of the check, by kind; `note` for other kinds."""
_FOLDERS = {row.folder for row in FILE_KINDS if row.folder} - TABLES.keys()
"""Folders whose names are checked here; check_tables finds foreign names among tables."""
AT_THE_TOP = {row.template.partition("/")[0] for row in FILE_KINDS}
"""Files and folders at the top of a run."""


def check_records(root: Root) -> Iterator[Finding]:
    """Check all files but tables and weights, by one listing."""
    for name in root.list(""):
        row, folder = file_kind_of(name), name.partition("/")[0]
        if row is None:
            if folder in _FOLDERS or name in TABLES or ("\\" in name and folder not in TABLES):
                yield Finding(check="misnamed", where=name, problem=FOREIGN_NAME)
        elif isinstance(row, Records) and row not in _WITH_THEIR_FILES:
            yield from _check_record(root, row, name)


def folders_for_files(root: Root) -> Iterator[str]:
    """Yield the folders of a local root that have the name of one file of the run; other stores have no folders."""
    for folder, names, _ in os.walk(root.path) if root.is_local else ():
        for name in (f"{folder}/{name}"[len(root.path) + 1 :] for name in names):
            row = file_kind_of(name)
            if row is not None and not row.ends_with_path:
                yield name


def check_code(root: Root) -> Iterator[Finding]:
    """Check code/: each copy of a user's file matches its name, and each list can be read. Runs no code."""
    for name in root.list(CODE.folder):
        with suppress(FileNotFoundError):
            yield from _check_code_file(root, name)


def _check_code_file(root: Root, name: str) -> Iterator[Finding]:
    parsed = parse_name(name)
    if parsed is None:
        return  # check_records reports it
    if isinstance(parsed, int):
        try:
            check_list(root, parsed)
        except (SchemaError, StoreError) as error:
            yield Finding(check="code", where=name, problem=reason_of(error))
    elif digest(root.read(name)) != parsed:
        problem = "is damaged: its text does not match the digest in its name; --update-code stores the present file"
        yield Finding(check="code", where=name, problem=problem)


def check_inputs(root: Root) -> Iterator[Finding]:
    """Check the data sets of the root: each matches the digest in its name, and those that the run names exist."""
    for name, problem in check_data(root):
        yield Finding(check="data", where=name, problem=problem)


def _check_record(root: Root, row: Records[Any, Any], name: str) -> Iterator[Finding]:
    of = row.parse(name)
    assert of is not None, f"{name} is not a name of {row.kind}"
    try:
        record = row.read(root, *of)
    except SchemaError as error:
        yield Finding(check=_CHECKS.get(row.kind, "note"), where=name, problem=reason_of(error))
        return
    if record is None:
        return
    own = row.home(of, {each.name: getattr(record, each.name) for each in fields(record)})
    if own != name:
        yield Finding(check="misnamed", where=name, problem=f"holds the record of {own}")


# --- Policies and checkpoints ---------------------------------------------------------------------------------
# Check that policies and checkpoints can be read and are complete.
#
# Loads no tensors. Files that vanish while they are checked are ignored, since a trainer prunes. Raises StoreError if
# the filesystem fails.


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
"""Errors from parsing a damaged file; ludic's SchemaError is a ValueError."""
_MOST_HEADER_BYTES = 100_000_000
"""Maximum header length in the safetensors format."""


def check_weights(root: Root) -> Iterator[Finding]:
    """Check policies, then LATEST, then checkpoints."""
    policies = root.sizes(WEIGHT_FILES.folder)
    complete = set(versions_with_weights(policies))
    for name in policies:
        folder = name.rpartition("/")[0]
        if WEIGHTS.parse(name) is not None:
            yield from _unless_gone(_findings("policy", root, folder, _weights_problems(root, folder, policies)))
        elif (delta := DELTAS.parse(name)) is not None:
            yield from _unless_gone(_findings("policy", root, folder, _delta_problems(root, delta.version, complete)))
    yield from _check_latest(root, complete)
    checkpoints = root.sizes(STATE_FILES.folder)
    for name in checkpoints:
        if CHECKPOINTS.parse(name) is not None:  # a checkpoint without it is incomplete, and no trainer reads it
            folder = name.rpartition("/")[0]
            yield from _unless_gone(
                _findings("checkpoint", root, folder, _checkpoint_problems(root, folder, checkpoints))
            )


def _unless_gone(findings: Iterator[Finding]) -> Iterator[Finding]:
    with suppress(FileNotFoundError):
        yield from findings


def _findings(check: str, root: Root, folder: str, in_form: Iterator[str]) -> Iterator[Finding]:
    """Yield the problems `in_form` of a folder, and files without such problems that do not match their digests."""
    found = list(in_form)
    for name, problem in folder_problems(root, folder):
        if not any(each.startswith(name) for each in found):
            found.append(f"{name} {problem}")
    yield from (Finding(check=check, where=folder, problem=problem) for problem in found)


def _check_latest(root: Root, complete: Collection[int]) -> Iterator[Finding]:
    try:
        latest = latest_policy(root)
    except _UNREADABLE as error:
        yield Finding(check="policy", where=LATEST.template, problem=reason_of(error))
        return
    if latest is not None and latest.version not in complete:
        problem = f"names version {latest.version}, which has neither {WEIGHTS.file} nor {DELTAS.file}"
        yield Finding(check="policy", where=LATEST.template, problem=problem)


def _delta_problems(root: Root, version: int, complete: Collection[int]) -> Iterator[str]:
    """Find a broken delta.json, and a base without weights. The result of the differences is not computed."""
    try:
        delta = read_delta(root, version)
    except _UNREADABLE as error:
        yield f"{DELTAS.file} can't be used: {reason_of(error)}"
        return
    if delta is not None and delta.base not in complete:
        yield f"holds differences to version {delta.base}, which has no weights"


def _checkpoint_problems(root: Root, folder: str, sizes: Mapping[str, int]) -> Iterator[str]:
    yield from _marker_problems(root, folder)
    yield from _weights_problems(root, folder, sizes)
    for name in ("optimizer.safetensors", "random.safetensors"):
        yield from _tensor_problems(root, f"{folder}/{name}", sizes)


def _marker_problems(root: Root, folder: str) -> Iterator[str]:
    try:
        info = decode_json(root.read(f"{folder}/{MARKER}"))
        attempt_id, step = int(info["attempt_id"]), int(info["step"])
    except _UNREADABLE as error:
        yield f"{MARKER} can't be read: {reason_of(error)}"
        return
    if info.get("run_id") not in (None, root.run_id):
        yield f"{MARKER} is of another run ({info['run_id']})"
        return
    wanted = checkpoint_folder((attempt_id, step))
    if folder != wanted:
        yield f"{MARKER} belongs in {wanted}"
    yield from _ledger_problems(root, attempt_id, step)


def _ledger_problems(root: Root, attempt_id: int, step: int) -> Iterator[str]:
    """Find a missing ledger of a checkpoint's step.

    The ledger is written before the gradient step. The step that an attempt resumed from has no ledger of that attempt.
    """
    try:
        parent = read_parent(root, attempt_id)
    except _UNREADABLE:
        return  # the broken attempt is a finding of its own
    cut = find_cut(root)
    if cut is not None and step < cut.first_step:
        return
    name = ledger_name(attempt_id, step)
    if step > (parent[1] if parent else 0) and not root.exists(name) and not is_quarantined(root, name):
        yield f"{name}, which says what its last step trained on, is missing"


def _weights_problems(root: Root, folder: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Find missing or incomplete parts of a Hugging Face folder: config, weights and their shards, or adapter."""
    if f"{folder}/{WEIGHTS.file}" not in sizes:
        yield "config.json is missing"
    if f"{folder}/{ADAPTER_CONFIG}" in sizes:
        yield from _tensor_problems(root, f"{folder}/adapter_model.safetensors", sizes)
        return
    index = f"{folder}/model.safetensors.index.json"
    if index not in sizes:
        yield from _tensor_problems(root, f"{folder}/model.safetensors", sizes)
        return
    try:
        shards = sorted(set(json.loads(root.read(index))["weight_map"].values()))
    except _UNREADABLE as error:
        yield f"model.safetensors.index.json can't be read: {reason_of(error)}"
        return
    for shard in shards:
        yield from _tensor_problems(root, f"{folder}/{shard}", sizes)


def _tensor_problems(root: Root, name: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Check that a safetensors file is as long as its header says: 8 bytes of header length, header, tensors."""
    file = name.rpartition("/")[2]
    if name not in sizes:
        yield f"{file} is missing"
        return
    try:
        length = int.from_bytes(root.read_range(name, 0, 8), "little")
        if length > min(_MOST_HEADER_BYTES, sizes[name]):
            raise ValueError(f"it has {sizes[name]:,} bytes, its header alone needs {8 + length:,}")
        header = json.loads(root.read_range(name, 8, 8 + length))
        ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
    except _UNREADABLE as error:
        yield f"{file} is not a safetensors file: {reason_of(error)}"
        return
    wanted = 8 + length + max(ends, default=0)
    if sizes[name] != wanted:
        yield f"{file} has {sizes[name]:,} bytes, its header says {wanted:,}"


# --- model/ ---------------------------------------------------------------------------------------------------
# Check model/: the kept files of the run's first model match their fingerprints.
#
# Raises StoreError if the filesystem fails; files that vanish while they are checked are ignored.


def check_model(root: Root) -> Iterator[Finding]:
    """Compare each kept file with its fingerprint, reading all of them; weights may be absent from model/."""
    try:
        identity = read_identity(root)
    except SchemaError as error:
        yield Finding(check="model", where=IDENTITY.template, problem=reason_of(error))
        return
    if identity is not None:
        yield from _check_files(root, identity)


def _check_files(root: Root, identity: ModelIdentity) -> Iterator[Finding]:
    kept = set(snapshot_files(root))
    wanted = {**identity.config, **identity.tokenizer, **identity.weights}
    for name in sorted(kept & wanted.keys()):
        with suppress(FileNotFoundError):
            if digest_file(root.open_file(MODEL.name(FileName(name))), hashlib.sha256()) != wanted[name]:
                problem = "does not match its fingerprint; delete it with identity.json, and start where the model is"
                yield Finding(check="model", where=MODEL.name(FileName(name)), problem=problem)
    for name in sorted((identity.config.keys() | identity.tokenizer.keys()) - kept):
        problem = "is missing; delete identity.json, and start where the model is"
        yield Finding(check="model", where=MODEL.name(FileName(name)), problem=problem)
