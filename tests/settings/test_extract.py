"""Functions taken out of scripts, modules and notebooks run in another process, without what starts the run."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from ludic.errors import ConfigError
from ludic.settings.extract import ExtractedCode, extract

TAKE = """
from ludic.settings.extract import extract
from pathlib import Path
import json
taken = extract({"reward r": reward})
Path("taken.py").write_text(taken.source)
Path("taken.json").write_text(json.dumps([taken.names["reward r"], sorted(taken.modules)]))
"""


def run(folder: Path, *args: str) -> str:
    done = subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def taken_from(folder: Path, script: str, *, name: str = "train.py") -> str:
    """The text that is taken out of a script, which runs as a script does; TAKE stands for the start of the run."""
    (folder / name).write_text(dedent(script).replace("TAKE", TAKE.strip()))
    run(folder, name)
    return (folder / "taken.py").read_text()


def call(folder: Path, *args: object) -> object:
    """What the taken function returns in a process that has neither the script nor its folder."""
    name, _ = json.loads((folder / "taken.json").read_text())
    code = f"import json; n = {{}}; exec(open('taken.py').read(), n); print(json.dumps(n[{name!r}](*{args!r})))"
    return json.loads(run(folder, "-P", "-c", code).splitlines()[-1])


SCRIPT = '''\
"""Trains something."""
from __future__ import annotations

import re
import json as js
from math import floor, ceil
import subprocess, os; print("imported")

print("this starts the run")
LIMIT = 2 + 3
WORDS = open("words.txt").read().split()
PATTERN = re.compile("[0-9]+")
SEEN = set(); SEEN.add("cat")
TABLE = {}
TABLE["cat"] = 1
UNUSED = [print("unused")]

class Counter(dict):
    size = LIMIT

    def add(self, key: str) -> int:
        return TABLE.get(key, 0)


def count(text):  # a helper
    return sum(word in WORDS for word in text.split())

def unused(): return UNUSED


def reward(completion: str) -> list:
    numbers = PATTERN.findall(completion)
    return [floor(1.5), count(completion), len(numbers), Counter.size, sorted(SEEN), Counter().add("cat")]

TAKE
'''


def test_a_script_gives_what_the_function_needs_on_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("cat dog")
    text = taken_from(tmp_path, SCRIPT)
    (tmp_path / "words.txt").unlink()
    assert call(tmp_path, "a cat and 2 dogs, 1 dog") == [1, 2, 2, 5, ["cat"], 1]
    lines, script = text.splitlines(), SCRIPT.splitlines()
    assert lines[4] == (
        "LIMIT = 5; TABLE = {'cat': 1}; PATTERN = __import__('re').compile('[0-9]+', 32); SEEN = {'cat'}; "
        "WORDS = ['cat', 'dog']"
    )
    for line in [
        "from math import floor, ceil",
        "class Counter(dict):",
        "def reward(completion: str) -> list:",
    ]:
        assert lines.index(line) == script.index(line)
    for left_out in ("print", "unused", "UNUSED", "json", "subprocess", "take"):
        assert left_out not in text


@pytest.mark.parametrize(
    "end",
    [
        "TAKE",
        'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in TAKE.strip().splitlines()),
        "def main():\n" + "".join(f"    {line}\n" for line in TAKE.strip().splitlines()) + "main()",
        "for _ in range(1):\n" + "".join(f"    {line}\n" for line in TAKE.strip().splitlines()),
    ],
)
def test_the_part_that_starts_the_run_is_left_out(tmp_path: Path, end: str) -> None:
    taken_from(tmp_path, "def reward(completion):\n    return len(completion)\n\n" + end.replace(TAKE.strip(), "TAKE"))
    assert "take" not in (tmp_path / "taken.py").read_text()
    assert call(tmp_path, "four") == 4


def test_functions_and_settings_of_the_main_part_are_taken_with_their_values(tmp_path: Path) -> None:
    taken_from(
        tmp_path,
        """
        import argparse

        def base(text):
            return len(text)

        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--bonus", type=int, default=3)
            bonus = parser.parse_args().bonus

            def reward(completion):
                return base(completion) + bonus

            exec('''TAKE''')
        """.replace("exec('''TAKE''')", "\n            ".join(TAKE.strip().splitlines())),
    )
    assert call(tmp_path, "four") == 7


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("from collections import Counter\ncounts = Counter('aab')", "is of type Counter"),
        ("counts = {'x': object()}\ncounts['y'] = 1", "is of type dict"),
        ("from functools import wraps\ndef counts(text): pass\ncounts = wraps(counts)(lambda text: 1)", "wrapped by a"),
    ],
)
def test_an_object_that_a_script_has_computed_is_refused_by_its_name(tmp_path: Path, made: str, said: str) -> None:
    script = f"{made}\ndef reward(completion):\n    return counts\nTAKE\n"
    with pytest.raises(AssertionError, match=rf"counts.*{said}.* move the function into a file of its own, such as "):
        taken_from(tmp_path, script)
    (tmp_path / "my_counts_of_taken.py").write_text(made)
    taken_from(tmp_path, "from my_counts_of_taken import counts\ndef reward(completion):\n    return 1\nTAKE\n")


def test_a_file_beside_the_script_is_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "words.txt").write_text("cat")
    taken_from(
        tmp_path,
        """
        from pathlib import Path
        def reward(completion):
            return Path(__file__).with_name("words.txt").read_text() in completion
        TAKE
        """,
    )
    assert call(tmp_path, "a cat") is True


def test_a_module_beside_the_script_comes_with_it(tmp_path: Path) -> None:
    (tmp_path / "my_words_of_taken.py").write_text("WORDS = ['cat']\nimport my_more_of_taken\n")
    (tmp_path / "my_more_of_taken.py").write_text("")
    taken_from(tmp_path, "from my_words_of_taken import WORDS as words\ndef reward(c):\n    return c in words\nTAKE\n")
    assert json.loads((tmp_path / "taken.json").read_text()) == ["reward", ["my_more_of_taken", "my_words_of_taken"]]


def test_a_function_of_a_module_beside_the_script_is_taken_with_the_whole_module(tmp_path: Path) -> None:
    module = (
        '"""Rewards."""\nfrom pathlib import Path\nHERE = Path(__file__).name\n\ndef reward(c):\n    return [c, HERE]\n'
    )
    (tmp_path / "my_rewards_of_taken.py").write_text(module)
    text = taken_from(tmp_path, "from my_rewards_of_taken import reward\nTAKE\n")
    assert call(tmp_path, "x") == ["x", "my_rewards_of_taken.py"]
    assert "def reward(c):\n    return [c, HERE]\n" in text


def test_what_workers_could_not_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my_package_of_taken").mkdir()
    (tmp_path / "my_package_of_taken" / "__init__.py").write_text("LIMIT = object()\ndef reward(c): return 1\n")
    script = "from my_package_of_taken import LIMIT\ndef reward(c):\n    return LIMIT\nTAKE\n"
    with pytest.raises(
        AssertionError, match=r"imports 'my_package_of_taken', which is not installed, so workers can't"
    ):
        taken_from(tmp_path, script)
    (tmp_path / "my_package_of_taken" / "inner.py").write_text("def reward(c): return 1\n")
    with pytest.raises(AssertionError, match=r"reward is in my_package_of_taken.inner, which is not installed"):
        taken_from(tmp_path, "from my_package_of_taken.inner import reward\nTAKE\n")


def make_nested(bonus: object) -> object:
    def nested(completion: str) -> object:
        return [completion, bonus]

    return nested


def run_text(taken: ExtractedCode, name: str, *args: object) -> object:
    names: dict = {}
    exec(taken.source, names)
    return names[taken.names[name]](*args)


def test_a_function_in_a_function_is_taken_with_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = make_nested({"a": [1, 2.5, None]})
    nested.__module__ = "__main__"
    assert run_text(extract({"r": nested}), "r", "x") == ["x", {"a": [1, 2.5, None]}]
    other = make_nested(object())
    other.__module__ = "__main__"
    with pytest.raises(ConfigError, match=r"'bonus', which a function uses, is of type object .* move the function"):
        extract({"r": other})


def test_functions_of_packages_are_imported() -> None:
    taken = extract({"a": json.dumps, "b": dedent})
    assert taken.source == "from json import dumps\nfrom textwrap import dedent\n"
    assert run_text(taken, "a", [1]) == "[1]"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completion: 1.0, r"r is a lambda, whose text can't be taken alone; define it with def"),
        (len, r"r is <built-in function len>, wanted a function that is defined with def"),
        (3, r"r is 3, wanted a function that is defined with def"),
    ],
)
def test_what_is_no_function_with_a_text_is_refused(function: object, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        extract({"r": function})  # type: ignore[dict-item]
