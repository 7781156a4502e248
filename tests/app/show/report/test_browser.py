"""The page in a real browser: no request, no script, no scrolling sideways; plots on the first screen, with hover."""

from pathlib import Path
from typing import Any

import pytest
from app.show.report.conftest import HOSTILE, SPELT
from compared_runs import make_compared

import ludic
from ludic.root.root import Root


def opened(browser: Any, file: Path, seen: list[str], **options: Any) -> Any:
    """Open a file in a new window, and note its requests, messages, errors and dialogs."""
    page = browser.new_context(**options).new_page()
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("dialog", lambda dialog: seen.append(dialog.message))
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    return page


@pytest.mark.slow
def test_hostile_rows_are_text_in_a_browser(browser: Any, hostile: Root, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    ludic.Run(hostile).report(file)
    seen: list[str] = []
    page = opened(browser, file, seen)
    page.wait_for_load_state("networkidle")
    assert seen == [file.as_uri()]
    assert page.title() == f"ludic report: {hostile.url}"
    assert page.locator("script, img, iframe, object, embed, link, base, form, [onload], [onerror]").count() == 0
    links = page.eval_on_selector_all("a", "links => links.map(link => link.getAttribute('href'))")
    assert links == ["#training", "#groups", "#evaluation", "#comparison"]
    texts = page.eval_on_selector_all("pre", "found => found.map(each => each.textContent)")
    assert len(texts) >= 8
    assert set(texts) == {SPELT}
    assert SPELT in page.eval_on_selector_all("td", "found => found.map(each => each.textContent)")


@pytest.mark.slow
def test_hostile_runs_are_text_in_a_browser_and_fit_a_phone(browser: Any, hostile: Root, tmp_path: Path) -> None:
    other = make_compared(str(tmp_path / "<img src=x onerror=alert(1)>"), {1: [[0.0, 1.0]]}, run={"model": HOSTILE})
    file = tmp_path / "runs.html"
    ludic.Run(hostile).report(file, also=[other.url])
    seen: list[str] = []
    page = opened(browser, file, seen, viewport={"width": 390, "height": 844})
    page.wait_for_load_state("networkidle")
    assert seen == [file.as_uri()]
    assert page.locator("script, img, iframe, object, embed, link, base, form, [onload], [onerror]").count() == 0
    links = page.eval_on_selector_all("a", "links => links.map(link => link.getAttribute('href'))")
    assert links == ["#curves", "#comparison"]
    assert SPELT in page.eval_on_selector_all("td", "found => found.map(each => each.textContent)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_only_and_follows_its_colours(
    browser: Any, hostile: Root, tmp_path: Path, scheme: str
) -> None:
    file = tmp_path / "report.html"
    ludic.Run(hostile).report(file)
    page = opened(browser, file, [], viewport={"width": 390, "height": 844}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_plot_is_on_the_first_screen_and_shows_its_values_under_the_pointer(
    browser: Any, trained: Root, tmp_path: Path, width: int, height: int
) -> None:
    file = tmp_path / "report.html"
    ludic.Run(trained).report(file)
    page = opened(browser, file, [], viewport={"width": width, "height": height})
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = false)")
    plot = page.locator(".plot").first
    box = plot.bounding_box()
    assert box["y"] + box["height"] < height
    values = plot.locator(".at p")
    assert not values.first.is_visible()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert values.first.inner_text().split("\n") == ["step 1", "● reward 0.4167", "warning 1 begins"]
    page.emulate_media(media="print", color_scheme="dark")
    assert not values.first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
