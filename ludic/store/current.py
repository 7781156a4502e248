"""The files that hold each stored row once.

While compaction swaps files, and after one that crashed, a worker's file may lie beside the compacted file
that holds its rows. Only in a partition with both is a footer read, to know.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ludic.errors import SchemaError
from ludic.store.files import Folder, RolloutFile, Source, list_files
from ludic.store.root import Root
from ludic.store.sources import read_sources

_CONCURRENT_READS = 8


def current_files(root: Root, folder: Folder = "rollouts") -> list[RolloutFile]:
    """Files that are there now, sorted, without those of workers whose rows a compacted file holds.

    A compacted file that is broken is left out while a worker's file lies beside it; else it is listed.
    """
    partitions: defaultdict[str, list[RolloutFile]] = defaultdict(list)
    for file in list_files(root, folder=folder):
        partitions[file.partition].append(file)
    mixed = [files for files in partitions.values() if len({file.is_compacted for file in files}) == 2]
    hidden = {file for files in mixed for file in _hidden(root, files)}
    return [file for files in partitions.values() for file in files if file not in hidden]


def _hidden(root: Root, files: Sequence[RolloutFile]) -> list[RolloutFile]:
    """Of one partition: what is doubled, and compacted files that are broken or gone again."""
    compacted = [file for file in files if file.is_compacted]
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        sources_of = dict(zip(compacted, pool.map(lambda file: _sources(root, file), compacted), strict=True))
    doubled = {source for sources in sources_of.values() for source in sources or ()}
    return [file for file in files if (sources_of[file] is None if file.is_compacted else file.source in doubled)]


def _sources(root: Root, file: RolloutFile) -> list[Source] | None:
    try:
        return read_sources(root, file)
    except (SchemaError, FileNotFoundError):
        return None
