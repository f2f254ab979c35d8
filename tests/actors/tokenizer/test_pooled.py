"""Texts for models that pool: truncated as transformers does, pairs with segments, one end token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagebus.actors.model.tokenizer import load_tokenizer
from pagebus.actors.tokenizer.encode import HEAVY_LENGTH, QUICK_LENGTH, Encoder, Limits
from pagebus.bus.messages import GenerateRequest, RequestFailed, SamplingParams, TokenizedRequest
from pagebus.bus.messages.segments import SEGMENT_SHIFT, without_segments
from tests.actors.model.pooling.tiny_models import write_encoder_tokenizer
from tests.helpers.tokenizer_factory import byte_level

TEXTS = ["the quick fox", "jumps over the lazy dog", "a", "", "quick " * 9]


def tokenizer_of(folder: Path, kind: str) -> Any:
    (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    write_encoder_tokenizer(folder, kind)
    return load_tokenizer(folder)


def ask(text: str, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1, pooling="cls", in_one_step=True)
    return GenerateRequest(request_id="r", ingress="web", sampling=sampling, prompt=text,
                           **{"truncation_side": "right", **fields})  # fmt: skip


def encoded(encoder: Encoder, request: GenerateRequest) -> np.ndarray:
    (outcome,) = encoder.encode([request])
    assert isinstance(outcome.reply, TokenizedRequest), outcome.reply
    return outcome.reply.prompt_token_ids


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("keep", [None, 5, 6, 9, 12, 40])
def test_pairs_as_transformers(kind: str, keep: int | None, tmp_path: Path) -> None:
    """Ids and segments of every pair, whole or cut; single texts likewise."""
    tokenizer = tokenizer_of(tmp_path, kind)
    encoder = Encoder(tokenizer, Limits(200, 307, 16, hashed=False, spare=0, segments=kind == "bert"))
    cut = {} if keep is None else {"truncation": "longest_first", "max_length": keep}
    for first in TEXTS:
        for second in (None, *TEXTS):
            expected = tokenizer(first, second, return_token_type_ids=True, **cut)
            tokenizer.backend_tokenizer.no_truncation()
            ids = encoded(encoder, ask(first, second_text=second, truncate_prompt_tokens=keep))
            assert without_segments(ids).tolist() == expected["input_ids"]
            if kind == "bert":
                assert (ids >> SEGMENT_SHIFT).tolist() == expected["token_type_ids"]


def test_both_texts_of_a_pair_take_time(tmp_path: Path) -> None:
    """A long document behind a short question is not encoded where others wait for it."""
    encoder = Encoder(tokenizer_of(tmp_path, "bert"), Limits(200, 307, 16, hashed=False, spare=0))
    short, long, heavy = (ask("fox", second_text="x" * length) for length in (100, QUICK_LENGTH, HEAVY_LENGTH))
    assert [encoder.is_quick([each]) for each in (short, long)] == [True, False]
    assert [encoder.is_heavy(each) for each in (long, heavy)] == [False, True]


def test_left_side(tmp_path: Path) -> None:
    """The last words stay, and the special tokens around them."""
    tokenizer = tokenizer_of(tmp_path, "bert")
    encoder = Encoder(tokenizer, Limits(200, 307, 16, hashed=False, spare=0))
    whole = encoded(encoder, ask("the quick fox")).tolist()
    cut = encoded(encoder, ask("the quick fox", truncate_prompt_tokens=4, truncation_side="left")).tolist()
    assert cut == [whole[0], *whole[-3:]]


def test_all_of_the_length_may_be_prompt(tmp_path: Path) -> None:
    """Nothing is left to an output."""
    encoder = Encoder(tokenizer_of(tmp_path, "bert"), Limits(5, 307, 16, hashed=False, spare=0))
    assert len(encoded(encoder, ask("the quick fox"))) == 5
    (outcome,) = encoder.encode([ask("the quick fox fox")])
    assert isinstance(outcome.reply, RequestFailed)
    assert outcome.reply.message.endswith("your prompt has 6 tokens. Please reduce the length of the prompt.")
    assert len(encoded(encoder, ask("the quick fox fox", truncate_prompt_tokens=-1))) == 5


class Promising:
    """A tokenizer that ought to end texts, and does not."""

    def __init__(self, adds: bool) -> None:
        self.backend_tokenizer = byte_level()
        self.add_eos_token, self.eos_token_id = adds, self.backend_tokenizer.token_to_id("</s>")
        self.chat_template = None


def test_a_promised_end_token() -> None:
    """Is there once, whether the text ends with it or not."""
    for adds in (True, False):
        tokenizer = Promising(adds)
        encoder = Encoder(tokenizer, Limits(200, 400, 16, hashed=False, spare=0))
        for text in ("Hello world", "Hello world</s>"):
            ids = encoded(encoder, ask(text)).tolist()
            assert ids.count(tokenizer.eos_token_id) == int(adds or text.endswith("</s>"))
        encoder.close()
