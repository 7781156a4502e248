"""Write what follows from the operations: `python -m ludic.app.cli.docs`, or check that it is there with --check.

docs/settings/ has a table of every setting, a page for each group, docs/api.md one of the methods of `Run` and their
commands, docs/reading.md one of the figures, docs/coming_from.md those of the settings of other programs, docs/fit.md
one of the forms of conversations and pairs. docs/files.md has what each module says first of itself.
ludic/settings/setting_texts.json has the texts below the fields of all settings, which --help reads.
ludic/app/operations/typed.pyi has the types of the operations' `**settings`, and methods.pyi the methods of `Run`, for
editors and type checkers.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.settings import JSON, settings_of_command
from ludic.app.operations.create import create
from ludic.app.operations.fit import fit
from ludic.app.operations.operation import Methods, command_name
from ludic.app.show.figures import FIGURES
from ludic.base import find_by_name, start_python
from ludic.eval import MeasureConfig
from ludic.settings import (
    TEXTS,
    Setting,
    about,
    default_text,
    forget_texts,
    groups_in,
    groups_of,
    is_operation,
    settings_of,
)
from ludic.settings.table import describe

_INTRODUCTION = """# Settings

Written by `make format` from the fields of the dataclasses and the parameters of the operations. A setting is a flag
(`--learning-rate 1e-4`), a key of the file of `--config FILE.toml` (`learning_rate = 1e-4`; a file that ends in .json
holds the same as JSON) and an argument in Python. The settings of an objective may stand in a table `[objective]` with
its `name`. Flags come before the file, the file before the preset of
`--algorithm`, and this before what the root holds from an earlier start. `None` is the text "None" in flags and TOML,
and null in JSON. Every command that returns figures has `--json`; `ludic sql` has `--format json`.

`ludic run --help GROUP` shows one of these pages in a terminal, `ludic run --help SETTING` one setting."""

_BEGIN, _END = "<!-- made by make format -->\n", "<!-- end -->\n"


_IN_TABLES = ("ludic.adapters.reward_models:ModelSettings", "ludic.adapters.reward_models:ServerSettings")
"""Settings that are neither flags nor keys of a file, but in a table of one."""
_OF_SCORERS = (
    "Reward models as scorers. The settings are in the option `scorer_options` of questions, by the scorer's name, and "
    "in `ludic score --scorer-options` ([environments](../environments.md#reward-models))."
)
_SCORERS, _OWN = "reward_models", "commands"
"""Pages of settings that are of no group."""


# --- docs/settings.md and docs/settings/ -----------------------------------------------------------------------------


def settings_pages() -> dict[str, str]:
    """Return the pages of settings below docs/, by path: one for each group, and docs/settings.md, which lists them."""
    used_by: dict[type, list[str]] = {}
    for name, command in COMMANDS.items():
        for owner in groups_in(command.operation).values():
            used_by.setdefault(owner, []).append(f"`ludic {name}`")
    groups: dict[str, list[Setting]] = {}
    texts: dict[str, list[str]] = {}
    for owner, commands in used_by.items():
        for group, settings in _by_group(owner).items():
            page = group or _page_name(owner)
            assert page not in groups, f"two groups of settings are called {page}"
            groups[page] = settings
            used = f"Fields of `{owner.__name__}`, used by {', '.join(commands)}."
            texts[page] = ["", f"{about(settings)}. {used}", *_table(settings)]
    scorers: list[Any] = [find_by_name(path) for path in _IN_TABLES]
    groups[_SCORERS] = [each for scorer in scorers for each in settings_of(scorer)]
    texts[_SCORERS] = ["", _OF_SCORERS, *(line for scorer in scorers for line in _section(scorer))]
    texts[_OWN] = ["", "Settings that only one command has.", *(line for name in COMMANDS for line in _own(name))]
    pages = {f"settings/{name}.md": "\n".join([f"# Settings: {name}", *text, ""]) for name, text in texts.items()}
    rows = [f"| [{name}](settings/{name}.md) | {_names(settings)} |" for name, settings in groups.items()]
    last = f"| [{_OWN}](settings/{_OWN}.md) | what only one command has |"
    index = [_INTRODUCTION, "", "| page | settings |", "| --- | --- |", *rows, last, ""]
    return {"settings.md": "\n".join(index), **pages}


def table(owner: Any) -> Iterator[str]:
    """Yield the lines of the tables of a dataclass's settings, one for each group."""
    for group, settings in _by_group(owner).items():
        if group:
            yield from ("", f"### {group}", "", f"{about(settings)}.")
        yield from _table(settings)


def _by_group(owner: Any) -> dict[str, list[Setting]]:
    """Return the settings of a dataclass by their group; "" is of those without one."""
    groups: dict[str, list[Setting]] = {}
    for each in settings_of(owner):
        groups.setdefault(each.group, []).append(each)
    return groups


def _page_name(owner: type) -> str:
    """Return the page of a dataclass: expiry_rule of ExpiryRule, run of RunConfig."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", re.sub(r"(Config|Options|Settings)$", "", owner.__name__)).lower()


def _names(settings: Sequence[Setting]) -> str:
    return ", ".join(f"`{_name(each)}`" for each in settings).replace("|", "\\|")


def _name(each: Setting) -> str:
    return each.shown.metavar if each.shown is not None and not each.has_flag else each.name


def _section(owner: Any) -> Iterator[str]:
    first = " ".join((owner.__doc__ or "").split("\n\n")[0].split())
    yield from ("", f"## {owner.__name__}", "", first)
    yield from table(owner)


def _own(name: str) -> Iterator[str]:
    """Yield the section of what only this command has."""
    own = [each for each in settings_of_command(COMMANDS[name].operation) if not each.path and each.name != JSON]
    if own:
        yield from ("", f"## ludic {name}", "", f"{COMMANDS[name].about}.")
        yield from _table(own)


def _table(settings: list[Setting]) -> Iterator[str]:
    yield from ("", "| setting | value | default | meaning |", "| --- | --- | --- | --- |")
    yield from map(_row, settings)


def _row(each: Setting) -> str:
    limits = "".join(f", {limit}" for limit in each.ranges)
    default = str(each.default).lower() if isinstance(each.default, bool) else default_text(each)
    default = "required" if each.default is MISSING else default
    cells = [f"`{_name(each)}`", f"{describe(each.kind)}{limits}", default, each.help]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# --- ludic/settings/setting_texts.json
# ----------------------------------------------------------------------------------------


def texts() -> str:
    """Return the texts below the fields of all dataclasses of settings and of their bases, as JSON."""
    functions = [*(command.operation for command in COMMANDS.values()), *methods().values(), fit]
    tables = [settings_of(each) for each in (*functions, *map(find_by_name, _IN_TABLES))]
    owners = {owner for table in tables for each in table for owner in (each.owner, *each.members)}
    classes = {base for owner in owners if isinstance(owner, type) for base in owner.__mro__[:-1]}
    found = {each.__name__: texts_below(each) for each in classes}
    assert len(found) == len(classes), "two dataclasses of settings have one name"
    return json.dumps({name: each for name, each in found.items() if each}, indent=1, sort_keys=True) + "\n"


def texts_below(owner: type) -> dict[str, str]:
    """Return the text below each of a dataclass's own fields, as one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field.target): " ".join(str(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


# --- docs/api.md -----------------------------------------------------------------------------------------------------


def methods() -> Mapping[str, Callable[..., Any]]:
    """Return the operations that are methods of `Run`, by name."""
    return {name: inspect.unwrap(each) for name, each in sorted(vars(Methods).items()) if is_operation(each)}


def methods_table() -> str:
    """Return the table of the methods of `Run`: each does what its docstring says first."""
    lines = ["| method of `Run` | does | command |", "| --- | --- | --- |"]
    for name, function in methods().items():
        does = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
        command = f"`ludic {command_name(function)}`" if command_name(function) in COMMANDS else ""
        lines.append(f"| `{name}({_shown(function)})` | {does} | {command} |")
    return "\n".join(lines) + "\n"


def _shown(function: Callable[..., Any]) -> str:
    """Return the parameters that are given by position, and ... for others."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    many = [f"*{each.name}" for each in parameters if each.kind is each.VAR_POSITIONAL]
    more = ["..."] if any(each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters) else []
    return ", ".join([*named, *many, *more])


# --- Types for editors and type checkers -----------------------------------------------------------------------------

_TYPED = '''"""Types of the operations' `**settings`, by which editors complete them and type checkers find mistakes.

Written by `make format` from the dataclasses of the settings.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict
'''
_METHODS = '''"""Types of the methods of `Run`. Written by `make format` from the operations."""
'''


def methods_stub() -> str:
    """Return ludic/app/operations/methods.pyi: a line for each method of `Run`."""
    homes = {name: (each.__module__.rpartition(".")[2], each.__name__) for name, each in methods().items()}
    modules = ", ".join(sorted({module for module, _ in homes.values()}))
    lines = [f"    {name} = {module}.{function}" for name, (module, function) in homes.items()]
    return "\n".join([_METHODS, f"from ludic.app.operations import {modules}", "", "class Methods:", *lines, ""])


def typed_stub() -> str:
    """Return ludic/app/operations/typed.pyi: a TypedDict for each dataclass, and one for each operation with settings.

    A setting that an operation has as a parameter of its own is in no dictionary of it. So such settings stand in the
    dictionaries of the other operations, and not in that of the dataclass.
    """
    of_commands = [command.operation for command in COMMANDS.values()]
    calls: list[Callable[..., Any]] = [create, fit, *of_commands]
    operations = {inspect.unwrap(each) for each in calls}
    operations |= {*methods().values()}
    with_settings = sorted((each for each in operations if groups_of(each)), key=lambda each: each.__name__)
    owners = {owner: None for each in with_settings for owner in groups_of(each).values()}
    apart = {
        owner: {name for each in with_settings if owner in groups_of(each).values() for name in _parameters(each)}
        for owner in owners
    }
    shared = {owner: [each for each in settings_of(owner) if each.name not in apart[owner]] for owner in owners}
    values = [_typed_dict(f"{owner.__name__}Values", "", [], each) for owner, each in shared.items()]
    classes = []
    for function in with_settings:
        groups = groups_of(function).values()
        own = [
            each for group in groups for each in settings_of(group) if each.name in apart[group] - _parameters(function)
        ]
        name = "".join(word.title() for word in function.__name__.split("_")) + "Settings"
        about = f"Settings of `{function.__module__.rpartition('.')[2]}.{function.__name__}`."
        classes.append(_typed_dict(name, about, [f"{group.__name__}Values" for group in groups], own))
    choices = {member for owner in owners for each in settings_of(owner) if each.is_choice for member in each.members}
    modules: dict[str, list[str]] = {}
    for member in sorted(choices, key=lambda each: (each.__module__, each.__name__)):
        modules.setdefault(member.__module__, []).append(member.__name__)
    imports = [f"from {module} import {', '.join(names)}" for module, names in modules.items()]
    return "\n".join([_TYPED, *imports, "", *values, *classes])


def _parameters(function: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(function).parameters}


def formatted(text: str) -> str:
    """Return the source of a stub as ruff formats it."""
    ruff = start_python(
        ["-m", "ruff", "format", "--stdin-filename", "typed.pyi", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with ruff as process:
        return process.communicate(text.encode())[0].decode()


def _typed_dict(name: str, about: str, bases: Sequence[str], settings: Sequence[Setting]) -> str:
    lines = [f"class {name}({', '.join(bases) or 'TypedDict'}, total=False):"]
    lines += [f'    """{about}"""', ""] if about else []
    lines += [] if settings or about else ["    pass"]
    for each in settings:
        members = [member.__name__ for member in each.members] if each.is_choice else []
        more = "".join(f" | {name}" for name in (["Mapping[str, Any]", *members] if members else []))
        lines.append(f"    {each.name}: {_type_of(each.kind)}{more}")
    return "\n".join([*lines, "", ""])


def _type_of(kind: Any) -> str:
    """Return the source of a type, as a caller may give it: any sequence for a tuple, a text for a path."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_of(inner[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_type_of, inner)))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if origin is tuple:
        return f"Sequence[{_type_of(inner[0])}]"
    if origin is Mapping:
        return f"Mapping[{', '.join(map(_type_of, inner))}]"
    names = {Path: "str | PathLike[str]", NoneType: "None"}
    return names.get(kind) or (kind.__name__ if kind in (str, int, float, bool) else "Any")


# --- docs/coming_from.md ---------------------------------------------------------------------------------------------


PAGE = "docs/coming_from.md"


def foreign_table(program: Any) -> str:
    """Return the table of the settings of another program, or of a trainer of it, with those of ludic.

    program: a Program of ludic.adapters.foreign_settings.
    """
    lines = [f"| {program.config or 'short'} | ludic | |", "| --- | --- | --- |"]
    for each in program.settings:
        cells = [", ".join(f"`{name}`" for name in names.split()) for names in (each.names, each.ours)]
        lines.append(f"| {cells[0]} | {cells[1] or 'none'} | {each.note} |")
    return "\n".join(lines) + "\n"


# --- docs/reading.md -------------------------------------------------------------------------------------------------


def figures_table() -> str:
    """Return the table of the figures that reports, pages and `Run.plot` draw, from their catalogue."""
    lines = ["| name | shows | unit | over | lines by a column |", "| --- | --- | --- | --- | --- |"]
    for each in FIGURES:
        note = f". {each.note.rstrip('.')}" if each.note else ""
        unit = each.unit.format(confidence=100 * MeasureConfig().confidence)
        cells = [f"`{each.name}`", f"{each.title}{note}", unit, each.x_name, "yes" if each.split else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# --- docs/fit.md -----------------------------------------------------------------------------------------------------

FORMS = "tests/adapters/imports/forms"
"""Folder of examples of each form, as which tests read them."""


def read_forms(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the examples of forms by their names. folder: of the repository."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / FORMS).glob("*.json"))}


def forms_table(folder: Path) -> str:
    """Return the table of the forms, with what their examples say that is read and refused."""
    examples = [*read_forms(folder).values()]
    lines = ["| form | fields | what is read | what is refused |", "| --- | --- | --- | --- |"]
    conversations = find_by_name("ludic.adapters.imports.forms:CONVERSATIONS")
    for form in (*conversations, *find_by_name("ludic.adapters.imports.forms:PAIRS")):
        own = [each for each in examples if each["form"] == form.name]
        reads = " ".join(each["reads"] for each in own if each["reads"])
        refused = "; ".join(refusal["why"] for each in own for refusal in each["refused"])
        lines.append(f"| {form.name} | {form.fields} | {reads} | {refused} |")
    return "\n".join(lines) + "\n"


# --- docs/files.md ---------------------------------------------------------------------------------------------------

_FILES = """# Files of the package

Written by `make format` from the first sentences of the modules and from the doors of the rooms (`__init__.pyi`): other
rooms import a name from its room's door, as `from ludic.root import Root`, never from the file.
[ARCHITECTURE.md](../ARCHITECTURE.md) says how the rooms depend on each other, and
[CONTRIBUTING.md](../CONTRIBUTING.md) where to add what.
"""


def names_at_doors(package: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield each door with a name that it gives and the file that has the name, without .py. A door is __init__.pyi."""
    for stub in sorted(package.rglob("__init__.pyi")):
        room = ".".join((package.name, *stub.parent.relative_to(package).parts))
        for node in ast.parse(stub.read_bytes()).body:
            assert isinstance(node, ast.ImportFrom), f"{stub}: wanted imports alone"
            yield from ((room, each.name, stub.parent / (node.module or "").replace(".", "/")) for each in node.names)


def _by_file(package: Path) -> dict[Path, tuple[str, list[str]]]:
    """Return the innermost room and the names that a file gives at doors, by the file's path without .py."""
    found: dict[Path, tuple[str, list[str]]] = {}
    for room, name, path in names_at_doors(package):
        given = found.get(path, (room, []))[1]  # also by the door of the room that this room is in
        found[path] = (room, given if name in given else [*given, name])
    return found


def files_page(folder: Path) -> str:
    """Return docs/files.md: the Python files below each folder of the package, with what each says first of itself.

    folder: of the repository. A module without a docstring is an error; such an __init__ or __main__ is left out.
    """
    sections: dict[Path, list[str]] = {}
    at_doors = _by_file(folder / "ludic")
    for path in sorted((folder / "ludic").rglob("*.py"), key=lambda path: (path.parent.parts, path.name)):
        text = ast.get_docstring(ast.parse(path.read_bytes()))
        assert text or path.stem in ("__init__", "__main__"), f"{path}: no docstring"
        if text:
            module = path.parent if path.stem == "__init__" else path.with_suffix("")
            room, names = at_doors.get(module, ("", []))
            given = f"`{room}`: {', '.join(f'`{each}`' for each in names)}" if names else ""
            sections.setdefault(path.parent, []).append(f"| `{path.name}` | {_first_sentence(text)} | {given} |")
    lines = [
        line
        for parent, rows in sections.items()
        for line in (
            f"\n## {parent.relative_to(folder)}\n",
            "| file | what it does | names at the door |",
            "| --- | --- | --- |",
            *rows,
        )
    ]
    return "\n".join([_FILES, *lines]).replace("\n\n\n", "\n\n") + "\n"


def _first_sentence(text: str) -> str:
    sentence = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".:")
    return re.sub(r"([|*<])", r"\\\1", sentence)


# --- All pages -------------------------------------------------------------------------------------------------------


def write(folder: Path, *, check: bool) -> list[str]:
    """Write all pages below a folder, or only compare them; returns the names of pages that were stale."""
    others = find_by_name("ludic.adapters.foreign_settings:others")()
    stale = _write({folder / "ludic/settings" / TEXTS: texts()}, check=check)
    forget_texts()
    api, coming_from, fit_page = folder / "docs/api.md", folder / PAGE, folder / "docs/fit.md"
    reading = folder / "docs/reading.md"
    pages = {
        folder / "docs/files.md": files_page(folder),
        **{folder / "docs" / name: text for name, text in settings_pages().items()},
        api: _with_tables(api, [methods_table()]),
        coming_from: _with_tables(coming_from, [foreign_table(each) for each in (*others.programs, others.short)]),
        fit_page: _with_tables(fit_page, [forms_table(folder)]),
        reading: _with_tables(reading, [figures_table()]),
        folder / "ludic/app/operations/typed.pyi": formatted(typed_stub()),
        folder / "ludic/app/operations/methods.pyi": formatted(methods_stub()),
    }
    left = [path for path in (folder / "docs/settings").glob("*.md") if path not in pages]
    for path in left:
        if not check:
            path.unlink()
    return [*stale, *_write(pages, check=check), *map(str, left)]


def _write(pages: Mapping[Path, str], *, check: bool) -> list[str]:
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages[path], encoding="utf-8")
    return [str(path) for path in stale]


def _with_tables(path: Path, tables: Sequence[str]) -> str:
    """Return a page with these tables in the places that it marks for them, in their order."""
    first, *others = path.read_text(encoding="utf-8").split(_BEGIN)
    parts = [f"{_BEGIN}{table}{_END}{rest.partition(_END)[2]}" for table, rest in zip(tables, others, strict=True)]
    return "".join([first, *parts])


if __name__ == "__main__":
    is_check = sys.argv[1:] == ["--check"]
    if (names := write(Path(), check=is_check)) and is_check:
        sys.exit(f"{', '.join(names)} is stale; run make format")
