"""Watching the engine in a real browser: what the page shows is what the scheduler holds."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import CDPSession, Page, expect

from pagebus.actors.commands.cli import main
from pagebus.actors.simulator.recording.recorded import Tables, read_rows
from pagebus.bus.messages import GenerateRequest, SamplingParams
from tests.browser.deployment import Deployment
from tests.browser.looking import wait_until
from tests.helpers.waiting import LIMIT_S

NUMBERS = count()
ROOT = Path(__file__).parents[2]
WIDTHS = (360, 2560, 1280)
VIEWS = ("chat", "batches", "overview", "memory", "steps", "requests", "charts", "replay")
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
MODULE = "document.querySelector('script[type=module]').src"
WORLD = f"(await import({MODULE})).world"


def visit(page: Page, view: str) -> None:
    page.goto(f"/#/{view}")
    expect(page.locator("nav a[aria-current=page]")).to_have_attribute("href", f"#/{view}")


def send(deployment: Deployment, request_id: str, num_prompt: int = 40, **sampling: Any) -> None:
    """A request of token ids, straight onto the bus, as any client of the bus could."""
    options = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0, **sampling}
    message = GenerateRequest(
        request_id=request_id,
        ingress="nobody",
        sampling=SamplingParams(**options),
        prompt_token_ids=np.arange(10, 10 + num_prompt, dtype=np.int32),
    )
    deployment.publish(deployment.names.requests, message)


def own_map(deployment: Deployment) -> tuple[list[int], list[int]]:
    """Owners and numbers of owners of all device blocks, from the scheduler's own books."""
    replica = deployment.replica
    owners, shares = [0] * replica.pool.num_blocks, Counter[int]()
    for block in replica.index.listed:
        owners[block] = -1
    sequences = [each for each in replica.slots.sequences if each is not None]
    for sequence in reversed(sequences):
        shares.update(sequence.blocks)
        for block in sequence.blocks:
            owners[block] = sequence.id
    return owners, [shares[block] for block in range(len(owners))]


def shown_map(page: Page) -> tuple[list[int], list[int]]:
    """The same as the page has it."""
    owners, shares = page.evaluate(
        f"(async () => {{ const [replica] = {WORLD}.replicas.values();"
        " return replica ? [[...replica.device.owners], [...replica.device.shares]] : [[], []]; })()"
    )
    return owners, shares


def test_the_block_map_is_the_schedulers_at_a_paused_step(page: Page, deployment: Deployment) -> None:
    """Owners, sharing, cached and free blocks, in what the page knows and in the pixels it draws."""
    visit(page, "memory")
    deployment.until_served(lambda: send(deployment, "before", max_tokens=3))
    deployment.hold()
    send(deployment, "twins", n=2)
    send(deployment, "other", num_prompt=56)
    deployment.until(lambda: len(deployment.core.requests) == 2)
    deployment.hold(after=9)
    deployment.paused()
    deployment.until(lambda: len(deployment.replica.slots) == 3)
    expected = own_map(deployment)
    assert max(expected[1]) > 1
    wait_until(page, lambda: shown_map(page) == expected)
    assert own_map(deployment) == expected, "the scheduler has gone on"
    by_owner: dict[int, set[tuple[int, ...]]] = {}
    for _ in range(8):  # a busy machine is slow to let flashes fade
        by_owner = {owner: set() for owner in expected[0]}
        for owner, colour in zip(expected[0], page.evaluate(PIXELS), strict=True):
            by_owner[owner].add(tuple(colour))
        if all(len(colours) == 1 for colours in by_owner.values()):
            break
    assert all(len(colours) == 1 for colours in by_owner.values()), "a block is drawn as another's"
    assert len(set.union(*by_owner.values())) == len(by_owner), "two owners look the same"


PIXELS = """async () => {
  await new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 1000));
  const canvas = document.querySelector(".map canvas"), context = canvas.getContext("2d");
  const [replica] = (await import(document.querySelector("script[type=module]").src)).world.replicas.values();
  const count = replica.device.owners.length;
  const rows = [...Array(count).keys()].find((rows) => rows && Math.ceil(count / Math.round(canvas.width / (canvas.height / rows))) === rows);
  const size = canvas.height / rows, columns = Math.round(canvas.width / size);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return Array.from({ length: count }, (_, block) => {
    const x = Math.round(((block % columns) * canvas.width) / columns) + 4, y = Math.floor(block / columns) * size + 4;
    return [...pixels.slice((y * canvas.width + x) * 4, (y * canvas.width + x) * 4 + 4)];
  });
}"""  # noqa: E501


def test_a_block_tells_its_table_and_hashes(page: Page, deployment: Deployment) -> None:
    """With the keyboard alone."""
    visit(page, "memory")
    deployment.hold(after=4)
    send(deployment, "one", num_prompt=50)
    deployment.paused()
    (sequence,) = deployment.replica.slots.occupied()
    expect(page.get_by_text(f"{len(sequence.blocks)} of 160 held")).to_be_visible()
    page.get_by_label("Device blocks of executor-0").focus()
    for _ in range(sequence.blocks[1] - 0):
        page.keyboard.press("ArrowRight")
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"Block {sequence.blocks[1]}")
    expect(tip).to_contain_text(f"2 of {len(sequence.blocks)} in its table")
    expect(tip).to_contain_text(sequence.hashes[1].hex()[:8])


def test_cancel_frees_the_blocks_on_the_map(page: Page, deployment: Deployment) -> None:
    """A request is followed, then cancelled; the map shows its blocks free."""
    deployment.hold(after=5)
    send(deployment, "goes-away")
    deployment.paused()
    visit(page, "requests")
    row = page.locator(".waterfall .row", has_text="goes-away")
    row.click()
    drawer = page.get_by_label("Followed request")
    expect(drawer).to_contain_text("40 tokens")
    drawer.get_by_role("button", name="Cancel request").click()
    deployment.until(lambda: not deployment.core.requests)
    expect(row).to_contain_text("ended early")
    deployment.release()
    visit(page, "memory")
    expect(page.get_by_text("0 of 160 held")).to_be_visible()
    assert deployment.replica.pool.num_free == deployment.replica.pool.num_blocks


def test_an_id_of_a_request_stays_text(page: Page, deployment: Deployment) -> None:
    """Whoever can write to the bus can choose any id."""
    evil = "<script>window.hacked = 1</script><img src=x onerror=window.hacked=1>"
    visit(page, "requests")
    send(deployment, evil, max_tokens=2)
    row = page.get_by_title(evil)
    expect(row).to_have_text(evil[:12])
    row.click()
    expect(page.get_by_label("Followed request").get_by_text(evil)).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_steps_are_shown_with_their_tokens(page: Page, deployment: Deployment) -> None:
    """Each step once; prefill and decode tokens as they were computed."""
    visit(page, "steps")
    before = deployment.replica.step
    send(deployment, "counted", num_prompt=41, max_tokens=10)
    deployment.until(lambda: deployment.replica.step > before and deployment.core.is_idle)
    last = deployment.replica.step
    last_shown = f"(async () => {WORLD}.steps.at(-1)?.step)()"
    wait_until(page, lambda: page.evaluate(last_shown) == last)
    steps = page.evaluate(
        f"(async () => {WORLD}.steps.map((step) => [step.step, step.decodes, step.prefill, step.wasted]))()"
    )
    mine = [step for step in steps if step[0] > before]
    assert [step[0] for step in mine] == list(range(before + 1, last + 1))
    cached = 41 // 16 * 16 if sum(step[2] for step in mine) < 41 else 0
    assert sum(step[2] for step in mine) == 41 - cached
    assert sum(step[1] - step[3] for step in mine) == 9
    in_sight = f"(async () => {WORLD}.nowS() - 0.25 > {WORLD}.steps.at(-1).done_s)()"  # the view is a moment behind
    wait_until(page, lambda: page.evaluate(in_sight))
    page.get_by_role("button", name="Hold").click()
    page.get_by_label("Steps over time").press("ArrowLeft")
    for _ in range(2):
        page.get_by_label("Steps over time").press("ArrowLeft")
    expect(page.locator("#tip")).to_contain_text(f"Step {last - 2}")
    for name in ("Decode", "Prefill", "Step", "Gap before it", "Plan on the bus", "Result on the bus"):
        expect(page.locator("#tip dt").get_by_text(name, exact=True)).to_be_visible()


def test_a_request_is_shown_with_all_its_phases(page: Page, deployment: Deployment) -> None:
    """From the queue to the text."""
    visit(page, "requests")
    answer = httpx.post(f"{deployment.url}/v1/completions", json={"prompt": "water", "max_tokens": 3}, timeout=LIMIT_S)
    name = answer.json()["id"].removeprefix("cmpl-")[:12]
    row = page.locator(".waterfall .row", has_text=name)
    expect(row).to_contain_text("done")
    row.click()
    drawer = page.get_by_label("Followed request")
    for phase in ("Queued", "Tokenize", "Waiting for blocks", "Prefill", "Decode", "Detokenize"):
        expect(drawer.get_by_text(phase, exact=True)).to_be_visible()
    expect(drawer.get_by_text("Preempted", exact=True)).to_be_visible()
    expect(drawer.get_by_text("Priority", exact=True)).to_be_visible()


def test_a_killed_actor_is_shown_as_gone_and_back(page: Page, deployment: Deployment) -> None:
    visit(page, "overview")
    card = page.locator("[data-actor=detokenizer-0]")
    expect(card).to_contain_text("ready")
    deployment.kill("detokenizer-0")
    expect(card).to_contain_text("gone for")
    deployment.revive("detokenizer", "detokenizer-0")
    expect(card).to_contain_text("ready")
    expect(card).to_contain_text("restarted once")
    deployment.until(lambda: not deployment.ingress.context.missing())  # type: ignore[union-attr]


def test_an_actor_is_not_ended_where_all_share_a_process(page: Page) -> None:
    """The question is asked, and the server's refusal shown."""
    visit(page, "overview")
    page.locator("[data-actor=tokenizer-0]").get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain it").click()
    expect(page.get_by_role("alert")).to_contain_text("share one process")
    page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 409


def test_a_replay_shows_what_the_recording_says(page: Page) -> None:
    """Who owns which block after a step, as another reader of the same file finds it."""
    rows = [row for row in read_rows(ROOT / "docs/measurements/cpu-run.jsonl.gz") if "step" in row]
    rows.sort(key=lambda row: row["done_s"])
    tables = Tables()
    for row in rows[:121]:
        tables.apply(row)
    found = page.evaluate(
        """async (atS) => {
          const { Recording, readLines } = await import("/static/js/replay/recording.js");
          const blob = await (await fetch("/static/sample/cpu-run.jsonl.gz")).blob();
          const recording = new Recording(await readLines(blob)), world = recording.world();
          recording.show(world, recording.endS);
          recording.show(world, atS);
          return [...world.replicas.values()][0].device.owners.reduce((held, owner) => held + (owner > 0), 0);
        }""",
        rows[120]["done_s"],
    )
    assert found == len(tables.held())
    visit(page, "replay")
    step = page.locator(".figure", has_text="Step").locator("dd")
    expect(step).to_contain_text("of 285")
    before = step.inner_text()
    page.get_by_role("button", name="Next step").click()
    expect(step).not_to_have_text(before)


def test_a_simulated_run_is_replayed(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``pagebus simulate --record`` wrote opens like a recording; with two executors, either is shown."""
    path = tmp_path / "simulated.jsonl.gz"
    run = ["simulate", "--workload", "chat", "--requests", "6", "--executors", "2", "--num-gpu-blocks-override", "300"]
    assert main([*run, "--record", str(path)]) == 0
    steps = [row for row in read_rows(path) if "step" in row]
    visit(page, "replay")
    page.get_by_label("Open a recording").set_input_files(path)
    expect(page.get_by_text("simulated.jsonl.gz")).to_be_visible()
    page.get_by_label("Time in the recording").press("End")
    for name in ("executor-1", "executor-0"):
        page.get_by_role("button", name=name).click()
        expect(page.get_by_label(f"Device blocks of {name}")).to_be_visible()
        last = max(row["step"] for row in steps if row["replica"] == name)
        expect(page.locator(".figure", has_text="Step").locator("dd")).to_have_text(f"{last} of {last}")
    expect(page.locator(".figure", has_text="Blocks held").locator("dd")).to_contain_text("of 300")


FRAMES = """async ([blocks, running, turns]) => {
  const { live, world } = await import(document.querySelector("script[type=module]").src);
  live.stop();
  const { requests, sequences } = world.hello.columns, atS = world.atS;
  const { device, host, ...counts } = [...world.replicas.values()][0];
  const base64 = (array) => btoa([...new Uint8Array(array.buffer)].map((byte) => String.fromCharCode(byte)).join(""));
  const row = (columns, known) => columns.map((name) => known[name] ?? (name.endsWith("_s") ? atS - 1 : 1));
  const ids = Array.from({ length: running }, (_, index) => index + 1);
  const state = (map, flashed) => ({
    at_s: atS, num_waiting: 0, num_over: 0, steps: [], flashed,
    requests: ids.map((id) => row(requests, { id: `request-${id}`, over_s: null, ended_s: null })),
    sequences: ids.map((id) => row(sequences, { id, request: id - 1, choice: 0, state: 2, replica: 0 })),
    replicas: [{ ...counts, num_blocks: blocks, num_running: running, device: { size: blocks, ...map },
      host: { size: 0 } }],
  });
  const owners = Int32Array.from({ length: blocks }, (_, block) => 1 + Math.floor((block * running) / blocks));
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  world.takeState(state({ owners: base64(owners), shares: base64(new Uint8Array(blocks).fill(1)) }, []));
  await frame();
  const start = performance.now();
  for (let turn = 0; turn < turns; turn++) {
    const changed = Int32Array.from(ids, (id) => (turn * 997 + id * 151) % blocks);
    const map = { changed: base64(changed), owners: base64(Int32Array.from(ids, (id) => 1 + ((id + turn) % running))),
      shares: base64(new Uint8Array(running).fill(1)) };
    world.takeState(state(map, [...changed].flatMap((block) => [0, block % 3, block])));
    await frame();
  }
  return (1000 * turns) / (performance.now() - start);
}"""


def worked_s(thread: CDPSession) -> float:
    """How long the page's thread has worked, without what other processes took meanwhile."""
    metrics = {each["name"]: each["value"] for each in thread.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


@pytest.mark.parametrize(("blocks", "least"), [(10_000, 30), (100_000, 10)])
def test_large_maps_move_smoothly(page: Page, blocks: int, least: int) -> None:
    """The whole view, with 64 running requests that each change a block in every frame, which flashes: frames a second.
    Every block can still be seen and found, also the last of 100,000."""
    visit(page, "memory")
    expect(page.locator(".map canvas").first).to_be_visible()
    thread = page.context.new_cdp_session(page)
    thread.send("Performance.enable", {"timeDomain": "threadTicks"})
    before_s = worked_s(thread)
    rate = page.evaluate(FRAMES, [blocks, 64, 60])
    frame_s = (worked_s(thread) - before_s) / 60
    print(f"{blocks} blocks: {rate:.0f} frames/s, of each {frame_s * 1000:.1f} ms of the page's thread")
    assert rate >= least or frame_s < 1 / least, "slow not only because the machine has other work to do"
    expect(page.get_by_text(f"{blocks:,} of {blocks:,} held")).to_be_visible()
    box = page.get_by_label("Device blocks of executor-0").bounding_box()
    assert box is not None
    assert box["width"] * box["height"] >= 4 * (blocks - box["width"]), "squares of at least two pixels"
    page.get_by_label("Device blocks of executor-0").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("Block 2 · held")
    expect(page.locator("#tip")).to_contain_text("request-")


CLIPPED = """() => {
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push(`the page: ${document.documentElement.scrollWidth}`);
  for (const element of document.querySelectorAll("main *, .rail *")) {
    const style = getComputedStyle(element);
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || element.closest(".clip, .sr, .rail nav, .heading .label, select, textarea")) continue;
    const box = element.getBoundingClientRect();
    const scrolls = element.closest(".segmented, pre, .table");
    if (!scrolls && (box.right > innerWidth + 1 || box.left < -1)) found.push(`${element.className} ${element.textContent}`);
    const hides = style.overflowX !== "visible" && style.display !== "inline";
    if (!scrolls && hides && element.scrollWidth > element.clientWidth + 1) found.push(`cut: ${element.className} ${element.textContent}`);
    const holder = element.closest(".figure, .card, .chip");
    if (holder && !scrolls && box.right > holder.getBoundingClientRect().right + 1) found.push(`over: ${element.textContent}`);
  }
  return found;
}"""  # noqa: E501


RULES = {"light": {"resultTypes": ["violations"]}, "dark": {"runOnly": ["color-contrast"]}}
"""In the dark only colours are others."""
SETTLED = "() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 150))"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_accessible_and_fits(page: Page, deployment: Deployment, theme: str) -> None:
    """While something runs: axe-core finds no serious fault, and no text is clipped on a phone, a laptop and a large
    screen."""
    deployment.hold(after=5)
    send(deployment, f"seen-{next(NUMBERS)}")
    deployment.paused()
    if theme == "dark":
        page.get_by_role("button", name="Dark or light").click()
    page.evaluate(AXE)
    for view in VIEWS:
        visit(page, view)
        page.evaluate(SETTLED)
        found = page.evaluate("async (rules) => (await axe.run(rules)).violations", RULES[theme])
        faults = [
            (view, fault["id"], [node["html"][:160] for node in fault["nodes"][:3]])
            for fault in found
            if fault["impact"] in ("serious", "critical")
        ]
        assert faults == []
        for width in WIDTHS if theme == "light" else ():
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate(SETTLED)
            assert page.evaluate(CLIPPED) == [], (view, width)
