"""The page in a real browser: a message sent, an answer streamed and colored, trees shown, and what axe finds.

The README's screenshot is made here, with SmolLM2 and drafts that are faster than the baseline:

    FOREDRAFT_SCREENSHOT=inference/serve/page.png python -m pytest -m real tests/serve/test_serve_page.py
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python import sync_playwright as axe
from playwright import sync_api

from tests.support import ROOT
from tests.support.processes import Served, on_cpu, served

pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OBSERVER = """() => { window.changes = 0
  new MutationObserver(() => window.changes++).observe(document.getElementById("chat"), {subtree: true, childList: true}) }"""

# Which calls of `ask` start and end, in this order.
WATCH = """() => { window.calls = []
  const inner = ask
  window.ask = async (...given) => {
    calls.push("asked"); try { await inner(...given) } finally { calls.push("answered") } } }"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return the system's Chromium, or the one that `playwright install chromium` brings."""
    with contextlib.ExitStack() as stack:
        try:
            playwright = stack.enter_context(sync_api.sync_playwright())
        except Exception as error:  # its Node.js lacks a library of this system
            pytest.skip(f"needs a browser, but playwright does not start: {error}")
        found = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)}, or `playwright install chromium`")
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(
        tmp_path_factory.mktemp("page"), *on_cpu("test_model"), "drafter=ngram", "drafter.tree=fixed"
    ) as running:
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
    page.evaluate(WATCH)
    page.click("#form summary")
    page.fill("#tokens", "48")
    page.check("#compare")
    page.fill("#message", "def add(a, b):\n    return a + b\n<img src='//example.com/x' onerror='alert(1)'>")
    page.press("#message", "Enter")
    page.wait_for_selector("p.figures:has-text('times as fast')", timeout=120_000)
    yield page
    assert page.errors == []
    context.close()


def accessible(page: Any) -> None:
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_an_answer_is_streamed_and_colored(page):
    assert page.evaluate("window.changes") > 5
    accepted, own = page.locator(".sides .accepted"), page.locator(".sides .own")
    assert accepted.count() > 0 and own.count() > 0
    for seen in ("backgroundColor", "textDecorationStyle"):  # the line tells them apart where colors do not
        assert len({token.first.evaluate(f"e => getComputedStyle(e).{seen}") for token in (accepted, own)}) == 2
    assert page.locator("pre .accepted[aria-label$=', accepted draft']").count() == accepted.count()


def test_the_page_explains_itself(page):
    legend = page.locator("#legend")
    assert legend.is_visible()
    marks = {name: legend.locator(f".{name}") for name in ("accepted", "own", "rejected")}
    assert [mark.inner_text() for mark in marks.values()] == list(marks)
    about = page.locator("#about")
    assert about.get_attribute("open") is None  # it makes room for the first answer
    page.focus("#about summary")
    page.keyboard.press("Enter")
    text = about.inner_text()
    assert "guesses the next few tokens" in text and "the answer stays the same" in text
    accessible(page)
    page.keyboard.press("Enter")


def test_the_baseline_is_decoded_after_the_drafted_answer(page):
    """Check the order: otherwise both would share the machine, and their speeds would say nothing."""
    sides = page.locator(".sides pre")
    assert sides.count() == 2 and sides.nth(0).inner_text() == sides.nth(1).inner_text() != ""
    assert "the same text" in page.locator("article [role=status]").inner_text()
    assert "one after the other" in page.locator("article [role=status]").inner_text()
    for figures in page.locator(".sides .figures").all_inner_texts():
        assert "tokens/s" in figures and re.search(r"48 tokens in \d+\.\d\d s", figures)
    assert page.evaluate("calls") == ["asked", "answered"] * 2


def test_speeds_are_gauges_on_one_scale(page):
    gauges = page.get_by_role("meter")
    speeds = [float(gauges.nth(number).get_attribute("aria-valuenow")) for number in (0, 1)]
    assert gauges.count() == 2 and min(speeds) > 0
    assert {gauges.nth(number).get_attribute("aria-valuemax") for number in (0, 1)} == {f"{max(speeds):.1f}"}
    widths = [gauges.nth(number).locator("div").bounding_box()["width"] for number in (0, 1)]
    assert widths[0] / widths[1] == pytest.approx(speeds[0] / speeds[1], rel=0.1)


def test_a_tree_is_shown_under_the_pointer_and_by_keys(page):
    page.locator(".sides .accepted").first.hover()
    tree = page.locator("#tree")
    drafted, accepted, rejected = map(int, re.findall(r"(\d+) (?:drafted|accepted|rejected)", tree.inner_text()))
    assert drafted == accepted + rejected and accepted == tree.locator("li.accepted").count() >= 1
    for kind, mark in (("accepted", "\u2713"), ("rejected", "\u2717")):
        nodes = tree.locator(f"li.{kind}")
        assert nodes.locator("> small").all_inner_texts() == [mark] * nodes.count()
    page.keyboard.press("Escape")
    assert not tree.is_visible()
    page.locator(".sides pre").first.focus()
    page.keyboard.press("Home")
    assert tree.is_visible() and "nothing is drafted" in tree.inner_text()  # of the first token
    page.keyboard.press("End")
    last = page.locator(".sides pre").first.locator(".token").last
    assert last.evaluate("e => e === document.activeElement")
    assert last.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert tree.inner_text()
    page.check("#chances")
    page.locator(".sides .accepted").first.hover()
    assert "%" in tree.inner_text()
    accessible(page)


def test_texts_are_never_html_and_nothing_comes_from_elsewhere(page, server):
    assert page.locator("#chat img").count() == 0 and "<img" in page.locator(".user pre").inner_text()
    assert page.asked and all(url.startswith((server.url, "data:")) for url in page.asked)


def test_it_fits_its_width(page):
    size = page.viewport_size
    for width in (size["width"], 320):
        page.set_viewport_size({"width": width, "height": size["height"]})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.set_viewport_size(size)


def test_the_tab_key_reaches_everything_in_the_order_it_is_seen(page):
    page.mouse.move(0, 0)  # a scrolled page may move a token under the pointer, which shows its tree
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur(); document.getSelection().removeAllRanges(); window.scrollTo(0, 0)")
    page.focus("#about summary")
    order = []
    for _ in range(6):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert (
            page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        )  # where one is, is seen
    assert order == ["PRE", "PRE", "message", "clear", "compare", "send"]


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
    page.wait_for_selector("p.figures:has-text('times as fast')", timeout=60_000)
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


@pytest.mark.real
def test_the_screenshot_shows_a_real_model_with_drafts(browser, tmp_path, monkeypatch):
    """Check it, and save it as FOREDRAFT_SCREENSHOT=FILE if drafts were faster on this machine now."""
    monkeypatch.delenv("FOREDRAFT_CACHE", raising=False)  # the model stays where a user's own runs find it
    facts = ["target=smollm2", f"drafter={ROOT / 'scripts/smollm2/eagle3'}+suffix"]
    with served(tmp_path, *facts, FOREDRAFT_REMEMBER="1") as running:
        page = browser.new_page(viewport={"width": 1000, "height": 880})
        page.goto(running.url)
        page.click("#form summary")
        page.fill("#tokens", "80")
        page.click("#form summary")
        page.check("#compare")
        for question in ("Give me three tips for staying healthy.", "List three reasons to learn to swim."):
            page.click("#clear")
            page.fill("#message", question)
            page.press("#message", "Enter")
            page.wait_for_selector("p.figures:has-text('times as fast')", timeout=600_000)
        said = page.locator("article [role=status]").inner_text()
        assert "the same text" in said
        trees = page.locator(".sides .accepted")
        shown = [number for number in range(trees.count()) if trees.nth(number).is_visible()]  # not a line break
        best = max(shown, key=lambda number: nodes_shown(page, trees.nth(number)))
        trees.nth(best).hover()
        file = tmp_path / "page.png"
        page.screenshot(path=file)
        page.close()
    assert 10_000 < file.stat().st_size < 150_000
    if wanted := os.environ.get("FOREDRAFT_SCREENSHOT"):
        speedup = float(re.search(r"([\d.]+) times as fast", said)[1])
        assert speedup > 1.1, f"{said}: the machine is too busy for a picture that shows what drafts gain"
        shutil.copy(file, ROOT / wanted)


def nodes_shown(page: Any, token: Any) -> int:
    token.hover()
    return page.locator("#tree li").count()
