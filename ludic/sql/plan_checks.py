"""Check what an advantage gives for the rollouts of a plan.

source: the advantage's file, for errors. used: rows of the ledger that the step trains on.
"""

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import QueryError


def check_advantages(source: str, used: pa.Table) -> None:
    """Raise QueryError unless each used row has a finite advantage, and one number per token if it has a list."""
    bad = used.filter(pc.invert(pc.fill_null(pc.is_finite(used["advantage"]), False)))
    if bad.num_rows:
        raise QueryError(
            f"{source}: {bad.num_rows} of {used.num_rows} rollouts to train on get no finite "
            f"advantage, first {bad['rollout_id'][0]}; return one for each, or drop them with a filter"
        )
    lengths = pc.list_value_length(used["token_advantages"])
    bad = used.filter(pc.fill_null(pc.not_equal(lengths, used["response_length"]), False))
    if bad.num_rows:
        first = bad.slice(0, 1).to_pylist()[0]
        raise QueryError(
            f"{source}: {bad.num_rows} of {used.num_rows} rollouts get token_advantages of a wrong length, first "
            f"{first['rollout_id']} in {first['file']}: {len(first['token_advantages'])} for "
            f"{first['response_length']} response tokens; return one for each token"
        )


def check_pairs(source: str, used: pa.Table, num_groups: int) -> None:
    """Raise QueryError unless each pair has two rows, one chosen and one rejected, and there is a pair.

    num_groups: groups of the batch.
    """
    if used.num_rows == 0:
        raise QueryError(
            f"{source}: makes no pair of the {num_groups} groups of a batch; "
            "keep groups of equal rewards out with drop_zero_variance_groups"
        )
    sides = pa.table({"pair_id": used["pair_id"], "side": pc.sign(used["advantage"])})
    pairs = sides.group_by("pair_id").aggregate([("side", "list")])
    for pair_id, found in zip(pairs["pair_id"].to_pylist(), pairs["side_list"].to_pylist(), strict=True):
        if sorted(found) != [-1, 1]:
            raise QueryError(
                f"{source}: pair {pair_id} has {len(found)} rollouts, {found.count(1)} of them chosen; "
                "wanted two, one with an advantage above 0 and one below"
            )
