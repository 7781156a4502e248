"""No file gets escape codes or frames of a bar, whatever the environment says of colours; and one function decides.

ipykernel sets FORCE_COLOR and CLICOLOR_FORCE for all processes that a notebook starts, and CI sets them too.
"""

import ast
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import forks
import pyarrow as pa
import pytest
from strategies import make_batch
from tiny_runs import create_root, fill, make_model

import ludic
from ludic.base.processes import safe_environment
from ludic.base.results import Frame, Result, open_console, progress_bar, stdout_console

PACKAGE = Path(ludic.__file__).parent
DECIDES = ("ludic/base/results.py", "open_console")
"""The one function that makes a console of rich."""
DRAWING = ("Console", "Live", "Progress", "Status", "open_console", "stdout_console", "tqdm", "trange")
"""What makes a console or something that moves."""
FORCED = [
    {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"},  # ipykernel
    {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"},  # CI
]
INTERMEDIATE = {
    ("ludic/app/show/watch.py", "live_panel"): "open_view and watch choose it on a terminal alone",
    ("ludic/app/show/status.py", "_text_of"): "returns text",
    ("ludic/app/show/run_table.py", "_shortened"): "returns text",
    ("ludic/app/show/run_table.py", "watch_runs"): "draws in the console that _watch_runs gives it",
    ("ludic/base/results.py", "to_html"): "its codes become HTML",
    ("ludic/base/results.py", "__repr__"): "returns text",
}
"""Functions that write to no stream of the process by themselves, and why."""


def functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield the innermost function around each call, and the call."""
    for child in ast.iter_child_nodes(tree):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
        if isinstance(child, ast.Call):
            yield inner, child
        yield from functions(child, inner)


def drawing() -> dict[tuple[str, str], set[str]]:
    """File and function of each call of the package that makes a console or a bar, with the names that it calls."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file, source = path.relative_to(PACKAGE.parent).as_posix(), path.read_text(encoding="utf-8")
        if not any(f"{name}(" in source for name in DRAWING):
            continue
        for function, call in functions(ast.parse(source)):
            if isinstance(call.func, ast.Name) and call.func.id in DRAWING:
                found.setdefault((file, function), set()).add(call.func.id)
    return found


# --- What each of them draws -----------------------------------------------------------------------------------------


class Figures(Result):
    def parts(self) -> Iterator[object]:
        yield Frame("rows", [{"step": 1, "reward": 0.5}], ["step", "reward"])


def draw_bar() -> None:
    with progress_bar() as track:
        assert [*track(range(3), 3, "compacting")] == [0, 1, 2]


def draw_training() -> None:
    from ludic.app.show.watch import training_progress

    with training_progress(2) as report:
        report(1, {"reward_mean": 0.5, "loss": 0.1, "off_policy_steps_mean": 0.0, "tokens_per_s": 9.0})


def draw_sampling() -> None:
    from ludic.app.show.watch import sampling_progress

    with sampling_progress(2) as report:
        report(make_batch(num_groups=1, group_size=2))


def draw_view() -> None:
    from ludic.app.show.watch import Watcher, open_view

    with open_view(Watcher("run")) as update:
        update()


def draw_log() -> None:
    from ludic.app.show.watch import log_shown

    with log_shown():
        logging.getLogger("ludic.run").warning("shown where no panel is")


def draw_rows() -> None:
    from ludic.app.show.tables import write_rows

    table = pa.table({"step": [1, 2], "text": ["a", "b"]})
    for out in (None, Path("rows.txt")):
        write_rows(table.to_reader(), "table", out, 10)


def draw_demo() -> None:
    open_console().print("[bold]a trainer, sharing nothing but a root[/]")


def draw_result() -> None:
    Figures().print_to(stdout_console())


def draw_watch() -> None:
    stdout_console().print("[bold]literally", style="bold red")


def draw_runs() -> None:
    from ludic.app.operations.inspect_run import _watch_runs

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.sleep", interrupt)  # Ctrl-C in the first pause
        _watch_runs(".", 1.0, once=False, totals=False)


def draw_grid() -> None:
    from ludic.app.launch.grid import GridProcesses, run_grid

    run_grid(GridProcesses([], {}, 1, gpus=(), stop_within_s=1), [])


DRAWN: Mapping[tuple[str, str], Callable[[], None]] = {
    ("ludic/base/results.py", "stdout_console"): draw_result,
    ("ludic/base/results.py", "progress_bar"): draw_bar,
    ("ludic/app/show/watch.py", "training_progress"): draw_training,
    ("ludic/app/show/watch.py", "sampling_progress"): draw_sampling,
    ("ludic/app/show/watch.py", "open_view"): draw_view,
    ("ludic/app/show/watch.py", "log_shown"): draw_log,
    ("ludic/app/show/tables.py", "write_rows"): draw_rows,
    ("ludic/app/demos/words.py", "teach_words"): draw_demo,
    ("ludic/app/demos/calculator.py", "teach_a_tool"): draw_demo,
    ("ludic/app/cli/main.py", "_run"): draw_result,
    ("ludic/app/operations/inspect_run.py", "watch"): draw_watch,
    ("ludic/app/operations/inspect_run.py", "_watch_runs"): draw_runs,
    ("ludic/app/launch/grid.py", "run_grid"): draw_grid,
}
"""By file and function, what it draws; the demos train for a minute, so only their console is tried."""


def test_one_function_makes_the_consoles_of_rich_and_each_user_of_it_is_tried_below() -> None:
    found = drawing()
    assert [place for place, names in found.items() if "Console" in names] == [DECIDES]
    assert found.keys() - {DECIDES} == DRAWN.keys() | INTERMEDIATE.keys()


@pytest.mark.parametrize("forced", FORCED, ids=["ipykernel", "ci"])
def test_no_function_that_draws_writes_escape_codes_or_frames_to_a_file(tmp_path: Path, forced: dict[str, str]) -> None:
    create_root(str(tmp_path / "run"), "tiny")
    process = forks.Forked([Path(__file__)], tmp_path / "log", os.environ | forced, cwd=tmp_path)
    assert process.wait(60) == 0, process.printed()
    text = process.printed()
    assert "shown where no panel is" in text  # a log line, since the file is no terminal
    for written in (text, (tmp_path / "rows.txt").read_text()):
        assert not {*"\x1b\r⠋"} & {*written}


def test_streams_that_are_closed_or_not_there_are_no_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = (tmp_path / "closed").open("w")
    file.close()
    for stream in (None, file):
        monkeypatch.setattr(sys, "stderr", stream)
        assert not open_console(stderr=True).is_terminal


@pytest.mark.slow
@pytest.mark.parametrize("forced", FORCED, ids=["ipykernel", "ci"])
def test_the_log_of_a_trainer_has_a_line_for_each_step(tmp_path: Path, forced: dict[str, str]) -> None:
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    words = ["ludic", "train", root.path, "--num-steps", "2", "--device", "cpu", "--learning-rate", "1e-3"]
    process = forks.Forked(words, tmp_path / "log", os.environ | forced)
    assert process.wait(120) == 0, process.printed()
    assert "\x1b" not in process.printed()
    assert [line.split()[1:5] for line in process.printed().splitlines() if " of 2" in line]


def test_the_processes_that_ludic_starts_are_not_told_to_force_colours() -> None:
    assert not {*FORCED[1]} & {*safe_environment({**os.environ, **FORCED[1]})}


if __name__ == "__main__":
    for draw in DRAWN.values():
        draw()
    sys.stdout.flush()
