"""What a page says of a deployment that does not answer, of a key that it needs, and of what it is told meanwhile."""

from __future__ import annotations

import re

import httpx
from playwright.sync_api import Page, expect

from tests.browser.deployment import Deployment
from tests.helpers.waiting import LIMIT_S

VIEWS = ("chat", "batches", "overview", "memory", "steps", "requests", "charts", "replay")
QUESTION = "What is water?"
SOON = "() => { const after = setTimeout; window.setTimeout = (then, ms) => after(then, ms === 5000 ? 100 : ms); }"
"""What a page does every five seconds, it does at once: it reads lists again that are at rest."""


def answer_of(deployment: Deployment) -> str:
    """What the API says to the question."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    content: str = httpx.post(f"{deployment.url}/v1/chat/completions", json=body, timeout=LIMIT_S).json()["choices"][0][
        "message"
    ]["content"]
    return content


def test_an_outage_is_said_on_all_views_and_ends(page: Page, deployment: Deployment) -> None:
    """The only executor dies in the middle of an answer: every view says so, the answer is paused and not "writing",
    the last map is greyed, and no view claims that there is nothing to do. Then it goes on to the same end."""
    whole = answer_of(deployment)
    announcer = page.locator("#announcer")
    expect(announcer).to_be_empty()  # all is well, but not again
    deployment.hold(after=6)
    page.locator("[name=temperature]").fill("0")
    page.get_by_label("Message").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .prose")).to_have_text(re.compile(r"\w{3}"))
    deployment.kill("executor-0")
    banner, status = page.locator(".banner"), page.get_by_role("banner").get_by_role("status")
    expect(banner).to_contain_text(
        re.compile(r"executor-0 died \d+ s ago.*1 request waits and goes on with the same tokens")
    )
    expect(status).to_have_text("Outage")
    expect(page.locator(".answer footer")).to_contain_text("paused: executor-0 died")
    expect(page.locator(".glance.stale")).to_contain_text("The engine when it was there last")
    expect(announcer).to_contain_text("executor-0 died")
    for view in VIEWS:
        page.goto(f"/#/{view}")
        expect(banner).to_be_visible()
    page.goto("/#/memory")
    expect(page.get_by_text("executor-0 is gone: these were its blocks")).to_be_visible()
    expect(page.locator(".view.stale .map canvas").first).to_be_visible()
    page.goto("/#/steps")
    expect(page.get_by_text("Nothing is computed. executor-0 died")).to_be_visible()
    page.reload()  # who comes now hears of it too
    expect(banner).to_contain_text("executor-0 died")
    page.goto("/#/overview")
    events, cache = page.get_by_label("Last events").locator("li"), page.locator(".figure", has_text="Cache in use")
    expect(banner).to_contain_text(
        re.compile(r"^Outage for .+: executor-0 died .+ same tokens\. The other 5 actors work\. No")
    )
    expect(events.filter(has_text="executor-0 died.")).to_have_count(1)
    expect(events.filter(has_text="Outage: without executor.")).to_have_count(1)
    expect(cache.locator("dd").first).to_have_text("\N{EN DASH}")
    deployment.revive("executor", "executor-0")
    expect(banner).to_contain_text(
        re.compile(r"^Requests are answered: all 6 actors work, for .+\. No request was lost")
    )
    expect(events.filter(has_text="executor-0 was started again, and is ready after")).to_have_count(1)
    expect(events.filter(has_text="1 sequence of a lost executor goes on with the same tokens.")).to_have_count(1)
    expect(events.first).to_have_text(re.compile(r"\d\d:\d\d:\d\d.*(answered again|started again|goes on)"))
    expect(cache.locator("dd").first).to_have_text(re.compile(r"^\d+(\.\d)?%"))
    page.goto("/#/memory")
    expect(banner).to_be_hidden()
    expect(status).to_have_text("Live")
    page.goto("/#/chat")
    expect(page.locator(".turn.assistant .prose")).to_have_text(whole)
    expect(page.locator(".glance.stale")).to_have_count(0)


HEALTH = """async (rows) => {
  const module = document.querySelector("script[type=module]").src;
  const { healthOf } = await import(new URL("health.js", module).href);
  const ready = { state: "ready", lost_s: null, progress: null };
  const well = { access: "ok", connected: true, away: "", missing: [], requests: new Map(), actors: [] };
  const found = rows.map(({ actors = [], ...more }) =>
    healthOf({ ...well, ...more, actors: actors.map((row) => ({ ...ready, ...row })) }, 1000));
  return found.map(({ level, label, text }) => [level, label, text]);
}"""


def test_health_is_that_of_the_deployment(page: Page) -> None:
    """In a sentence: what is missing, since when, how far it is, and what becomes of requests meanwhile."""
    executor = {"kind": "executor", "name": "executor-0"}
    loading = {"state": "loading", "phase": "imports", "progress": 0}
    states = [
        {"actors": [executor]},
        {"actors": [{**executor, **loading, "lost_s": 988}], "missing": ["executor"]},
        {"actors": [{**executor, "state": "gone", "lost_s": 988, "drained": True}], "missing": ["executor"]},
        {"actors": [{**executor, **loading}], "missing": ["executor"]},
        {"actors": [{**executor, **loading, "lost_s": 988}]},
        {"actors": [{**executor, "state": "gone", "lost_s": 700}]},
        {"actors": [{**executor, "state": "stalled 9 s"}], "missing": ["executor"]},
        {"held": "abort"},
        {"held": "keep"},
        {"missing": ["bus"]},
        {"away": "The scheduler does not answer."},
        {"connected": False, "problem": "The server cannot be reached."},
        {"access": "refused"},
    ]
    new = "New requests are told to come again (503)."
    assert page.evaluate(HEALTH, states) == [
        ["good", "Live", ""],
        ["bad", "Outage", f"executor-0 died 12 s ago, restarting (imports 0%). {new}"],
        ["bad", "Outage", f"executor-0 ended 12 s ago. {new}"],
        ["bad", "Outage", f"executor-0 is starting (imports 0%). {new}"],
        ["warn", "Degraded", "executor-0 died 12 s ago, restarting (imports 0%). Others of its kind carry on."],
        ["good", "Live", ""],
        ["bad", "Outage", f"executor-0 does not get on with its steps (stalled 9 s). {new}"],
        ["warn", "Paused", f"An operator has paused the work: {new[0].lower()}{new[1:]}"],
        ["warn", "Paused", "An operator has paused the work: requests wait."],
        ["bad", "Outage", f"Redis does not answer. {new}"],
        ["bad", "Outage", f"There is no scheduler. {new}"],
        ["bad", "Not connected", "The server cannot be reached. Trying again."],
        ["warn", "Key needed", "This server refused the key."],
    ]


SENTENCES = """async (rows) => {
  const module = document.querySelector("script[type=module]").src;
  const { healthOf, sentenceOf } = await import(new URL("health.js", module).href);
  const ready = { state: "ready", lost_s: null, progress: null };
  const well = { access: "ok", connected: true, away: "", missing: [], requests: new Map(), actors: [], incidents: [] };
  return rows.map(({ actors = [], ...more }) => {
    const world = { ...well, ...more, actors: actors.map((row) => ({ ...ready, ...row })) };
    return sentenceOf(world, healthOf(world, 1000), 1000);
  });
}"""


def test_the_sentence_of_an_operators_home(page: Page) -> None:
    """What works, what does not, since when, and what was lost: no claim of what nobody knows."""
    executor, scheduler = {"kind": "executor", "name": "executor-0"}, {"kind": "scheduler", "name": "scheduler-0"}
    dead = {**executor, "state": "gone", "lost_s": 988}
    none_lost, lost = ({"over_s": 300, "server": number} for number in (0, 2))
    died = [{"what": "died", "at_s": 989}, {"what": "outage", "at_s": 988}, {"what": "joined", "at_s": 900}]
    states = [
        {"actors": [{**executor, "started_s": 990}, {**scheduler, "started_s": 400}], "failures": none_lost},
        {"actors": [executor, scheduler], "incidents": [{"what": "back", "at_s": 995}], "failures": lost},
        {"actors": [dead, {**executor, "name": "executor-1"}], "failures": none_lost},
        {"actors": [dead, scheduler], "missing": ["executor"], "incidents": died, "failures": none_lost},
        {"actors": [executor, scheduler], "missing": ["bus"], "failures": none_lost},
        {"actors": [executor], "held": "keep", "failures": none_lost},
        {"actors": [executor], "failures": None},
        {"connected": False, "problem": ""},
    ]
    waits = "executor-0 died 12 s ago. New requests are told to come again (503). The other actor works."
    no_loss = "No request was lost in the last 5 min."
    assert page.evaluate(SENTENCES, states) == [
        f"Requests are answered: all 2 actors work, for 10 s. {no_loss}",
        "Requests are answered: all 2 actors work, for 5 s. 2 requests got an error of the server (5xx) in the last "
        "5 min.",
        f"Requests are answered. executor-0 died 12 s ago. Others of its kind carry on. {no_loss}",
        f"Outage for 12 s: {waits} {no_loss}",
        "Outage: Redis does not answer. New requests are told to come again (503).",
        f"An operator has paused the work: requests wait. {no_loss}",
        "Requests are answered: the actor works.",
        "Connecting to the server.",
    ]


BROKEN = """async () => {
  const { events } = await import(new URL("api.js", document.querySelector("script[type=module]").src).href);
  const body = new ReadableStream({ pull: (control) => control.error(new TypeError("network error")) });
  try {
    for await (const each of events(new Response(body))) return each;
  } catch (error) {
    return [error.message, error.status];
  }
}"""


def test_a_connection_that_breaks_is_said_in_our_words(page: Page) -> None:
    """Those of the browser are no sentence; it counts as a server that cannot be reached, which is tried again."""
    assert page.evaluate(BROKEN) == ["The connection to the server broke.", 0]


def test_a_server_without_keys_says_so(page: Page) -> None:
    """Who looks where a key is put in learns that none is needed."""
    page.get_by_role("button", name="API key").click()
    expect(page.get_by_role("dialog")).to_contain_text("This server asks for no key")


def test_only_charts_fetch_what_draws_them(page: Page) -> None:
    """And no module is fetched without its version."""
    names = "performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)"
    loaded = page.evaluate(names)
    assert not any("uPlot" in name for name in loaded)
    assert [name for name in loaded if name.startswith("/static/") and not name.startswith("/static/v-")] == []
    page.goto("/#/charts")
    expect(page.locator(".chart canvas").first).to_be_visible()
    assert any("uPlot.esm.js" in name for name in page.evaluate(names))


def test_a_list_of_batches_that_comes_again_takes_the_error_away(page: Page) -> None:
    """It could not be read once, as while an ingress is started again; what an upload ended with stays."""
    page.evaluate(SOON)
    page.route("**/v1/batches?*", lambda route: route.fulfill(status=503, json={"error": {"message": "Come again."}}))
    page.goto("/#/batches")
    problem = page.locator("#main [role=alert]").first
    expect(problem).to_have_text("Come again.")
    page.unroute("**/v1/batches?*")
    page.route("**/v1/batches?*", lambda route: route.fulfill(json={"data": [{"id": "a", "status": "failed"}]}))
    expect(page.get_by_label("a", exact=True)).to_be_visible()
    expect(problem).to_be_hidden()
    page.route("**/v1/files", lambda route: route.fulfill(status=507, json={"error": {"message": "No room."}}))
    page.get_by_role("button", name="Run an example of 20 questions").click()
    expect(problem).to_have_text("No room.")
    for _ in range(2):
        with page.expect_response("**/v1/batches?*"):
            pass
    expect(problem).to_have_text("No room.")
    page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 503 and 507
