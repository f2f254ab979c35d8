"""Pictures of every view from a real run: ``python -m tests.browser.screenshots FOLDER`` (or ``make screenshots``).
With ``--all`` every view in every size and theme, to look at.

A ``pagebus serve`` of the shipped model on this machine, with a small cache and a host tier, under a dozen clients.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import threading
from pathlib import Path

import aiohttp
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUM
from tests.browser.served import served

SERVE = ("--num-gpu-blocks-override", "420", "--swap-space", "0.05", "--max-num-batched-tokens", "192")
WORDS = ("water", "river", "brave", "light", "house", "music", "bread", "ocean", "stone", "green", "happy", "winter",
         "honest", "bridge", "garden", "silver", "thunder", "gentle", "planet", "letter")  # fmt: skip
CLIENTS = 14
WARM_MS = 25_000
LOOK_MS = 4_000
VIEWS = ("overview", "memory", "steps", "requests", "charts", "replay", "batches")
Picture = tuple[str, tuple[int, int], str, tuple[str, ...]]
PICTURES: tuple[Picture, ...] = (
    ("", (1280, 860), "light", (*VIEWS, "chat")),
    ("-dark", (1280, 860), "dark", (*VIEWS, "chat")),
    ("-wide", (2560, 1400), "dark", ("memory", "replay")),
    ("-phone", (360, 760), "light", ("overview", "memory", "requests", "chat")),
)
"""Suffix of the file, size of the window, theme, and which views: those of the documentation."""
EVERY: tuple[Picture, ...] = tuple(
    (f"-{size[0]}-{theme}", size, theme, (*VIEWS, "chat"))
    for size in ((1280, 860), (2560, 1400), (360, 760))
    for theme in ("light", "dark")
)
"""To look at."""


async def load(url: str, stop: threading.Event) -> None:
    """Clients that ask one thing after another; many prompts begin alike, and some want two answers."""
    dice = random.Random(7)

    async def client(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            words = " ".join(dice.choices(WORDS, k=dice.choice((2, 12, 60, 160))))
            messages = [
                {"role": "system", "content": "You are a dictionary. " * 8},
                {"role": "user", "content": f"What is {dice.choice(WORDS)}? {words}"},
            ]
            body = {"messages": messages, "max_tokens": dice.randint(10, 220), "ignore_eos": True,
                    "n": dice.choice((1, 1, 1, 2)), "stream": True}  # fmt: skip
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                async for _ in response.content:
                    if stop.is_set():
                        return
            await asyncio.sleep(dice.random())

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))


def open_page(browser: Browser, url: str, size: tuple[int, int], theme: str, notes: str = "closed") -> Page:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.add_init_script(f"localStorage.setItem('pagebus.notes', '{notes}')")
    page.goto(url)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    return page


DOUBTFUL = """() => {
  const doubt = (token) => Number(token.style.getPropertyValue("--doubt"));
  const tokens = [...document.querySelectorAll(".tokens button")];
  tokens.reduce((one, other) => (doubt(one) >= doubt(other) ? one : other)).focus();
}"""
"""Points at the token of which the model was least sure."""


def talk(page: Page) -> None:
    """A short talk, with the tokens of its last answer."""
    page.get_by_role("link", name="Playground").click()
    tune = page.get_by_role("button", name="Settings")
    if tune.is_visible():
        tune.click()
    page.get_by_label("Show tokens and their odds").check()
    page.locator("[name=temperature]").fill("0")
    if tune.is_visible():
        tune.click()
    for number, text in enumerate(("What is water?", "What does brave mean?"), 1):
        page.get_by_label("Message").fill(text)
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Copy as…")).to_have_count(number)
        expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    page.evaluate(DOUBTFUL)
    page.evaluate("document.querySelector('.settings').scrollTop = 0")


def take(browser: Browser, url: str, folder: Path, pictures: tuple[Picture, ...]) -> None:
    for suffix, size, theme, views in pictures:
        page = open_page(browser, url, size, theme, notes="open" if size[0] > 2000 else "closed")
        for view in views:
            page.goto(f"{url}/#/{view}")
            if view == "memory":
                page.locator(".map canvas").first.hover(position={"x": 60, "y": 12})
            if view == "charts":
                page.get_by_role("button", name="1 min").click()
            if view == "chat":
                talk(page)
            else:
                page.wait_for_timeout(LOOK_MS)
            page.screenshot(path=folder / f"page-{view}{suffix}.png")
        page.context.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots", description="Pictures of the page.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every view in every size and theme")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=30_000)
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory() as files,
        served(*SERVE, "--files-dir", files) as url,
        sync_playwright() as playwright,
    ):
        loading = threading.Thread(target=lambda: asyncio.run(load(url, stop)))
        loading.start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = open_page(browser, url, (1280, 860), "light")
            page.wait_for_timeout(WARM_MS)
            page.goto(f"{url}/#/batches")
            page.get_by_role("button", name="Run an example of 20 questions").click()
            expect(page.get_by_text("of 20 done")).to_be_visible()
            page.context.close()
            take(browser, url, folder, EVERY if arguments.all else PICTURES)
        finally:
            browser.close()
            stop.set()
            loading.join()


if __name__ == "__main__":
    main()
