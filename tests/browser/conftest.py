"""One deployment and one browser for all tests of a module; a new page for each, whose console must stay silent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.browser.deployment import Deployment
from tests.helpers.waiting import LIMIT_MS

CHROMIUM = os.environ.get("PAGEBUS_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
"""Chromium breaks its connections off, those to this machine too, when a network interface comes or goes: as when
containers are started beside the tests."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The shipped model behind real actors."""
    started = Deployment(files_dir=str(tmp_path_factory.mktemp("files")))
    started.start()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, as Debian packs it."""
    assert CHROMIUM is not None, "these tests need chromium: `make test` installs it"
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page of a server, as who comes for the first time sees it. Whatever it says on the console as a warning or
    an error is a failure."""
    said: list[str] = []
    context = context_of(browser, url)
    context.pages[0].evaluate("localStorage.clear()")
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.said = said  # type: ignore[attr-defined]
    page.goto("/")
    if any(NETWORK_CHANGED in each for each in said):
        page.reload()
    yield page
    for each in context.pages[1:]:
        each.close()
    assert [each for each in said if NETWORK_CHANGED not in each] == []


def context_of(browser: Browser, url: str) -> BrowserContext:
    """All pages of a server share one, and with it the process that draws them, which has compiled the scripts: a
    process for each page takes twice as long. Its first page shows little, and keeps it."""
    for context in browser.contexts:
        if context.pages[0].url.startswith(url):
            return context
    context = browser.new_context(viewport={"width": 1280, "height": 860}, base_url=url)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.new_page().goto("/health")
    return context


@pytest.fixture
def page(browser: Browser, deployment: Deployment) -> Iterator[Page]:
    """The page, just opened."""
    with opened(browser, deployment.url) as page:
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        yield page
    deployment.release()
    deployment.until(lambda: deployment.core.is_idle)
