"""A flipped bit in a JSON file of any kind that ludic writes is named by `ludic verify`."""

import ast
from pathlib import Path

import pytest
from bit_flips import flipped, is_named
from tiny_runs import make_whole_root

import ludic
from ludic.store import Root
from ludic.store.catalogue import CUT
from ludic.store.evaluations import evaluation_of, put_evaluation
from ludic.store.json_files import encode_json, encode_record
from ludic.store.records import CutRecord, Evaluator

WRITERS = {
    "interop/imports/importing.py": "imports/",
    "store/attempts.py": "attempts/1.json",
    "store/checkpoints.py": "checkpoints/",
    "store/code_files.py": "code/",
    "store/compaction_plans.py": "compactions/",
    "store/evaluations.py": "evaluations/",
    "store/evaluators.py": "evaluators/",
    "store/kept_model.py": "model/identity.json",
    "store/lease.py": "attempts/1.lease",
    "store/manifest.py": "policies/",
    "store/policies.py": "policies/LATEST",
    "store/policy_writer.py": "policies/",
    "store/quarantine.py": "quarantine/",
    "store/run_json.py": "run.json",
    "store/slots.py": "workers/",
    "store/tombstones.py": "expired/",
    "what_if/cut.py": "cut.json",
}
"""The begin of the files that each module writes with a digest."""


def modules_that_write_json() -> set[str]:
    folder = Path(ludic.__file__).parent
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if path.name != "json_files.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("encode_json", "encode_record")
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    root = make_whole_root(tmp_path_factory.mktemp("whole"))
    put_evaluation(root, evaluation_of("moar_cats", {"max_steps": 1}, []))
    running = Evaluator(owner="host-1", process=None, blocks=["evals/version=1/env=moar_cats/e-0.parquet"])
    root.put("evaluators/01929292-0000-7000-8000-000000000001.json", encode_record(running))
    root.put(CUT.template, encode_record(CutRecord(step=2, first_step=1)))
    root.put("imports/import-0123456789abcdef.json", encode_json({"format": "jsonl", "file": "x"}))
    root.put("code/1.json", encode_json({"files": {}}))
    return root


def test_every_module_that_writes_json_is_listed() -> None:
    assert modules_that_write_json() == WRITERS.keys()


@pytest.mark.parametrize("begin", sorted(set(WRITERS.values())))
def test_a_flipped_bit_in_each_kind_of_json_is_named(root: Root, begin: str) -> None:
    names = [name for name in root.list("") if name.startswith(begin) and name.endswith((".json", ".lease", "LATEST"))]
    assert names
    name = min(names)
    size = Path(root.at(name)).stat().st_size
    assert not is_named(root, name)
    for byte in (0, size // 3, size // 2, size - 30, size - 10, size - 2):
        with flipped(Path(root.at(name)), 8 * byte + byte % 7):
            assert is_named(root, name), (name, byte)
