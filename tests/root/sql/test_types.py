import subprocess
import sys
from importlib.util import find_spec

import duckdb
import pyarrow as pa
import pytest

from ludic.records.extra_columns import EXTRA_TYPES
from ludic.records.tables import arrow_schema, rollouts_schema, table_names
from ludic.root.sql.root_views import columns_sql, duckdb_type
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

EXTRA_COLUMNS = {f"x_{number}": type_ for number, type_ in enumerate(EXTRA_TYPES)}


@pytest.mark.parametrize("schema", [*map(arrow_schema, table_names()), rollouts_schema(EXTRA_COLUMNS)], ids=str)
def test_types_have_the_names_that_duckdb_gives_them(schema):
    con = duckdb.connect()
    con.from_arrow(schema.empty_table()).create("theirs")
    con.execute(f"create table ours ({columns_sql(schema)})")
    (theirs, ours) = (con.sql(f"describe {table}").fetchall() for table in ("theirs", "ours"))
    assert ours == theirs


def test_a_type_that_no_column_has_is_refused():
    with pytest.raises(KeyError):
        duckdb_type(pa.decimal128(5, 2))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pandas") is None, reason="pandas is not installed")
def test_a_connection_does_not_import_pandas(tmp_path):
    root = put_run(str(tmp_path), RunConfig(model="tiny", env=("moar_cats",)))
    program = "import sys, ludic; ludic.connect(sys.argv[1]); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, root.url], check=True)
