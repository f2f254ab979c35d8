"""Hostile chat templates: they are ended, refused or contained, and the next chat is rendered as ever."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from jinja2 import TemplateError

from pagebus.actors.model.tokenizer import load_tokenizer
from pagebus.actors.tokenizer import render_process
from pagebus.actors.tokenizer.chat import ChatTemplate
from pagebus.actors.tokenizer.refusal import Refusal
from pagebus.actors.tokenizer.render_process import RenderFailure, RenderProcess
from pagebus.bus.messages import GenerateRequest, SamplingParams
from tests.helpers.tokenizer_factory import byte_level, model_folder

GOOD = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxx{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a huge string": "{{ 'x' * 10 ** 11 }}",
    "a string that doubles": "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x=n.x*2 %}{% endfor %}",
    "a huge number": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ '%99999999999d' % 1 }}",
    "more padding": "{{ '{:>99999999999}'.format(1) }}",
    "a huge range": "{{ range(10 ** 9) | list }}",
    "too much text": "{{ 'x' * (17 * 2 ** 20) }}",
    "an attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format strings": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "changing the messages": "{{ messages.append(1) }}",
    "importing": "{% include '/etc/passwd' %}",
    "no template": "{% for %}",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("model"), byte_level())
    made = ChatTemplate(load_tokenizer(folder), GOOD)
    yield made
    made.close()


def raising(error):
    def function(*_):
        raise error

    return function


def chat(template: str | None = None) -> GenerateRequest:
    messages = ({"role": "user", "content": "hi"},)
    return GenerateRequest(
        request_id="r", ingress="in", sampling=SamplingParams(), messages=messages, chat_template=template
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(template, name):
    """A 400 that names the field; nothing of this server is in the text."""
    with pytest.raises(Refusal) as caught:
        template.render(chat(HOSTILE[name]))

    assert (caught.value.status, caught.value.param) == (400, "chat_template")
    assert "<class" not in str(caught.value)
    assert template.render(chat()).pieces == ("user: hi\n",)


def test_attributes_that_are_not_there(template):
    """To the sandbox, what it keeps away is undefined, which is no text."""
    assert template.render(chat("<{{ raise_exception.__globals__ }}>")).pieces == ("<>",)


def test_a_template_of_the_client(template):
    """It takes the place of the model's, for that request."""
    assert template.render(chat("[{{ messages[0].content }}]")).pieces == ("[hi]",)
    assert template.render(chat()).pieces == ("user: hi\n",)


def test_the_child_is_one_and_ends():
    """One process renders all chats; it ends with its owner, and one that was killed is replaced, unnoticed."""
    process = RenderProcess(lambda chat: f"{os.getpid()} {chat['x']}", refusals=TemplateError)
    pid, _ = process.render({"x": "1"}).split()

    assert process.render({"x": "é\ud800"}) == f"{pid} é\ud800"
    os.kill(int(pid), signal.SIGKILL)
    other, text = process.render({"x": "2"}).split()
    assert (other != pid, text) == (True, "2")
    del process
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(int(other), 0)


@pytest.mark.parametrize("still", [1, 2])
def test_children_that_stand_still(monkeypatch, still):
    """One is replaced, unnoticed; two are an error of ours, not of the template, and the next chat is rendered."""
    started = 0

    class Impatient(RenderProcess):
        def _start(self):
            nonlocal started
            started += 1
            monkeypatch.setattr(render_process, "WALL_S", 0.0 if started <= still else 60.0)
            return super()._start()

    def render(chat):
        if started <= still:
            signal.pause()
        return "rendered"

    process = Impatient(render, refusals=TemplateError)
    if still == 2:
        with pytest.raises(TimeoutError):
            process.render({})
    assert process.render({}) == "rendered"
    assert started == still + 1
    process.close()


def test_an_answer_that_cannot_be_read(monkeypatch):
    """It is not the next chat's."""
    process = RenderProcess(lambda chat: chat["x"], refusals=TemplateError)
    assert process.render({"x": "0"}) == "0"
    with monkeypatch.context() as patch:
        patch.setattr(render_process.Connection, "recv_bytes", raising(MemoryError))
        with pytest.raises(MemoryError):
            process.render({"x": "1"})

    assert process.render({"x": "2"}) == "2"
    process.close()


def test_what_the_template_raises():
    """On purpose or not is told apart."""

    def fails(chat: dict[str, str]) -> str:
        raise TemplateError("no") if chat["x"] == "refuse" else KeyError("role")

    process = RenderProcess(fails, refusals=TemplateError)
    for given, refused in (("refuse", True), ("else", False)):
        with pytest.raises(RenderFailure) as caught:
            process.render({"x": given})
        assert caught.value.refused is refused
    process.close()


def test_files_of_the_parent_are_closed(tmp_path):
    """The child has no connection, file or socket of its parent."""
    with open(tmp_path / "secret", "w"):
        process = RenderProcess(lambda _: " ".join(sorted(os.listdir("/proc/self/fd"))), refusals=TemplateError)
        kept = process.render({}).split()
    assert len(kept) == 5  # standard streams, the pipe, and the folder that is being read
    process.close()
