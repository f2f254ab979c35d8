"""An operator before the page: actors that are processes of their own are drained and stopped, behind the key."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import opened
from tests.browser.served import served
from tests.helpers.waiting import LIMIT_S

KEY = "a-key-of-32-characters-for-tests"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two executors, and a key."""
    arguments = ("--executors", "2", "--num-gpu-blocks-override", "64", "--api-key", KEY)
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


def test_a_copied_job_runs(page: Page) -> None:
    """As it stands in the dialog: it finds the private server's socket, and its answer, not an older one."""
    page.goto("/#/chat")
    page.locator("[name=max_tokens]").fill("3")
    page.get_by_label("Message").fill("What is water?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copy as…")).to_be_visible()
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
    assert next(iter(told))[0] == 200
    after = {name: process_of(page.locator(f"[data-actor={name}]")) for name in before}
    assert all(None is not after[name] != before[name] for name in before)
