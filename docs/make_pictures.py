"""Make the pictures of docs/ anew: panel, viewer, reports and pages. Look at each before you commit it.

    python docs/make_pictures.py FOLDER

FOLDER keeps the runs, which take some minutes on this machine; those that are there are not made again. Needs the
extras view and browser, and chromium on the PATH.
"""

import os
import shutil
import subprocess
import sys
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console

import ludic

DOCS = Path(__file__).parent.resolve()
# One environment learns until a learning rate that is too high ruins the policy; the other's reward is always 0.
SHOP = """\
from ludic.environments import Example, Score
from ludic.records import Message

ANIMALS = {"dogs", "birds", "fish", "mice", "horse", "cow"}


class Cats:
    def example(self, index, split):
        prompt = Message(role="user", content=f"write a story about cats in the garden {index}")
        return Example(example_id=f"{split}-{index}", messages=(prompt,))

    def score(self, example, answer):
        words = answer.split()
        cats, others = words.count("cats"), len(set(words) & ANIMALS)
        return Score(reward=0.25 * cats + others, components={"cats": 0.25 * cats, "others": float(others)})


class Colours:
    def example(self, index, split):
        prompt = Message(role="user", content=f"which colour is the sky {index}")
        return Example(example_id=f"{split}-{index}", messages=(prompt,), wanted="#87ceeb")

    def score(self, example, answer):
        return Score(reward=float("#87ceeb" in answer), components={"colour": float("#87ceeb" in answer)})
"""
SETTINGS = ["--model", "runs/demo/model", "--env", "shop.py:Cats", "shop.py:Colours", "--num-workers", "2"]
SETTINGS += ["--group-size", "8", "--groups-per-batch", "8", "--max-tokens", "24", "--accept-incomplete"]
SETTINGS += ["--learning-rate", "2e-2", "--num-steps", "50", "--eval-every", "10"]
SETTINGS += ["--eval-options", '{"num_examples": 16}']


def make_run(name: str, *command: str) -> None:
    """Make a run, unless it is there."""
    if not Path("runs", name).exists():
        subprocess.run([sys.executable, "-m", "ludic", *command], check=True)


# Three learning rates, one of them with two seeds.
SWEEP = (("2e-3", "0"), ("2e-3", "1"), ("8e-3", "0"), ("2e-2", "0"))
OF_SWEEP = ["--model", "runs/demo/model", "--env", "moar_cats", "--group-size", "8", "--groups-per-batch", "8"]
OF_SWEEP += ["--max-tokens", "24", "--accept-incomplete", "--num-steps", "40", "--eval-every", "20"]
OF_SWEEP += ["--eval-options", '{"num_examples": 16}']


def make_sweep() -> list[str]:
    """Make the runs of three learning rates, and return their roots."""
    names = [f"lr{rate}-seed{seed}" for rate, seed in SWEEP]
    for name, (rate, seed) in zip(names, SWEEP, strict=True):
        make_run(f"sweep/{name}", "run", f"runs/sweep/{name}", *OF_SWEEP, "--learning-rate", rate, "--seed", seed)
    return [f"runs/sweep/{name}" for name in names]


def picture_of_panel(root: str, path: Path) -> None:
    """Draw the panel of `ludic watch` as SVG; it names no font of another server."""
    from ludic.app.show.terminal.start import without_fonts

    console = Console(record=True, width=110, file=StringIO(), force_terminal=True)
    ludic.open(root).watch(once=True).print_to(console)
    path.write_text(without_fonts(console.export_svg(title=f"ludic watch {root}")), encoding="utf-8")


def pictures_of_reports(shop: str, sweep: list[str], agents: str) -> None:
    """Show the first screens of two reports, and the evaluations and the comparison of another one, in chromium."""
    options: dict[str, dict[str, Any]] = {
        "report": {},
        "report_runs": {"also": sweep[1:]},
        "report_comparison": {"compare": (1, "latest")},
    }
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for root, (name, settings) in zip((shop, sweep[0], agents), options.items(), strict=True):
            file = Path(f"{name}.html").resolve()
            ludic.open(root).report(file, overwrite=True, **settings)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(file.as_uri())
            if root == agents:
                page.evaluate(_TO_COMPARISON)
            elif root == shop:
                page.locator(".plot").first.locator(".at:has(b + b)").last.hover()  # a step with values of both lines
            save(page.screenshot(), DOCS / f"{name}.png")
        browser.close()


PAGES = (
    ("web_runs", "/curves?run=lr2e-2-seed0&run=lr2e-3-seed0&run=lr2e-3-seed1&run=lr8e-3-seed0", (1280, 800), "light"),
    ("web_overview", "/r/lr2e-2-seed0/overview", (1280, 800), "dark"),
    ("web_rollout", "rollout", (390, 844), "light"),
    ("web_phone", "/curves?run=lr2e-3-seed0&run=lr2e-3-seed1&run=lr8e-3-seed0&by=seed", (390, 844), "dark"),
)
"""Name, address, size and colours of each picture of the page; "rollout" is the best rollout of a run."""


def pictures_of_pages(folder: str) -> None:
    """Show pages of `ludic view FOLDER --web` in chromium, on a desk and on a phone, light and dark."""
    words = [sys.executable, "-m", "ludic", "view", folder, "--web"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as started:
        assert server.stdout is not None
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, path, (width, height), scheme in PAGES:
            size: Any = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme="dark" if scheme == "dark" else "light")
            page.goto(server.stdout.readline().split()[-1])
            run = page.url.removesuffix("/runs") + ("/r/lr2e-2-seed0" if path == "rollout" else "")
            if path == "rollout":
                page.goto(f"{run}/rollouts?order=episode_reward desc")
                page.locator("tbody tr").first.get_by_role("link").first.click()
            else:
                page.goto(run + path)
            page.wait_for_load_state("networkidle")
            if name == "web_runs":
                page.locator("figure .u-over").first.hover(position={"x": 200, "y": 60})
            save(page.screenshot(), DOCS / f"{name}.png")
        browser.close()
        server.terminate()


_TO_COMPARISON = """() => {
  const [first, last] = ["evaluation", "comparison"].map(id => document.getElementById(id))
  document.querySelectorAll("figure details").forEach(it => it.remove())
  first.nextElementSibling.querySelectorAll("figure:nth-child(n + 3)").forEach(it => it.remove())
  while (first.nextElementSibling.nextElementSibling !== last) first.nextElementSibling.nextElementSibling.remove()
  scrollTo(0, first.offsetTop - 20)
}"""
"""Scrolls to the evaluations, and leaves two plots without their numbers between their title and the comparison."""


def save(png: bytes, path: Path) -> None:
    """Write a picture of few colours, which takes half of the bytes."""
    Image.open(BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    Path("shop.py").write_text(SHOP, encoding="utf-8")
    make_run("demo", "demo")
    make_run("shop", "run", "runs/shop", *SETTINGS)
    make_run("demo-agents", "demo", "--agents")
    picture_of_panel("runs/shop", DOCS / "watch.svg")
    ludic.open("runs/shop").view(picture=DOCS / "view.svg")
    pictures_of_reports("runs/shop", make_sweep(), "runs/demo-agents")
    pictures_of_pages("runs/sweep")


if __name__ == "__main__":
    main(*sys.argv[1:])
