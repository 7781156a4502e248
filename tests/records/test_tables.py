"""The canonical schemas as Arrow, and which files of others pass."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strategies import as_plain, make_batch

from ludic.errors import ConfigError, SchemaError
from ludic.records.columns import array_columns
from ludic.records.conversion import from_table, to_table
from ludic.records.extra_columns import EXTRA_TYPES, check_extra_columns
from ludic.records.tables import (
    SCALAR_COLUMNS,
    SCHEMA_VERSION,
    arrow_schema,
    check_schema,
    conform,
    load_table,
    rollouts_schema,
    type_name,
)

ROLLOUTS = arrow_schema("rollouts")


def with_version(version: str, schema: pa.Schema = ROLLOUTS) -> pa.Schema:
    return schema.with_metadata({"ludic.table": "rollouts", "ludic.schema_version": version})


def with_type(column: str, type_: pa.DataType) -> pa.Schema:
    return ROLLOUTS.set(ROLLOUTS.get_field_index(column), pa.field(column, type_, nullable=False))


def without(column: str) -> pa.Schema:
    return ROLLOUTS.remove(ROLLOUTS.get_field_index(column))


def test_every_kind_of_type_reaches_arrow_with_its_nullability():
    assert ROLLOUTS.field("group_index").equals(pa.field("group_index", pa.int32(), nullable=False))
    assert ROLLOUTS.field("error").equals(pa.field("error", pa.string(), nullable=True))
    assert ROLLOUTS.field("created_at").type == pa.timestamp("us", tz="UTC")
    assert ROLLOUTS.field("response_logprobs").type == pa.list_(pa.field("element", pa.float32(), nullable=False))
    assert ROLLOUTS.field("action_mask").nullable
    assert ROLLOUTS.field("reward_components").type == pa.map_(
        pa.string(), pa.field("value", pa.float64(), nullable=False)
    )
    agent_step = ROLLOUTS.field("agent_steps").type.value_type
    assert not agent_step.field("start").nullable
    assert agent_step.field("action").nullable
    assert agent_step.field("tool_calls").type.value_type.field("result").nullable


def test_a_schema_carries_its_table_and_version():
    assert ROLLOUTS.metadata == {b"ludic.table": b"rollouts", b"ludic.schema_version": b"1.9"}
    assert SCHEMA_VERSION == "1.9"
    assert arrow_schema("metrics").metadata[b"ludic.table"] == b"metrics"


def test_columns_keep_the_docs_of_nested_fields():
    column = next(column for column in load_table("rollouts").columns if column.name == "agent_steps")
    assert [child.name for child in column.children][:2] == ["turn", "action_target"]
    assert all(child.doc for child in column.children)


def test_the_columns_of_a_run_come_after_the_schemas_own_and_may_be_null():
    schema = rollouts_schema({"x_judge": "string", "x_spans": "list<int64>"})
    assert schema.names == [*ROLLOUTS.names, "x_judge", "x_spans"]
    assert schema.field("x_judge").equals(pa.field("x_judge", pa.string(), nullable=True))
    assert schema.field("x_spans").type == pa.list_(pa.field("element", pa.int64(), nullable=False))
    assert schema.metadata == ROLLOUTS.metadata
    assert rollouts_schema({}) == ROLLOUTS


@pytest.mark.parametrize("type_", EXTRA_TYPES)
def test_each_type_of_a_runs_own_column_is_named_as_it_is_shown(type_):
    check_extra_columns({"x_a": type_})
    assert type_name(rollouts_schema({"x_a": type_}).field("x_a").type) == type_


@pytest.mark.parametrize("name", ["judge", "x_", "x_Judge", "x_a b", "x_a\n", "", 7])
def test_a_runs_own_column_with_another_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"wanted x_ and then lower-case letters, digits or _"):
        check_extra_columns({name: "string"})


@pytest.mark.parametrize("type_", ["float", "int32", "text", "list<list<string>>", "list<>", "", None])
def test_an_unknown_type_of_a_runs_own_column_is_refused(type_):
    with pytest.raises(ConfigError, match=r"extra column 'x_a' is .*, wanted one of string, int64, double, bool, list"):
        check_extra_columns({"x_a": type_})


def test_an_unknown_table_is_refused_by_name():
    with pytest.raises(SchemaError, match="no table 'rollout'; ludic has rollouts, batches, calls, labels"):
        load_table("rollout")


def test_scalar_and_token_columns_are_told_from_the_types():
    tokens = ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards", "action_mask")
    assert tuple(array_columns()) == (*tokens, "kept_tokens", "experts")
    nested = {"agent_steps", "environment_steps", "messages", "reward_components", "metadata", "weight_versions"}
    assert set(ROLLOUTS.names) == {
        *(*SCALAR_COLUMNS, *array_columns()),
        *(*nested, "traceback", "example_columns"),
    }


@pytest.mark.parametrize("name", ["rollouts", "batches", "metrics"])
def test_an_empty_table_survives_parquet(name):
    file = io.BytesIO()
    pq.write_table(arrow_schema(name).empty_table(), file)
    read = pq.read_table(file)
    assert read.num_rows == 0
    assert read.schema.equals(arrow_schema(name), check_metadata=False)
    assert read.schema.metadata == arrow_schema(name).metadata
    check_schema(read.schema, name, "empty.parquet")


def test_nested_columns_survive_parquet():
    batch = make_batch(num_groups=3, group_size=2, num_turns=3)
    file = io.BytesIO()
    pq.write_table(to_table(batch, run_id="run", sequence=0), file, row_group_size=4)
    read = pq.read_table(file)
    check_schema(read.schema, "rollouts", "a.parquet")
    assert as_plain(from_table(read)) == as_plain([batch])


def test_a_foreign_file_is_refused():
    with pytest.raises(SchemaError, match=r"s3://b/x.parquet: no ludic.table in its metadata, wanted rollouts"):
        check_schema(pa.schema([("text", pa.string())]), "rollouts", "s3://b/x.parquet")


def test_another_table_is_refused():
    with pytest.raises(SchemaError, match=r"x.parquet: holds the table batches, wanted rollouts"):
        check_schema(arrow_schema("batches"), "rollouts", "x.parquet")


def test_a_missing_required_column_is_named():
    with pytest.raises(SchemaError, match=r"x.parquet: column 'group_id' is missing, wanted string"):
        check_schema(without("group_id"), "rollouts", "x.parquet")


def test_a_wrong_type_names_column_found_and_wanted():
    with pytest.raises(SchemaError, match=r"x.parquet: column 'episode_reward' is float, wanted double"):
        check_schema(with_type("episode_reward", pa.float32()), "rollouts", "x.parquet")
    with pytest.raises(SchemaError, match="'response_tokens' is list<int64>, wanted list<int32>"):
        check_schema(with_type("response_tokens", pa.list_(pa.int64())), "rollouts", "x.parquet")
    with pytest.raises(
        SchemaError, match=r"'created_at' is timestamp\[us, no time zone\], wanted timestamp\[us, UTC\]"
    ):
        check_schema(with_type("created_at", pa.timestamp("us")), "rollouts", "x.parquet")


def test_a_wrong_type_within_a_struct_is_shown():
    messages = pa.list_(pa.struct([("role", pa.int64()), ("content", pa.string())]))
    with pytest.raises(SchemaError, match=r"'messages' is list<struct<role: int64, content: string>>, wanted list<str"):
        check_schema(with_type("messages", messages), "rollouts", "x.parquet")


def test_every_wrong_column_is_listed():
    schema = without("group_id")
    schema = schema.remove(schema.get_field_index("seed"))
    with pytest.raises(SchemaError, match=r"'group_id' is missing.*; column 'seed' is missing"):
        check_schema(schema, "rollouts", "x.parquet")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.0", "rollouts schema 2.0 is newer than this ludic, which reads 1.9; upgrade ludic"),
        ("0.9", "rollouts schema 0.9 is older than this ludic, which reads 1.9"),
        ("one", "its schema version is 'one', wanted a number such as 1.9"),
    ],
)
def test_another_major_version_is_refused_by_name(version, message):
    with pytest.raises(SchemaError, match=f"x.parquet: {message}"):
        check_schema(with_version(version), "rollouts", "x.parquet")


def test_a_newer_minor_version_with_more_columns_passes_and_conforms():
    table = to_table(make_batch(), run_id="run", sequence=0)
    newer = table.append_column("mood", pa.array(["calm"] * table.num_rows)).replace_schema_metadata(
        {"ludic.table": "rollouts", "ludic.schema_version": "1.9"}
    )
    check_schema(newer.schema, "rollouts", "x.parquet")
    assert conform(newer, "rollouts").equals(table, check_metadata=True)


def test_a_newer_minor_version_with_more_fields_in_a_struct_passes_and_conforms():
    table = to_table(make_batch(num_turns=2), run_id="run", sequence=0)
    message = ROLLOUTS.field("messages").type.value_type
    newer_type = pa.list_(pa.struct([pa.field("mood", pa.string()), *message]))
    index = table.schema.get_field_index("messages")
    newer = table.set_column(index, pa.field("messages", newer_type), table["messages"].cast(newer_type))
    check_schema(newer.schema.with_metadata(ROLLOUTS.metadata), "rollouts", "x.parquet")
    assert as_plain(from_table(newer)) == as_plain(from_table(table))


def test_an_older_file_without_a_nullable_column_passes_and_reads_as_null():
    table = to_table(make_batch(), run_id="run", sequence=0)
    older = table.drop_columns(["truncation_reason", "action_mask"])
    check_schema(older.schema, "rollouts", "x.parquet")
    read = conform(older, "rollouts")
    assert read.schema.equals(arrow_schema("rollouts"), check_metadata=True)
    assert read["truncation_reason"].null_count == read["action_mask"].null_count == table.num_rows


def test_an_older_file_without_a_nullable_field_in_a_struct_reads_as_null():
    table = to_table(make_batch(num_groups=1, group_size=2), run_id="run", sequence=0)
    old_type = pa.list_(
        pa.struct([("content", pa.string()), ("role", pa.string()), ("tool_calls", pa.list_(tool_call()))])
    )
    index = table.schema.get_field_index("messages")
    older = table.set_column(index, pa.field("messages", old_type, nullable=False), table["messages"].cast(old_type))
    check_schema(older.schema, "rollouts", "x.parquet")
    assert conform(older, "rollouts").equals(table)


def tool_call() -> pa.StructType:
    return ROLLOUTS.field("messages").type.value_type.field("tool_calls").type.value_type


def test_conform_restores_the_order_of_columns():
    table = to_table(make_batch(), run_id="run", sequence=0)
    assert conform(table.select(table.column_names[::-1]), "rollouts").equals(table, check_metadata=True)


def test_conform_takes_the_wide_types_that_polars_writes():
    import polars as pl

    table = to_table(make_batch(num_turns=2), run_id="run", sequence=0)
    wide = pl.from_arrow(table).to_arrow()
    assert wide.schema.field("rollout_id").type == pa.large_string()
    assert conform(wide, "rollouts").equals(table)


def test_conform_refuses_nulls_where_none_may_be():
    table = to_table(make_batch(num_groups=1, group_size=2), run_id="run", sequence=0)
    nulls = pa.array([None, "a"])
    with pytest.raises(SchemaError, match="column 'env_name' has 1 nulls, wanted none"):
        conform(table.set_column(table.schema.get_field_index("env_name"), "env_name", nulls), "rollouts")
    elements = pa.array([[1, None], [2]], pa.list_(pa.int32()))
    with pytest.raises(SchemaError, match="column 'prompt_tokens' has null elements"):
        conform(table.set_column(table.schema.get_field_index("prompt_tokens"), "prompt_tokens", elements), "rollouts")
