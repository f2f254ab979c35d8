"""An operator before the page: actors that are processes of their own are drained and stopped, behind the key."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import opened
from tests.browser.looking import history
from tests.browser.served import served
from tests.helpers.waiting import LIMIT_S

KEY = "a-key-of-32-characters-for-tests"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two executors, a key, targets, and a path below which a proxy may pass requests on."""
    arguments = ("--executors", "2", "--num-gpu-blocks-override", "64", "--api-key", KEY, "--root-path", "/llm",
                 "--ttft-target-ms", "2000", "--itl-target-ms", "50")  # fmt: skip
    with served(*arguments) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, with the key that it asked for."""
    with opened(browser, url) as page:
        page.get_by_role("textbox", name="Key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 401
        page.goto("/#/actors")
        yield page


def process_of(card: Locator) -> str | None:
    """The process that an actor is, by its number and its machine."""
    return card.locator("[title^=Process]").get_attribute("title")


def order(page: Page, actor: str, what: str) -> Locator:
    """Order an actor, and confirm it; its card."""
    card = page.locator(f"[data-actor={actor}]")
    card.get_by_role("button", name=what).click()
    page.get_by_role("dialog").get_by_role("button", name=f"{what} it").click()
    return card


ASK_AGAIN = """async () => {
  const module = document.querySelector("script[type=module]").src;
  const { request } = await import(new URL("api.js", module).href);
  return request("/api/history").catch((error) => error.status);
}"""


def test_a_key_is_asked_for_once(browser: Browser, url: str) -> None:
    """Then the banner says that one is needed, however often the server refuses; a wrong one is said to be wrong."""
    with opened(browser, url) as page:
        page.goto("/#/charts")
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        banner = page.locator(".banner")
        expect(banner).to_contain_text("This server needs an API key.")
        assert page.evaluate(ASK_AGAIN) == 401
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.goto("/#/chat")
        page.get_by_label("Message").fill("What is water?")
        page.keyboard.press("Enter")
        expect(page.locator(".answer .error")).to_contain_text("A valid API key is needed")
        expect(page.get_by_role("dialog")).to_have_count(0)
        banner.get_by_role("button", name="Enter a key").click()
        page.get_by_role("textbox", name="Key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text("This key was refused.")
        page.get_by_role("textbox", name="Key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        expect(banner).to_be_hidden()
        page.said.clear()  # type: ignore[attr-defined]


def test_the_page_lies_below_a_root_path(browser: Browser, url: str) -> None:
    """With its files, its calls, the sample of Replay and the address in copied requests, also without a slash."""
    with opened(browser, url) as elsewhere:
        page, asked = elsewhere.context.new_page(), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.goto("/llm")
        page.get_by_role("textbox", name="Key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        page.get_by_label("Message").fill("What is water?")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Copy as…").click()
        expect(page.get_by_role("dialog").locator("pre")).to_contain_text(f"curl -N {url}/llm/v1/chat/completions")
        page.keyboard.press("Escape")
        page.goto("/llm/#/replay")
        expect(page.get_by_label("Time in the recording")).to_be_visible()
        assert {f"{url}/llm", f"{url}/llm/v1/chat/completions", f"{url}/llm/api/events"} <= set(asked)
        assert [each for each in asked if not each.startswith(f"{url}/llm")] == []
        elsewhere.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 401


def test_a_copied_job_runs(page: Page) -> None:
    """As it stands in the dialog: it finds the private server's socket, and its answer, not an older one."""
    page.goto("/#/chat")
    page.locator("[name=max_tokens]").fill("3")
    page.get_by_label("Message").fill("What is water?")
    page.keyboard.press("Enter")
    expect(page.locator("article.answer")).to_contain_text("3 tokens")  # while an answer grows, its buttons move
    page.get_by_role("button", name="Copy as…").click()
    page.get_by_role("dialog").get_by_role("button", name="Redis job").click()
    script = page.get_by_role("dialog").locator("pre").inner_text()
    answers = []
    for custom_id in ("first", "second"):
        told = subprocess.run(["bash", "-c", script.replace("mine-1", custom_id)], capture_output=True, text=True,
                              timeout=LIMIT_S, check=True)  # fmt: skip
        (line,) = [line for line in told.stdout.splitlines() if line.startswith('{"')]
        answers.append(json.loads(line))
    assert [each["custom_id"] for each in answers] == ["first", "second"]
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 3 for each in answers)


LINES = """async () => {
  const { world } = await import(document.querySelector("script[type=module]").src);
  const prototype = CanvasRenderingContext2D.prototype, { clearRect, lineTo } = prototype;
  const drawn = new Set(), found = {};
  const chart = (context) => context.canvas.closest("section").getAttribute("aria-label");
  prototype.clearRect = function (...area) { drawn.add(chart(this)); return clearRect.apply(this, area); };
  prototype.lineTo = function (x, y) {
    if (this.getLineDash().length) {
      const plot = this.canvas.parentElement.querySelector(".u-over").getBoundingClientRect();
      const at = this.canvas.getBoundingClientRect().top + y / devicePixelRatio;
      found[chart(this)] = (plot.bottom - at) / plot.height;
    }
    return lineTo.call(this, x, y);
  };
  world.tell("theme"); // all are drawn anew
  while (drawn.size < 12) await new Promise((done) => setTimeout(done, 20));
  Object.assign(prototype, { clearRect, lineTo });
  return found;
}"""
"""The charts with a dashed line across, and its height as a share of theirs."""
WITHOUT_TARGETS = """async () => {
  const { live, world } = await import(document.querySelector("script[type=module]").src);
  live.stop();
  world.takeHello({ ...world.hello, targets: {} });
}"""


def test_targets_are_lines_in_charts(page: Page) -> None:
    """At their values, above what was measured and below it, in the two charts that they are of; named in the key.
    They come with the feed, later than a page that begins with the charts; without targets there are none."""
    rows = [{"ttft_p99_s": 0.5, "itl_p99_s": 0.1, "e2e_p99_s": 3.0}] * 3
    page.route("**/api/history?*", lambda route: route.fulfill(json=history(rows)))
    page.goto("/#/charts")
    page.reload()
    for title, text in (("Time to first token", "target 2.00 s"), ("Time between tokens", "target 50.0 ms")):
        expect(page.get_by_label(title, exact=True).locator(".target")).to_have_text(text)
    expect(page.locator(".target:visible")).to_have_count(2)
    heights = page.evaluate(LINES)
    assert heights == {
        "Time to first token": pytest.approx(1 / 1.12, abs=0.01),
        "Time between tokens": pytest.approx(0.05 / 0.1 / 1.12, abs=0.01),
    }
    page.evaluate(WITHOUT_TARGETS)
    expect(page.locator(".target:visible")).to_have_count(0)
    assert page.evaluate(LINES) == {}


def test_actors_are_drained_and_stopped_and_come_back(page: Page, url: str) -> None:
    """An executor of two and the detokenizer: each goes, and its supervisor starts another process in its place. What
    they had begun goes on; nobody without the key can do that."""
    assert httpx.post(f"{url}/api/actors/executor/executor-0/stop", json={}, timeout=LIMIT_S).status_code == 401

    def answer(_: int) -> tuple[int, str]:
        body = {"prompt": "What is water?", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        choice = httpx.post(f"{url}/v1/completions", json=body, headers=AUTHORIZED, timeout=LIMIT_S).json()
        return choice["usage"]["completion_tokens"], choice["choices"][0]["text"]

    before = {name: process_of(page.locator(f"[data-actor={name}]")) for name in ("executor-0", "detokenizer-0")}
    with ThreadPoolExecutor(4) as clients:
        answers = clients.map(answer, range(4))
        card = order(page, "executor-0", "Drain")
        expect(card.locator(".chip")).not_to_have_text("ready")
        expect(card).to_contain_text("restarted once")
        stopped = order(page, "detokenizer-0", "Stop")
        expect(stopped).to_contain_text("restarted once")
        for each in (card, stopped):
            expect(each.locator(".chip")).to_have_text("ready")
        told = set(answers)
    assert len(told) == 1, "not all got the same"
    events = page.get_by_label("Last events").locator("li")
    for text in (
        "executor-0 ended, as it was told to.",
        "detokenizer-0 ended, as it was told to.",
        "executor-0 was started again",
        "detokenizer-0 was started again",
    ):
        expect(events.filter(has_text=text)).to_have_count(1)
    for name, target in (("First token, p99", "2.00 s"), ("Between tokens, p99", "50.0 ms")):
        figure = page.locator(".figure", has=page.get_by_text(name, exact=True))
        expect(figure.locator(".note")).to_have_text(re.compile(f"^(within|above) target {target}$"))
    assert next(iter(told))[0] == 200
    after = {name: process_of(page.locator(f"[data-actor={name}]")) for name in before}
    assert all(None is not after[name] != before[name] for name in before)
