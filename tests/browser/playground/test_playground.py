"""Talking to the model in a real browser."""

from __future__ import annotations

import ast
import json
import re
import shlex
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from playwright.sync_api import Locator, Page, Route, expect

from pagebus.bus.messages import SamplingParams
from tests.browser.deployment import Deployment
from tests.helpers.waiting import LIMIT_S

QUESTION = "What is water?"


def ask(page: Page, text: str = QUESTION, **settings: object) -> None:
    """Fill settings in, and send."""
    for name, value in settings.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".turn.assistant .prose")


def answer_of(deployment: Deployment, **body: Any) -> str:
    """What the API says to the same."""
    messages = [{"role": "user", "content": QUESTION}]
    response = httpx.post(
        f"{deployment.url}/v1/chat/completions", json={"messages": messages, "temperature": 0, **body}, timeout=LIMIT_S
    )
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def test_the_first_answer_streams(page: Page, deployment: Deployment) -> None:
    """Its beginning is there while the rest is still computed; the whole is what the API says."""
    whole = answer_of(deployment)
    deployment.hold(after=6)
    ask(page, temperature=0)
    expect(answers(page)).to_have_text(re.compile(r"\w{3}"))
    begun = answers(page).inner_text()
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    deployment.release()
    expect(answers(page)).to_have_text(whole)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_reload_in_the_middle_goes_on(page: Page, deployment: Deployment) -> None:
    """The same request goes on where it was: nothing is lost, nothing is told or computed twice."""
    whole = answer_of(deployment)
    deployment.hold(after=6)
    ask(page, temperature=0)
    expect(answers(page)).to_have_text(re.compile(r"\w{3}"))
    (request_id,) = deployment.core.requests
    page.reload()
    expect(answers(page)).to_have_text(re.compile(r"\w{3}"))
    assert list(deployment.core.requests) == [request_id]
    deployment.release()
    expect(answers(page)).to_have_text(whole)


@pytest.mark.parametrize("after", [0, 4])
def test_stop_frees_what_the_answer_held(page: Page, deployment: Deployment, after: int) -> None:
    """At once, though the client could come back; also before anything of it has come."""
    deployment.hold(after=after)
    ask(page, max_tokens=300)
    deployment.until(lambda: deployment.core.requests)
    if after:
        expect(answers(page)).to_have_text(re.compile(r"\w"))
    with page.expect_request("**/abort_requests"):
        page.get_by_role("button", name="Stop").click()
    deployment.until(lambda: not deployment.core.requests)
    deployment.release()
    expect(page.get_by_text("stopped")).to_be_visible()
    assert deployment.replica.pool.num_free == deployment.replica.pool.num_blocks
    page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 409


def test_parameters_take_effect(page: Page, deployment: Deployment) -> None:
    """Two choices of four tokens each, cut, with the sampling that was asked for."""
    deployment.hold(after=1)
    page.get_by_text("More sampling").click()
    page.get_by_label("Go on after the end token").check()
    ask(page, n=2, max_tokens=4, temperature=0.5, seed=11, top_k=7, presence_penalty=0.5, stop="zebra")
    deployment.until(lambda: bool(deployment.core.requests))
    (request,) = deployment.core.requests.values()
    sampling = request.sampling
    assert (sampling.n, sampling.max_tokens, sampling.temperature, sampling.seed) == (2, 4, 0.5, 11)
    assert (sampling.top_k, sampling.presence_penalty, sampling.stop) == (7, 0.5, ("zebra",))
    assert sampling.ignore_eos
    deployment.release()
    expect(page.get_by_text("Stopped at max tokens")).to_have_count(2)
    expect(page.get_by_text("Choice 2 of 2")).to_be_visible()
    expect(page.get_by_text(re.compile(r"^8 tokens"))).to_be_visible()


def test_every_sampling_field_of_the_api_can_be_set(page: Page, deployment: Deployment) -> None:
    """What is filled in is what the scheduler samples by; beams, whose answer comes as a whole, too."""
    page.get_by_text("More sampling").click()
    for label in ("Go on after the end token", "Show the stop text", "Show special tokens", "No spaces between these"):
        page.get_by_label(label).check()
    numbers = {"n": 2, "max_tokens": 4, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.01,
               "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 11}  # fmt: skip
    texts = {"stop": "zebra\nyak", "bad_words": "gnu", "stop_token_ids": "3, 5", "allowed_token_ids": "3 5 7",
             "logit_bias": '{"7": 1.5}'}  # fmt: skip
    deployment.hold(after=1)
    ask(page, **numbers, **texts)
    deployment.until(lambda: bool(deployment.core.requests))
    (request,) = deployment.core.requests.values()
    expected = SamplingParams(
        **numbers, stop=("zebra", "yak"), bad_words=("gnu",), stop_token_ids=(3, 5), allowed_token_ids=(3, 5, 7),
        logit_bias={7: 1.5}, ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )  # fmt: skip
    assert replace(request.sampling, bad_words_token_ids=()) == expected
    deployment.release()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Back to defaults").click()
    page.get_by_label("Beam search").check()
    ask(page, n=2, max_tokens=4, length_penalty=0.5)
    expect(page.locator(".turn.assistant").last.get_by_text("Choice 2 of 2")).to_be_visible()


def test_a_wrong_parameter_is_said(page: Page) -> None:
    """The server's words are shown; a text that is no JSON is not sent at all."""
    ask(page, temperature=7)
    expect(page.locator(".answer .error")).to_contain_text("temperature: must be from 0 to 2")
    page.get_by_text("Structure and tools").click()
    ask(page, json_schema="{no")
    expect(page.locator(".composer .error")).to_contain_text("Answer as JSON")
    page.said.clear()  # type: ignore[attr-defined]  # the browser itself writes down every 400


def test_structure_and_tools_are_sent_in_the_shapes_of_the_api(page: Page) -> None:
    sent: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        sent.append(route.request.post_data_json)
        call = {"index": 0, "id": "1", "function": {"name": "look_up", "arguments": '{"word": "water"}'}}
        route.fulfill(content_type="text/event-stream", body=sse({"tool_calls": [call]}, "tool_calls"))

    page.route("**/v1/chat/completions", answer)
    page.get_by_text("Structure and tools").click()
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    ask(page, json_schema='{"type": "object"}', tools=json.dumps([tool]), other='{"logit_bias": {"3": 1}}')
    expect(page.get_by_text('look_up({"word": "water"})')).to_be_visible()
    (body,) = sent
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (body["tools"], body["logit_bias"]) == ([tool], {"3": 1})


def sse(delta: dict[str, Any], finish: str = "stop") -> str:
    """An answer of one chunk."""
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": finish}
    chunks = [{"id": "chatcmpl-1", "choices": [each]} for each in (choice, end)]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_what_a_model_says_stays_text(page: Page) -> None:
    """Scripts, handlers and links of other kinds do nothing; Markdown is rendered."""
    evil = (
        "<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'>\n\n"
        "**bold** [here](javascript:window.hacked=1) <b>not bold</b>"
    )
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        content_type="text/event-stream", body=sse({"content": evil})))  # fmt: skip
    ask(page)
    expect(answers(page)).to_contain_text("<script>window.hacked = 1</script>")
    expect(answers(page)).to_contain_text("<b>not bold</b>")
    expect(answers(page).locator("strong")).to_have_text("bold")
    assert answers(page).locator("script, img, b, [href^=javascript]").count() == 0
    assert page.evaluate("window.hacked") is None


def test_edit_and_regenerate(page: Page, deployment: Deployment) -> None:
    """Regenerated, the last thing is answered again; edited, what came after is gone and the new text is asked."""
    ask(page, temperature=0, max_tokens=6)
    expect(page.get_by_text("6 tokens")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, "And brave?")
    expect(page.get_by_text("6 tokens")).to_have_count(2)  # while an answer grows, its buttons move
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn.assistant")).to_have_count(2)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Say it differently").fill("What is a river?")
    page.get_by_role("button", name="Save and send").click()
    expect(page.locator(".turn.user .says")).to_have_text(["What is a river?"])
    expect(page.get_by_text("6 tokens")).to_have_count(1)


def test_without_adapters_nobody_asks_for_them(page: Page) -> None:
    """There is no other model to choose, and the page knows it."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.install()
    page.reload()
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    page.clock.fast_forward(5000)
    ask(page, max_tokens=2)
    expect(page.get_by_text("2 tokens")).to_be_visible()
    assert any(url.endswith("/v1/chat/completions") for url in asked)
    assert not any(url.endswith("/v1/models") for url in asked)
    expect(page.locator("[name=model]")).to_be_hidden()


def test_two_settings_side_by_side(page: Page) -> None:
    """Both sides answer the same with their own settings."""
    page.get_by_label("Compare two settings").check()
    page.locator("[name=max_tokens]").fill("3")
    page.get_by_role("button", name="Side B").click()
    page.locator("[name=max_tokens]").fill("5")
    ask(page)
    expect(page.get_by_label("Answer A").get_by_text("3 tokens")).to_be_visible()
    expect(page.get_by_label("Answer B").get_by_text("5 tokens")).to_be_visible()


def test_tokens_show_their_odds(page: Page) -> None:
    """Each token says how likely it was, and what it could have been instead."""
    page.get_by_label("Show tokens and their odds").check()
    ask(page, temperature=0, max_tokens=5)
    tokens = page.locator(".tokens button")
    expect(tokens).to_have_count(5)
    tokens.nth(1).focus()
    expect(page.locator("#tip .odds code")).to_have_count(5)


def test_a_request_can_be_taken_along(page: Page, deployment: Deployment) -> None:
    """As curl and as Python: each holds the same request."""
    ask(page, 'It\'s "quoted"', max_tokens=2)
    expect(page.locator("article.answer")).to_contain_text("2 tokens")  # while an answer grows, its buttons move
    page.get_by_role("button", name="Copy as…").click()
    dialog = page.get_by_role("dialog")
    curl = shlex.split(dialog.locator("pre").inner_text().replace("\\\n", " "))
    body = json.loads(curl[curl.index("-d") + 1])
    assert (body["messages"][0]["content"], body["max_tokens"]) == ('It\'s "quoted"', 2)
    dialog.get_by_role("button", name="Python").click()
    assert "answer = client.chat.completions.create(" in dialog.locator("pre").inner_text()
    ast.parse(dialog.locator("pre").inner_text())
    expect(dialog.get_by_role("button", name="Redis job")).to_have_count(0)  # the bus is none
    dialog.get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()") == dialog.locator("pre").inner_text()
    dialog.get_by_role("button", name="Close").click()


def test_a_batch_is_uploaded_and_watched(page: Page) -> None:
    """A file of three requests runs to its end, and its answers can be taken."""
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3}}
        for number in range(3)
    ]  # fmt: skip
    page.goto("/#/batches")
    data = "\n".join(map(json.dumps, lines)).encode()
    page.locator("#batch-file").set_input_files({"name": "mine.jsonl", "mimeType": "text/plain", "buffer": data})
    expect(page.get_by_text("3 of 3 done")).to_be_visible()
    expect(page.get_by_text("Completed", exact=True)).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Answers").click()
    answered = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert sorted(line["custom_id"] for line in answered) == ["0", "1", "2"]
