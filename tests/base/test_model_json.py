"""JSON of models is read by one function, which takes what JSON has and nothing else."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.adapters import judge
from ludic.agents.parsers import JsonParser
from ludic.agents.tools.toolbox import read_arguments
from ludic.app.show import transcript
from ludic.base.model_json import find_json, read_json
from ludic.errors import ToolError
from ludic.models.chat import _as_function_call
from ludic.records.rollout import ToolCall

PACKAGE = Path(ludic.__file__).parent
NO_JSON = ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", '"\t"', "{", "")
NUMBERS = ("1e308", "-0.0", "1e-999", "123456789012345678901234567890")

READERS_OF_OTHER_TEXTS = {
    "files of models": """
        engines/vllm_engine.py models/weight_files.py base/model_folders.py models/families.py
        root/weights/model_location.py models/lora.py models/tokenizer.py training/model.py app/launch/preflight.py
        app/launch/trial.py root/maintenance/verify/other_files.py root/weights/weight_folders.py
    """,
    "records and values of ludic's own": """
        records/tables.py root/sql/library.py root/sql/listed_files.py root/json_records.py root/rows/files.py
        training/inherited_settings.py training/numerics.py run/config.py app/cli/docs.py eval/what_if/cut.py
        app/operations/fit.py training/batches/source.py app/launch/vllm_server.py app/launch/fork_server.py
        adapters/environments/verifiers.py adapters/exports/tables.py settings/table.py app/show/runs.py
        app/show/web/rollout.py root/rows/calls.py base/guard.py
    """,
    "what a user gives": """
        settings/values.py base/config_files.py base/data_files.py records/messages.py adapters/imports/evaluations.py
        adapters/imports/records.py adapters/imports/forms.py adapters/imports/following.py
        run/recording/recorder.py adapters/trl.py adapters/trl_rows.py gateway/dialects/rules.py
    """,
    "where JSON ends, which msgspec then reads": "agents/parsers.py",
    "this function": "base/model_json.py",
}


def test_no_other_module_reads_json_of_models() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        names = {
            ast.unparse(node) for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Attribute)
        }
        if names & {"json.loads", "json.load", "json.JSONDecoder"}:
            found.add(path.relative_to(PACKAGE).as_posix())
    assert found == {each for names in READERS_OF_OTHER_TEXTS.values() for each in names.split()}


@pytest.mark.parametrize("text", [*NO_JSON, *(f'{{"a": [{text}]}}' for text in NO_JSON if text)])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_json(text)
    with pytest.raises(ToolError, match="the arguments are not valid JSON"):
        read_arguments(text)
    if "\t" not in text:
        with pytest.raises(ValueError):
            find_json(f"x {text}", 2)


@pytest.mark.parametrize("number", [text for text in NO_JSON if text[-1:].isalnum()])
def test_no_reader_takes_it(number: str) -> None:
    arguments = f'{{"x": {number}}}'
    call = {"id": "1", "name": "delegate", "arguments": arguments}
    read: dict[str, Callable[[], Any]] = {
        "a template": lambda: _as_function_call(0, ToolCall(**call))["function"]["arguments"],
        "a transcript": lambda: transcript._task({**call, "arguments": f'{{"task": {number}}}'}) or arguments,
        "a parser": lambda: JsonParser().parse(arguments).action or arguments,
        "a judge": lambda: judge._parse(number, None) or arguments,
        "a judge's pattern": lambda: judge._parse(f"is {number}", re.compile(r"is (\S+)")) or arguments,
    }
    assert {name: each() for name, each in read.items()} == dict.fromkeys(read, arguments)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_json_has_is_read_as_python_reads_it(number: str) -> None:
    assert read_json(number) == json.loads(number)
    assert find_json(f"x {number} y", 2) == (json.loads(number), 2 + len(number))
