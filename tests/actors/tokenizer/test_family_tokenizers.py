"""Each family's own kind of tokenizer and form of chat, against transformers: ids, prompts, and streamed text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from pagebus.actors.detokenizer.text import make_decoder
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.tokenizer import load_tokenizer
from pagebus.actors.tokenizer.encode import Encoder, Limits
from pagebus.bus.messages import GenerateRequest, SamplingParams, TokenizedRequest
from tests.actors.detokenizer.test_text import streamed
from tests.actors.tokenizer.family_tokenizers import TOKENIZERS

LIMITS = Limits(max_model_len=4096, vocab_size=1000, block_size=16)
TEXTS = (
    "Hello world", " the  quick\n\n brown\tfox", "It's 12345 o'clock, isn't it?", "你好 🎉👩‍👩‍👧 naïve Straße",
    "<|im_end|> [INST] <bos>", "a", "",
)  # fmt: skip
CASES = [(name, model_type) for name, each in TOKENIZERS.items() for model_type in each.model_types]
CHATS = [case for case in CASES if TOKENIZERS[case[0]].template is not None]
SERVED = {family.model_type for family in FAMILIES}
TALK = (
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is  this?\nA 🎉"},
    {"role": "assistant", "content": "A party."}, {"role": "user", "content": "And <b> that? "},
)  # fmt: skip


@cache
def both(name: str, model_type: str) -> tuple[Any, Any]:
    """Ours, and what transformers loads; of a class that comes with the model, by the class that it forces on it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = TOKENIZERS[name].folder(Path(mkdtemp()), model_type)
    theirs = PreTrainedTokenizerFast if "auto_map" in TOKENIZERS[name].said else AutoTokenizer
    return load_tokenizer(folder), theirs.from_pretrained(str(folder))


def ids(tokenizer: Any, **prompt: Any) -> list[int]:
    """Of one request, as the tokenizer actor makes them."""
    request = GenerateRequest(request_id="r", ingress="in-0", sampling=SamplingParams(max_tokens=4), **prompt)
    reply = Encoder(tokenizer, LIMITS).encode([request])[0].reply
    assert isinstance(reply, TokenizedRequest), reply
    return list(map(int, reply.prompt_token_ids))


@pytest.mark.parametrize(("name", "model_type"), CASES)
def test_texts_become_the_same_ids(name: str, model_type: str) -> None:
    """With the tokens that a class puts around a text, and without."""
    ours, theirs = both(name, model_type)
    for text in TEXTS:
        for special in (True, False):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special)["input_ids"] == expected
            if expected:
                assert ids(ours, prompt=text, add_special_tokens=special) == expected


@pytest.mark.parametrize(("name", "model_type"), CHATS)
def test_chats_become_the_same_prompts(name: str, model_type: str) -> None:
    """No token stands twice at the front, and special tokens are those of the vocabulary, not their letters."""
    ours, theirs = both(name, model_type)
    expected = theirs.apply_chat_template(list(TALK), add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids(ours, messages=TALK, add_special_tokens=False) == expected
    starts = [token for token in expected[:2] if token == theirs.bos_token_id]
    assert len(starts) == (theirs.bos_token is not None and "bos_token" in str(TOKENIZERS[name].template))
    special = set(theirs.all_special_ids) | set(theirs.added_tokens_decoder)
    assert sum(token in special for token in expected) >= 1


@pytest.mark.parametrize(("name", "model_type"), CASES)
def test_text_streams_as_it_decodes(name: str, model_type: str) -> None:
    """Token by token, with special tokens and without, half characters held back."""
    ours, theirs = both(name, model_type)
    decoder = make_decoder(ours.backend_tokenizer)
    for text in TEXTS:
        for skip in (True, False):
            tokens = theirs(text, add_special_tokens=not skip)["input_ids"]
            whole = ours.backend_tokenizer.decode(tokens, skip_special_tokens=skip)
            assert whole == theirs.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            deltas = streamed(decoder, [], tokens, skip)
            assert "".join(deltas) == whole
            assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in whole


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_a_template_sees_what_a_request_gives_it(model_type: str) -> None:
    """``enable_thinking`` of Qwen 3."""
    ours, theirs = both("qwen", model_type)
    told = {"enable_thinking": False}
    expected = theirs.apply_chat_template(list(TALK), add_generation_prompt=True, return_dict=False, **told)
    got = ids(ours, messages=TALK, add_special_tokens=False, chat_template_kwargs=told)
    assert got == expected
    assert got != ids(ours, messages=TALK, add_special_tokens=False)


def test_every_family_has_a_tokenizer_here() -> None:
    """By its type."""
    assert SERVED - {model_type for _, model_type in CASES} == set()
