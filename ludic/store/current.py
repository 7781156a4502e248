"""List a set of rollout files that holds each stored row once.

During compaction, and after one that crashed, a worker's file may lie beside the compacted file
that holds its rows. Footers are read only in partitions that have both kinds of file.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ludic.store.files import Folder, RolloutFile, list_files
from ludic.store.root import Root
from ludic.store.sources import find_sources

_CONCURRENT_READS = 8


def current_files(root: Root, folder: Folder = "rollouts") -> list[RolloutFile]:
    """List the current files, sorted, without workers' files whose rows a compacted file holds.

    A broken compacted file is left out if its partition has workers' files; else it is listed.
    """
    partitions: defaultdict[str, list[RolloutFile]] = defaultdict(list)
    for file in list_files(root, folder=folder):
        partitions[file.partition].append(file)
    mixed = [files for files in partitions.values() if len({file.is_compacted for file in files}) == 2]
    hidden = {file for files in mixed for file in _hidden(root, files)}
    return [file for files in partitions.values() for file in files if file not in hidden]


def _hidden(root: Root, files: Sequence[RolloutFile]) -> list[RolloutFile]:
    """Return the files of a partition to leave out: doubled workers' files, and compacted files broken or gone."""
    compacted = [file for file in files if file.is_compacted]
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        sources_of = dict(zip(compacted, pool.map(partial(find_sources, root), compacted), strict=True))
    doubled = {source for sources in sources_of.values() for source in sources or ()}
    return [file for file in files if (sources_of[file] is None if file.is_compacted else file.source in doubled)]
