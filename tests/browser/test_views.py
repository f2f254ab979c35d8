"""Views as an operator uses them: who is followed, readings of charts, many requests, failed batches, small windows."""

from __future__ import annotations

import json
import re

import httpx
import numpy as np
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from pagebus.bus.messages import GenerateRequest, SamplingParams
from pagebus.web.observatory.vitals import FIGURES
from tests.browser.deployment import Deployment
from tests.browser.looking import history, pixel_of, wait_until
from tests.helpers.waiting import LIMIT_S

MODULE = "document.querySelector('script[type=module]').src"
WORLD = f"(await import({MODULE})).world"
NONE = "\N{EN DASH}"
EMPTY = [0, 0, 0, 0]
"""A pixel of a map that is not drawn yet."""
NO_SCROLL = ("chat", "batches", "steps")


def visit(page: Page, view: str) -> None:
    page.goto(f"/#/{view}")
    expect(page.locator("nav a[aria-current=page]")).to_have_attribute("href", f"#/{view}")


def send(deployment: Deployment, request_id: str, first: int, num_prompt: int = 40) -> None:
    """A request of token ids; those with the same ``first`` begin alike."""
    prompt = np.arange(first, first + num_prompt, dtype=np.int32)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    message = GenerateRequest(request_id=request_id, ingress="nobody", sampling=sampling, prompt_token_ids=prompt)
    deployment.publish(deployment.names.requests, message)


def test_who_is_followed_stands_out_with_what_it_shares(page: Page, deployment: Deployment) -> None:
    """The second of two that begin alike: its shared blocks are the first one's on the map, and stay bright all the
    same; the first one's own fade. Escape ends it."""
    deployment.until_served(lambda: send(deployment, "before", 10))
    deployment.hold()
    send(deployment, "first", 10)
    send(deployment, "second", 10, 56)
    deployment.until(lambda: len(deployment.core.requests) == 2)
    deployment.hold(after=9)
    deployment.paused()
    deployment.until(lambda: len(deployment.replica.slots) == 2)
    first, second = sorted(deployment.replica.slots.occupied(), key=lambda each: each.request.id)
    shared, own = first.blocks[0], first.blocks[-1]
    assert second.blocks[0] == shared
    visit(page, "memory")
    wait_until(page, lambda: page.evaluate(f"(async () => {WORLD}.sequences.size)()") == 2)
    wait_until(page, lambda: pixel_of(page, shared) == pixel_of(page, own) != EMPTY)  # one sequence, one colour
    bright = pixel_of(page, own)
    visit(page, "requests")
    page.locator(".waterfall .row", has_text="second").click()
    page.get_by_label("Followed request").get_by_role("link", name="Show its blocks").click()
    link = page.get_by_role("button", name="Following second")
    expect(link).to_be_visible()
    wait_until(page, lambda: pixel_of(page, own) != bright)
    assert pixel_of(page, shared) == bright
    page.keyboard.press("Escape")
    expect(link).to_have_count(0)
    wait_until(page, lambda: pixel_of(page, own) == bright)


def test_a_replay_is_played_from_its_start(page: Page) -> None:
    """Home on the slider, and Play at the end: before the first step there is nothing, and it is no error."""
    visit(page, "replay")
    figure = page.locator(".figure", has_text="Time").locator("dd")
    expect(figure).to_contain_text("of 27.6 s")
    slider = page.get_by_label("Time in the recording")
    slider.press("Home")
    expect(figure).to_have_text("0 s of 27.6 s")
    expect(page.get_by_text("0 of 112 held")).to_be_visible()
    slider.press("End")
    expect(figure).to_have_text("27.6 s of 27.6 s")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(figure).not_to_have_text("27.6 s of 27.6 s")
    page.get_by_role("button", name="Pause").click()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    expect(page.get_by_role("button", name="Play")).to_be_in_viewport()


def test_charts_show_the_history(page: Page, deployment: Deployment) -> None:
    """Twelve charts, over a minute to a day."""
    httpx.post(f"{deployment.url}/v1/completions", json={"prompt": "water", "max_tokens": 3}, timeout=LIMIT_S)
    visit(page, "charts")
    expect(page.locator(".chart canvas")).to_have_count(12)
    for name in (
        "p50",
        "p99",
        "tokens/s",
        "429/s",
        "timeouts/s",
        "5xx/s",
        "cancelled/s",
        "waiting",
        "host tier",
        "prefix hits",
        "swapped/s",
        "parked/s",
    ):
        expect(page.locator(".key").get_by_text(name, exact=True).first).to_be_visible()
    for text, span_s in (("1 min", 60), ("1 h", 3600), ("3 h", 10800), ("24 h", 86400), ("10 min", 600)):
        with page.expect_response(f"**/api/history?span_s={span_s}") as answer:
            page.get_by_role("button", name=text, exact=True).click()
        assert len(answer.value.json()["figures"]) == len(FIGURES)
    first = page.get_by_label("Time to first token").locator(".key")
    expect(first).to_contain_text(re.compile(r"p50 \d"))
    expect(first.locator(".target")).to_be_hidden()  # this deployment has none


UNREACHED = """async () => {
  const { live, world } = await import(document.querySelector("script[type=module]").src);
  live.stop();
  world.connected = false;
  world.tell("status");
}"""


def test_an_operators_home_shows_the_figures_of_now(page: Page, deployment: Deployment) -> None:
    """Under a load of some requests, one of which fails: latencies, what runs and waits, the cache, errors by status.
    A page that has lost its server knows nothing of now. The old address of the actors leads here."""

    def figure(name: str) -> Locator:
        return page.locator(".figure", has=page.get_by_text(name, exact=True)).locator("dd").first

    def ask(max_tokens: int = 5) -> bool:
        body = {"prompt": "water", "max_tokens": max_tokens}
        return httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=LIMIT_S).is_success

    visit(page, "memory")
    page.goto("/#/constructor")  # no view's name
    expect(page.locator("nav a[aria-current=page]")).to_have_text(re.compile("Playground"))
    page.goto("/#/actors")
    expect(page.locator("nav a[aria-current=page]")).to_have_text(re.compile("Overview"))
    assert page.url.endswith("#/overview")
    expect(page.locator("#actors")).to_be_in_viewport()
    assert not ask(-1)
    for name in ("First token, p50", "First token, p99", "Between tokens, p50", "Between tokens, p99"):
        wait_until(page, lambda name=name: ask() and re.match(r"\d[\d.]* (µs|ms|s)$", figure(name).inner_text()))
    deployment.hold(after=4)
    for place in range(2):
        send(deployment, f"load-{place}", 10)
    deployment.paused()
    expect(figure("Running")).to_have_text(f"2 of {deployment.replica.slots.num_slots}")
    expect(figure("Waiting")).to_have_text("0")
    expect(figure("Cache in use")).to_have_text(re.compile(r"^\d+(\.\d)?%$"))
    expect(page.locator(".note:visible")).to_have_text([re.compile(r"^\d+ of 160 blocks$")])  # no targets
    errors = page.get_by_label("Errors")
    expect(errors).to_contain_text("last 5 min")
    expect(errors.locator("div", has_text="Other mistakes of clients (4xx)").locator("dd")).to_have_text(
        re.compile("[1-9]")
    )
    expect(page.locator(".banner.home.good")).to_contain_text("No request was lost in the last 5 min.")
    page.evaluate(UNREACHED)
    expect(page.locator(".overview .figure dd:not(.note)")).to_have_text([NONE] * 10)
    expect(errors.locator("dd")).to_have_text([NONE] * 4)


def test_charts_can_be_read(page: Page) -> None:
    """The values of one time in all charts at once, by keys or the pointer; what is not known now is a dash, and no
    figure from before; samples that are missing leave a gap."""
    rows = [{"ttft_p50_s": 0.5, "output_tokens_per_s": 7.0, "server_errors_per_s": 3.0}, {"output_tokens_per_s": 8.0}]
    page.route("**/api/history?*", lambda route: route.fulfill(json=history(rows)))
    visit(page, "charts")
    first, output = (
        page.get_by_label("Time to first token").locator(".key"),
        page.get_by_label("Output").locator(".key"),
    )
    expect(output).to_have_text("tokens/s 8")
    expect(first).to_have_text(f"p50 {NONE}p99 {NONE}")
    chart = page.get_by_label("Output over time")
    chart.press("ArrowLeft")
    chart.press("ArrowLeft")
    expect(first).to_have_text(f"p50 500 msp99 {NONE}")
    expect(output).to_have_text("tokens/s 7")
    expect(page.get_by_label("Errors").locator(".key")).to_contain_text("5xx/s 3.00")
    expect(page.locator(".reading-time")).to_be_visible()
    chart.press("Escape")
    expect(first).to_have_text(f"p50 {NONE}p99 {NONE}")
    expect(page.locator(".reading-time")).to_be_hidden()
    box = page.get_by_label("Output over time").locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
    expect(page.locator(".reading-time")).to_be_visible()
    gaps = page.evaluate(
        """async () => {
          const module = document.querySelector("script[type=module]").src;
          const { withGaps } = await import(new URL("parts/chart.js", module).href);
          return withGaps([[0, 1], [2, 2], [60, 3]], 2);
        }"""
    )
    assert gaps == [[0, 1], [2, 2], [4, None], [60, 3]]


REQUESTS = """async ([many, anew]) => {
  const { live, world } = await import(document.querySelector("script[type=module]").src);
  live.stop();
  if (anew) world.over = []; // those of tests before
  const { requests } = world.hello.columns, atS = world.nowS();
  const row = (columns, known) => columns.map((name) => known[name] ?? (name.endsWith("_s") ? null : 0));
  const over = (index) => ({ id: `over-${String(index).padStart(3, "0")}`, num_prompt: 5, num_output: 2,
    num_drafted: 8, num_accepted: 2, outcome: index % 10 ? 1 : 2, arrived_s: atS - 9 + index / 1000, over_s: atS - 1 });
  const early = { id: "early", arrived_s: atS + 3, num_prompt: 5, num_output: 1 };
  const told = [...Array.from({ length: many }, (_, index) => over(index)), early];
  world.takeState({ at_s: atS, num_waiting: 0, num_over: many, steps: [], flashed: [], replicas: [], sequences: [],
    clients: told.map((each, index) => (index % 2 ? "alice" : "bob")),
    requests: told.map((each) => row(requests, each)) });
}"""


def test_many_requests_can_be_found(page: Page) -> None:
    """Not more are shown than can be read, and that is said; they are found by id, kind and key; a clock that differs a
    little makes no time negative; what is held stays as it is."""
    visit(page, "requests")
    page.get_by_role("button", name="2 min").click()
    page.evaluate(REQUESTS, [100, True])
    rows = page.locator(".waterfall .row")
    expect(page.get_by_text("80 of 101 shown.")).to_be_visible()
    expect(rows).to_have_count(80)
    expect(rows.first).to_contain_text("early")
    expect(rows.first).to_contain_text("0 s")
    page.get_by_role("button", name="Show 80 more").click()
    expect(rows).to_have_count(101)
    page.get_by_role("button", name="Failed").click()
    expect(rows).to_have_count(10)
    page.get_by_label("Key", exact=True).select_option("alice")
    expect(rows).to_have_count(0)
    expect(page.get_by_text("No request fits.")).to_be_visible()
    page.get_by_label("Key", exact=True).select_option("bob")
    page.get_by_label("Find an id").fill("over-03")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="All", exact=True).click()
    page.get_by_label("Key", exact=True).select_option("")
    page.get_by_label("Find an id").fill("")
    page.get_by_label("Order").select_option("oldest")
    expect(rows.first).to_contain_text("over-000")
    page.get_by_role("button", name="Hold").click()
    page.evaluate(REQUESTS, [3, False])
    expect(page.locator(".figure", has_text="Ended just now").locator("dd")).to_contain_text("103")
    expect(rows.first).to_contain_text("over-000")
    expect(rows).to_have_count(101)
    before = rows.nth(60).bounding_box()
    rows.nth(60).click()
    drawer = page.get_by_label("Followed request")
    expect(drawer).to_contain_text("over-060")
    expect(drawer.get_by_text("Key", exact=True)).to_be_visible()
    expect(drawer).to_contain_text("8: 2 accepted (25%), 6 wasted")
    expect(drawer.get_by_role("link", name="Show its blocks")).to_be_hidden()
    assert rows.nth(60).bounding_box() == before or page.evaluate("innerWidth") >= 1200, "it was pushed away"


def test_rows_stay_under_the_pointer(page: Page) -> None:
    """Newcomers, which would come first, come last until the pointer has left."""
    visit(page, "requests")
    page.evaluate(REQUESTS, [20, True])
    rows = page.locator(".waterfall .row")
    expect(rows.nth(5)).to_contain_text("over-015")
    rows.nth(5).hover()
    page.evaluate("""async () => {
      const { world } = await import(document.querySelector("script[type=module]").src);
      world.requests.set("new", { ...world.requests.get("early"), id: "new", arrived_s: world.nowS() + 9 });
    }""")
    expect(rows).to_have_count(22)
    expect(rows.nth(5)).to_contain_text("over-015")
    expect(rows.last).to_contain_text("new")
    page.mouse.move(2, 2)
    expect(rows.first).to_contain_text("new")


BATCH = {"object": "batch", "metadata": {"name": "mine"}, "created_at": 1000, "in_progress_at": 1000,
         "output_file_id": None, "error_file_id": None, "errors": None}  # fmt: skip


def test_batches_say_why(page: Page) -> None:
    """In words: how far, how fast, why one failed; a batch of which nothing came is not green; answers are shown."""
    problem = {"error": {"message": "max_tokens: must be at least 1"}}
    files = {
        "errors": {"custom_id": "one", "response": {"status_code": 400, "body": problem}},
        "answers": {"custom_id": "two", "response": {"body": {"choices": [{"message": {"content": "Wet."}}]}}},
    }
    unreadable = {"line": 3, "message": "The request is not valid JSON."}
    batches = [
        {**BATCH, "id": "a", "status": "failed", "errors": {"data": [unreadable]}},
        {**BATCH, "id": "b", "status": "completed", "request_counts": {"total": 1, "completed": 0, "failed": 1},
         "error_file_id": "errors", "completed_at": 1002},
        {**BATCH, "id": "c", "status": "completed", "request_counts": {"total": 20, "completed": 20, "failed": 0},
         "output_file_id": "answers", "completed_at": 1010},
        {**BATCH, "id": "d", "status": "in_progress", "request_counts": {"total": 4, "completed": 1, "failed": 0}},
    ]  # fmt: skip

    def content(route: Route) -> None:
        route.fulfill(body=json.dumps(files[route.request.url.split("/")[-2]]) + "\n")

    page.route("**/v1/files/*/content", content)
    page.route("**/v1/batches?*", lambda route: route.fulfill(json={"data": batches}))
    visit(page, "batches")
    card = {name: page.get_by_label(name, exact=True) for name in "abcd"}
    expect(card["a"]).to_contain_text("Line 3: The request is not valid JSON.")
    expect(card["b"].locator(".chip.bad")).to_have_text("All failed")
    expect(card["b"]).to_contain_text("one: max_tokens: must be at least 1")
    expect(card["c"].locator(".chip.good")).to_have_text("Completed")
    expect(card["c"]).to_contain_text("20 of 20 done · took 10 s · 2.0 requests/s")
    expect(card["d"].locator(".chip")).to_have_text("Running")
    card["c"].get_by_role("button", name="Preview").click()
    expect(card["c"].locator(".previews")).to_contain_text("Wet.")


TEXTS = """async () => {
  const found = new Set(), prototype = CanvasRenderingContext2D.prototype, before = prototype.fillText;
  prototype.fillText = function (text, ...more) { found.add(text); return before.call(this, text, ...more); };
  for (let turn = 0; turn < 3; turn++) await new Promise((done) => requestAnimationFrame(done));
  prototype.fillText = before;
  return [...found];
}"""


def test_times_are_told_from_now(page: Page) -> None:
    """The axis of steps goes back from now; an actor says how long it is up, and its memory beside the others'."""
    visit(page, "steps")
    shown = page.evaluate(TEXTS)
    assert {"now", "\N{MINUS SIGN}5 s", "\N{MINUS SIGN}9 s"} <= set(shown)
    visit(page, "overview")
    card = page.locator("[data-actor=executor-0]")
    expect(card).to_contain_text("never restarted · up ")
    expect(card).not_to_contain_text("life")
    bars = page.locator(".meter[title^='A full bar'] b").evaluate_all("(all) => all.map((each) => each.style.width)")
    assert "100%" in bars


@pytest.mark.parametrize("size", [(1280, 860), (360, 760)])
def test_nothing_scrolls_that_fits(page: Page, size: tuple[int, int]) -> None:
    """Not by a pixel. On a phone every view has its name under its sign."""
    page.set_viewport_size({"width": size[0], "height": size[1]})
    for view in NO_SCROLL if size[0] > 800 else ("chat",):
        visit(page, view)
        wait_until(page, lambda: page.evaluate("document.documentElement.scrollHeight === innerHeight"))
    names = page.locator("nav a:visible").evaluate_all("(all) => all.map((each) => each.innerText)")
    assert names[0] == ("Playground" if size[0] > 800 else "Chat")
    assert names[1:] == ["Batches", "Overview", "Memory", "Steps", "Requests", "Charts", "Replay"]


def test_nothing_covers_the_suggestions_at_200_percent(page: Page) -> None:
    """A window of 1280 by 860 has half of these pixels then: whatever is scrolled to can be reached."""
    page.set_viewport_size({"width": 640, "height": 430})
    for idea in page.locator(".suggestions button").all():
        idea.scroll_into_view_if_needed()
        assert idea.evaluate("""(button) => {
          const { left, top, width, height } = button.getBoundingClientRect();
          return document.elementFromPoint(left + width / 2, top + height / 2) === button;
        }""")
    button = page.get_by_role("link", name="Memory")
    assert button.evaluate("(each) => getComputedStyle(each).position") == "static"


HEIGHT_WITH = """([selector, text, more]) => {
  const element = document.querySelector(selector), before = [...element.childNodes];
  const small = document.createElement("small");
  small.textContent = more;
  element.replaceChildren(text, ...(more ? [small] : []));
  const height = element.closest(".figures, header").getBoundingClientRect().height;
  element.replaceChildren(...before);
  return height;
}"""


@pytest.mark.parametrize(
    ("view", "width", "selector", "short", "long"),
    [
        ("steps", 1280, ".figure:nth-child(2) dd", (NONE, ""), ("147", " / 358 ms")),
        ("memory", 390, ".counts", ("0 held", ""), ("83 of 10,922 held, 6 of them shared · 124 cached", "")),
    ],
)
def test_longer_figures_move_nothing(
    page: Page, view: str, width: int, selector: str, short: tuple[str, str], long: tuple[str, str]
) -> None:
    """What stands below them stays where it is while they change."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"/#/{view}")
    expect(page.locator(selector).first).to_be_visible()
    heights = [page.evaluate(HEIGHT_WITH, [selector, *texts]) for texts in (short, long)]
    assert heights[0] == heights[1]


def test_figures_of_the_overview_are_large(page: Page) -> None:
    """They are what an operator looks at from afar; on a phone they are smaller."""
    for width, size in ((1280, "28px"), (390, "24px")):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("/#/overview")
        expect(page.locator(".overview .figure dd").first).to_have_css("font-size", size)
