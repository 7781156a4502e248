"""Check compacted files against their plans and each other, and find interrupted compactions.

ludic.maintenance.verify.tables compares rows with footers, and ludic/sql/checks/lost_sources.sql finds lost sources of
rollouts/ and evals/: rows of requests/ do not name their source.
Raises StoreError if the filesystem fails.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ludic.maintenance.verify.findings import Finding
from ludic.maintenance.verify.tables import Checked, first_names
from ludic.store import Root
from ludic.store.files import Plan, parse_file, read_plans

_RUN_COMPACT = "`ludic compact` does"


def check_compactions(root: Root, stored: Sequence[Checked]) -> Iterator[Finding]:
    """Find compacted files and plans that are wrong. stored: all files of rollouts/, evals/ and requests/."""
    plans = read_plans(root)
    for plan in plans:
        if not plan.outputs:
            problem = "is no plan that ludic can read, so it counts as one that replaces nothing"
            yield Finding(check="compaction", where=plan.name, problem=problem)
    planned = _planned(plans)
    holders: dict[str, str] = {}
    for file in stored:
        held = _source_names(file)
        if held and file.name not in planned:
            yield Finding(check="compaction", where=file.name, problem="no plan in compactions/ lists it")
        elif held - planned.get(file.name, held):
            problem = f"holds {first_names(held - planned[file.name])}, which its plan does not list"
            yield Finding(check="compaction", where=file.name, problem=problem)
        for source in sorted(held & holders.keys()):
            yield Finding(check="compaction", where=file.name, problem=f"holds {source}, and so does {holders[source]}")
        holders |= dict.fromkeys(held, file.name)


def unfinished_compactions(root: Root, stored: Sequence[Checked]) -> Iterator[Finding]:
    """Find the leftovers of killed compactors: outputs not made yet, and replaced files not deleted yet."""
    names = {file.name for file in stored}
    held = {file.name: _source_names(file) for file in stored}
    for output, sources in _planned(read_plans(root)).items():
        if output not in names and sources & names:
            problem = f"was to replace {first_names(sources & names)}, and is not made yet; {_RUN_COMPACT}"
            yield Finding(check="unfinished", where=output, problem=problem)
        elif held.get(output, set()) & names:
            problem = f"replaces {first_names(held[output] & names)}, to be deleted; {_RUN_COMPACT}"
            yield Finding(check="unfinished", where=output, problem=problem)


def _planned(plans: Sequence[Plan]) -> dict[str, set[str]]:
    """Return the names of the files that each output replaces, by the output's name."""
    return {
        output.file.name: {replace(output.file, **source._asdict()).name for source in output.sources}
        for plan in plans
        for output in plan.outputs
    }


def _source_names(file: Checked) -> set[str]:
    """Return the names of the files whose rows a compacted file holds; empty for any other file."""
    compacted = parse_file(file.name)
    assert compacted is not None or not file.sources
    return {replace(compacted, **source._asdict()).name for source in file.sources} if compacted else set()
