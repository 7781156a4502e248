"""Every change of a file is made by ludic.root.storage.local, or is listed here with the reason why it needs no store.

Below a root, files are changed through descriptors that follow no link (ludic.root.storage.local). Code that changes a
file by its path can be led out of the root by a link; so each such place is listed, and a new one fails until it is
listed.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ludic

PACKAGE = Path(ludic.__file__).parent
LOCAL = "root/storage/local.py"

_OF_OS = "open mkdir makedirs rename renames replace link symlink unlink remove rmdir removedirs truncate ftruncate"
_OF_OS += " chmod fchmod lchmod chown fchown lchown mkfifo mknod utime write pwrite sendfile copy_file_range setxattr"
_OF_SHUTIL = "copy copy2 copyfile copyfileobj copymode copystat copytree move rmtree chown make_archive unpack_archive"
_OF_TEMPFILE = "mkdtemp mkstemp mktemp TemporaryDirectory TemporaryFile NamedTemporaryFile SpooledTemporaryFile"
_OF_PARQUET = "ParquetWriter write_table write_to_dataset write_metadata"
FUNCTIONS = {
    *(f"os.{name}" for name in _OF_OS.split()),
    *(f"shutil.{name}" for name in _OF_SHUTIL.split()),
    *(f"tempfile.{name}" for name in _OF_TEMPFILE.split()),
    *(f"pyarrow.parquet.{name}" for name in _OF_PARQUET.split()),
    *(f"numpy.{name}" for name in ("save", "savez", "savez_compressed", "savetxt", "memmap")),
    *(f"pyarrow.{name}" for name in ("output_stream", "create_memory_map", "FileOutputStream", "ipc.new_file")),
    *("pyarrow.ipc.new_stream", "pyarrow.csv.write_csv", "pyarrow.feather.write_feather"),
    *("pyarrow.dataset.write_dataset", "torch.save", "sqlite3.connect", "shelve.open", "logging.FileHandler"),
    *("logging.handlers.RotatingFileHandler", "zipfile.ZipFile", "tarfile.open", "gzip.open", "bz2.open", "lzma.open"),
    *("wandb.init", "wandb.Table", "torch.utils.tensorboard.SummaryWriter", "inspect_ai.log.write_eval_log"),
    *("huggingface_hub.snapshot_download", "huggingface_hub.hf_hub_download", "pyiceberg.catalog.sql.SqlCatalog"),
    *(
        "deltalake.write_deltalake",
        "deltalake.transaction.create_table_with_add_actions",
        "deltalake.convert_to_deltalake",
    ),
    *("fsspec.open", "fsspec.open_files"),
}
_METHODS = "write_bytes write_text touch mkdir rmdir unlink rename symlink_to hardlink_to chmod lchmod makedirs"
_METHODS += " save_pretrained save_file save_model savefig write_image write_html tofile to_csv to_parquet to_feather"
_METHODS += " extract extractall export_chrome_trace export_stacks save_to_disk push_to_hub"
_METHODS += " pipe pipe_file put_file cp_file get_file rm rm_file mv"
METHODS = set(_METHODS.split())
"""Of paths, models, figures, tables, archives, profilers and filesystems, of whatever object."""
_STATEMENT = re.compile(
    r"""\bcopy\s+(\(.*\)|[\w."]+)\s+to\s+['"{]|\bexport\s+database\b|\battach\s+(database\s+)?['"{]""",
    re.IGNORECASE | re.DOTALL,
)
"""What of SQL writes files."""


def dotted(node: ast.AST) -> list[str]:
    """The parts of a name such as os.replace; [""] if it is none."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def imported(tree: ast.AST) -> dict[str, str]:
    """What the names of a module mean that it imports."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                names[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def is_open_to_write(call: ast.Call) -> bool:
    """Whether a call may open a file to write."""
    *_, name = dotted(call.func)
    is_method = isinstance(call.func, ast.Attribute) and dotted(call.func)[0] not in ("io", "codecs", "builtins")
    if name not in ("open", "fdopen", "OSFile", "memory_map"):
        return False
    place = 0 if is_method and name == "open" else 1
    given = [*call.args[place : place + 1], *(key.value for key in call.keywords if key.arg == "mode")]
    texts = [each.value for mode in given for each in ast.walk(mode) if isinstance(each, ast.Constant)]
    is_mode = any(isinstance(text, str) and re.fullmatch("(?=.*[wax+])[rwaxbt+]{1,4}", text) for text in texts)
    return is_mode or any("mode" in ast.unparse(mode) for mode in given)


def changes(source: str) -> Iterator[tuple[str, str]]:
    """Yield the function and the name of everything in a module by which a file can be changed."""
    tree = ast.parse(source)
    names, pending = imported(tree), list[tuple[ast.AST, str]]([(tree, "-")])
    while pending:
        node, where = pending.pop()
        where = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else where
        yield from ((where, name) for name in changes_of(node, names))
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                below = value if isinstance(value, list) else [value]
                pending += [(each, where) for each in below if isinstance(each, ast.AST)]


def changes_of(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        first, *rest = dotted(node)
        name = ".".join([names.get(first, ""), *rest])
        if name in FUNCTIONS:
            yield name
        elif isinstance(node, ast.Name) and name.rpartition(".")[2] in METHODS:
            yield name.rpartition(".")[2]
    elif isinstance(node, ast.Call):
        if is_open_to_write(node):
            yield "open to write"
        if isinstance(node.func, ast.Attribute):
            is_replace = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
            is_function = names.get(dotted(node.func)[0]) in ("os", "shutil")
            if (node.func.attr in METHODS or is_replace) and not is_function:
                yield node.func.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _STATEMENT.search(node.value):
        yield "a statement of SQL"


ALLOWED = {
    "the storage layer itself: names on object stores and in memory, which have no links": """
        root/storage/filesystem.py put pipe_file
        root/storage/filesystem.py _create pipe_file pipe_file
        root/storage/filesystem.py _create_from put_file
        root/storage/filesystem.py _move_in put_file unlink
        root/storage/filesystem.py _delete_all rm rm_file
        root/storage/filesystem.py rename cp_file
    """,
    "through the store": """
        root/storage/filesystem.py rename rename
        root/rows/tombstones.py quarantine rename
    """,
    "a copy of stored files in a local folder that the caller made: a scratch or a temporary one, or a cache": """
        root/storage/filesystem.py copy_all mkdir mkdir
        root/storage/filesystem.py copy_out get_file write_bytes
        root/storage/s3.py get_file open to write
        root/storage/s3.py fetch os.pwrite
        root/weights/weight_folders.py apply_delta open to write
        root/weights/policies.py _make_copy tempfile.mkdtemp rename shutil.rmtree mkdir
        root/weights/policies.py _apply tempfile.TemporaryDirectory
        root/weights/policies.py _complete unlink
        root/weights/policies.py _copy_files mkdir shutil.copyfile
        root/weights/policies.py _forget_older shutil.rmtree
        root/weights/policies.py _is_sound_copy shutil.rmtree
        root/weights/model_location.py write_files mkdir write_bytes
        rollouts/weight_sync.py _load shutil.rmtree
        eval/sampling.py __exit__ shutil.rmtree
    """,
    "a scratch folder, or a temporary one of this process: no other user can write in it": """
        root/weights/weight_folders.py write_manifest write_bytes
        root/weights/weight_folders.py write_delta pyarrow.ipc.new_stream open to write
        root/weights/policies.py write mkdir shutil.rmtree
        root/weights/policies.py _write_delta mkdir write_bytes
        root/weights/policies.py _link os.link shutil.copyfile
        root/rows/parquet.py _open pyarrow.parquet.ParquetWriter
        root/rows/parquet.py seal_file open to write
        training/checkpoint.py write_checkpoint save_file save_file
        training/model.py save_weights save_pretrained save_pretrained
        training/model.py _set_config_dtype write_text
        training/model.py _known_names symlink_to
        models/weight_files.py save_pretrained save_pretrained write_bytes
        models/lora.py save_adapter save_pretrained save_file
        models/tiny.py write_model save_pretrained save_pretrained
        eval/what_if/cut.py _copy_model mkdir shutil.copyfile
        eval/what_if/cut.py _copy_policies unlink
        adapters/exports/weights.py _download_policy unlink
        adapters/exports/weights.py _merge_adapter unlink
        adapters/exports/hub.py _write savefig write_text
        adapters/exports/hub.py _write_dataset mkdir pyarrow.parquet.ParquetWriter write_bytes
        adapters/imports/evaluations.py read_inspect open to write shutil.copyfileobj
        adapters/trl.py _model_folder save_pretrained save_pretrained shutil.rmtree
        agents/tools/interpreter.py _run write_text
        app/launch/process.py config_args write_text
    """,
    "an agent's own temporary folder: written before the agent begins, deleted without following links": """
        rollouts/programs.py _run mkdir mkdir write_bytes write_text write_text
        rollouts/program_episodes.py _play mkdir
        rollouts/program_episodes.py _score_by_command tempfile.mkdtemp
        rollouts/program_episodes.py _delete chmod unlink shutil.rmtree
    """,
    "reads a file or a pipe through its descriptor; writes an error to its own output": """
        rollouts/programs.py _read_answer os.open
        base/guard.py _become os.open os.write
    """,
    "makes and deletes private folders of this machine": """
        base/temporary.py make_folder tempfile.mkdtemp
        base/temporary.py temporary_folder shutil.rmtree
        base/temporary.py folder_of_object shutil.rmtree
        base/temporary.py _sweep_once shutil.rmtree
        base/temporary.py private_folder mkdir
    """,
    "the user's own configuration or cache folder": """
        settings/consent.py give_consent mkdir tempfile.NamedTemporaryFile replace
        models/families.py _keep mkdir tempfile.NamedTemporaryFile replace
        root/weights/model_location.py _snapshot huggingface_hub.snapshot_download huggingface_hub.snapshot_download
        adapters/trl.py _model_folder huggingface_hub.snapshot_download
        root/sql/listed_files.py update_segments mkdir
        root/sql/listed_files.py _write_segment pyarrow.parquet.write_table replace
        root/sql/listed_files.py _mark_in_use os.utime
        root/sql/listed_files.py _forget_replaced unlink
    """,
    "what the user names on the command line or is in": """
        base/row_files.py open_sink open to write replace unlink unlink
        app/operations/machines.py _write_new mkdir open to write
        app/operations/init.py init mkdir shutil.copytree
        app/operations/init.py _move_all rename rename rename
        app/show/terminal/start.py view_run write_text
        app/demos/words.py save write_bytes
        adapters/exports/inspect_logs.py _write mkdir unlink unlink inspect_ai.log.write_eval_log replace
        adapters/exports/weights.py _staging_folder mkdir
        adapters/exports/weights.py _publish rename
        adapters/exports/hub.py _new_folder mkdir
        adapters/exports/hub.py _move rename
        eval/what_if/cut.py _appearing mkdir shutil.rmtree chmod rename
    """,
    "a folder of another program's files that is checked for links first; the program writes by path": """
        adapters/trackers.py tensorboard torch.utils.tensorboard.SummaryWriter
        adapters/exports/tables.py open_catalog mkdir pyiceberg.catalog.sql.SqlCatalog
        adapters/exports/tables.py _delta_create deltalake.transaction.create_table_with_add_actions
    """,
    "a log's folder, made after a link is refused": """
        app/launch/supervisor.py make_log_folder mkdir
    """,
    "deletes empty folders only": """
        app/operations/fit_inputs.py _delete_unused rmdir rmdir rmdir
    """,
    "a folder of the package itself, in its repository": """
        app/cli/docs.py write unlink
        app/cli/docs.py _write mkdir write_text
        root/__main__.py - write_text
    """,
    "the source of functions, as a text in memory": """
        app/operations/fit_inputs.py _write_functions extract
    """,
    "an open file, bytes in memory, a pipe, a device, a connection, or a name of a column": """
        adapters/imports/records.py open_file fsspec.open
        adapters/imports/evaluations.py _check_log zipfile.ZipFile
        adapters/trackers.py _log_to_wandb wandb.init wandb.Table
        records/conversion.py table_to_bytes pyarrow.ipc.new_stream
        app/cli/main.py main os.open os.open
        app/demos/words.py save savefig
        app/operations/drawing.py _repr_png_ savefig
        environments/scorer_process.py main os.open open to write
        app/launch/fork_server.py start open to write
        app/launch/guard.py _shared_file tempfile.TemporaryFile open to write
        app/launch/guard.py _grow os.pwrite
        base/row_files.py write_result pyarrow.parquet.ParquetWriter
        root/rows/parquet.py encode_plain pyarrow.parquet.write_table
        root/rows/parquet.py _leaves pyarrow.parquet.write_table
        eval/what_if/rerun.py compare_plans rename
    """,
}
"""Code that changes files by path: why it may, and the file, the function and the names there."""


def lines_of(allowed: str) -> Counter[tuple[str, str, str]]:
    found = Counter[tuple[str, str, str]]()
    for line in allowed.split("\n"):
        file, function, *names = line.replace("open to write", "open_to_write").split() or [""] * 2
        found.update((file, function, name.replace("_to_", " to ") if "open_to" in name else name) for name in names)
    return found


@pytest.mark.slow
def test_no_code_outside_of_the_store_changes_files_without_a_reason() -> None:
    found = Counter[tuple[str, str, str]]()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file != LOCAL:
            found.update((file, function, name) for function, name in changes(path.read_text()))
    assert len(found) > 80
    allowed = sum((lines_of(lines) for lines in ALLOWED.values()), Counter[tuple[str, str, str]]())
    assert {"new": found - allowed, "gone": allowed - found} == {"new": Counter(), "gone": Counter()}


def test_no_file_of_sql_writes_a_file() -> None:
    files = [*PACKAGE.rglob("*.sql")]
    assert len(files) > 20
    assert [path for path in files if _STATEMENT.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("path.write_text('x')", ["write_text"]),
        ("from pathlib import Path\nPath('x').write_bytes(b'')", ["write_bytes"]),
        ("import os as o\no.replace(a, b)\no.stat(a)", ["os.replace"]),
        ("from shutil import copyfile as c\nf(c)", ["shutil.copyfile"]),
        ("def f(g=shutil.copytree): pass\nimport shutil", ["shutil.copytree"]),
        ("old.replace(new)\ntext.replace('a', 'b')\nday.replace(hour=1)", ["replace"]),
        ("open(a, 'w')\nopen(b)\nopen(c, mode='r+b')\nopen(d, 'rb')", ["open to write", "open to write"]),
        ("a.open('xb')\nb.open()\nc.open('wb' if x else 'rb')\nd.open(mode)", ["open to write"] * 3),
        ("import io, os\nio.open(a, 'a')\nos.fdopen(b, 'wb')", ["open to write", "open to write"]),
        ("import pyarrow as pa\npa.OSFile(a, 'wb')\npa.OSFile(b)\npa.memory_map(c, 'r+')", ["open to write"] * 2),
        ("import pyarrow.parquet as pq\npq.write_table(t, p)\npq.read_table(p)", ["pyarrow.parquet.write_table"]),
        ("from pyarrow import parquet\nparquet.ParquetWriter(p)", ["pyarrow.parquet.ParquetWriter"]),
        ("import numpy as np\nnp.save(p, a)\nnp.load(p)", ["numpy.save"]),
        ("from safetensors.torch import save_file\nsave_file(a, b)", ["save_file"]),
        (
            "import safetensors.torch\nsafetensors.torch.save_file(a, b)\nmodel.save_pretrained(c)",
            ["save_file", "save_pretrained"],
        ),
        (
            "import tempfile\nwith tempfile.TemporaryDirectory() as d: tempfile.gettempdir()",
            ["tempfile.TemporaryDirectory"],
        ),
        ("import zipfile\nzipfile.ZipFile(p).extractall(d)", ["zipfile.ZipFile", "extractall"]),
        ("con.execute(\"copy (from t) to 'x.parquet'\")\ncon.execute('from t')", ["a statement of SQL"]),
        ('con.sql("""attach \'a.db\'""")\ncon.sql(\'export database x\')', ["a statement of SQL"] * 2),
    ],
)
def test_a_change_is_found_however_it_is_written(source: str, found: list[str]) -> None:
    assert sorted(name for _, name in changes(source)) == sorted(found)


def test_where_a_change_is_made_is_named_by_the_innermost_function() -> None:
    source = "def outer(a):\n    def inner(b): b.unlink()\n    return inner\n\n\nfor each in x: each.unlink()"
    assert sorted(changes(source)) == [("-", "unlink"), ("inner", "unlink")]
