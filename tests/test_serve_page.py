"""The page in a real browser: a message sent, an answer streamed and coloured, trees shown, and what axe finds."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Served, served

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'foredraft[serve-test]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OBSERVER = """() => { window.changes = 0
  new MutationObserver(() => window.changes++).observe(document.getElementById("chat"), {subtree: true, childList: true}) }"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return the system's Chromium, or the one that `playwright install chromium` brings."""
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)}, or `playwright install chromium`")
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    facts = ["target.dtype=float32", "target.device=cpu", "drafter=ngram"]
    with served(tmp_path_factory.mktemp("page"), *facts) as running:
        yield running


@pytest.fixture(scope="module", params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, server: Served) -> Iterator[Any]:
    """Load a page with one answer in it; the dark one as wide as a phone."""
    width = 1100 if request.param == "light" else 390
    context = browser.new_context(color_scheme=request.param, viewport={"width": width, "height": 800})
    page = context.new_page()
    page.asked, page.errors = [], []
    page.on("request", lambda asked: page.asked.append(asked.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(server.url)
    accessible(page)
    page.evaluate(OBSERVER)
    page.click("summary")
    page.fill("#tokens", "48")
    page.check("#compare")
    page.fill("#message", "def add(a, b):\n    return a + b\n<img src='//example.com/x' onerror='alert(1)'>")
    page.press("#message", "Enter")
    page.wait_for_selector("p.figures:has-text('plain speed')", timeout=120_000)
    yield page
    assert page.errors == []
    context.close()


def accessible(page: Any) -> None:
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_an_answer_is_streamed_and_coloured(page):
    assert page.evaluate("window.changes") > 5
    drafted, own = page.locator(".sides .drafted"), page.locator(".sides .own")
    assert drafted.count() > 0 and own.count() > 0
    colours = {one.first.evaluate("e => getComputedStyle(e).backgroundColor") for one in (drafted, own)}
    assert len(colours) == 2
    assert page.locator("pre .drafted[aria-label$=', drafted']").count() == drafted.count()


def test_plain_decoding_stands_beside_it(page):
    sides = page.locator(".sides pre")
    assert sides.count() == 2 and sides.nth(0).inner_text() == sides.nth(1).inner_text() != ""
    assert "the same text" in page.locator("article [role=status]").inner_text()
    for figures in page.locator(".sides .figures").all_inner_texts():
        assert "tokens/s" in figures and re.search(r"48 tokens in \d+\.\d\d s", figures)


def test_a_tree_is_shown_under_the_pointer_and_by_keys(page):
    page.locator(".sides .drafted").first.hover()
    tree = page.locator("#tree")
    assert "accepted" in tree.inner_text() and tree.locator("li.accepted").count() >= 2
    page.keyboard.press("Escape")
    assert not tree.is_visible()
    page.locator(".sides pre").first.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tree.is_visible() and tree.inner_text()
    page.check("#chances")
    page.locator(".sides .drafted").first.hover()
    assert "%" in tree.inner_text()
    accessible(page)


def test_texts_are_never_html_and_nothing_comes_from_elsewhere(page, server):
    assert page.locator("#chat img").count() == 0 and "<img" in page.locator(".user pre").inner_text()
    assert page.asked and all(url.startswith((server.url, "data:")) for url in page.asked)


def test_it_fits_its_width(page):
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_acceptance_over_time_is_drawn(page):
    chart = page.locator("#chart")
    points = chart.locator("polyline").get_attribute("points").split()
    assert chart.is_visible() and len(points) > 3 and len({point.split(",")[1] for point in points}) > 1
    assert f"in {len(points)} steps" in chart.get_attribute("aria-label")


def test_a_chat_is_begun_anew_while_an_answer_streams(page):
    """Check that the old answer appears neither in the new conversation nor in its buttons."""
    page.fill("#tokens", "400")
    page.fill("#message", "class Pair:")
    page.press("#message", "Enter")
    page.wait_for_selector("article:last-child .token", timeout=60_000)
    page.click("#clear")
    assert page.is_disabled("#stop") and not page.locator("#chart").is_visible()
    page.fill("#tokens", "8")
    page.fill("#message", "def add(a, b):")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press("#message", "Enter")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "def add(a, b):"}]
    page.wait_for_selector("p.figures:has-text('plain speed')", timeout=60_000)
    assert page.locator("article").count() == 2 and page.is_disabled("#stop") and page.is_enabled("#send")
    assert page.evaluate("messages.map(one => one.role).join()") == "user,assistant"


def test_an_answer_can_be_stopped_and_the_chat_begun_anew(page):
    page.fill("#tokens", "400")
    page.fill("#message", "class Pair:")
    page.press("#message", "Enter")
    page.wait_for_selector("article:last-child .token", timeout=60_000)
    page.click("#stop")
    page.wait_for_selector("article:last-child p:has-text('stopped')", timeout=60_000)
    page.fill("#temperature", "9")
    page.evaluate("document.getElementById('form').noValidate = true")
    page.fill("#message", "class Pair:")
    page.press("#message", "Enter")
    page.wait_for_selector("p.error:has-text('temperature')", timeout=60_000)
    accessible(page)
    page.click("#clear")
    assert page.locator("article").count() == 0
