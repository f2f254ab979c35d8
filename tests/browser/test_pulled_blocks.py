"""Blocks that move between executors, on their two maps."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from pagebus.web.observatory.board import PINNED, Board
from tests.actors.scheduler.moves.test_shown import TARGET, Watched, owners
from tests.browser.looking import pixel_of, wait_until

MODULE = "document.querySelector('script[type=module]').src"
TAKE_OVER = f"""async () => {{
  (await import({MODULE})).live.stop();
  window.clockMs = performance.now();
  performance.now = () => window.clockMs;
}}"""
"""From now on the test says what the deployment is, and how late."""
TAKE = f"async (state) => (await import({MODULE})).world.takeState(state)"
ACCENT = """() => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}"""


def show(page: Page, board: Board, pair: Watched) -> Any:
    """Send the page what a scheduler tells that holds these two executors."""
    state = pair.look()
    page.evaluate(TAKE, board.update(state))
    return state


def test_a_block_leaves_one_map_and_enters_the_other(page: Page) -> None:
    """Both sides are marked meanwhile; what has arrived flashes, then has the colour of the sequence that waited."""
    page.goto("/#/memory")
    expect(page.locator(".map canvas").first).to_be_visible()
    figure = page.locator(".figure", has=page.get_by_text("Pulled / lent", exact=True)).locator("dd")
    expect(figure).to_be_hidden()  # where there is one executor
    page.evaluate(TAKE_OVER)
    pair, board = Watched(), Board()
    pair.world.step("gpu-1")
    state = show(page, board, pair)
    page.get_by_role("button", name="gpu-1").click()
    expect(figure).to_have_text("0 / 0")
    expect(page.get_by_text("Being copied", exact=True)).to_be_visible()
    flashes = page.get_by_text("Just pulled from another executor")
    expect(flashes).to_be_hidden()
    assert owners(state, TARGET)[1] == PINNED
    page.get_by_label("Device blocks of gpu-1").press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("Block 1 · being copied")
    page.get_by_label("Device blocks of gpu-1").press("Escape")

    (*_, block) = pair.arrive()
    show(page, board, pair)
    expect(figure).to_have_text("9 / 0")
    expect(flashes).to_be_visible()
    wait_until(page, lambda: pixel_of(page, block)[:3] == page.evaluate(ACCENT))
    page.evaluate("() => { window.clockMs += 2000; }")
    wait_until(page, lambda: pixel_of(page, block)[:3] != page.evaluate(ACCENT))
    page.get_by_role("button", name="gpu-0").click()
    expect(figure).to_have_text("0 / 9")
    expect(flashes).to_be_hidden()
