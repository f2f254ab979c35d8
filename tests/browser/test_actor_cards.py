"""What cards tell: an executor's of the load of experts and its adapters, a request's whether it is a job."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.looking import wait_until


def visit(page: Page, view: str) -> None:
    page.goto(f"/#/{view}")
    expect(page.locator("nav a[aria-current=page]")).to_have_attribute("href", f"#/{view}")


WITH_EXPERTS = """async (experts) => {
  const { live, world } = await import(document.querySelector("script[type=module]").src);
  live.stop();
  const actors = world.actors.map((row) => (row.kind === "executor" ? { ...row, experts } : row));
  world.takeActors({ at_s: world.atS, actors, streams: world.streams });
}"""


def test_the_load_of_experts_is_shown(page: Page) -> None:
    """A bar for each layer that has some, the busiest as text; nothing where there are none."""
    visit(page, "overview")
    card = page.locator("[data-actor=executor-0]")
    expect(card.locator(".experts")).to_be_hidden()
    page.evaluate(WITH_EXPERTS, [[1, 1.5, 0], [3, 4.0, 2]])
    expect(card).to_contain_text("\N{LESS-THAN OR EQUAL TO} 4.0 \N{MULTIPLICATION SIGN} mean")
    bars = card.locator(".experts b")
    expect(bars).to_have_count(2)
    assert bars.evaluate_all("(all) => all.map((each) => each.style.height)") == ["37.5%", "100%"]
    expect(bars.last).to_have_attribute("title", "Layer 3: the busiest expert has 4.0 times the mean; 2 had no token")


WITH_ADAPTERS = """async ([places, adapters]) => {
  const { live, world } = await import(document.querySelector("script[type=module]").src);
  live.stop();
  Object.assign(world.replicas.get("executor-0"), { most_adapters: places, adapters, num_adapter_blocks: 80 });
  world.takeActors({ at_s: world.atS, actors: world.actors, streams: world.streams });
}"""


def test_adapters_on_a_device_are_shown(page: Page) -> None:
    """How many, and which; nothing where an executor serves none."""
    visit(page, "overview")
    row = page.locator("[data-actor=executor-0] .meter", has_text="Adapters")
    wait_until(page, lambda: page.evaluate(HAS_REPLICA))
    expect(row).to_be_hidden()
    page.evaluate(WITH_ADAPTERS, [4, []])
    expect(row).to_contain_text("0")
    page.evaluate(WITH_ADAPTERS, [4, ["sql", "<b>", "legal"]])
    expect(row).to_contain_text("3: legal +2")
    expect(row).to_have_attribute("title", "In 80 blocks of the device, the one used last in front: legal, <b>, sql")


def test_a_long_name_of_an_adapter_stays_in_its_row(page: Page) -> None:
    """Names may have 256 characters. The whole one is on the tip."""
    visit(page, "overview")
    wait_until(page, lambda: page.evaluate(HAS_REPLICA))
    name = "customer-support-" * 15
    page.evaluate(WITH_ADAPTERS, [4, ["sql", name]])
    row = page.locator("[data-actor=executor-0] .meter", has_text="Adapters")
    expect(row).to_contain_text(name)
    assert row.evaluate("(row) => row.scrollWidth <= row.clientWidth")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


HAS_REPLICA = """async () => {
  const { world } = await import(document.querySelector("script[type=module]").src);
  return world.replicas.has("executor-0");
}"""


JOBS = """async () => {
  const { live, world } = await import(document.querySelector("script[type=module]").src);
  live.stop();
  const { requests } = world.hello.columns, atS = world.nowS();
  const row = (known) => requests.map((name) => known[name] ?? (name.endsWith("_s") ? null : 0));
  const job = (number, more) =>
    row({ id: `chatcmpl-job-1796019175344-${number}`, arrived_s: atS - number, is_job: 1, ...more });
  world.takeState({ at_s: atS, num_waiting: 0, num_over: 0, steps: [], flashed: [], replicas: [], sequences: [],
    clients: ["", ""], requests: [job(1, { priority: 3 }), job(2, {})] });
}"""


def test_jobs_can_be_told_apart(page: Page) -> None:
    """By the end of their ids, all of which begin with a time; a job with a priority is still a job."""
    visit(page, "requests")
    page.evaluate(JOBS)
    rows = page.locator(".waterfall .row")
    expect(rows.locator("code")).to_have_text(
        ["job-\N{HORIZONTAL ELLIPSIS}75344-1", "job-\N{HORIZONTAL ELLIPSIS}75344-2"]
    )
    drawer = page.get_by_label("Followed request")
    for place, text in enumerate(("job: behind all others, 3", "job: behind all others")):
        rows.nth(place).click()
        expect(drawer.locator("div", has_text="Priority").locator("dd").first).to_be_visible()
        expect(drawer).to_contain_text(text)
        page.keyboard.press("Escape")
