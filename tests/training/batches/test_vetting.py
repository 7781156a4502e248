"""What an error says of rows that can't be trained on; test_untrainable.py has what training does with them."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tiny_runs import create_root, fill

from ludic.errors import ConfigError
from ludic.root.rows.reader import RolloutReader
from ludic.training.batches.reading import Vetting


@pytest.mark.parametrize(("num_bad", "num_named", "rest"), [(1, 1, ")"), (5, 5, ")"), (7, 5, "; and 2 more)")])
def test_five_rows_are_named_and_the_others_counted(tmp_path, num_bad, num_named, rest):
    root = create_root(str(tmp_path / "run"), "no-model")
    fill(root, num_files=1, groups_per_file=4, response_length=4)
    columns = ["rollout_id", "group_id", "prompt_length", "response_length"]
    rows = RolloutReader(root, columns).poll(None)
    wrong = pc.add(rows["response_length"], pa.array([1] * num_bad + [0] * (rows.num_rows - num_bad), pa.int32()))
    rows = rows.set_column(rows.schema.get_field_index("response_length"), "response_length", wrong)
    rows = rows.append_column("root", pa.nulls(rows.num_rows, pa.string()))
    reason = "response_tokens has 4 tokens, the row says 5"
    named = "; ".join(f"rollout {rollout_id}: {reason}" for rollout_id in rows["rollout_id"].to_pylist()[:num_named])
    with pytest.raises(ConfigError) as error:
        Vetting(root).check(rows, "batches/1.parquet")
    said = f"batches/1.parquet: {num_bad} of {rows.num_rows} rows can't be trained on ({named}{rest}, and a replay"
    assert str(error.value).startswith(said)
