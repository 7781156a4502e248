"""The intent log of compaction: which sources go into which compacted file, decided once for all compactors.

Plan N of a partition is compactions/{partition}/{N}.json, put if absent. A compactor reads all earlier plans before it
puts a new plan, so no source is planned twice. Only the stored file counts: a plan that can't be read is a plan without
outputs, and its number stays taken. Plans are never deleted, so that no compacted file's name is used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludic.store.catalogue import COMPACTIONS, PlanName
from ludic.store.files import AppendedFile, RolloutFile, Source, output_of, parse_file, parse_source
from ludic.store.records import CompactionPlan, PlannedOutput, encode_record
from ludic.store.root import Root


@dataclass(frozen=True, slots=True)
class Output:
    """A planned compacted file, and the sources that it replaces."""

    file: AppendedFile
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One compaction of a partition; compacted files are named by its number."""

    partition: str
    number: int
    outputs: tuple[Output, ...]

    @property
    def name(self) -> str:
        """Path below the root."""
        return COMPACTIONS.name_of(self)


def put_plan(root: Root, number: int, files: Sequence[Sequence[AppendedFile]]) -> None:
    """Store a plan with an output for each sequence of files, unless the number is taken; read it to find out.

    files: of one partition, at least one.
    """
    outputs = [
        PlannedOutput(name=output_of(of_output[0], number, index).name, sources=[file.source for file in of_output])
        for index, of_output in enumerate(files)
    ]
    plan = encode_record(CompactionPlan(outputs=outputs), indent=None)
    root.put_if_absent(COMPACTIONS.name(PlanName(files[0][0].partition, number)), plan)


def read_partition_plans(root: Root, partition: str) -> list[Plan]:
    """Return the plans of one partition, in order; read by name, since a listing may be delayed."""
    plans: list[Plan] = []
    while (plan := _read_plan(root, partition, len(plans))) is not None:
        plans.append(plan)
    return plans


def read_plans(root: Root) -> list[Plan]:
    """Return the plans of all partitions."""
    partitions = dict.fromkeys(found.partition for found in COMPACTIONS.listed(root))
    return [plan for partition in partitions for plan in read_partition_plans(root, partition)]


def find_replacement(root: Root, file: RolloutFile) -> RolloutFile | None:
    """Return the compacted file that was planned to replace a worker's file that is gone; None if there is no plan."""
    if file.is_compacted:
        return None
    for plan in reversed(read_partition_plans(root, file.partition)):
        for output in plan.outputs:
            if file.source in output.sources:
                return replace(file, worker_id=output.file.worker_id, sequence=output.file.sequence)
    return None


def _read_plan(root: Root, partition: str, number: int) -> Plan | None:
    """Return a plan; None if it does not exist. A plan that can't be read has no outputs."""
    try:
        plan = COMPACTIONS.read(root, partition, number)
        outputs = tuple(_parse_output(output, partition) for output in plan.outputs) if plan else ()
    except ValueError:  # also those of SchemaError and ConfigError
        plan, outputs = CompactionPlan(outputs=()), ()
    return Plan(partition, number, outputs) if plan else None


def _parse_output(output: PlannedOutput, partition: str) -> Output:
    file = parse_file(output.name)
    if file is None or not file.is_compacted or file.partition != partition:
        raise ValueError(output.name)
    return Output(file, tuple(parse_source(worker_id, sequence) for worker_id, sequence in output.sources))
