"""Ask the same questions of the same samples in ludic, in `inspect view` and in W&B's offline files.

    python -m benchmarks.peers --inspect .venv/inspect/bin/python     # made by `make .venv/inspect/installed`

A made store of 5,120 rollouts of some 200 tokens and of 10 versions is read by ludic as it is. inspect_ai has it as the
logs that `ludic export --format inspect` writes of the same rows, one of each version. W&B has the reward of each
version and a table of its samples, in a run of WANDB_MODE=offline; a second run's tables also hold the tokens.

A question is answered when the answer is on the screen: in the output of a command, in a terminal, or in a page of
Chromium. CPU seconds are those of all processes of the program, user and system, and apart from them those of the
browser. A program that isn't installed is left out, and named.
"""

import json
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import psutil  # type: ignore[import-untyped]

import ludic
from benchmarks.measure import in_a_process, print_table
from benchmarks.ports import free_port
from benchmarks.stores import make_store
from ludic.base import CACHE_VARIABLE
from ludic.root import Root, start_attempt
from ludic.root.rows import MetricsLog
from ludic.settings import run_script
from ludic.training import TrainConfig

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CURVE, WRONG, TOKENS = "the reward curve", "wrong answers with a high reward, and their texts", "an answer's tokens"
START = "the server starts"
_QUESTIONS = (START, CURVE, WRONG, TOKENS)
_HIGH = 0.99
_WRONG = f"reward_components['correct'] = 0 and episode_reward > {_HIGH}"
_CURVE = "select step, reward_mean from metrics where step is not null order by step"
_SAMPLES = """
select rollout_id, env_example_id, episode_reward as reward, reward_components['correct'] as correct,
    messages[1].content as question, messages[-1].content as answer
"""
_WRONG_TEXTS = f"{_SAMPLES} from rollouts where {_WRONG} order by episode_reward desc"
_WRONG_OF_TABLES = f".data[] | select(.[2] > {_HIGH} and .[3] == 0)"
_WANDB = {
    "texts": ("texts", ""),
    "texts, tokens, logprobs": ("tokens", ", response_tokens, response_logprobs"),
}
"""Folders of the two offline runs, and the columns of their tables beside those of _SAMPLES."""
_SCREEN = {"width": 2400, "height": 900}
_MOST_S = 120.0

Seconds = Mapping[str, tuple[float, float]]
"""CPU seconds of the program and of the browser, by question."""


def main(quick: bool = False, rounds: int = 3, inspect: Path = Path(".venv/inspect/bin/python")) -> None:
    """Print tables.

    Args:
        quick: Ask ludic one question about a small store, to check that the benchmark works.
        rounds: Number of times that every question is asked; medians are printed.
        inspect: Python that has ludic and inspect_ai.
    """
    folder = Path(tempfile.mkdtemp())
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    try:
        root = make_run(folder / "run", num_files=1 if quick else 80, num_versions=1 if quick else 10)
        found = Found(root)
        programs: dict[str, Callable[[], Seconds]] = {"ludic in a shell": lambda: in_shell(root, found, quick)}
        installed = others(folder, found, inspect)
        if not quick:
            print_table("peers: bytes on disk", ["", "MB", "of ludic's", "CPU s to make"], make_others(folder, inspect))
            programs |= installed
        asked: dict[str, list[Seconds]] = {name: [] for name in programs}
        for _ in range(1 if quick else rounds):
            for name, ask in programs.items():
                asked[name].append(ask())
        rows = [[name, question, *_figures(each, question)] for name, each in asked.items() for question in _QUESTIONS]
        title = f"peers: {found.num_rows:,} samples, of which {found.num_wrong} are wrong with a high reward"
        print_table(title, ["", "question", "CPU s", "browser's CPU s"], rows)
    finally:
        shutil.rmtree(folder)


def _figures(asked: list[Seconds], question: str) -> list[str]:
    """Return medians; a program that does not answer a question has none."""
    answered = [seconds[question] for seconds in asked if question in seconds]
    return [f"{median(each):.2f}" for each in zip(*answered, strict=True)] or ["-", "-"]


# --- The samples -----------------------------------------------------------------------------------------------------


class Found:
    """What is to be found in a run: samples, those that are wrong with a high reward, and the first of these."""

    def __init__(self, root: Root) -> None:
        run = ludic.open(root.url)
        (self.num_rows,) = run.sql("select count(*) from rollouts").row(0)
        wrong = run.sql(_WRONG_TEXTS)
        self.num_wrong = wrong.height
        self.rollout_id, self.answer = wrong["rollout_id"][0], wrong["answer"][0]


def make_run(folder: Path, num_files: int, num_versions: int) -> Root:
    """Make a run whose trainer has stored the mean reward of each version as that of a step."""
    root = make_store(str(folder), num_files, num_versions=num_versions, mean_length=200)
    query = "select version, avg(episode_reward), count(*) from rollouts group by all order by 1"
    means = ludic.open(root.url).sql(query).rows()
    attempt = start_attempt(root, config=TrainConfig.of(num_steps=num_versions).flat())
    with closing(MetricsLog(root, "train", "train-1")) as log:
        for version, reward, count in means:
            own = {"attempt_id": attempt.attempt_id, "step": version + 1}
            log.write(policy_version=version, reward_mean=reward, num_rollouts=count, **own)
    return root


def make_others(folder: Path, inspect: Path) -> list[list[str]]:
    """Write the logs and the offline runs; returns rows of their sizes."""
    found: list[tuple[str, Path, float | None]] = [
        ("ludic: texts, tokens, logprobs", folder / "run" / "rollouts", None)
    ]
    if inspect.exists():
        # The same rows as samples of an evaluation, which is what the export takes.
        evaluated, logs = folder / "evaluated", folder / "logs"
        shutil.copytree(folder / "run", evaluated)
        (evaluated / "rollouts").rename(evaluated / "evals")
        options = ["--format", "inspect", "--out", str(logs)]
        cpu_s, _ = run_command([str(inspect), "-m", "ludic", "export", str(evaluated), *options])
        found.append(("inspect_ai: texts", logs, cpu_s))
    if find_spec("wandb") is not None:
        for name, (place, columns) in _WANDB.items():
            cpu_s = in_a_process(log_to_wandb, str(folder / "run"), folder / place, columns)
            found.append((f"W&B, offline: {name}", folder / place / "wandb", cpu_s))
    sizes = [size(place) for _, place, _ in found]
    return [
        [name, f"{num_bytes / 1e6:.1f}", f"{num_bytes / sizes[0]:.2f}x", "" if cpu_s is None else f"{cpu_s:.1f}"]
        for (name, _, cpu_s), num_bytes in zip(found, sizes, strict=True)
    ]


def log_to_wandb(url: str, folder: Path, columns: str) -> float:
    """Log the reward of each version and a table of its samples to a run without a server; returns CPU seconds."""
    places = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CACHE", "DATA", "CONFIG", "ARTIFACT")}
    os.environ.update(places | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    import wandb

    folder.mkdir()
    run, before = ludic.open(url), os.times()
    with wandb.init(project="peers", dir=folder) as log:
        for step, reward in run.sql(_CURVE).rows():
            frame = run.sql(f"{_SAMPLES}{columns} from rollouts where version = {step - 1} order by rollout_id")
            table = wandb.Table(columns=frame.columns, data=[list(row) for row in frame.rows()])
            log.log({"reward": reward, "samples": table}, step=step)
    wandb.teardown()
    return sum(os.times()[:4]) - sum(before[:4])


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# --- Questions to commands -------------------------------------------------------------------------------------------


def in_shell(root: Root, found: Found, quick: bool) -> Seconds:
    """Ask ludic's commands."""
    commands = {
        CURVE: (["sql", root.url, _CURVE], "reward_mean"),
        WRONG: (["sql", root.url, _WRONG_TEXTS, "--format", "json"], found.answer),
        TOKENS: (["view", root.url, found.rollout_id, "--tokens"], "logprob"),
    }
    asked = {CURVE: commands[CURVE]} if quick else commands
    seconds = {}
    for question, (args, wanted) in asked.items():
        cpu_s, printed = run_command([sys.executable, "-m", "ludic", *args])
        assert wanted in printed, (question, printed)
        seconds[question] = (cpu_s, 0.0)
    return seconds


def run_command(command: list[str]) -> tuple[float, str]:
    """Return the CPU seconds of a command, with those of the processes that it waited for, and what it printed."""
    before = os.times()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system, done.stdout


def in_wandb(folder: Path, found: Found) -> Seconds:
    """Ask W&B's terminal viewer for the curve, and jq for the rest, since no program of W&B shows tables offline."""
    run, with_tokens = (next((folder / place).glob("wandb/offline-run-*")) for place, _ in _WANDB.values())
    seconds = {CURVE: (leet_seconds(run), 0.0)}
    one = f".data[] | select(.[0] == {json.dumps(found.rollout_id)})"
    for question, query, place in ((WRONG, _WRONG_OF_TABLES, run), (TOKENS, one, with_tokens)):
        tables = sorted(map(str, place.glob("files/media/table/*.json")))
        cpu_s, printed = run_command(["jq", query, *tables])
        assert found.answer in printed, (question, printed)
        seconds[question] = (cpu_s, 0.0)
    return seconds


def leet_seconds(run: Path) -> float:
    """Return the CPU seconds until `wandb leet` has drawn the plots of a run in a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 130))
    command = [sys.executable, "-m", "wandb", "leet", "run", str(run)]
    environment = os.environ | {"TERM": "xterm-256color"}
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        while b"Finished" not in shown:  # the state of the run, drawn with its plots
            if not select.select([ours], [], [], _MOST_S)[0]:
                raise TimeoutError(f"wandb leet has drawn no plot, but {shown.decode(errors='replace')}")
            shown += os.read(ours, 65_536)
        tree = psutil.Process(process.pid)
        cpu_s = tree_seconds(tree)
        for each in [*tree.children(recursive=True), tree]:
            each.terminate()
    os.close(ours)
    assert b"reward" in shown
    return cpu_s


# --- Questions to pages ----------------------------------------------------------------------------------------------


def others(folder: Path, found: Found, inspect: Path) -> dict[str, Callable[[], Seconds]]:
    """Return the programs beside ludic's shell that are installed, and print which are not."""
    chromium = shutil.which("chromium") if find_spec("playwright") is not None else None
    has_wandb = find_spec("wandb") is not None and shutil.which("jq") is not None
    calls: dict[str, tuple[object, Callable[[], Seconds]]] = {
        "ludic in a browser": (chromium, lambda: in_browser(str(chromium), folder, found)),
        "inspect view": (chromium and inspect.exists(), lambda: in_inspect(str(chromium), folder, found, inspect)),
        "W&B's files": (has_wandb, lambda: in_wandb(folder, found)),
    }
    for name, (is_there, _) in calls.items():
        if not is_there:
            print(f"{name}: not installed (of the program, Chromium, playwright and jq)")
    return {name: call for name, (is_there, call) in calls.items() if is_there}


def in_browser(chromium: str, folder: Path, found: Found) -> Seconds:
    """Ask the pages of `ludic view --web`."""
    command = [sys.executable, "-m", "ludic", "view", str(folder / "run"), "--web", "--port", str(free_port())]
    with opened(chromium, command) as (page, clock, address):
        home = address.partition("?")[0].rstrip("/")
        page.goto(address)
        page.locator("[data-figures] canvas").first.wait_for()
        clock.stop(CURVE)
        page.goto(f"{home}/rollouts?{urlencode({'where': _WRONG, 'order': 'episode_reward desc'})}")
        page.locator("tbody tr").nth(found.num_wrong - 1).wait_for()
        page.goto(f"{home}/rollout?id={found.rollout_id}")
        page.get_by_text(found.answer).first.wait_for()
        clock.stop(WRONG)
        page.goto(f"{home}/rollout?id={found.rollout_id}")
        page.locator("pre.tokens span").first.wait_for()
        clock.stop(TOKENS)
        return clock.seconds


def in_inspect(chromium: str, folder: Path, found: Found, inspect: Path) -> Seconds:
    """Ask the pages of `inspect view`: a list of means in the place of a curve. It shows no tokens."""
    port = free_port()
    options = ["--log-dir", str(folder / "logs"), "--port", str(port)]
    command = [str(inspect), "-m", "inspect_ai", "view", "start", *options]
    with opened(chromium, command) as (page, clock, address):
        page.goto(address)
        page.get_by_text("10 items").wait_for()
        page.get_by_text("@9").first.wait_for()
        clock.stop(CURVE)
        page.get_by_text("Samples", exact=True).first.click()
        page.get_by_text(f"{found.num_rows:,} samples", exact=True).wait_for()
        for column, operator, value in (("score_reward", ">", str(_HIGH)), ("score_correct", "=", "0")):
            page.click(f'button[aria-label="Filter {column}"]')
            page.select_option(f"#{column}-op", operator)
            page.fill(f"#{column}-val", value)
            page.get_by_text("Apply", exact=True).click()
        page.get_by_text(f"{found.num_wrong:,} samples", exact=True).wait_for()
        page.locator("tbody tr, [role=row]").nth(1).click()
        page.get_by_text("ANSWER").first.wait_for()
        clock.stop(WRONG)
        return clock.seconds


class Clock:
    """CPU seconds of a server and of a browser, by question."""

    def __init__(self, server: psutil.Process) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self._server = server
        self._before = (0.0, self._now()[1])

    def _now(self) -> tuple[float, float]:
        beside = [each for each in psutil.Process().children(recursive=True) if "chrom" in each.name()]
        return tree_seconds(self._server), sum(map(_seconds_of, beside))

    def stop(self, question: str) -> None:
        """Give a question the seconds since the one before it."""
        now = self._now()
        self.seconds[question] = (now[0] - self._before[0], now[1] - self._before[1])
        self._before = now


@contextmanager
def opened(chromium: str, command: list[str]) -> "Iterator[tuple[Page, Clock, str]]":
    """Start a server, and an empty page in a browser without a cache; yields both and the server's address."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser: Browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=_SCREEN)  # type: ignore[arg-type]
        page.set_default_timeout(1000 * _MOST_S)
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            clock = Clock(psutil.Process(server.pid))
            address = next(word for line in _lines(server) for word in line.split() if word.startswith("http://"))
            clock.stop(START)
            yield page, clock, address
        finally:
            server.terminate()
            server.wait()
            browser.close()


def _lines(server: "subprocess.Popen[str]") -> Iterator[str]:
    """Yield the lines that a server prints."""
    assert server.stdout is not None
    yield from server.stdout
    raise RuntimeError(f"{shlex.join(map(str, server.args))} has ended and printed no address")  # type: ignore[arg-type]


def tree_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of all below it."""
    return sum(map(_seconds_of, [process, *process.children(recursive=True)]))


def _seconds_of(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of those that it has waited for; 0 if it has ended meanwhile."""
    try:
        times: Any = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


if __name__ == "__main__":
    run_script(main, description=__doc__)
