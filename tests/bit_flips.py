"""Flip bits in the files of a root, and see what `ludic verify` says of a file and what training reads of it."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludic.errors import LudicError
from ludic.root.attempts import complete_checkpoints, folder_of, read_attempt
from ludic.root.catalogue import WORKERS
from ludic.root.claims import read_lease
from ludic.root.maintenance.verify.calls import check_calls
from ludic.root.maintenance.verify.other_files import (
    check_code,
    check_inputs,
    check_model,
    check_records,
    check_weights,
)
from ludic.root.maintenance.verify.tables import TABLES, check_compactions, check_file
from ludic.root.root import Root
from ludic.root.rows.files import read_plans
from ludic.root.rows.ledger import read_ledger
from ludic.root.rows.parquet import decode, read_columns
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.tables import read_reference, read_reference_index
from ludic.root.rows.tombstones import list_quarantined, read_tombstones
from ludic.root.weights.policies import latest_policy, read_delta, read_policy
from ludic.root.weights.weight_folders import check_folder, read_identity, read_snapshot
from ludic.run.run_json import run_of

TOKENS = ["rollout_id", "prompt_tokens", "response_tokens", "response_logprobs", "action_mask", "temperature"]
UNCOVERED = re.compile(r"quarantine/(?!.*\.json$)|logs/|\.tmp/|tensorboard/")
"""Broken files, and logs of people."""


def kind_of(name: str) -> str:
    """Of a file below the root: files that are written and read in one way."""
    folder, _, rest = name.partition("/")
    is_compacted = "compacted." in name and folder != "compactions"
    last = name.rpartition("/")[2]
    return f"{folder}/{last}" if folder in ("policies", "checkpoints") else f"{folder}{Path(rest).suffix}{is_compacted}"


def covered_files(root: Root) -> list[str]:
    return [name for name in root.list("") if not UNCOVERED.match(name)]


def draw_flips(root: Root, num_flips: int, seed: int) -> Iterator[tuple[str, int]]:
    """File and bit; each kind of file as often as any other, so that small ones are hit too."""
    draw = random.Random(seed)
    kinds: dict[str, list[str]] = {}
    for name in covered_files(root):
        kinds.setdefault(kind_of(name), []).append(name)
    for number in range(num_flips):
        name = draw.choice(kinds[sorted(kinds)[number % len(kinds)]])
        yield name, draw.randrange(8 * Path(root.at(name)).stat().st_size)


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of a file is another one, until the end of the block."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (before,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([before ^ 1 << bit % 8]))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(bytes([before]))


def is_named(root: Root, name: str) -> bool:
    """Whether `ludic verify`, by the functions that it calls, names the file, and perhaps others."""
    try:
        if name == "run.json":
            Root.open(root.url)
        if name.partition("/")[0] in TABLES:
            return bool(check_file(root, name).findings)
        findings = [
            *check_records(root),
            *check_weights(root),
            *check_code(root),
            *check_inputs(root),
            *check_model(root),
            *check_compactions(root, []),
            *check_calls(root, []),
        ]
    except LudicError as error:
        return f"{root.url}/{name}" in str(error)
    return any(name in (each.where, f"{each.where}/{each.problem.split()[0]}") for each in findings)


def read_as_training_does(root: Root, name: str) -> Any:
    """What is read of the file, to be compared; None for one that is refused or passed over."""
    try:
        return _READS[name.partition("/")[0]](root, name)
    except LudicError:
        return None


def _rollouts(root: Root, name: str) -> Any:
    reader = RolloutReader(root, ["episode_reward", "env_name", "policy_version", "request_index", "response_length"])
    rows = reader.poll(None)
    if name in reader.broken_files or rows is None:
        return None
    return rows.filter([file == name for file in rows["file"].to_pylist()]), read_columns(root, name, TOKENS)


def _ledger(root: Root, name: str) -> Any:
    attempt_id, step = map(int, re.findall(r"=(\d+)", name))
    return read_ledger(root, attempt_id, step)


def _reference(root: Root, name: str) -> Any:
    index = read_reference_index(root, name.split("=")[1].partition("/")[0])
    rows = index.filter([file == name for file in index["file"].to_pylist()])
    if not rows.num_rows:
        return None
    return rows.to_pylist(), [values.tolist() for values in read_reference(root, name, rows["row"].to_pylist())]


def _attempt(root: Root, name: str) -> Any:
    stem, _, kind = name.removeprefix("attempts/").rpartition(".")
    return read_attempt(root, int(stem)) if kind == "json" else read_lease(root, int(stem))


def _policy(root: Root, name: str) -> Any:
    if name == "policies/LATEST":
        return latest_policy(root)
    folder = name.split("/")[1]
    if name.endswith("/policy.json"):
        return read_policy(root, int(folder.removeprefix("version=")))
    if name.endswith("/delta.json"):
        return read_delta(root, int(folder.removeprefix("version=")))
    check_folder(root, f"policies/{folder}")
    return Path(root.at(name)).read_bytes()


def _checkpoint(root: Root, name: str) -> Any:
    folder = name.rpartition("/")[0]
    infos = [info for info in complete_checkpoints(root) if folder_of(info) == folder]
    if not infos:
        return None
    check_folder(root, folder)
    return infos, Path(root.at(name)).read_bytes()


def _model(root: Root, name: str) -> Any:
    identity = read_identity(root)
    names = {**identity.config, **identity.tokenizer} if identity else {}
    return identity, read_snapshot(root, names)


_READS: dict[str, Callable[[Root, str], Any]] = {
    "rollouts": _rollouts,
    "evals": lambda root, name: read_columns(root, name, TOKENS),
    "batches": _ledger,
    "requests": lambda root, name: decode(root.read(name), name, name.partition("/")[0]),
    "metrics": lambda root, name: decode(root.read(name), name, name.partition("/")[0]),
    "token_stats": lambda root, name: decode(root.read(name), name, name.partition("/")[0]),
    "reference": _reference,
    "attempts": _attempt,
    "policies": _policy,
    "checkpoints": _checkpoint,
    "workers": lambda root, name: WORKERS.read(root, *map(int, re.findall(r"(\d+)", name))),
    "compactions": lambda root, name: next(
        (plan for plan in read_plans(root) if plan.name == name and plan.outputs), None
    ),
    "expired": lambda root, name: read_tombstones(root) or None,
    "model": _model,
    "run.json": lambda root, name: run_of(Root.open(root.url)),
    "quarantine": lambda root, name: list_quarantined(root)[0].reason or None,
}
