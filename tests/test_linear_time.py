"""Texts of models, servers and environments are read in linear time, so none of them holds a worker.

Eight times the text may take 24 times the CPU seconds of this thread; quadratic time is 64 times. What is tried is
listed by the code: all parsers, all tool formats, and each regular expression of the package, by the method that is
called.
"""

import ast
import importlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ludic
from ludic.adapters import judge
from ludic.agents.contexts import text_after_thinking, text_without_thinking
from ludic.agents.parsers import make_parser
from ludic.agents.tools.formats import make_tool_format
from ludic.agents.tools.toolbox import read_arguments
from ludic.base.masking import has_secret, mask, public_url
from ludic.base.printable import printable, storable
from ludic.environments.environment import Example
from ludic.environments.qa import score_exact, score_numeric
from ludic.errors import ToolError
from ludic.models.chat import Names
from ludic.records.rollout import Message
from ludic.rollouts.failures import _VARYING
from ludic.root.storage.failures import diagnose
from ludic.settings.kinds import PARSER, TOOL_FORMAT
from ludic.settings.user_code import place_of, without_place

Read = Callable[[str], object]

TIMES, MOST = 8, 24
SHORT, LONG = 1_250, 12_500
"""Characters: the shorter ones show what a regular expression does, the longer ones what copies and counts."""
_LEAST_S = 0.0005
"""A text that takes less counts as one that takes this: the clock and the caches of a CPU are not finer."""

ARGUMENTS = {"NAME": "answer", "PATTERN": r"answer: (\w+)", "path/to/file.py:TypeName": "{file}:Move"}
"""Arguments of the parsers that are made with one."""
MOVE = "from dataclasses import dataclass\n@dataclass\nclass Move:\n    name: str\n"
EXAMPLE = Example(example_id="e", messages=(Message(role="user", content="?"),), data={"answer": "42"})

MARKUP = ("<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "\\", "{", "}", "[", "]", '"', "```", "```json\n")
CALLS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "a[ARGS]", "[CALL_ID]", "<|python_tag|>", "<act>", ";"),
    *('{"name": ', '{"name": "a", "parameters": {}}', '{"a":1', '{ "', '{"a":', '{"a": [1, ', "1e999", "null"),
)
URLS = (
    "://",
    "://:a",
    "://:1",
    "://a:b",
    "a:b@",
    "@",
    "?",
    "#",
    "&",
    "token=",
    "Bearer ",
    "AKIA12345678",
    "%25",
    "\\u0041",
)
WORDS = (
    " ",
    "\n",
    "'",
    ".",
    ",",
    "-",
    "1",
    "a",
    "_",
    ":",
    " (a.py:1, in a",
    ")",
    "answer: ",
    "<|im_end|>",
    "<",
    "é",
    "\ud800",
)
ATOMS = (*MARKUP, *CALLS, *URLS, *WORDS)
PIECES = (
    *ATOMS,
    *('{"', '"a"', "\\boxed{}", '{"name": }', "````", "a b ", " (", '{"a":' * 100 + "x"),
    "Error performing GET http://a/ ",
)
CLOSED = ("\\boxed{", "}"), ("{", "}"), ('{"a":', "1}"), ("[", "]"), ("<think>", "</think>")
"""Beginnings, each of which is followed by as many ends."""


def long_text(piece: str, size: int, end: str = "") -> str:
    return piece * (size // len(piece)) + end


def closed_text(begin: str, close: str, size: int) -> str:
    number = size // len(begin + close)
    return begin * number + close * number


def seconds(read: Read, text: str) -> float:
    start = time.thread_time()
    read(text)
    return time.thread_time() - start


def is_linear(read: Read, text_of: Callable[[int], str], size: int) -> bool:
    """Compare the times of a text and one that is TIMES as long; a busy machine gets three tries."""
    short, long = text_of(size), text_of(TIMES * size)
    once, eight = _LEAST_S, float("inf")
    for _ in range(3):
        eight = min(eight, seconds(read, long))
        if eight > MOST * once:
            once = max(once, min(seconds(read, short) for _ in range(3)))
        if eight <= MOST * once:
            return True
    return False


def not_linear(readers: dict[str, Read], pieces: Any = PIECES, size: int = SHORT) -> list[tuple[str, str]]:
    """Return readers and pieces of texts for which they take too long."""
    texts = {repr(piece): partial(long_text, piece) for piece in pieces}
    texts |= {f"{begin} {close}": partial(closed_text, begin, close) for begin, close in CLOSED}
    found = product(readers.items(), texts.items())
    return [(name, piece) for (name, read), (piece, text_of) in found if not is_linear(read, text_of, size)]


# --- What reads texts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(MOVE)
    specs = []
    for name in PARSER.built_in:
        stage, colon, argument = name.partition(":")
        specs.append(f"{stage}{colon}{ARGUMENTS[argument].format(file=file) if argument else ''}")
    return {f"parser {spec}": make_parser(spec).parse for spec in [*specs, "think|tag:answer", "boxed|json"]}


def tool_formats() -> dict[str, Read]:
    return {f"tool format {name}": make_tool_format(name).parse for name in [*TOOL_FORMAT.names(), "json:act"]}


def arguments(text: str) -> object:
    try:
        return read_arguments(text)
    except ToolError as error:
        return error


NAMES = Names([f"<|special_{number}|>" for number in range(1_000)] + ["<|im_end|>", "<", "a ", "{{", "}}", "aaaaab"])
OTHERS: dict[str, Read] = {
    "mask": mask,
    "has_secret": lambda text: has_secret(f"http://{text}"),
    "public_url": public_url,
    "special tokens": NAMES.broken_up,
    "place_of": place_of,
    "without_place": without_place,
    "kind of a failure": partial(_VARYING.sub, ""),
    "error of a bucket": lambda text: diagnose(OSError(f"Error performing GET http://a/ {text}")).cause,
    "judge's number": lambda text: judge._parse(text, None),
    "judge's number by a pattern": lambda text: judge._parse(text, re.compile(r"(?s).+")),
    "exact": partial(score_exact, EXAMPLE),
    "numeric": partial(score_numeric, EXAMPLE),
    "arguments of a call": arguments,
    "without thinking": text_without_thinking,
    "after thinking": partial(text_after_thinking, is_thinking=True),
    "storable": storable,
    "printable": printable,
}


@pytest.mark.slow
def test_parsers_and_tool_formats_read_in_linear_time(parsers: dict[str, Read]) -> None:
    assert not_linear(parsers | tool_formats(), size=LONG) == []


@pytest.mark.slow
def test_masks_searches_and_scorers_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_linear(OTHERS) == []
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    assert not_linear({"mask": mask}) == []


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(
    piece=st.lists(st.sampled_from(ATOMS), min_size=1, max_size=4).map("".join),
    end=st.sampled_from(("", "@", "x", ")")),
)
def test_no_piece_takes_more_than_linear_time(parsers: dict[str, Read], piece: str, end: str) -> None:
    readers = parsers | tool_formats() | OTHERS
    text_of = partial(long_text, piece, end=end)
    assert [name for name, read in readers.items() if not is_linear(read, text_of, SHORT)] == []


# --- Regular expressions -----------------------------------------------------------------------------------------

OWN_TEXTS = {
    "ludic.adapters.environments.verifiers '(def|import.*) load_environment\\\\b'": "the text of an installed package",
    "ludic.models.families _HEAD_COUNTS": "names of at most 100 characters",
    "ludic.settings _ABOUT_NONE": "docstrings of ludic",
    "ludic.app.show.terminal.start _FONT_FACES": "styles of textual",
}
"""Regular expressions that read no long text of others, and what they read."""
_METHODS: dict[str, Callable[[re.Pattern[str]], Read]] = {
    "search": lambda pattern: pattern.search,
    "match": lambda pattern: pattern.match,
    "fullmatch": lambda pattern: pattern.fullmatch,
    "findall": lambda pattern: pattern.findall,
    "finditer": lambda pattern: lambda text: deque(pattern.finditer(text), maxlen=0),
    "sub": lambda pattern: partial(pattern.sub, ""),
    "sub once": lambda pattern: partial(pattern.sub, "", count=1),
    "split": lambda pattern: pattern.split,
}


@cache
def patterns() -> dict[str, tuple[re.Pattern[str], str]]:
    """Return the regular expressions of the package with the methods that are called, by module and name or text."""
    found: dict[str, tuple[re.Pattern[str], str]] = {}
    package = Path(ludic.__file__).parent
    for file in sorted(package.rglob("*.py")):
        if "re." not in (source := file.read_text()):
            continue
        module, tree = ".".join(["ludic", *file.relative_to(package).with_suffix("").parts]), ast.parse(source)
        names = {ast.unparse(target) for target in compiled_in(tree)}
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="re"), attr=method), args=[ast.Constant(value=text), *_]
                ):
                    if method in _METHODS:
                        found[f"{module} {text!r}.{called(method, node)}"] = re.compile(text), called(method, node)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if name in names:
                    pattern = getattr(importlib.import_module(module), name)
                    if isinstance(pattern.pattern, str):
                        found[f"{module} {name}.{called(method, node)}"] = pattern, called(method, node)
    return found


def called(method: str, call: ast.Call) -> str:
    return f"{method} once" if any(each.arg == "count" for each in call.keywords) else method


def compiled_in(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what a module assigns re.compile(...) to."""
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=targets, value=ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="compile"))
            ):
                yield from targets
            case ast.AnnAssign(
                target=target, value=ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="compile"))
            ):
                yield target


def pieces_of(pattern: re.Pattern[str]) -> list[str]:
    """Return the literal texts in a pattern, and pairs of them: what a text must hold to be looked at for long."""
    runs = [*dict.fromkeys(literals(re._parser.parse(pattern.pattern, pattern.flags)))]  # type: ignore[attr-defined]
    return [*runs, *map("".join, product(runs[:6], repeat=2)), *("".join(runs[:size]) for size in range(3, 6))]


_ONE_OF: dict[str, Callable[[Any], str]] = {
    "LITERAL": chr,
    "RANGE": lambda ends: chr(ends[0]),
    "CATEGORY": lambda category: {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " "}.get(str(category), "a"),
    "NEGATE": lambda _: "",
}


def literals(parsed: Any) -> Iterator[str]:
    """Yield the runs of characters in a parsed pattern, and one character of each set."""
    run = ""
    for kind, value in [*parsed, ("END", None)]:
        if str(kind) == "LITERAL":
            run += chr(value)
            continue
        yield from filter(None, [run, *([_ONE_OF[str(value[-1][0])](value[-1][1])] if str(kind) == "IN" else [])])
        run = ""
        for part in parts_of(value) if str(kind) != "IN" else ():
            yield from literals(part)


def parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, re._parser.SubPattern):  # type: ignore[attr-defined]
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from parts_of(each)


@pytest.mark.slow
def test_each_regular_expression_is_searched_in_linear_time() -> None:
    assert len(patterns()) > 60
    slow = []
    for name, (pattern, method) in patterns().items():
        if name.rpartition(".")[0] not in OWN_TEXTS:
            slow += not_linear({name: _METHODS[method](pattern)}, dict.fromkeys([*PIECES, *pieces_of(pattern)]))
    assert slow == []
