"""The playground's choice among the served model and its adapters, which come and go while the page is open."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from pagebus.actors.model.config import SHIPPED_MODEL
from tests.browser.conftest import opened
from tests.browser.deployment import Deployment
from tests.browser.playground.test_playground import answer_of, answers, ask
from tests.helpers.lora.adapters import make_adapter
from tests.helpers.waiting import LIMIT_S

HTML = "<img src=x onerror=window.hacked=1>"
LONG = "customer-support-" * 15
LOOK_MS = 5000
"""How often the page asks for the list."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """The shipped model, with adapters."""
    started = Deployment(enable_lora=True)
    started.start()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "one", SHIPPED_MODEL, seed=1)


@pytest.fixture
def page(browser: Browser, deployment: Deployment) -> Iterator[Page]:
    """The page, whose clock is moved on by tests that wait for the list."""
    with opened(browser, deployment.url) as page:
        page.clock.install()
        page.reload()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        yield page
    deployment.until(lambda: deployment.core.is_idle)
    for name in list(deployment.ingress.context.model.adapters):  # type: ignore[union-attr]
        change(deployment, "unload", lora_name=name)


def change(deployment: Deployment, what: str, **body: Any) -> None:
    """Load or unload an adapter."""
    answer = httpx.post(f"{deployment.url}/v1/{what}_lora_adapter", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text


def choice(page: Page) -> Locator:
    return page.get_by_role("combobox", name="Model", exact=True)


def choose(page: Page, name: str) -> None:
    """Once the page has asked for the list, and ``name`` is in it."""
    offered(page, name)
    choice(page).select_option(value=name)


def offered(page: Page, *names: str) -> None:
    """Wait until the page offers just these adapters, behind the model."""
    page.clock.fast_forward(LOOK_MS)
    expect(choice(page).locator("option")).to_have_text(["pagebus", *names], use_inner_text=True)


def sent(page: Page, **settings: object) -> dict[str, Any]:
    """What is sent when something is asked; it is answered."""
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, max_tokens=6, temperature=0, **settings)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    body: dict[str, Any] = asked.value.post_data_json
    return body


def test_an_adapter_is_chosen_while_it_is_there(page: Page, deployment: Deployment, adapter: Path) -> None:
    """One that is loaded can be chosen, and answers. Once it is unloaded the model itself does, and that is said."""
    expect(choice(page)).to_be_hidden()
    change(deployment, "load", lora_name="sql", lora_path=str(adapter))
    change(deployment, "load", lora_name="legal", lora_path=str(adapter))
    offered(page, "legal", "sql")
    expect(choice(page)).to_have_value("")
    assert "model" not in sent(page)
    choice(page).select_option("sql")
    page.get_by_role("button", name="New chat").click()
    assert sent(page)["model"] == "sql"
    expect(answers(page)).to_have_text(answer_of(deployment, model="sql", max_tokens=6))
    expect(page.locator(".answer .chip.side")).to_have_text("sql")
    page.reload()
    expect(choice(page)).to_have_value("sql")

    change(deployment, "unload", lora_name="sql")
    offered(page, "legal")
    expect(choice(page)).to_have_value("")
    said = page.get_by_role("alert").filter(has_text="Unloaded: 'sql'. The model itself answers now.")
    expect(said).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    assert "model" not in sent(page)
    expect(said).to_be_hidden()
    expect(answers(page)).to_have_text(answer_of(deployment, max_tokens=6))
    expect(page.locator(".answer .chip.side")).to_have_count(0)
    change(deployment, "unload", lora_name="legal")
    offered(page)


def test_names_of_adapters_stay_text(page: Page, deployment: Deployment, adapter: Path) -> None:
    """Also long ones, which widen nothing; what is copied names them as they are."""
    for name in (HTML, LONG):
        change(deployment, "load", lora_name=name, lora_path=str(adapter))
    offered(page, HTML, LONG)
    for name in (HTML, LONG):
        choice(page).select_option(name)
        expect(choice(page)).to_have_attribute("title", name)
        assert sent(page)["model"] == name
        expect(page.locator(".answer .chip.side").last).to_have_text(name)
        page.get_by_role("button", name="Copy as…").last.click()
        curl = shlex.split(page.get_by_role("dialog").locator("pre").inner_text().replace("\\\n", " "))
        assert json.loads(curl[curl.index("-d") + 1])["model"] == name
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".settings, .answer").locator("img").count() == 0
    assert page.evaluate("window.hacked") is None
    change(deployment, "unload", lora_name=LONG)
    offered(page, HTML)
    expect(page.get_by_role("alert").filter(has_text="Unloaded: 'customer-support-custom…'.")).to_be_visible()


def test_an_adapter_is_compared_with_the_model(page: Page, deployment: Deployment, adapter: Path) -> None:
    """Each side has its own choice."""
    change(deployment, "load", lora_name="sql", lora_path=str(adapter))
    offered(page, "sql")
    page.get_by_label("Compare two settings").check()
    page.get_by_role("button", name="Side B").click()
    choice(page).select_option("sql")
    ask(page, max_tokens=4)
    expect(page.get_by_label("Answer B").locator(".chip.side")).to_have_text("B · model sql, max tokens 4")
    page.get_by_role("button", name="Side A").click()
    expect(choice(page)).to_have_value("")


def test_any_key_may_choose(page: Page, deployment: Deployment, adapter: Path) -> None:
    """The feed is for operators; the playground is for all."""
    change(deployment, "load", lora_name="sql", lora_path=str(adapter))
    page.route("**/api/events", lambda route: route.fulfill(status=403, json={"error": {"message": "No."}}))
    page.reload()
    expect(page.get_by_text("No access", exact=True)).to_be_visible()
    choose(page, "sql")
    assert sent(page)["model"] == "sql"
    page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 403
