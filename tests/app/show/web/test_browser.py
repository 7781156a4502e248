"""The pages in a real browser, served by the command: what a person does, and what a hostile run must not do."""

import math
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from app.show.report.conftest import HOSTILE, SPELT
from app.show.web.test_server import served
from app.show.web.viewed_run import ENV, make_viewed_run
from compared_runs import make_compared

from ludic.app.show.web.answering import PAGES

LEARNS = {"fast": 0.05, "slow": 0.01, "flat": 0.0}
"""Reward that each run gains in a step."""
HOSTILE_FOLDER = "<img src=x onerror=alert(1)>"


def entered(browser: Any, address: str, seen: list[str], **options: Any) -> Any:
    """Open the printed address in a browser without cookies; note errors, dialogs and requests to other hosts."""
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)
    home = urlsplit(address).netloc
    context.on("request", lambda it: seen.append(it.url) if urlsplit(it.url).netloc != home else None)
    page = context.new_page()
    # Chromium asks for an icon when it shows JSON.
    context.route("**/favicon.ico", lambda route: route.fulfill(status=204))
    page.on(
        "console",
        lambda it: seen.append(f"{it.text} {it.location['url']}") if it.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
    page.goto(address)
    assert "token" not in page.url
    return page


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of usual and of hostile runs; made before the browser begins, whose event loop forbids another one."""
    usual, hostile = tmp_path_factory.mktemp("usual"), tmp_path_factory.mktemp("hostile")
    make_viewed_run(usual / "sums")
    for name, gain in LEARNS.items():
        steps = {step: [[gain * step - 0.1, gain * step + 0.1]] * 8 for step in range(1, 13)}
        make_compared(str(usual / name), steps, learning_rate=gain or 1e-9)
    make_viewed_run(hostile / HOSTILE_FOLDER, question=HOSTILE, answer=HOSTILE, wanted=HOSTILE)
    make_compared(str(hostile / "other"), {1: [[0.0, 1.0]]}, run={"model": HOSTILE})
    return usual, hostile


@pytest.mark.slow
def test_a_person_finds_a_wrong_answer_that_is_rewarded_shows_it_to_another_and_finds_the_run_that_learns_fastest(
    browser: Any, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    seen: list[str] = []
    with served(str(folders[0]), tmp_path) as (process, address):
        page = entered(browser, address, seen)
        page.get_by_role("link", name="sums/run").click()
        page.get_by_role("link", name="environments").click()
        page.get_by_role("row").filter(has_text=ENV).get_by_role("link").nth(1).click()
        page.get_by_role("link", name="not correct and episode_reward > 0").click()
        # of four answers with rewards 1, 0, .5, 0 one; of four with .25 the three that are wrong; in three versions
        assert "of 12," in page.locator("main").inner_text()
        page.locator("#where").fill("not correct and episode_reward = 0.5 and difficulty = 'hard' and level = 0")
        page.get_by_role("button", name="Show").click()
        assert "of 3," in page.locator("main").inner_text()
        page.locator("tbody tr").first.get_by_role("link").first.click()
        assert "difficulty" in page.locator("details", has_text="columns of the data set").inner_text()
        link = page.url
        page.get_by_role("link", name="compare with the best sibling, reward 1").click()
        assert page.locator(".own").count() > 1

        assert process.stdout is not None
        other = entered(browser, process.stdout.readline().split()[-1], seen)
        other.goto(link)
        other.get_by_label("mark").fill("lucky")
        other.get_by_label("author").fill("ann")
        other.get_by_role("button", name="Label").click()
        assert other.url == f"{link}#labels"
        assert "lucky" in other.locator("main").inner_text()
        page.goto(link)
        page.get_by_role("link", name="rollouts", exact=True).click()
        page.locator("#where").fill("marks is not null")
        page.get_by_role("button", name="Show").click()
        assert "lucky" in page.locator("tbody").inner_text()

        page.get_by_role("link", name="runs", exact=True).click()
        page.get_by_label("all runs").check()
        assert page.locator("[name=run]:checked").count() == 1 + len(LEARNS)
        page.get_by_label("sums/run").uncheck()
        page.get_by_role("button", name="Compare them in tables").click()
        assert "highest reward up to step 12: fast" in page.locator("main").inner_text()
        page.get_by_role("link", name="curves over each other").click()
        page.locator("figure canvas").first.wait_for()
        page.wait_for_load_state("networkidle")
    assert seen == []


@pytest.mark.slow
def test_no_page_lets_a_text_of_a_run_act_or_scroll_a_phone_sideways(
    browser: Any, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    seen: list[str] = []
    with served(str(folders[1]), tmp_path) as (_, address):
        page = entered(browser, address, seen, viewport={"width": 390, "height": 844})
        home = address.partition("/?")[0]
        run = f"{home}/r/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E/run"
        both = "run=other&run=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E/run"
        todo = [f"{home}/{name}?{both}" for name in ("runs", "curves", "overlaid", "compare-runs")]
        todo += [f"{run}/{name}" for name in ("overview", "state", "figures", "rollouts", "sql?q=from%20rollouts")]
        todo += [f"{home}/r/other/figure?name=reward_mean", f"{run}/paired?a=0&b=2"]
        counts: dict[str, int] = {}
        texts = ""
        while todo:
            link = todo.pop(0).partition("#")[0]
            name = urlsplit(link).path.rpartition("/")[2]
            if name not in PAGES or counts.get(name, 0) >= 3 or "csv=" in link:
                continue
            counts[name] = counts.get(name, 0) + 1
            answer = page.goto(link)
            assert (answer.status, page.title() != "hacked") == (200, True), link
            if "html" in answer.headers["content-type"]:
                page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
                assert page.evaluate("document.documentElement.scrollWidth") == 390, link
                assert page.locator("img, iframe, object, embed, base, style, [onload], [onerror]").count() == 0, link
                texts += page.locator("main").inner_text()
                todo += page.eval_on_selector_all("a", "links => links.map(link => link.href)")
            if name == "rollout":  # which has too few calls for a link
                todo.append(link.replace("/rollout?", "/calls?"))
        page.wait_for_load_state("networkidle")
    assert (set(counts), seen) == ({*PAGES} - {"label"}, [])
    assert SPELT.partition("{{")[0] in texts


NUMBERS = (
    (1.0, 1.0, 1.0),
    (1.0, 1 + 1e-9, 1 - 1e-8),
    (1e300, 1e300, -1e300),
    (1e-320, 2e-320, 0.0),
    (0.0, 0.0, 0.0),
    (1.7e308, -1.7e308, math.inf),
    (5e-324, 1.7e308, math.nan),
)


@pytest.mark.slow
def test_numbers_of_any_size_are_drawn_with_ticks_that_differ(browser: Any, tmp_path: Path) -> None:
    seen: list[str] = []
    make_compared(str(tmp_path / "run"), {1: [[0.0, 0.0]], 2: [[0.0, 0.0]]})
    with served(str(tmp_path / "run"), tmp_path) as (_, address):
        page = entered(browser, address, seen)
        page.locator("figure", has_text="Reward").locator("canvas").first.wait_for()  # which is 0 everywhere
        sql = page.get_by_role("link", name="SQL").get_attribute("href")
        for values in NUMBERS:
            rows = ", ".join(f"({index}, '{value}'::double)" for index, value in enumerate(values))
            for columns in ("x, y", "y, x"):
                page.goto(f"{address.partition('/?')[0]}{sql}")
                query = f"select {columns} from (values {rows}) as made(x, y) where isfinite(y)"  # noqa: S608
                page.get_by_label("SQL").fill(query)
                page.get_by_role("button", name="Run").click()
                page.locator("figure canvas").wait_for()
                page.get_by_role("button", name="log").click()
            for texts in page.evaluate(_TICKS, [value for value in values if math.isfinite(value)]):
                assert 2 <= len(texts) == len(set(texts)) <= 40, (values, texts)
    assert seen == []


_TICKS = """values => {
  const textsOf = ticks => ticks.map(tick => shown(tick, TICK_DIGITS))
  const [low, high] = roomy(Math.min(...values), Math.max(...values))
  const found = [textsOf(ticks(low, high, tickStep(low, high, 150, 30, false)))]
  const positive = values.filter(value => value > 0)
  if (positive.length) found.push(textsOf(logTicks(...decades(Math.min(...positive), Math.max(...positive)), 5)))
  return found
}"""
