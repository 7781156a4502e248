"""Requests: the identity of sampled work, whichever worker sampled it.

A group of the schedule samples the requests number * group_size, number * group_size + 1, ..., so its number
identifies them. Imports, and writers that follow no schedule, have no requests.
"""

import numpy as np
import pyarrow as pa

from ludic.store.files import slot_of


def group_numbers(rows: pa.Table) -> np.ndarray:
    """Return each row's group number in the schedule, (num_rows,) int64; -1 for a row that follows no schedule."""
    workers = rows["worker_id"].combine_chunks().dictionary_encode()
    slots = [slot_of(worker_id) for worker_id in workers.dictionary.to_pylist()]
    is_scheduled = np.array([slot is not None for slot in slots], np.bool_)[workers.indices.to_numpy()]
    indexes, sizes = rows["request_index"].to_numpy(), rows["group_size"].to_numpy()
    return np.where(is_scheduled & (indexes >= 0) & (sizes > 0), indexes // np.maximum(sizes, 1), -1)
