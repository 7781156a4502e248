"""Make conversations ready for supervised fine-tuning, with TRL and with ludic: how long does a row take?

    python -m venv trl && trl/bin/pip install --constraint constraints.txt trl==1.16.0 peft torch
    taskset -c 0 python -m benchmarks.sft_rows --python trl/bin/python

trl_sft.py and ludic_sft.py are the two scripts, which train for one step on the answers alone. Each runs as a process
of its own, in turns, on a tenth of the rows and on all rows; the difference is the time that rows take. A row has two
questions and two answers: words of docs/, some 300 tokens.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median

from tokenizers import pre_tokenizers, trainers

from benchmarks.measure import print_table, with_spread
from ludic.models import CHAT_END, CHAT_PAD, CHAT_START, train_tokenizer, write_model
from ludic.settings import run_script

_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML, in which TRL finds the answers by their mark."""
Seconds = tuple[float, float]
"""By the clock, and of processors."""
_SCRIPTS = {"TRL": "trl_sft.py", "ludic": "ludic_sft.py"}


def main(quick: bool = False, python: Path | None = None, rows: int = 8_000, rounds: int = 3) -> None:
    """Print a row for each side.

    Args:
        quick: Take 40 rows, once, to check that the benchmark works.
        python: Python of an environment with TRL; without it, ludic's script alone runs.
        rows: Number of conversations.
        rounds: Number of runs of each side.
    """
    rows, rounds = (40, 1) if quick else (rows, rounds)
    pythons = {"TRL": python.absolute()} if python is not None else {}
    pythons["ludic"] = Path(sys.executable)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_inputs(folder, (rows // 10, rows))
        seconds: Mapping[str, Mapping[int, list[Seconds]]] = {side: {rows // 10: [], rows: []} for side in pythons}
        for number in range(rounds):
            for side, of_side in seconds.items():
                for size, times in of_side.items():
                    own = folder / f"{side}-{size}-{number}"
                    times.append(_seconds(pythons[side], _SCRIPTS[side], own, folder / f"{size}.jsonl"))
                    took = f"{times[-1][0]:.1f} s, {times[-1][1]:.1f} s of processors"
                    print(f"{own.name} took {took}; the load is {os.getloadavg()[0]:.1f}", flush=True)
    columns = ["", f"s, {rows // 10} rows", f"s, {rows} rows", "ms a row", "ms a row of processors"]
    cells = [[side, *_cells(of_side)] for side, of_side in seconds.items()]
    print_table(f"sft_rows on {len(os.sched_getaffinity(0))} cores", columns, cells)


def _cells(of_side: Mapping[int, Sequence[Seconds]]) -> Iterator[str]:
    (few, _), (many, _) = of_side.items()
    yield from (with_spread([by_clock for by_clock, _ in times]) for times in of_side.values())
    for kind in range(2):
        medians = {size: median(each[kind] for each in times) for size, times in of_side.items()}
        yield f"{1e3 * (medians[many] - medians[few]) / (many - few):.2f}"


def _make_inputs(folder: Path, sizes: Sequence[int]) -> None:
    """Write so many conversations to {size}.jsonl each, and a tiny model with a tokenizer of their words to model/."""
    docs = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    words = [word for path in docs for word in path.read_text().split() if "<|" not in word]

    def text(random: Random, most_words: int) -> str:
        start, length = random.randrange(len(words) - most_words), random.randint(most_words // 8, most_words)
        return " ".join(words[start : start + length])

    for size in sizes:
        random = Random(0)
        with (folder / f"{size}.jsonl").open("w") as file:
            for _ in range(size):
                turns = [
                    (role, text(random, most)) for _ in range(2) for role, most in (("user", 50), ("assistant", 100))
                ]
                messages = [{"role": role, "content": content} for role, content in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = train_tokenizer((), vocab_size=0, max_length=2_048)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = split
    tokenizer.backend_tokenizer.train_from_iterator(
        [" ".join(words)],
        trainers.BpeTrainer(
            vocab_size=8_192,
            special_tokens=[CHAT_PAD, CHAT_START, CHAT_END],
            initial_alphabet=split.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.chat_template = _TEMPLATE
    write_model(str(folder / "model"), tokenizer, seed=0, hidden_size=64, num_layers=1)


def _seconds(python: Path, script: str, folder: Path, rows: Path) -> Seconds:
    """Run a side's script in a new folder; returns the seconds of the process, by the clock and of processors."""
    folder.mkdir()
    environment = os.environ | {"HF_HOME": str(folder / "cache")}  # rows that TRL has seen are not in it
    command = [str(python), "-P", str(Path(__file__).with_name(script)), str(rows.parent / "model"), str(rows)]
    began, before = time.perf_counter(), _children_s()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed: {done.stderr[-4000:]}")
    return time.perf_counter() - began, _children_s() - before


def _children_s() -> float:
    """Seconds of processors that ended children of this process have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    run_script(main, description=__doc__)
