"""The playground beyond one question: chats that are kept, versions, tools, choices, comparing, copying."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.browser.conftest import opened
from tests.browser.deployment import Deployment

LONG = json.dumps({"words": ["water" * 40, "river" * 40]})


def chunks(choices: list[dict[str, Any]], **finish: str) -> str:
    """A stream of one chunk for each choice, and its end."""
    events = []
    for index, delta in enumerate(choices):
        events.append({"id": "chatcmpl-1", "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        events.append(
            {"id": "chatcmpl-1", "choices": [{"index": index, "delta": {}, "finish_reason": "stop", **finish}]}
        )
    return "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"


@contextmanager
def answering(page: Page, *bodies: str) -> Iterator[list[dict[str, Any]]]:
    """The API answers with these, the last one again and again; yields what it is asked."""
    asked: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json)
        body = bodies[min(len(asked), len(bodies)) - 1]
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    yield asked
    page.unroute("**/v1/chat/completions")


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".turn.assistant .answer")


def texts(page: Page) -> Locator:
    return page.locator(".turn .says")


def test_a_new_chat_loses_nothing(page: Page) -> None:
    """What was said is in the list, also in another tab; what is deleted there can be had back."""
    with answering(page, chunks([{"content": "Wet."}])):
        ask(page, "What is water?")
        expect(answers(page)).to_contain_text("Wet.")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        ask(page, "What is a river?")
        expect(answers(page)).to_contain_text("Wet.")
    other = page.context.new_page()
    other.goto("/")
    expect(other.locator(".turn")).to_have_count(0)
    other.get_by_role("button", name="Chats").click()
    dialog = other.get_by_role("dialog")
    expect(dialog.locator(".chat .clip")).to_have_text(["What is a river?", "What is water?"])
    dialog.get_by_role("button", name="Delete What is water?").click()
    dialog.get_by_role("button", name="Undo").click()
    dialog.get_by_role("button", name="Delete What is a river?").click()
    dialog.get_by_role("button", name="Close").click()
    other.get_by_role("button", name="Chats").click()
    other.get_by_role("dialog").get_by_role("button", name="What is water?").first.click()
    expect(texts(other)).to_have_text(["What is water?"])
    other.reload()
    expect(texts(other)).to_have_text(["What is water?"])
    other.close()


def test_an_edit_is_another_version(page: Page) -> None:
    """Enter saves it and Escape does not; what was there before, with all that followed, is one step back."""
    with answering(page, chunks([{"content": "One."}]), chunks([{"content": "Two."}]), chunks([{"content": "Three."}])):
        for text in ("What is water?", "And brave?"):
            ask(page, text)
            expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.get_by_role("button", name="Edit").first.click()
        area = page.get_by_label("Say it differently")
        area.fill("Not this")
        area.press("Escape")
        expect(texts(page)).to_have_text(["What is water?", "And brave?"])
        page.get_by_role("button", name="Edit").first.click()
        area.fill("What is a river?")
        area.press("Enter")
        expect(texts(page)).to_have_text(["What is a river?"])
        expect(answers(page)).to_contain_text("Three.")
    page.get_by_role("button", name="The version before").click()
    expect(texts(page)).to_have_text(["What is water?", "And brave?"])
    expect(page.locator(".turn.user header").first).to_contain_text("1 of 2")
    page.reload()
    page.get_by_role("button", name="The next version").click()
    expect(texts(page)).to_have_text(["What is a river?"])


def test_tools_are_answered(page: Page) -> None:
    """A call stays within its card and goes into the next request, with the result that was put in."""
    calls = [{"index": 0, "id": "a", "function": {"name": "look_up", "arguments": LONG}}]
    with answering(
        page, chunks([{"tool_calls": calls}], finish_reason="tool_calls"), chunks([{"content": "Wet."}])
    ) as asked:
        ask(page, "What is water?")
        expect(page.get_by_text("Tool call", exact=True)).to_be_visible()
        page.set_viewport_size({"width": 1130, "height": 860})
        card, call = answers(page).bounding_box(), page.locator("pre.call").bounding_box()
        assert card is not None
        assert call is not None
        assert call["x"] + call["width"] <= card["x"] + card["width"] + 1
        assert page.evaluate(
            "(() => { const e = document.querySelector('pre.call'); return e.scrollWidth <= e.clientWidth + 1; })()"
        )
        page.get_by_label("Result of look_up").fill('{"kind": "liquid"}')
        page.get_by_role("button", name="Send the result").click()
        expect(answers(page).last).to_contain_text("Wet.")
        ask(page, "Thanks")
        expect(answers(page)).to_have_count(3)
    call_sent = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": LONG}}
    assert asked[1]["messages"] == [
        {"role": "user", "content": "What is water?"},
        {"role": "assistant", "content": "", "tool_calls": [call_sent]},
        {"role": "tool", "tool_call_id": "a", "content": '{"kind": "liquid"}'},
    ]
    assert [each["role"] for each in asked[2]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]


def test_the_server_takes_results_of_tools(page: Page, deployment: Deployment) -> None:
    """They come as far as the chat template, and that of the shipped model knows no tools."""
    state = {"id": "1", "system": "", "turns": [
        {"role": "user", "content": "What is water?"},
        {"role": "assistant", "sides": [{"label": "", "body": {}, "status": "done", "choices": [
            {"text": "", "reasoning": "", "tokens": [], "finish": "tool_calls",
             "calls": [{"id": "a", "name": "look_up", "arguments": "{}"}]}]}]}]}  # fmt: skip
    page.add_init_script(
        f"localStorage['pagebus.chat.1'] ??= {json.dumps(json.dumps(state))}; sessionStorage['pagebus.talk'] = '1';"
    )
    page.reload()
    page.locator("[name=max_tokens]").fill("4")
    page.get_by_label("Result of look_up").fill("liquid")
    page.get_by_role("button", name="Send the result").click()
    expect(answers(page).last.locator(".error")).to_contain_text("The chat template refuses these messages")
    page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 400


def test_choices_and_json_have_their_looks(page: Page) -> None:
    """Each of four choices is a card, with its own button that copies; JSON is indented; text that is no tag, no
    ligature; the caret stands where the text ends."""
    with answering(
        page,
        chunks([{"content": f"Choice {letter}."} for letter in "abcd"]),
        chunks([{"content": '{"kind":"liquid"}'}]),
    ):
        ask(page, "What is water?")
        cards = page.locator(".turn.assistant .answers .answer .answer")
        expect(cards).to_have_count(4)
        borders = cards.evaluate_all("(all) => all.map((each) => getComputedStyle(each).borderTopWidth)")
        assert borders == ["1px"] * 4
        cards.nth(2).get_by_role("button", name="Copy").click()
        expect(cards.nth(2).get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "Choice c."
        ask(page, "As JSON")
        code = answers(page).last.locator("pre code")
        expect(code).to_have_text('{\n  "kind": "liquid"\n}')
        assert code.evaluate("(each) => getComputedStyle(each).fontVariantLigatures") == "none"
        answers(page).last.get_by_role("button", name="Copy", exact=True).click()
        expect(answers(page).last.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == '{"kind":"liquid"}'


def test_the_caret_stands_behind_the_last_word(page: Page, deployment: Deployment) -> None:
    """And not on a line of its own: it belongs to the last paragraph."""
    deployment.hold(after=6)
    ask(page, "What is water?")
    expect(page.locator(".running .prose > p")).to_be_visible()
    content = "getComputedStyle(document.querySelector('{}'), '::after').content"
    whole, last = content.format(".running .prose"), content.format(".running .prose > p:last-child")
    page.wait_for_function(f"{whole} === 'none' && {last} === '\"\"'")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped")).to_be_visible()


def test_two_sides_are_told_apart(page: Page) -> None:
    """Cards say in what they differ; one is regenerated alone; later turns go on from the one that is chosen."""
    with answering(page, *[chunks([{"content": f"Answer {number}."}]) for number in range(9)]) as asked:
        page.get_by_label("Compare two settings").check()
        page.locator("[name=temperature]").fill("0")
        page.get_by_role("button", name="Side B").click()
        page.locator("[name=temperature]").fill("1.5")
        ask(page, "What is water?")
        sides = [page.get_by_label("Answer A"), page.get_by_label("Answer B")]
        for side, name in zip(sides, ("A · temperature 0", "B · temperature 1.5"), strict=True):
            expect(side.locator(".chip.side")).to_have_text(name)
            width = side.locator(".chip.side").evaluate("(each) => each.getBoundingClientRect().width")
            assert width < 220, "it is as wide as its text"
        expect(sides[0].get_by_role("button", name="Later turns go on from here")).to_be_visible()
        first = sides[0].locator(".prose").inner_text()
        sides[1].get_by_role("button", name="Regenerate").click()
        expect(sides[1].locator(".prose")).to_have_text("Answer 2.")
        assert [each["temperature"] for each in asked] == [0, 1.5, 1.5]
        assert sides[0].locator(".prose").inner_text() == first
        sides[1].get_by_role("button", name="Go on from here").click()
        ask(page, "And now?")
        expect(answers(page)).to_have_count(4)
        assert [each["messages"][1]["content"] for each in asked[3:]] == ["Answer 2."] * 2


def test_settings_say_what_holds(page: Page) -> None:
    """The model's own defaults; and what is set in closed sections is counted, also after a reload. Odds are shown as
    soon as they are asked for, and the composer keeps the focus after a suggestion."""
    expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0.2 (model)")
    expect(page.locator("[name=min_p]")).to_have_attribute("placeholder", "0")
    page.get_by_text("More sampling").click()
    page.get_by_label("Go on after the end token").check()
    page.locator("[name=bad_words]").fill("gnu")
    for _ in range(2):
        expect(page.locator("summary", has_text="More sampling")).to_contain_text("2 changed")
        page.reload()
    expect(page.locator("summary", has_text="Structure and tools").locator(".chip")).to_be_hidden()
    page.get_by_role("button", name="Back to defaults").click()
    expect(page.locator("summary .chip", has_text="changed").first).to_be_hidden()
    page.get_by_label("Show tokens and their odds").check()
    page.locator("[name=max_tokens]").fill("3")
    page.get_by_role("button", name="What is water?").click()
    expect(page.locator(".tokens button")).to_have_count(3)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message"


def test_a_failed_answer_cannot_be_followed(page: Page) -> None:
    """There is nothing to follow."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=400, content_type="application/json", body='{"error": {"message": "No."}}'))  # fmt: skip
    ask(page, "What is water?")
    expect(page.locator(".answer .error")).to_have_text("No.")
    expect(page.get_by_role("button", name="Follow")).to_be_hidden()
    page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 400


def test_copying_without_a_clipboard(browser: Browser, deployment: Deployment) -> None:
    """As on a page over plain HTTP from another machine, where browsers give none: by the selection."""
    with opened(browser, deployment.url) as page:
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.reload()
        with answering(page, chunks([{"content": "Wet."}])):
            ask(page, "What is water?")
            page.get_by_role("button", name="Copy", exact=True).click()
            expect(page.get_by_role("button", name="Copied")).to_be_visible()
        page.get_by_label("Message").press("Control+V")
        expect(page.get_by_label("Message")).to_have_value("Wet.")
        page.get_by_role("button", name="Copy as…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Copy", exact=True).click()
        expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
        page.evaluate("document.execCommand = () => false")
        dialog.get_by_role("button", name="Python").click()
        dialog.locator(".actions .primary").click()
        expect(dialog.get_by_role("button", name="Press Ctrl+C")).to_be_visible()
        assert page.evaluate("getSelection().toString()").startswith("from openai import OpenAI")
