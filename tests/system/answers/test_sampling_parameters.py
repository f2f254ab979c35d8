"""Every sampling parameter through the whole system, over HTTP, with the model that comes along."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

import pagebus.actors.shipped_model
from tests.system.serving import Client, serving

FOLDER = Path(pagebus.actors.shipped_model.__file__).parent
PROMPT = "<|bos|><|user|>What is a dog?<|end|><|assistant|>"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with serving(FOLDER, max_model_len=256) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def ask(client: Client, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
    """The one choice, with its token ids."""
    options = {"max_tokens": 8, "add_special_tokens": False, "return_token_ids": True} | body
    choice: dict[str, Any] = (await client.completion(prompt, **options))["choices"][0]
    return choice


async def test_bad_words(client):
    """A word, of one token or of several, is not written, behind a space or not; a prompt may have it."""
    plain = await ask(client)
    words = [token for token in plain["text"].split() if token.isalpha()]
    single, several = words[0], " ".join(words[1:3])
    assert len(TOKENIZER.encode(" " + several, add_special_tokens=False).ids) > 1

    without = await ask(client, bad_words=[single, several])
    other = await ask(client, PROMPT + plain["text"][:10], bad_words=["never seen before"])

    assert single not in without["text"].split()
    assert several not in without["text"]
    assert without["text"]
    assert other["text"] == (await ask(client, PROMPT + plain["text"][:10]))["text"]
    assert (await client.refused("completions", prompt="x", bad_words=["a b c d"] * 129))["param"] == "bad_words"


async def test_bad_words_of_several_tokens_only_ban_the_last(client):
    """The first tokens of a word may come, as long as it does not."""
    plain = (await ask(client))["token_ids"]
    text = TOKENIZER.decode(plain[1:4]).strip()

    got = (await ask(client, bad_words=[text]))["token_ids"]

    written = TOKENIZER.encode(" " + text, add_special_tokens=False).ids
    if written == plain[1:4]:
        assert got[:3] == plain[:3]
    assert got[:4] != plain[:4]


async def test_allowed_token_ids(client):
    """Nothing else is sampled, greedily or not; others in the batch go their own ways."""
    allowed = list(range(300, 1500))
    for temperature in (0, 1.5):
        choice = await ask(client, allowed_token_ids=allowed, temperature=temperature, seed=1, ignore_eos=True)
        assert len(choice["token_ids"]) == 8
        assert set(choice["token_ids"]) <= set(allowed)
    one = await ask(client, allowed_token_ids=[77], ignore_eos=True)
    assert one["token_ids"] == [77] * 8
    assert (await ask(client))["token_ids"] != one["token_ids"]
    assert (await client.refused("completions", prompt="x", allowed_token_ids=[]))["param"] == "allowed_token_ids"


async def test_logit_bias(client):
    """Clamped to 100, which decides; -100 bans."""
    plain = (await ask(client))["token_ids"]

    assert (await ask(client, logit_bias={"77": 1000}, max_tokens=3))["token_ids"] == [77] * 3
    assert plain[0] not in (await ask(client, logit_bias={str(plain[0]): -100}))["token_ids"]


async def test_ends(client):
    """min_tokens keeps the end away, ignore_eos for ever; stop_token_ids end with their id as the reason."""
    plain = await ask(client, max_tokens=100)
    assert plain["finish_reason"] == "stop"
    count = len(plain["token_ids"])

    longer = await ask(client, max_tokens=100, min_tokens=count + 3)
    endless = await ask(client, max_tokens=100, ignore_eos=True)
    stopped = await ask(client, max_tokens=100, stop_token_ids=[plain["token_ids"][2]])

    assert len(longer["token_ids"]) >= count + 3
    assert longer["token_ids"][: count - 1] == plain["token_ids"][:-1]
    assert (len(endless["token_ids"]), endless["finish_reason"]) == (100, "length")
    first = plain["token_ids"].index(plain["token_ids"][2])
    assert stopped["token_ids"] == plain["token_ids"][: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", plain["token_ids"][2])
    assert stopped["text"] == TOKENIZER.decode(plain["token_ids"][:first])


async def test_stop_strings(client):
    """The text ends before the stop string, or behind it if it is to be included; min_tokens holds it off."""
    text = (await ask(client))["text"]
    stop = text[3:7]

    cut = await ask(client, stop=stop)
    included = await ask(client, stop=stop, include_stop_str_in_output=True)
    held_off = await ask(client, stop=stop, min_tokens=8)

    assert (cut["text"], cut["stop_reason"]) == (text[: text.index(stop)], stop)
    assert included["text"] == text[: text.index(stop)] + stop
    assert held_off["text"] == text


async def test_special_tokens(client):
    """They are no text unless asked for, and then with the spaces that the tokenizer's own decode gives or without."""
    special = TOKENIZER.token_to_id("<|end|>")
    options = {"logit_bias": {str(special): 100}, "ignore_eos": True, "max_tokens": 3}

    assert (await ask(client, **options))["text"] == ""
    shown = await ask(client, skip_special_tokens=False, **options)
    close = await ask(client, skip_special_tokens=False, spaces_between_special_tokens=False, **options)

    assert shown["text"] == TOKENIZER.decode([special] * 3, skip_special_tokens=False)
    assert close["text"] == "<|end|>" * 3


async def test_truncate_prompt_tokens(client):
    """Only the last tokens are read; the echo shows which; -1 keeps what fits."""
    ids = list(range(100, 140))

    cut = await ask(client, ids, truncate_prompt_tokens=5, echo=True)
    direct = await ask(client, ids[-5:], echo=True)
    fitting = await ask(client, [100] * 400, truncate_prompt_tokens=-1)

    assert cut == direct
    assert cut["prompt_token_ids"] == ids[-5:]
    assert len(fitting["prompt_token_ids"]) == 256 - 8


async def test_seeds(client):
    """A seed repeats; -1 and none at all do not; choices of one request differ."""
    words, options = list(range(100, 160)), {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True}

    async def ids(**more: Any) -> list[int]:
        return (await ask(client, words, **options, **more))["token_ids"]

    assert await ids(seed=7) == await ids(seed=7)
    assert await ids(seed=7) != await ids(seed=8)
    assert await ids(seed=-1) != await ids(seed=-1)
    assert await ids() != await ids()
    choices = (await client.completion(words, n=3, seed=7, **options))["choices"]
    assert len({choice["text"] for choice in choices}) == 3


async def test_truncation(client):
    """top_k 1, a tiny top_p and min_p 1 are greedy."""
    plain = await ask(client)
    for limit in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert (await ask(client, temperature=1.5, seed=1, **limit))["text"] == plain["text"]


@pytest.mark.parametrize(
    ("penalty", "changed"),
    [
        ({"presence_penalty": 2.0}, lambda value, count: value - 2.0 * (count > 0)),
        ({"frequency_penalty": 1.5}, lambda value, count: value - 1.5 * count),
    ],
)
async def test_penalties(client, penalty, changed):
    """Greedy decoding takes the best of what the penalty leaves of the log probabilities that are reported."""
    words = list(range(100, 160))
    choice = await ask(
        client, words, max_tokens=30, ignore_eos=True, logprobs=20, return_tokens_as_token_ids=True, **penalty
    )

    output = choice["token_ids"]
    moved = 0
    for place, tops in enumerate(choice["logprobs"]["top_logprobs"]):
        said = output[:place]
        values = {int(name.split(":")[1]): value for name, value in tops.items()}
        left = {token: changed(value, said.count(token)) for token, value in values.items()}
        assert output[place] == max(left, key=lambda token: left[token])
        moved += output[place] != max(values, key=lambda token: values[token])
    assert moved
