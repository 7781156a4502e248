"""Files of settings are UTF-8, with or without a byte-order mark, whatever the locale; so is every text of ludic's."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.app.cli.settings import parse
from ludic.base.config_files import parse_config, read_config
from ludic.errors import ConfigError
from ludic.eval.config import EvalConfig
from ludic.eval.suite import read_suite

PACKAGE = Path(ludic.__file__).parent
MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_bytes()) for path in PACKAGE.rglob("*.py")}
BOM = b"\xef\xbb\xbf"


def command(*, model: str = "") -> None:
    """A command with a setting."""


def of_a_command(path: Path) -> Any:
    return parse(command, ["--config", str(path)], program="ludic", description="")["model"]


def of_a_suite(path: Path) -> Any:
    return read_suite(path, EvalConfig())[0].name


READERS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("settings.toml", of_a_command, 'model = "日本"'),
    ("settings.json", of_a_command, '{"model": "日本"}'),
    ("suite.toml", of_a_suite, '[[entries]]\nname = "日本"\nenv = "moar_cats"\nn = 1\n'),
    ("preset.toml", lambda path: parse_config(path.read_bytes(), path.name)["model"], 'model = "日本"'),
]


@pytest.mark.parametrize(("name", "read", "text"), READERS)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, name: str, read: Callable, text: str) -> None:
    path = tmp_path / name
    for before in (b"", BOM):
        path.write_bytes(before + text.encode())
        assert read(path) == "日本"


@pytest.mark.parametrize(("name", "read", "text"), READERS)
@pytest.mark.parametrize(
    ("encoding", "problem"),
    [
        ("utf-16", r"byte 0 is 0xff, which is not UTF-8; the file is in UTF-16: save it as UTF-8"),
        ("shift-jis", r"byte \d+ is 0x93, which is not UTF-8; the file is in another encoding: save it as UTF-8"),
    ],
)
def test_another_encoding_is_refused_with_the_byte(
    tmp_path: Path, name: str, read: Callable, text: str, encoding: str, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError, match=rf"{name}: {problem}$"):
        read(path)


def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    for name, content, problem in (
        ("list.json", b"[1]", "wanted a JSON object"),
        ("deep.json", b"[" * 100_000, "recursion"),
        ("large.toml", b" " * 10_000_001, "has more than 10,000,000 bytes"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}.*{problem}"):
            read_config(tmp_path / name)
    with pytest.raises(ConfigError, match="directory"):
        read_config(tmp_path)


# --- All texts of the package ------------------------------------------------------------------------------------


def test_one_module_reads_toml() -> None:
    uses = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and "tomllib" in {each.name for each in node.names})
        or (isinstance(node, ast.ImportFrom) and node.module == "tomllib")
    }
    assert uses == {"base/config_files.py"}


OTHERS = (
    "os.open",
    "cls.open",
    "Root.open",
    "request.open",
    "page.open",
    "make_environment.open",
    "self._recent.open",
    "fsspec.open(url, 'rb').open",
    "self.open",
    "self._life.open",
    "self._episodes.open",
)
"""Functions of this name that open no text: of the system, in bytes, and of ludic's classes."""


def texts_without_encoding(tree: ast.AST) -> Iterator[str]:
    """Yield each call that opens, reads or writes a text in the encoding of the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {each.arg: each.value for each in node.keywords}
        if "encoding" in given or None in given:
            continue
        if name in ("read_text", "write_text") or (name in ("run", "Popen", "check_output") and "text" in given):
            yield ast.unparse(node)
        elif name in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"):
            # A mode that is computed counts as one of text; without a mode, open reads text.
            constants = [each for value in [*node.args, *given.values()] for each in ast.walk(value)]
            texts = [each.value for each in constants if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            modes = [text for text in texts if set(text) <= set("rwaxbt+")]
            is_text = all("b" not in mode for mode in modes) if modes else name == "open"
            if is_text and ast.unparse(node.func) not in OTHERS:
                yield ast.unparse(node)


@pytest.mark.parametrize("module", MODULES)
def test_each_text_has_its_encoding(module: str) -> None:
    assert [*texts_without_encoding(MODULES[module])] == []


def test_a_text_without_encoding_is_found() -> None:
    source = """
path.read_text(); path.write_text(text); open(path); path.open(); path.open("w"); run(args, text=True)
os.fdopen(1, "w"); tempfile.NamedTemporaryFile("w"); open(path, mode)
"""
    assert len([*texts_without_encoding(ast.parse(source))]) == 9
    fine = """
path.read_text(encoding="utf-8"); open(path, "rb"); path.open("xb"); os.open(path, flags); path.read_bytes()
tempfile.TemporaryFile(); Root.open(url); open(path, encoding="ascii"); run(args)
"""
    assert [*texts_without_encoding(ast.parse(fine))] == []
