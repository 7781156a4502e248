"""The ledger's rows, against one SQL statement that says the same, over random rows."""

from collections.abc import Sequence
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ludic.records.tables import arrow_schema, conform
from ludic.root.sql.ledger_rows import (
    FOR_LEDGER,
    ledger_rows,
    planned_groups,
    rows_to_train_on,
    whole_pairs,
    with_reason,
)

PENDING = pa.schema(
    [
        *((name, pa.string()) for name in ("rollout_id", "group_id", "env_name", "file", "truncation_reason")),
        *((name, pa.int64()) for name in ("policy_version", "policy_version_last", "arrival")),
        *((name, pa.int32()) for name in ("row_group", "row", "prompt_length", "response_length", "num_uses")),
        ("episode_reward", pa.float64()),
        ("truncated", pa.bool_()),
        ("scorer_versions", pa.map_(pa.string(), pa.string())),
        ("reason", pa.string()),
    ]
)
ESTIMATED = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("advantage", pa.float64()),
        ("token_advantages", pa.list_(pa.float32())),
        ("pair_id", pa.string()),
    ]
)
FACTS: dict[str, Any] = {"step": 7, "trainer_version": 5, "attempt_id": 2}

LEDGER = """
with whole_pairs as (
    select pair_id
    from estimated
    inner join judged using (rollout_id)
    where reason is null and $paired
    group by pair_id
    having count(*) > 1
),

planned as (
    select
        judged.rollout_id,
        judged.group_id,
        chosen.queue_position,
        coalesce(reason, case when $paired and whole_pairs.pair_id is null then 'no_pair' end) as reason
    from judged
    left join chosen on chosen.group_id = judged.group_id
    left join estimated on estimated.rollout_id = judged.rollout_id
    left join whole_pairs on whole_pairs.pair_id = estimated.pair_id
    where chosen.queue_position is not null or judged.group_id not in (select group_id from judged where reason is null)
),

described as (
    select
        pending.* exclude (reason),
        planned.reason,
        planned.queue_position is not null and planned.reason is null as used,
        case when used then planned.queue_position end as queue_position,
        num_uses + (planned.queue_position is not null)::integer as uses,
        used
        and response_length > 0
        and coalesce(prompt_length + response_length > $max_seq_len::integer, false) as is_cut,
        min({v: policy_version, a: arrival, f: file, g: row_group, r: "row"}) over (partition by planned.group_id)
            as arrived
    from planned
    inner join pending on pending.rollout_id = planned.rollout_id
)

select
    $attempt_id::integer as attempt_id,
    $step::bigint as step,
    (row_number() over in_order - 1)::integer as batch_index,
    described.rollout_id,
    group_id,
    env_name,
    policy_version,
    $trainer_version::bigint as trainer_version,
    $trainer_version::bigint - policy_version as lag,
    $trainer_version::bigint - policy_version_last as lag_last,
    file,
    row_group,
    "row",
    prompt_length,
    response_length,
    episode_reward,
    advantage,
    coalesce(weights.weight, used::double) as weight,
    used,
    reason,
    case when used then token_advantages end as token_advantages,
    uses as num_uses,
    is_cut as seq_len_truncated,
    truncated or is_cut as truncated,
    coalesce(truncation_reason, case when is_cut then 'max_seq_len' end) as truncation_reason,
    case when $paired and used then pair_id end as pair_id,
    scorer_versions
from described
left join estimated on estimated.rollout_id = described.rollout_id
left join weights on weights.rollout_id = described.rollout_id
window in_order as (order by used desc, queue_position, arrived, file, row_group, "row")
order by batch_index
"""


def pending(random: Random, num_groups: int) -> pa.Table:
    """Return rows of 1 to 5 rollouts a group, of files whose order by name is not that of their arrival."""
    files = [(f"version={version}/w{name}.parquet", version) for version in (0, 1) for name in (9, 10, 1)]
    arrivals = dict(zip(files, random.sample(range(20), len(files)), strict=True))
    rows = []
    for group in range(num_groups):
        file = random.choice(files)
        for index in range(random.randint(1, 5)):
            rows.append(
                {
                    "rollout_id": f"r{len(rows)}",
                    "group_id": f"g{group}",
                    "env_name": random.choice(["a", "b"]),
                    "policy_version": file[1],
                    "policy_version_last": file[1] + index % 2,
                    "file": file[0],
                    "row_group": group % 3,
                    "row": len(rows),
                    "arrival": arrivals[file],
                    "prompt_length": random.randint(1, 8),
                    "response_length": random.randint(0, 8),
                    "episode_reward": random.choice([None, 0.0, random.random()]),
                    "num_uses": random.randint(0, 2),
                    "truncated": random.random() < 0.3,
                    "truncation_reason": random.choice([None, "env"]),
                    "scorer_versions": random.choice([None, [], [("judge", "1a")]]),
                    "reason": random.choice([None, None, "drop_errors", "no_tokens"]),
                }
            )
    random.shuffle(rows)
    return pa.Table.from_pylist(rows, PENDING)


def estimates(random: Random, rollout_ids: Sequence[str]) -> pa.Table:
    """Return an advantage for most rows, in another order; some rows are in pairs, some pairs have one side."""
    rows = [
        {
            "rollout_id": rollout_id,
            "advantage": random.choice([None, random.gauss(0, 1)]),
            "token_advantages": random.choice([None, [], [random.random() for _ in range(3)]]),
            "pair_id": random.choice([None, "p0", "p1", "p2"]),
        }
        for rollout_id in random.sample(rollout_ids, len(rollout_ids) * 3 // 4)
    ]
    return pa.Table.from_pylist(rows, ESTIMATED)


def in_sql(rows: pa.Table, chosen: pa.Table, estimated: pa.Table, weights: pa.Table, **params: Any) -> pa.Table:
    con = duckdb.connect()
    tables = {"pending": rows, "judged": rows.select(["rollout_id", "group_id", "reason"]), "chosen": chosen}
    for name, table in {**tables, "estimated": estimated, "weights": weights}.items():
        con.register(name, table)
    return conform(con.sql(LEDGER, params=params).to_arrow_table(), "batches")


@pytest.mark.parametrize("seed", range(12))
def test_the_ledger_is_what_one_sql_statement_says(seed):
    random = Random(seed)
    rows = pending(random, num_groups=random.randint(1, 9))
    judged = rows.select(["rollout_id", "group_id", "reason"])
    kept = sorted(set(rows.filter(pc.is_null(rows["reason"]))["group_id"].to_pylist()))
    group_ids = random.sample(kept, random.randint(0, len(kept)))
    chosen = pa.table({"group_id": pa.array(group_ids, pa.string()), "queue_position": range(len(group_ids))})
    estimated = estimates(random, rows["rollout_id"].to_pylist())
    weighted = random.sample(rows["rollout_id"].to_pylist(), rows.num_rows // 2)
    weights = pa.table({"rollout_id": pa.array(weighted, pa.string()), "weight": pa.array([0.25] * len(weighted))})
    paired, max_seq_len = seed % 3 == 0, [None, 9, 4][seed // 3 % 3]

    of_groups = rows.filter(pc.is_in(rows["group_id"], planned_groups(judged, chosen))).select(FOR_LEDGER)
    pairs = whole_pairs(estimated, judged) if paired else None
    planned = with_reason(of_groups, judged)
    ledger = ledger_rows(planned, chosen, estimated, weights, **FACTS, max_seq_len=max_seq_len, pairs=pairs)
    assert ledger.schema.equals(arrow_schema("batches"))
    expected = in_sql(rows, chosen, estimated, weights, **FACTS, max_seq_len=max_seq_len, paired=paired)
    assert ledger.to_pylist() == expected.to_pylist()


def test_files_are_ordered_by_name_within_an_arrival_and_groups_by_the_selection():
    # Both files are of one arrival; "w10" comes before "w9" as text.
    addresses = [("late", "w9", 0), ("late", "w10", 3), ("first", "w9", 1), ("lost", "w9", 2), ("gone", "w10", 4)]
    rows = pa.Table.from_pylist(
        [
            {
                **dict.fromkeys(PENDING.names),
                "rollout_id": f"{file}-{row}",
                "group_id": group,
                "env_name": "a",
                "file": file,
                "row": row,
                **dict.fromkeys(("policy_version", "arrival", "row_group", "num_uses"), 0),
                "prompt_length": 1,
                "response_length": 1,
                "truncated": False,
                "reason": "drop_errors" if group in ("lost", "gone") else None,
            }
            for group, file, row in addresses
        ],
        PENDING,
    )
    chosen = pa.table({"group_id": ["first", "late"], "queue_position": [0, 1]})
    none, weights = (
        ESTIMATED.empty_table(),
        pa.table({"rollout_id": pa.array([], pa.string()), "weight": pa.array([], pa.float64())}),
    )
    ledger = ledger_rows(rows, chosen, none, weights, **FACTS, max_seq_len=None, pairs=None)
    assert ledger["rollout_id"].to_pylist() == ["w9-1", "w10-3", "w9-0", "w10-4", "w9-2"]
    assert rows_to_train_on(rows, chosen)["rollout_id"].to_pylist() == ["w9-0", "w10-3", "w9-1"]
