"""Blocks that move between executors, on their two maps: live, and of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from pagebus.actors.commands.cli import main
from pagebus.actors.simulator.recording.recorded import read_rows
from pagebus.web.observatory.board import FREE, PINNED, Board
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
RECORDED = """async ([text, times]) => {
  const { Recording } = await import("/static/js/replay/recording.js");
  const recording = new Recording(text.split("\\n").filter((line) => line)), world = recording.world();
  return times.map((atS) => {
    recording.show(world, atS);
    return Object.fromEntries([...world.replicas].map(([name, { device, ...counts }]) => [name, {
      owners: [...device.owners], counts,
      flashes: [...device.flashes].filter(([, [kind, sinceMs]]) => kind === 3 && performance.now() - sinceMs < 900).map(([block]) => block),
    }]));
  });
}"""  # noqa: E501
"""What the world of a recording is at some times."""
SIMULATE = (
    "simulate --workload long4k --requests 4 --executors 2 --link-gbps 100 --roles prefill=1,decode=1 "
    "--num-gpu-blocks-override 2000"
)


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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run in which prompts are computed by one executor, and pulled by the other."""
    path = tmp_path_factory.mktemp("recorded") / "pulls.jsonl"
    assert main([*SIMULATE.split(), "--record", str(path)]) == 0
    return path


def test_pulls_of_a_recording_are_on_both_maps(page: Page, recorded: Path) -> None:
    """Marked from the order to the end, then cached on both sides; they flash where they have come, forth and back."""
    pulls = [row for row in read_rows(recorded) if "pull" in row]
    pull = max(pulls, key=lambda row: len(row["blocks"]))
    before_s, after_s = pull["ordered_s"] - 1e-6, pull["ended_s"] + 1e-6
    steps = [row for row in read_rows(recorded) if row.get("replica") == "executor-1" and row.get("entered")]
    entered_s = min(row["done_s"] for row in steps if row["planned_s"] >= pull["ended_s"])
    times = [after_s, before_s, (before_s + after_s) / 2, after_s, entered_s, after_s + 1]
    again, before, during, after, entered, late = page.evaluate(RECORDED, [recorded.read_text(), times])
    for name, side in (("executor-0", "sources"), ("executor-1", "blocks")):
        marked = [[shown[name]["owners"][block] for block in pull[side]] for shown in (before, during, after)]
        assert PINNED not in marked[0]
        assert set(marked[1]) == {PINNED}
        assert PINNED not in marked[2]
        assert FREE not in marked[2]
    waited = entered["executor-1"]["owners"][pull["blocks"][-1]]
    assert waited > 0
    assert waited in before["executor-0"]["owners"]
    assert not any(waited in shown["executor-0"]["owners"] for shown in (after, entered))
    assert after == again
    assert set(pull["blocks"]) <= set(after["executor-1"]["flashes"])
    assert not set(pull["blocks"]) & {*before["executor-1"]["flashes"], *during["executor-1"]["flashes"]}
    assert not set(pull["blocks"]) & set(late["executor-1"]["flashes"])
    total = sum(len(each["blocks"]) for each in pulls if each["ended_s"] <= after_s)
    counts = [after[name]["counts"] for name in ("executor-0", "executor-1")]
    assert [(each["pulled_blocks"], each["lent_blocks"]) for each in counts] == [(0, total), (total, 0)]


def test_a_replay_tells_of_pulls(page: Page, recorded: Path) -> None:
    """As figures, in the legend, and on the time axis beside the steps; a recording without any does not."""
    pulls = [row for row in read_rows(recorded) if "pull" in row]
    page.goto("/#/replay")
    figure = page.locator(".figure", has=page.get_by_text("Pulled / lent", exact=True)).locator("dd")
    expect(page.get_by_text("cpu-run.jsonl.gz")).to_be_visible()
    expect(figure).to_be_hidden()
    page.get_by_label("Open a recording").set_input_files(recorded)
    expect(page.get_by_text("pulls.jsonl")).to_be_visible()
    page.get_by_label("Time in the recording").press("End")
    total = sum(len(row["blocks"]) for row in pulls)
    expect(figure).to_have_text(f"0 / {total:,}")
    expect(page.locator(".figure", has_text="Preempted").locator("dd")).to_have_text("0")  # they moved
    page.get_by_role("button", name="executor-1").click()
    expect(figure).to_have_text(f"{total:,} / 0")
    expect(page.get_by_text("Just pulled from another executor")).to_be_visible()
    canvas, tip = page.get_by_label("Steps over time"), page.locator("#tip")
    last = pulls[-1]
    told = f"{len(last['blocks'])} from executor-0 to executor-1"
    canvas.press("ArrowLeft")
    for _ in range(len([row for row in read_rows(recorded) if "step" in row])):
        if told in tip.inner_text():
            break
        canvas.press("ArrowLeft")
    expect(tip).to_contain_text(told)
