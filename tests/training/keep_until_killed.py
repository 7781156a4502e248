"""Run by test_reference.py: keep logprobs under a root, a file a call, until killed.

python keep_until_killed.py ROOT MODEL
"""

import itertools
import sys

import pyarrow as pa

from ludic.records.tables import arrow_schema
from ludic.root.root import Root
from ludic.root.rows.tables import write_reference


def rows(model: str, response_length: int) -> pa.Table:
    """Of 200 rollouts."""
    columns = {
        "model": [model] * 200,
        "rollout_id": [f"r{index}" for index in range(200)],
        "temperature": [1.0] * 200,
        "response_length": [response_length] * 200,
        "reference_logprobs": [[-1.5] * response_length] * 200,
    }
    schema = arrow_schema("reference")
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


if __name__ == "__main__":
    url, model = sys.argv[1:]
    root = Root.open(url)
    for length in itertools.count(1):
        write_reference(root, model, rows(model, length))
