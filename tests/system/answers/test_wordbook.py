"""The shipped model, served by the real engine, knows what it was taught."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import pagebus.actors.shipped_model
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.system.harness import running

FOLDER = Path(pagebus.actors.shipped_model.__file__).parent
KNOWN = {
    "What is water?": "colorless odorless tasteless liquid",
    "what is a dog": "domesticated by man",
    "Define gravity": "the force of attraction between all masses in the universe",
    "Tell me about London.": "the capital and largest city of England",
    "What is an apple?": "fruit with red or yellow or green skin",
    "Hello": "Ask me what a word means",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


async def test_its_answers_are_right(tokenizer):
    """Greedy answers hold the definitions the model was trained on."""
    server = MemoryServer()
    prompts = [
        tokenizer.encode(f"<|bos|><|user|>{question}<|end|><|assistant|>", add_special_tokens=False).ids
        for question in KNOWN
    ]
    async with running(FOLDER, lambda: MemoryBus(server)) as system:
        answers = await system.generate(prompts, max_tokens=60, ignore_eos=False)

    texts = [tokenizer.decode(answer) for answer in answers]
    assert [True] * len(KNOWN) == [part in text for part, text in zip(KNOWN.values(), texts, strict=True)], texts


def test_it_is_small():
    """At most 12 MB of weights travel with the project."""
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
