"""Where in a prompt's text its tokens are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from pagebus.actors.model.tokenizer import load_tokenizer
from pagebus.actors.tokenizer.encode import Encoder, Limits
from pagebus.bus.messages import GenerateRequest, PromptReply, RequestFailed, SamplingParams
from tests.helpers.tokenizer_factory import byte_level, model_folder, sentencepiece, with_bos

FAMILIES = {"byte level": byte_level, "llama": sentencepiece}
TEMPLATE = "{{ '<s>' + messages[0]['content'] + '</s>' }}"


@cache
def tokenizer(family: str) -> Any:
    return load_tokenizer(model_folder(Path(mkdtemp()), with_bos(FAMILIES[family]())))


@cache
def encoder(family: str) -> Encoder:
    return Encoder(tokenizer(family), Limits(64, 400, 16), chat_template=TEMPLATE)


def ask(family: str, **changes: Any) -> Any:
    fields = {"request_id": "r", "ingress": "i", "sampling": SamplingParams(max_tokens=4), "tokens_only": True}
    request = GenerateRequest(**(fields | {"return_token_offsets": True} | changes))
    return encoder(family).encode([request])[0].reply


def told(family: str, **changes: Any) -> tuple[list[int], list[tuple[int, int]]]:
    reply = ask(family, **changes)
    assert isinstance(reply, PromptReply), reply
    return reply.token_ids.tolist(), [(begin, end) for begin, end in reply.token_offsets.reshape(-1, 2).tolist()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", ["a bc  d", "é 你🎉 ok\n", "x<|im_end|> y</s>"])
def test_offsets_are_those_of_transformers(family: str, special: bool, text: str) -> None:
    """In characters; what begins every text is nowhere in it."""
    expected = tokenizer(family)(text, add_special_tokens=special, return_offsets_mapping=True)

    ids, offsets = told(family, prompt=text, add_special_tokens=special)

    assert (ids, offsets) == (expected["input_ids"], expected["offset_mapping"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", ["a bc", "é</s>你 <s>🎉 ok", "</s>", "a</s></s> b"])
def test_offsets_of_a_chat(family: str, content: str) -> None:
    """Are of the text that the template makes, also where a client has written what would be special tokens: these are
    several tokens, which together stand for their characters."""
    text = f"<s>{content}</s>"
    ids, offsets = told(family, messages=({"role": "user", "content": content},), add_special_tokens=False)

    assert len(ids) == len(offsets)
    assert [text[begin:end] for begin, end in (offsets[0], offsets[-1])] == ["<s>", "</s>"]
    assert offsets == sorted(offsets)
    assert {place for begin, end in offsets for place in range(begin, end)} == set(range(len(text)))
    if "</s>" not in content:
        expected = tokenizer(family)(text, add_special_tokens=False, return_offsets_mapping=True)
        assert offsets == expected["offset_mapping"]


def test_what_is_truncated_has_no_offsets() -> None:
    """There is one for each token that is left, of the text as it was."""
    ids, offsets = told("byte level", prompt="a b c d", add_special_tokens=False)

    for side, part in (("left", slice(-2, None)), ("right", slice(2))):
        kept = told("byte level", prompt="a b c d", add_special_tokens=False, truncate_prompt_tokens=2,
                    truncation_side=side)  # fmt: skip
        assert kept == (ids[part], offsets[part])
    long = told("byte level", prompt="a" * 100, add_special_tokens=False, truncate_prompt_tokens=-1)
    assert (len(long[0]), long[1][-1]) == (60, (99, 100))


def test_where_there_are_none() -> None:
    """Of token ids, and where nobody has asked for them."""
    assert told("byte level", prompt_token_ids=np.array([5, 6], np.int32)) == ([5, 6], [])
    assert told("byte level", prompt="a b", return_token_offsets=False)[1] == []


def test_a_text_that_is_no_unicode() -> None:
    """Is the client's error, as without offsets."""
    reply = ask("byte level", prompt="a\ud800")
    assert isinstance(reply, RequestFailed)
    assert (reply.status, reply.param) == (400, "prompt")
