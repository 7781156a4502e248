"""Is a root sound? Every file against its name and its schema, weights and checkpoints whole, and the data checks.

Reads all files below the root, writes nothing. What is wrong becomes a Finding; only a filesystem that can't
be listed raises StoreError. Files that vanish while they are checked are left alone: a run may prune them.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.cli.output import Track, cell, untracked
from ludic.errors import LudicError, QueryError
from ludic.schema import check_schema
from ludic.sql import connect
from ludic.sql.library import load_checks, run_query
from ludic.store import RolloutFile, Root, latest_policy, read_attempt
from ludic.store.files import Folder
from ludic.store.ledger import ledger_name
from ludic.store.policies import LATEST, Policy, policy_folder

TABLES = {"rollouts": "rollouts", "evals": "rollouts", "batches": "batches", "metrics": "metrics"}
"""The table that each folder of Parquet files holds."""

_CONCURRENT_READS = 8
_MOST_ROWS_A_CHECK = 5
_MARKER = "checkpoint.json"
_FOREIGN_NAME = "ludic writes no file of this name; move it out of the run"
_BATCH_NAME = re.compile(r"batches/attempt=\d+/step=\d+\.parquet")
_METRICS_NAME = re.compile(r"metrics/(train|worker)-[^/]+-\d+\.parquet")
_BROKEN = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises for files that are cut off, damaged or foreign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """unreadable, misnamed, policy, checkpoint, attempt, or the name of a file in ludic/sql/checks/."""
    where: str
    """A name below the root; empty for what spans files."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a Parquet file says of itself."""

    name: str
    size_bytes: int
    num_rows: int = 0
    problem: str | None = None
    """Why it can't be used; None for a sound one."""


def check_root(root: Root, track: Track = untracked) -> list[Finding]:
    """Everything that is wrong with a run, file by file, then check by check; empty when it is sound."""
    sizes = {folder: file_sizes(root, folder) for folder in (*TABLES, "policies", "checkpoints")}
    stored = [name for folder in TABLES for name in sizes[folder]]
    found = _concurrently(lambda name: _check_file(root, name), stored, track, "files")
    findings = sorted((finding for finding in found if finding is not None), key=lambda finding: finding.check)
    findings += _check_attempts(root)
    findings += _check_policies(root, sizes["policies"])
    findings += _check_checkpoints(root, sizes["checkpoints"])
    unreadable = [finding.where for finding in findings if finding.check == "unreadable"]
    return findings + _check_data(root, unreadable, track)


def read_footers(root: Root, folder: str, track: Track = untracked) -> list[Footer]:
    """Size, rows and problem of each Parquet file of a folder of TABLES, by its footer alone."""
    sizes = {name: size for name, size in file_sizes(root, folder).items() if name.endswith(".parquet")}
    return _concurrently(lambda name: _read_footer(root, name, sizes[name]), list(sizes), track, folder)


def file_sizes(root: Root, folder: str) -> dict[str, int]:
    """Bytes of each file below a folder, by its name below the root."""
    with root.explained(folder):
        found = root.fs.find(root.at(folder), detail=True)
    return {path[len(root.path) + 1 :]: info["size"] for path, info in sorted(found.items())}


def _concurrently(function: Callable[[str], Any], names: Sequence[str], track: Track, description: str) -> list[Any]:
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        return list(track(pool.map(function, names), len(names), description))


def _read_footer(root: Root, name: str, size_bytes: int) -> Footer:
    try:
        with root.open_file(name) as source:
            file = pq.ParquetFile(source)
            check_schema(file.schema_arrow, TABLES[name.partition("/")[0]], name)
            return Footer(name=name, size_bytes=size_bytes, num_rows=file.metadata.num_rows)
    except (*_BROKEN, LudicError) as error:
        return Footer(name=name, size_bytes=size_bytes, problem=_line(error).removeprefix(f"{name}: "))


def _check_file(root: Root, name: str) -> Finding | None:
    """Read a file of rows whole, and compare its rows with its name."""
    folder = name.partition("/")[0]
    homes = {name}
    try:
        if name.endswith(".parquet"):
            homes = _homes(folder, pq.ParquetFile(io.BytesIO(root.read(name))), root.run_id, name)
    except FileNotFoundError:
        return None
    except (*_BROKEN, LudicError) as error:
        return Finding(check="unreadable", where=name, problem=_line(error).removeprefix(f"{name}: "))
    if not _is_name(folder, name):
        return Finding(check="misnamed", where=name, problem=_FOREIGN_NAME)
    strays = sorted(homes - {name})
    if not strays:
        return None
    return Finding(check="misnamed", where=name, problem=f"holds rows that belong in {', '.join(strays)}")


def _is_name(folder: str, name: str) -> bool:
    if folder in ("rollouts", "evals"):
        return RolloutFile.parse(name) is not None
    return bool((_BATCH_NAME if folder == "batches" else _METRICS_NAME).fullmatch(name))


def _homes(folder: str, file: pq.ParquetFile, run_id: str, name: str) -> set[str]:
    """Names of the files that the rows say they are in, or of another run; reading all finds damaged pages."""
    check_schema(file.schema_arrow, TABLES[folder], name)
    homes: set[str] = set()
    for row_group in range(file.num_row_groups):
        table = file.read_row_group(row_group, use_threads=False)
        homes |= _homes_of_rows(folder, table, run_id, name)
    return homes


def _homes_of_rows(folder: str, table: pa.Table, run_id: str, name: str) -> set[str]:
    if folder == "batches":
        return {ledger_name(**keys) for keys in _distinct(table, "attempt_id", "step")}
    others = [keys["run_id"] for keys in _distinct(table, "run_id") if keys["run_id"] != run_id]
    if others:
        return {f"another run ({others[0]})"}
    if folder == "metrics":
        return {name}
    home: Folder = "evals" if folder == "evals" else "rollouts"
    return {
        RolloutFile(row["policy_version"], row["env_name"], row["worker_id"], row["sequence"], home).name
        for row in _distinct(table, "policy_version", "env_name", "worker_id", "sequence")
    }


def _distinct(table: pa.Table, *columns: str) -> list[dict[str, Any]]:
    return table.select(columns).group_by(list(columns)).aggregate([]).to_pylist()


def _check_attempts(root: Root) -> Iterator[Finding]:
    for name in root.list("attempts"):
        stem = name.removeprefix("attempts/").removesuffix(".json")
        if not stem.isdigit():
            yield Finding(check="misnamed", where=name, problem=_FOREIGN_NAME)
            continue
        try:
            found = read_attempt(root, int(stem)).name
        except (ValueError, TypeError, AttributeError, LudicError) as error:
            yield Finding(check="attempt", where=name, problem=f"is no attempt that ludic can read: {_line(error)}")
            continue
        if found != name:
            yield Finding(check="misnamed", where=name, problem=f"holds what belongs in {found}")


def _check_policies(root: Root, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Each policy.json, the weights of each version with a config.json, which comes last, and that LATEST has one."""
    complete = [name.removesuffix("/config.json") for name in sizes if name.endswith("/config.json")]
    for name in sizes:
        if name.endswith("/policy.json"):
            yield from _check_policy(root, name)
    for folder in complete:
        problems = _weights_problems(root, folder, sizes)
        yield from (Finding(check="policy", where=folder, problem=problem) for problem in problems)
    try:
        latest = latest_policy(root)
    except (ValueError, TypeError, AttributeError, LudicError) as error:
        yield Finding(check="policy", where=LATEST, problem=f"names no version: {_line(error)}")
        return
    if latest is not None and policy_folder(latest.version) not in complete:
        yield Finding(check="policy", where=LATEST, problem=f"names version {latest.version}, which has no config.json")


def _check_policy(root: Root, name: str) -> Iterator[Finding]:
    try:
        found = f"{policy_folder(Policy(**json.loads(root.read(name))).version)}/policy.json"
    except (ValueError, TypeError, AttributeError, LudicError) as error:
        yield Finding(check="policy", where=name, problem=f"is no policy.json that ludic can read: {_line(error)}")
        return
    if found != name:
        yield Finding(check="misnamed", where=name, problem=f"holds what belongs in {found}")


def _check_checkpoints(root: Root, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Those whose marker was put; without it a checkpoint is a torso that no trainer reads."""
    for marker in sizes:
        folder, _, last = marker.rpartition("/")
        if last == _MARKER:
            problems = [*_marker_problems(root, marker), *_weights_problems(root, folder, sizes)]
            for name in ("optimizer.safetensors", "random.safetensors"):
                problems += _tensor_problems(root, f"{folder}/{name}", sizes)
            yield from (Finding(check="checkpoint", where=folder, problem=problem) for problem in problems)


def _marker_problems(root: Root, marker: str) -> Iterator[str]:
    try:
        info = json.loads(root.read(marker))
        found = f"checkpoints/attempt={info['attempt_id']}/step={info['step']}/{_MARKER}"
    except (ValueError, KeyError, TypeError, LudicError) as error:
        yield f"{_MARKER} can't be read: {_line(error)}"
        return
    if found != marker:
        yield f"{_MARKER} belongs in {found}"


def _weights_problems(root: Root, folder: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """What a Hugging Face folder lacks: its config, its weights or some of their shards, whole."""
    if f"{folder}/config.json" not in sizes:
        yield "config.json is missing"
    index = f"{folder}/model.safetensors.index.json"
    if index not in sizes:
        yield from _tensor_problems(root, f"{folder}/model.safetensors", sizes)
        return
    try:
        shards = sorted(set(json.loads(root.read(index))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, LudicError) as error:
        yield f"model.safetensors.index.json can't be read: {_line(error)}"
        return
    for shard in shards:
        yield from _tensor_problems(root, f"{folder}/{shard}", sizes)


def _tensor_problems(root: Root, name: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Whether a safetensors file is as long as its header says: 8 bytes of header length, header, tensors."""
    file = name.rpartition("/")[2]
    if name not in sizes:
        yield f"{file} is missing"
        return
    try:
        with root.explained(name):
            length = int.from_bytes(root.fs.cat_file(root.at(name), start=0, end=8), "little")
            if 8 + length > sizes[name]:
                yield f"{file} has {sizes[name]:,} bytes, its header alone wants {8 + length:,}"
                return
            header = json.loads(root.fs.cat_file(root.at(name), start=8, end=8 + length))
        ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, LudicError) as error:
        yield f"{file} is no safetensors file: {_line(error)}"
        return
    wanted = 8 + length + max(ends, default=0)
    if sizes[name] != wanted:
        yield f"{file} has {sizes[name]:,} bytes, its header says {wanted:,}"


def _check_data(root: Root, unreadable: Iterable[str], track: Track) -> list[Finding]:
    """The SQL of ludic/sql/checks/ over what can be read; each check that finds rows shows the first of them."""
    con, checks = connect(root, without=unreadable), load_checks()
    findings: list[Finding] = []
    for name, sql in track(checks.items(), len(checks), "data checks"):
        try:
            findings += _row_findings(name, run_query(con, sql))
        except QueryError as error:
            findings.append(Finding(check=name, where="", problem=f"can't be checked: {_line(error)}"))
    return findings


def _row_findings(check: str, rows: pa.Table) -> Iterator[Finding]:
    for row in rows.slice(0, _MOST_ROWS_A_CHECK).to_pylist():
        values = ", ".join(f"{name} {cell(value)}" for name, value in row.items())
        yield Finding(check=check, where="", problem=values)
    if rows.num_rows > _MOST_ROWS_A_CHECK:
        problem = f"and {rows.num_rows - _MOST_ROWS_A_CHECK:,} more rows like these"
        yield Finding(check=check, where="", problem=problem)


def meaning_of(check: str) -> str:
    """What a check looks for, in words; those of ludic/sql/checks/ say it on their first lines."""
    if check in _MEANINGS:
        return _MEANINGS[check]
    comment, _, _ = load_checks()[check].partition("\n-- grain:")
    return " ".join(comment.replace("--", " ").split()).removeprefix(f"{check}: ")


_MEANINGS = {
    "unreadable": "a file that no reader can use; it is set aside and never trained on",
    "misnamed": "a file whose name does not say what is in it",
    "attempt": "a trainer start that can't be read",
    "policy": "published weights that can't be used",
    "checkpoint": "a checkpoint that no trainer can resume from",
}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
