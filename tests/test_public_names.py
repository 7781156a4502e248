"""The public API: a name, a method or an argument that changes here breaks users' notebooks and pipelines.

Add to these lists what is new. A change to a line needs an entry in CHANGELOG.md.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest

import ludic
from ludic.settings.table import groups_of, is_operation

NAMES = [
    "AgentStep",
    "EnvironmentStep",
    "Message",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "RolloutMetadata",
    "Root",
    "Run",
    "RunConfig",
    "ToolCall",
    "compare",
    "connect",
    "create",
    "dpo",
    "fit",
    "grpo",
    "open",
    "plot",
    "record",
    "refresh",
    "runs",
    "scan",
    "sft",
]
_OF_ANY = ["*model", "*root", "*dataset"]
_OF_QUESTIONS = ["*reward", "*heldout", "*system_prompt"]
CALLS = {
    "dpo": [*_OF_ANY, "*dataset_options", "*wait"],
    "fit": ["*algorithm", *_OF_ANY, *_OF_QUESTIONS, "*dataset_options", "*wait"],
    "grpo": [*_OF_ANY, *_OF_QUESTIONS, "*dataset_options", "*wait"],
    "sft": [*_OF_ANY, "*dataset_options", "*wait"],
}
"""Functions that train by one call; each takes the settings of a run, a trainer, an engine and processes, too."""
METHODS = {
    "assemble": ["*into", "*tokenizer", "*track"],
    "bisect": ["predicate", "table"],
    "check": [
        "config",
        "*algorithm",
        "*engine",
        "**RunConfig",
        "**TrainConfig",
        "**CodeSettings",
        "**EngineConfig",
        "**LaunchConfig",
    ],
    "cluster": ["system", "config", "*cluster", "*engine", "*algorithm", "*out", "**TrainConfig", "**EngineConfig"],
    "compact": ["before", "*all_versions", "*target_mb", "*dry_run", "*track"],
    "compare": [
        "sides",
        "*env",
        "*evaluation",
        "*difference",
        "*seed",
        "*by",
        "*window",
        "*output",
        "*overwrite",
        "**MeasureConfig",
    ],
    "contamination": ["*also", "*env", "*evaluation", "*query", "*params"],
    "cut": ["step", "out"],
    "eval": [
        "versions",
        "*stored",
        "*suite",
        "*interval",
        "*engine",
        "*device",
        "*model",
        "*stop",
        "*report",
        "**EvalConfig",
        "**MeasureConfig",
        "**CodeSettings",
    ],
    "expire": ["*break_resume", "*break_replay", "*dry_run", "*track", "**ExpiryRule"],
    "export": ["format", "out", "*track", "**ExportOptions"],
    "gateway": [
        "*engine",
        "*device",
        "*model",
        "*stop",
        "**GatewayProcess",
        "**GatewaySettings",
        "**HttpSettings",
        "**UpstreamSettings",
        "**EngineConfig",
    ],
    "import_": [
        "files",
        "from_",
        "*env",
        "*tokenizer",
        "*model",
        "*group_size",
        "*groups_per_batch",
        "*follow",
        "*interval_s",
        "*rest_s",
        "*until_idle_s",
        "*stop",
        "*track",
    ],
    "frame": ["name", "*by"],
    "label": ["rollout_id", "value", "*note", "*name", "*author"],
    "plot": ["names", "*by", "*also"],
    "push": ["repo", "*to", "*version", "*parts", "*public", "*personal", "*license", "*model"],
    "report": ["output", "*also", "*by", "*versions", "*compare", "*overwrite", "**MeasureConfig"],
    "run": [
        "config",
        "*algorithm",
        "*engine",
        "*like",
        "*create_only",
        "**RunConfig",
        "**TrainConfig",
        "**CodeSettings",
        "**EngineConfig",
        "**LaunchConfig",
    ],
    "sample": ["prompt", "n", "*version", "*track", "**Question"],
    "scale": ["num_workers", "*ray_address"],
    "score": ["scorer", "*track", "**ScoreOptions"],
    "serve": ["*stop", "**ServeConfig"],
    "sql": ["query", "params", "*also", "*format", "*out", "*max_rows", "*unsafe"],
    "train": [
        "config",
        "*algorithm",
        "*model",
        "*resume",
        "*ranks",
        "*stop_within_s",
        "*take_over",
        "*replaces",
        "*json",
        "*stop",
        "*report",
        "**TrainConfig",
        "**CodeSettings",
    ],
    "verify": ["*repair", "*track"],
    "view": ["rollout_id", "*text", "*color", "*tokens", "*full", "*json", "**ViewOptions"],
    "watch": ["interval_s", "*once", "*totals", "*json", "*track"],
    "what_if": [
        "*advantage",
        "*filters",
        "*algorithm",
        "*sql_params",
        "*steps",
        "*train",
        "*from_step",
        "*num_steps",
        "*track",
    ],
    "worker": [
        "num_groups",
        "*engine",
        "*device",
        "*model",
        "*stop",
        "*report",
        "**WorkerConfig",
        "**CodeSettings",
        "**EngineConfig",
    ],
}
"""Methods of Run and their arguments. * marks one that is given by name only, ** all settings of a dataclass."""
OTHERS = ["config", "url", "watcher"]


def arguments(method: object, first: int = 1) -> list[str]:
    assert callable(method)
    parameters = list(inspect.signature(method).parameters.values())[first:]
    own = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    groups = [f"**{group.__name__}" for group in groups_of(method).values()]
    return [*(f"{'*' * (each.kind is each.KEYWORD_ONLY)}{each.name}" for each in own), *groups]


def test_the_names_of_the_package_are_these() -> None:
    assert sorted(ludic.__all__) == NAMES
    assert all(getattr(ludic, name) is not None for name in NAMES)


def test_the_calls_that_train_take_these() -> None:
    groups = ["**RunConfig", "**TrainConfig", "**CodeSettings", "**EngineConfig", "**LaunchConfig"]
    found = {name: arguments(getattr(ludic, name), first=0) for name in CALLS}
    assert found == {**CALLS, "fit": [*CALLS["fit"], *groups]}


def test_the_methods_of_a_run_are_these() -> None:
    public = {name: getattr(ludic.Run, name) for name in dir(ludic.Run) if not name.startswith("_")}
    assert {name: arguments(value) for name, value in public.items() if is_operation(value)} == METHODS
    assert sorted(name for name, value in public.items() if not is_operation(value) and name != "root") == OTHERS


def test_every_method_has_a_docstring_and_annotations() -> None:
    for name in METHODS:
        method = getattr(ludic.Run, name)
        assert method.__doc__, name
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert all(parameter.annotation is not parameter.empty for parameter in parameters), name
        assert inspect.signature(method).return_annotation is not inspect.Signature.empty, name


DOCS = Path(__file__).parents[1] / "docs"


def importable() -> dict[str, set[str]]:
    """The table of docs/api.md: the names that users' files may import, by module."""
    text = (DOCS / "api.md").read_text().partition("## What your files may import")[2].partition("\n## ")[0]
    found = {}
    for module, names in re.findall(r"^\| `(ludic[^`]*)` \| ([^|]*) \|", text, re.MULTILINE):
        found[module] = set(re.findall(r"`([^`]+)`", names))
    return found


def imports_of_the_docs() -> Iterator[tuple[str, str, str]]:
    """The page, the module and the name of each import in a Python block of README and docs/."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        indented = re.findall(r"(?:^ {4}.*\n|^\n)+", page.read_text(), re.MULTILINE)
        for block in (*blocks, *(dedent(each) for each in indented if "from ludic" in each)):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ludic"):
                    yield from ((page.name, str(node.module), alias.name) for alias in node.names)


def test_the_docs_import_only_what_the_list_has() -> None:
    listed = importable()
    found = list(imports_of_the_docs())
    assert len(found) > 20
    assert [each for each in found if each[2] not in listed.get(each[1], ())] == []


def code_of_notebooks() -> dict[str, list[str]]:
    """The code cells of the notebooks, and of the one that `ludic init` makes, by file."""
    first = Path(ludic.__file__).parent / "app/operations/first_experiment/notebook.ipynb"
    files = [*sorted((DOCS.parent / "notebooks").glob("*.ipynb")), first]
    cells = {path.name: json.loads(path.read_text(encoding="utf-8"))["cells"] for path in files}
    return {
        name: ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
        for name, found in cells.items()
    }


def test_notebooks_begin_with_a_plot_and_import_only_what_the_list_has() -> None:
    listed = importable()
    for name, cells in code_of_notebooks().items():
        first = "\n".join(cells).splitlines()[:15]
        assert any(line.startswith("run.plot(") for line in first), name
        tree = ast.parse("\n".join(cells))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in imports:
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [each.name for each in node.names]
            if module is None:
                assert not any(each.startswith("ludic.") for each in names), name
            elif module.startswith("ludic"):
                assert {*names} <= listed.get(module, set()), (name, module)


def test_a_former_name_gives_the_one_of_now():
    with pytest.raises(ImportError, match=r"episodes\.Episode is called ImportedEpisode now"):
        exec("from ludic.adapters.imports.episodes import Episode")
    with pytest.raises(ImportError, match=r"formats\.Format is called ImportFormat now"):
        exec("from ludic.adapters.imports.formats import Format")
    status = object.__new__(import_module("ludic.app.show.status").RunStatus)
    with pytest.raises(AttributeError, match="'troubles'; it is called 'diagnostics' now"):
        status.troubles()


def types_of_the_package() -> Iterator[tuple[str, str]]:
    """Each public class and type alias of a module: its name, and the file."""
    for path in sorted(Path(ludic.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.ClassDef(name=name):
                    yield name, path.name
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if re.match("[A-Z].*[a-z]", name):
                    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar"):
                        yield name, path.name


def test_no_two_public_types_have_the_same_name():
    files: dict[str, list[str]] = {}
    for name, file in types_of_the_package():
        if not name.startswith("_"):
            files.setdefault(name, []).append(file)
    assert len(files) > 400
    assert {name: named for name, named in files.items() if len(named) > 1} == {}


def test_what_the_list_has_is_there() -> None:
    listed = importable()
    assert len(listed) > 8
    assert [
        (module, name) for module in listed for name in listed[module] if not hasattr(import_module(module), name)
    ] == []


def test_the_glossary_has_each_word_once_and_its_types_exist():
    rows = re.findall(r"^\| ([a-z][^|]*) \| [^|]+ \| (.+) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    words = [word for word, _ in rows if word != "word"]
    assert len(words) > 60
    assert len(words) == len(set(words))
    named = {name for _, names in rows for name in re.findall("`([A-Z][a-z][A-Za-z]+)`", names)}
    assert named - {name for name, _ in types_of_the_package()} == set()
