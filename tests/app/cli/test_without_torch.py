"""Commands that look at stored runs, keep them and plan their steps again need no torch, no agents and no engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from light_runs import make_run

from ludic.root.root import Root

# Runs `ludic` with several commands, of which none can import what is refused. Prints of each its exit status and what
# it wrote, as JSON in the last line.
PROBE = """
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

REFUSED = ("torch", "transformers", "tokenizers", "safetensors", "peft", "ludic.agents", "ludic.environments")
SETTINGS = ("ludic.engines", "ludic.engines.config")

class Refuse:
    def find_spec(name, path=None, target=None):
        is_engine = name.startswith("ludic.engines") and name not in SETTINGS
        if is_engine or any(f"{name}.".startswith(f"{each}.") for each in REFUSED):
            raise ModuleNotFoundError(f"{name} is refused", name=name)

sys.meta_path.insert(0, Refuse)
from ludic.app.cli.main import main

found = []
for args in json.loads(sys.argv[1]):
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(args)
        except SystemExit as ended:
            code = ended.code or 0
    found.append((code, *(stream.buffer.getvalue().decode() for stream in (out, err))))
print(json.dumps(found))
"""


def run(*commands: list[str]) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(commands)], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def stored(tmp_path: Path) -> Root:
    """A run of two planned steps with their metrics, and evaluations of two versions, that no trainer has made."""
    make_run(str(tmp_path / "run"), "model")
    return Root.open(str(tmp_path / "run"))


@pytest.mark.slow
def test_what_looks_at_a_stored_run_runs_without_torch(stored: Root, tmp_path: Path) -> None:
    url, page, rows = stored.url, str(tmp_path / "page.html"), str(tmp_path / "rows.jsonl")
    by_words = {
        "16": ["sql", url, "select count(*) as n from rollouts"],
        "evals": ["watch", url, "--totals"],
        "2 groups of 4": ["watch", url, "--once"],
        "sound": ["verify", url],
        "turns true at step 2": ["bisect", url, "reward_mean > 1"],
        "The same as the ledger, bit for bit, in 2 steps.": ["what-if", url],
        "largest_differences": ["what-if", url, "--advantage", "grpo", "--json"],
        "paired on the same examples": ["compare", f"{url}@0", f"{url}@1"],
        "page.html": ["report", url, "--output", page],
        "rows.jsonl": ["export", url, "--format", "jsonl", "--out", rows],
        "2 files of 1 partition became 1": ["compact", url, "--all-versions"],
        "in 2 steps": ["what-if", url],
        "deleted": ["expire", url, "--keep-versions", "1", "--folder", "evals"],
    }
    for words, args, (code, out, err) in zip(by_words, by_words.values(), run(*by_words.values()), strict=True):
        assert code == 0, (args, err)
        assert words in out + err, (args, out, err)
