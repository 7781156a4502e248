"""Measure the strength of the tests: break one place of the package at a time, and see whether a test fails.

    python .ci/mutants.py draw                    choose mutants by a seed: .ci/mutants.json
    python .ci/mutants.py cover PYTEST_ARGS ...   run tests once; add which ones reach each mutant to cover.json
    python .ci/mutants.py run                     run each mutant against these tests: build/mutants/results.json
    python .ci/mutants.py compare BEFORE AFTER    count what each result killed, and list the mutants that differ

A mutant is named by its function or SQL file, its operator, its statement, and the changed part of it before and after.
So it is found in another file and with other formatting. A statement that was rewritten is reported as lost: enter its
new text in mutants.json. Everything runs in a copy of the working tree. There this file is `mutants_probe`: a plugin of
pytest, and `hit`, which `cover` puts at the place of each mutant, so that processes that a test starts are seen, too.
"""

import argparse
import ast
import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DRAWN = Path(__file__).with_name("mutants.json")
BUILD = REPOSITORY / "build" / "mutants"
COVERED, RESULTS = BUILD / "cover.json", BUILD / "results.json"
NUMBERS = {
    ("root", ".py"): 25,
    ("root", ".sql"): 12,
    ("training/batches", ".py"): 9,
    ("training", ".py"): 14,
}
"""How many mutants are drawn, by folder of the package and kind of file."""
MEMORY = 12 * 2**30
"""Bytes that a process may allocate: a mutant can make a loop endless."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one part of a statement."""

    function: str
    """Qualified name without the module, or the name of a SQL file."""
    operator: str
    statement: str
    """Without its body, as `ast.unparse` writes it; of a SQL file the line."""
    before: str
    after: str

    @property
    def name(self) -> tuple[str, str, str]:
        return self.function, self.operator, self.statement


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a mutant's text stands in a file."""

    mutant: Mutant
    span: tuple[int, int]
    """First byte, and the byte after the last."""
    is_statement: bool = False


# ---- Places in Python

OPPOSITE = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OPPOSITE |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
TEXTS_AND_LISTS = (ast.JoinedStr, ast.List, ast.Tuple)


def python_sites(source: bytes) -> Iterator[Site]:
    """Yield the places of all functions and methods, in the order of the text."""
    starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
    for function, node in _functions(ast.parse(source).body):
        found = []
        for statement in (each for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node):
            header = ast.unparse(_without_body(statement)).split("\n")[0]
            for operator, old, new in _mutations(statement):
                span = (starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset)
                before, after = ast.unparse(old), ast.unparse(new)
                mutant = Mutant(function=function, operator=operator, statement=header, before=before, after=after)
                found.append(Site(mutant=mutant, span=span, is_statement=isinstance(old, ast.stmt)))
        yield from sorted(found, key=lambda site: site.span)


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node


def _without_body(statement: ast.stmt) -> ast.stmt:
    blocks = {"body": [ast.Pass()], "orelse": [], "finalbody": [], "handlers": [], "cases": []}
    fields = {name: blocks.get(name, value) for name, value in ast.iter_fields(statement)}
    return ast.copy_location(type(statement)(**fields), statement)


def _mutations(statement: ast.stmt) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield (operator, node, what replaces it) for a statement, without the statements inside it."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield "return value dropped", value, ast.Constant(None)
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call() | ast.Await()):
            yield "statement removed", statement, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement removed", statement, ast.Pass()
    for node in _own_expressions(statement):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=others):
                yield "comparison flipped", node, ast.Compare(left, [OPPOSITE[type(op)]()], others)
                if type(op) in BOUNDARY:
                    yield "comparison off by one", node, ast.Compare(left, [BOUNDARY[type(op)]()], others)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _are_texts(left, right):
                yield "arithmetic swapped", node, ast.BinOp(left, ARITHMETIC[type(op)](), right)
            case ast.BoolOp(op=op, values=values):
                yield "and or swapped", node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "not removed", node, operand
            case ast.Constant(value=bool() as value):
                yield "constant changed", node, ast.Constant(not value)
            case ast.Constant(value=int() | float() as value):
                yield "constant changed", node, ast.Constant(value + 1)
            case ast.Call(func=func, args=[first, second, *rest], keywords=keywords) if _differ(func, first, second):
                yield "arguments swapped", node, ast.Call(func, [second, first, *rest], keywords)
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            yield "condition negated", node.test, ast.UnaryOp(ast.Not(), node.test)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement and its expressions, without texts, annotations and the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                is_part = isinstance(child, (ast.expr, ast.comprehension, ast.keyword, ast.withitem))
                if is_part and name != "annotation" and not isinstance(child, ast.JoinedStr):
                    waiting.append(child)


def _are_texts(*nodes: ast.AST) -> bool:
    return any(
        isinstance(each, TEXTS_AND_LISTS) or isinstance(getattr(each, "value", 0), (str, bytes)) for each in nodes
    )


def _differ(function: ast.expr, first: ast.expr, second: ast.expr) -> bool:
    is_symmetric = isinstance(function, ast.Name) and function.id in ("min", "max")
    has_star = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    return not is_symmetric and not has_star and ast.dump(first) != ast.dump(second)


# ---- Places in SQL

_OPERAND = r"[\w.$]+(?:\([\w.$, ]*\))?"
_PREDICATE = rf"(?:not )?{_OPERAND} (?:[<>=!]+ {_OPERAND}|is (?:not )?null)"
SQL_OPERATORS: list[tuple[str, str, Callable[[str], str]]] = [
    (
        "comparison flipped",
        "(?<= )(<>|!=|[<>]?=|[<>])(?= )",
        {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "=": "!=", "!=": "=", "<>": "="}.__getitem__,
    ),
    ("comparison off by one", "(?<= )([<>]=?)(?= )", {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}.__getitem__),
    ("arithmetic swapped", "(?<= )([-+*/])(?= )", dict(zip("+-*/", "-+/*", strict=True)).__getitem__),
    ("and or swapped", r"\b(and|or)\b", {"and": "or", "or": "and"}.__getitem__),
    ("constant changed", r"(?<![\w.$])(\d+)(?![\w.])", lambda number: str(int(number) + 1)),
    (
        "predicate dropped",
        rf"\b(?:where|and|or|on|having|when) ({_PREDICATE})(?= and\b| or\b| then\b|$|\))",
        lambda _: "true",
    ),
]
"""(name, pattern whose group is replaced, what replaces it)."""


def sql_sites(source: bytes, function: str) -> Iterator[Site]:
    """Yield the places of a SQL file, outside of comments and strings."""
    start = 0
    for line in source.splitlines(keepends=True):
        code = re.sub(rb"'[^']*'", lambda text: b"'" + b"_" * (len(text[0]) - 2) + b"'", line).split(b"--")[0]
        text = code.decode("latin-1").rstrip("\n")  # a character a byte
        found = []
        for operator, pattern, change in SQL_OPERATORS:
            for match in re.finditer(pattern, text) if operator != "and or swapped" or " between " not in text else []:
                old, span = match[1], (start + match.start(1), start + match.end(1))
                names = {"function": function, "operator": operator, "statement": " ".join(line.decode().split())}
                found.append(Site(mutant=Mutant(**names, before=old, after=change(old)), span=span))
        yield from sorted(found, key=lambda site: site.span)
        start += len(line)


# ---- Mutants


def all_sites(tree: Path, folder: str = "") -> list[tuple[Path, Site]]:
    """Return the places of the package, or of one folder of it."""
    places = []
    for file in sorted((tree / "ludic" / folder).rglob("*")):
        if file.suffix == ".py":
            places += [(file, site) for site in python_sites(file.read_bytes())]
        elif file.suffix == ".sql":
            places += [(file, site) for site in sql_sites(file.read_bytes(), file.name)]
    return places


def draw(seed: int) -> list[dict]:
    """Choose mutants by the seed: one of a function, two of a file, no operator for more than a fifth of a folder."""
    chooser = random.Random(seed)
    homes = Counter(name for _, name in {(file, site.mutant.name) for file, site in all_sites(REPOSITORY)})
    drawn: list[dict] = []
    for (folder, suffix), number in NUMBERS.items():
        functions: dict[tuple[Path, str], list[Site]] = defaultdict(list)
        for file, site in all_sites(REPOSITORY, folder):
            if file.suffix == suffix and homes[site.mutant.name] == 1:
                functions[file, site.mutant.function].append(site)
        order = list(functions)
        chooser.shuffle(order)
        of_file: Counter[Path] = Counter()
        of_operator: Counter[str] = Counter()
        for file, function in order:
            sites = functions[file, function]
            operators = sorted({site.mutant.operator for site in sites})
            chooser.shuffle(operators)
            operator = min(operators, key=of_operator.__getitem__)
            if of_file[file] == 2 or of_operator[operator] * 5 >= number:
                continue
            site = chooser.choice([site for site in sites if site.mutant.operator == operator])
            twins = [each.span for each in sites if each.mutant == site.mutant]
            place = {"number": len(drawn) + 1, "folder": folder, "occurrence": twins.index(site.span)}
            drawn.append(place | asdict(site.mutant))
            of_file[file] += 1
            of_operator[operator] += 1
            if of_file.total() == number:
                break
    return drawn


def find(tree: Path) -> tuple[list[dict], dict[int, tuple[Path, Site]]]:
    """Return the drawn mutants, and where each stands in a tree, by number; one that is lost has no entry.

    Its function has the same name; or else exactly one function of the package has such a statement.
    """
    drawn = json.loads(DRAWN.read_text())["mutants"]
    places: dict[tuple[str, ...], list[tuple[Path, Site]]] = defaultdict(list)
    for file, site in all_sites(tree):
        places[tuple(asdict(site.mutant).values())[1:]].append((file, site))
    found = {}
    for entry in drawn:
        alike = places[entry["operator"], entry["statement"], entry["before"], entry["after"]]
        alike = [place for place in alike if place[1].mutant.function == entry["function"]] or alike
        if len({(file, site.mutant.function) for file, site in alike}) == 1 and entry["occurrence"] < len(alike):
            found[entry["number"]] = alike[entry["occurrence"]]
    return drawn, found


def mutated(source: bytes, site: Site) -> bytes:
    new = site.mutant.after
    return _replaced(source, site, new if site.is_statement or site.mutant.function.endswith(".sql") else f"({new})")


def probed(source: bytes, site: Site, number: int) -> bytes:
    hit, old = f'__import__("mutants_probe").hit({number})', source[slice(*site.span)].decode()
    return _replaced(source, site, f"{hit}; {old}" if site.is_statement else f"({hit}, ({old}))[1]")


def _replaced(source: bytes, site: Site, text: str) -> bytes:
    return source[: site.span[0]] + text.encode() + source[site.span[1] :]


# ---- Tests


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy the files that git lists to a temporary folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="ludic-mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        for name in names.rstrip("\0").split("\0"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, tree / name)
        shutil.copyfile(__file__, tree / "mutants_probe.py")
        (tree / ".venv").symlink_to(REPOSITORY / ".venv")
        yield tree


def run_pytest(tree: Path, arguments: list[str], limit_s: float | None, **environment: str) -> int | None:
    """Run tests of a copy, one at a time, and return pytest's exit code, or None if they take longer than limit_s."""
    command = [sys.executable, "-m", "pytest", "-p", "mutants_probe", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | environment,
        stdout=None if limit_s is None else subprocess.DEVNULL,
        stderr=None if limit_s is None else subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cover(arguments: list[str]) -> None:
    """Run tests with a probe at the place of each mutant; add what they reach to build/mutants/cover.json."""
    BUILD.mkdir(parents=True, exist_ok=True)
    log = BUILD / "cover.jsonl"
    log.write_text("")
    with copied_tree() as tree:
        _, found = find(tree)
        from_the_end = sorted(found.items(), key=lambda each: each[1][1].span, reverse=True)
        for number, (file, site) in from_the_end:  # so that the places before keep their bytes
            if file.suffix == ".py":
                file.write_bytes(probed(file.read_bytes(), site, number))
        with (tree / "ludic" / "__init__.py").open("a") as package:
            package.write('\n__import__("mutants_probe").watch_sql_files()\n')
        sql = {str(file): number for number, (file, _) in found.items() if file.suffix == ".sql"}
        run_pytest(tree, arguments, None, MUTANTS_LOG=str(log), MUTANTS_SQL=json.dumps(sql))
    new = summary(log.read_text().splitlines())
    old = json.loads(COVERED.read_text()) if COVERED.exists() else {"seconds": {}, "failed": [], "tests": {}}
    merged = {
        "seconds": old["seconds"] | new["seconds"],
        "failed": sorted({*old["failed"], *new["failed"]}),
        "tests": {
            number: sorted({*old["tests"].get(number, []), *new["tests"].get(number, [])})
            for number in old["tests"] | new["tests"]
        },
    }
    COVERED.write_text(json.dumps(merged, indent=0))


def summary(lines: list[str]) -> dict:
    """Return the seconds of each test that passed, the tests that failed, and the tests that reach each mutant."""
    records = [json.loads(line) for line in lines]
    tests = {name: facts for kind, name, *facts in records if kind == "test"}
    reached: dict[int, set[str]] = defaultdict(set)
    for number, context, fixture in {tuple(values) for kind, *values in records if kind == "hit"}:
        if context in tests:
            reached[number].add(context)
        else:  # a fixture that tests share, or a file of tests while it was collected
            inside = (f"{context}::", f"{context}/") if context else ""
            users = {test for test, (_, _, fixtures) in tests.items() if not fixture or fixture in fixtures}
            reached[number] |= {test for test in users if test.startswith(inside)}
    passed = {name for name, (outcome, _, _) in tests.items() if outcome == "passed"}
    return {
        "seconds": {name: round(tests[name][1], 3) for name in sorted(passed)},
        "failed": sorted(name for name, (outcome, _, _) in tests.items() if outcome == "failed"),
        "tests": {str(number): sorted(reached[number] & passed) for number in sorted(reached)},
    }


def run(limit_s: float, numbers: list[int]) -> None:
    """Run each mutant without a result, or those of these numbers; write build/mutants/results.json after each."""
    covered = json.loads(COVERED.read_text())
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with copied_tree() as tree:
        drawn, found = find(tree)
        for entry in drawn:
            number = entry["number"]
            if number not in numbers if numbers else str(number) in results:
                continue
            tests, began = covered["tests"].get(str(number), []), time.monotonic()
            outcome, killer = "lost" if number not in found else "not covered", None
            if number in found and tests:
                outcome, killer = run_one(tree, *found[number], tests, covered["seconds"], limit_s)
            taken_s = round(time.monotonic() - began, 1)
            result = {"outcome": outcome, "killed_by": killer, "num_tests": len(tests), "seconds": taken_s}
            results[str(number)] = entry | result
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{number:3} {outcome:11} {taken_s:5.0f} s {len(tests):4} tests  {entry['function']}", flush=True)
    print(dict(Counter(result["outcome"] for result in results.values())))


def run_one(
    tree: Path, file: Path, site: Site, tests: list[str], seconds: dict[str, float], limit_s: float
) -> tuple[str, str | None]:
    """Return (outcome, the test that failed). A test that fails is run once more: a busy machine kills no mutant."""
    costs: Counter[str] = Counter()
    for test in tests:
        costs[test.split("::")[0]] += seconds[test]
    near = f"tests/{file.relative_to(tree / 'ludic').parts[0]}/"
    files = sorted(costs, key=lambda name: (not name.startswith(near), costs[name]))
    wanted, killed = tree / "mutants_wanted.json", tree / "mutants_killed"
    wanted.write_text(json.dumps(tests))
    killed.unlink(missing_ok=True)
    source = file.read_bytes()
    file.write_bytes(mutated(source, site))
    # The timer is of the function alone: that of a whole test does not start again when the test is run again.
    arguments = ["-x", "--reruns=1", "--timeout=100", "-o", "timeout_func_only=true", *files]
    try:
        code = run_pytest(tree, arguments, limit_s, MUTANTS_WANTED=str(wanted), MUTANTS_KILLED=str(killed))
    finally:
        file.write_bytes(source)
    outcome = {0: "survived", None: "out of time"}.get(code, "killed")
    return outcome, killed.read_text() if killed.exists() else None


def compare(before: Path, after: Path) -> None:
    """Print both results side by side; the exit code is 1 if the second one killed fewer."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    counts = [Counter(each["outcome"] for each in results.values()) for results in (old, new)]
    for outcome in sorted(counts[0] | counts[1]):
        print(f"{outcome:12} {counts[0][outcome]:3} {counts[1][outcome]:3}")
    for number, entry in old.items():
        outcome = new.get(number, {"outcome": "not run"})["outcome"]
        if entry["outcome"] != outcome:
            print(f"{number:>3} {entry['function']}, {entry['operator']}: {entry['outcome']}, then {outcome}")
            print(f"    {entry['statement']}\n    {entry['before']} -> {entry['after']}")
    sys.exit(counts[1]["killed"] < counts[0]["killed"])


# ---- In the copy: what the package calls, and pytest's hooks

_seen: set[tuple[int, str]] = set()
_OUTCOME = pytest.StashKey[str]()


def hit(number: int) -> None:
    """Note that the running test, or the shared fixture, reached a mutant."""
    context = os.environ.get("MUTANTS_CONTEXT")
    if context and (number, context) not in _seen:
        _seen.add((number, context))
        _append("hit", number, *json.loads(context))


def watch_sql_files() -> None:
    """Call `hit` when a SQL file with a mutant is opened."""
    numbers = json.loads(os.environ.get("MUTANTS_SQL", "{}"))

    def watch(event: str, values: tuple) -> None:
        if event == "open" and str(values[0]) in numbers:
            hit(numbers[str(values[0])])

    sys.addaudithook(watch)


def _append(*values: object) -> None:
    if log := os.environ.get("MUTANTS_LOG"):
        with Path(log).open("a") as file:  # one write, so that lines of several processes do not mix
            file.write(json.dumps(values) + "\n")


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        os.environ["MUTANTS_CONTEXT"] = json.dumps([collector.nodeid, ""])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if file := os.environ.get("MUTANTS_WANTED"):
        wanted = set(json.loads(Path(file).read_text()))
        items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "MUTANTS_LOG" in os.environ:
        _clear_caches()
    os.environ["MUTANTS_CONTEXT"] = json.dumps([item.nodeid, ""])
    began = time.monotonic()
    result = yield
    _append("test", item.nodeid, item.stash.get(_OUTCOME, "failed"), time.monotonic() - began, item.fixturenames)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "setup" or item.stash[_OUTCOME] == "passed":
        item.stash[_OUTCOME] = report.outcome
    if report.failed and "MUTANTS_KILLED" in os.environ:
        Path(os.environ["MUTANTS_KILLED"]).write_text(report.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    context = os.environ["MUTANTS_CONTEXT"]
    if request.scope != "function":
        os.environ["MUTANTS_CONTEXT"] = json.dumps([request.node.nodeid.removesuffix("."), fixturedef.argname])
    try:
        return (yield)
    finally:
        os.environ["MUTANTS_CONTEXT"] = context


def _clear_caches() -> None:
    """Empty the caches of functions: else only the first test would reach them."""
    for name in [name for name in sys.modules if name.split(".")[0] == "ludic"]:
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw").add_argument("--seed", type=int, default=26)
    commands.add_parser("cover")
    running = commands.add_parser("run")
    running.add_argument("numbers", type=int, nargs="*", help="run only these, again")
    running.add_argument("--limit-s", type=float, default=900, help="seconds for the tests of one mutant")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options, pytest_arguments = parser.parse_known_args()
    match options.command:
        case "draw":
            DRAWN.write_text(json.dumps({"seed": options.seed, "mutants": draw(options.seed)}, indent=1) + "\n")
        case "cover":
            cover(pytest_arguments)
        case "run":
            run(options.limit_s, options.numbers)
        case "compare":
            compare(options.before, options.after)


if __name__ == "__main__":
    main()
