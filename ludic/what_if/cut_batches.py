"""Copy the batches of some steps into a cut: ledger files, the considered rollouts, and their reference logprobs.

Rows keep their order and their row groups, so that ranks get the same shares; the ledger gets the new addresses. A file
has the name that its worker gave it, also if compaction has moved its rows.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError
from ludic.schema import rollouts_schema
from ludic.store import Root
from ludic.store.catalogue import REFERENCE
from ludic.store.files import RolloutFile
from ludic.store.ledger import ledger_name
from ludic.store.parquet import encode_plain, open_writer
from ludic.store.records import CUT_ATTEMPT
from ludic.store.tables import read_reference_index
from ludic.what_if.steps import read_considered, read_step

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
    schema = rollouts_schema(root.run.extra_columns)
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
