"""Groups as another program's trainer has them, and what a root holds of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ludic.records.tables import arrow_schema
from ludic.root.attempts import read_attempt
from ludic.root.catalogue import METRICS, WORKERS
from ludic.root.json_records import SlotClaim
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.ledger import attempt_of_steps, read_ledger, read_rollouts
from ludic.root.rows.parquet import read_columns
from ludic.root.rows.tables import read_table

MODEL = "somebody/model"


def group(seed: int = 0, size: int = 4, length: int = 6, **columns: Any) -> list[dict[str, Any]]:
    """A group of dictionaries; the rewards are 0, 1, 2, ... columns: more of each row."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 100, 5)
    return [
        {
            "prompt_tokens": prompt.tolist(),
            "response_tokens": rng.integers(0, 100, length),
            "response_logprobs": np.log(rng.uniform(0.1, 1, length)),
            "episode_reward": index,
            **columns,
        }
        for index in range(size)
    ]


def rows_of(url: str, folder: Any = "rollouts") -> list[dict[str, Any]]:
    """All stored rows, in order of their rollout_id: of one recorder, that in which they were made."""
    root, names = Root.open(url), arrow_schema("rollouts").names
    rows = [row for file in list_files(root, None, folder) for row in read_columns(root, file.name, names).to_pylist()]
    return sorted(rows, key=lambda row: row["rollout_id"])


def ledger_of(url: str) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The rows of the steps that count, by attempt and step, once their addresses led to their rollouts."""
    root, found = Root.open(url), {}
    for step, attempt_id in attempt_of_steps(root).items():
        rows = read_ledger(root, attempt_id, step)
        if rows.num_rows:
            ids = read_rollouts(root, rows, ["rollout_id"])
            assert ids["rollout_id"].equals(rows["rollout_id"])
        found[attempt_id, step] = rows.to_pylist()
    return found


def metrics_of(url: str) -> list[dict[str, Any]]:
    """All rows of metrics, by attempt and step."""
    root = Root.open(url)
    rows = [
        row for of in METRICS.listed(root) for row in read_table(root, METRICS, of).to_pylist(maps_as_pydicts="lossy")
    ]
    return sorted(rows, key=lambda row: (row["attempt_id"], row["step"]))


def claims_of(url: str) -> list[SlotClaim]:
    """All claims, by slot and life."""
    root = Root.open(url)
    claims = [WORKERS.read(root, *of) for of in WORKERS.listed(root)]
    return sorted((claim for claim in claims if claim), key=lambda claim: (claim.slot, claim.life))


def parents_of(url: str, attempt_ids: Sequence[int]) -> list[tuple[int, int] | None]:
    return [read_attempt(Root.open(url), attempt_id).parent for attempt_id in attempt_ids]


def notes_of(url: str) -> list[str]:
    """What `ludic verify` says of harmless facts."""
    return [f"{note.check}: {note.problem}" for note in check_root(Root.open(url)).notes]


def problems_of(url: str) -> list[str]:
    """What `ludic verify` finds."""
    return [str(finding) for finding in check_root(Root.open(url)).findings]
