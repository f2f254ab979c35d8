"""Head norms, rotation and cache writes: the reference against the definition, the kernel against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pagebus.kernels.layers.rotary_kv_write
from pagebus.kernels.common.float8 import FLOAT8
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write, rotary_kv_write_invariant, rotary_kv_write_reference

pytestmark = pytest.mark.share(6)

DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)  # the interpreter cuts bfloat16 results off instead of rounding them
Q_HEADS, KV_HEADS, TOKENS, LAYER = 5, 3, 6, 1


@pytest.fixture(params=[1, TOKENS + 1], ids=["many tokens", "few"])
def many_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two kernels: with so few tokens, the one for many is taken."""
    monkeypatch.setattr(pagebus.kernels.layers.rotary_kv_write, "MANY_TOKENS", request.param)


@dataclass
class Case:
    """Arguments of one call; `cache` [num_blocks, layers, 2, block_size, KV_HEADS, D] is poisoned with fives."""

    qkv: torch.Tensor
    cache: torch.Tensor
    positions: torch.Tensor
    angles: torch.Tensor
    mapping: torch.Tensor
    keywords: dict[str, Any]

    def run(self, function: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries and the cache after a call on copies."""
        cache, table = self.cache.clone(), torch.cat((self.angles.cos(), self.angles.sin()), 1)
        k_cache, v_cache = cache[:, LAYER].unbind(1)
        q = function(self.qkv.clone(), self.positions, table, k_cache, v_cache, self.mapping, **self.keywords)
        return q, cache


def make(
    device: torch.device, dtype: torch.dtype, cache: torch.dtype | None = None, *, head_dim: int = 64,
    block_size: int = 16, norms: bool = False,
) -> Case:  # fmt: skip
    keywords: dict[str, Any] = {}
    if norms:
        weights = torch.randn(2, head_dim, device=device).to(dtype)
        keywords |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-2}
    if cache in FLOAT8:
        keywords["kv_scales"] = torch.rand(2, KV_HEADS, device=device) * 0.1 + 0.002
    return Case(
        (torch.randn(TOKENS, Q_HEADS + 2 * KV_HEADS, head_dim, device=device) * 3).to(dtype),
        torch.full((9, 3, 2, block_size, KV_HEADS, head_dim), 5.0, device=device).to(cache or dtype),
        torch.tensor([0, 49, 3, 3, 17, 8], device=device, dtype=torch.int32),
        torch.rand(50, head_dim // 2, device=device) * 6,
        torch.tensor([3 * block_size + 7, -1, 0, 9 * block_size - 1, -1, 5], device=device),
        keywords,
    )


def turned(case: Case, heads: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + D / 2) as complex numbers, turned by their angles, in float64."""
    pair = torch.complex(*heads.double().chunk(2, dim=-1))
    angles = case.angles.double()[case.positions.long()].unsqueeze(1)
    pair = pair * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pair.real, pair.imag), -1)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("function", [rotary_kv_write, rotary_kv_write_reference])
def test_definition(function: Any, norms: bool, device: torch.device) -> None:
    """Queries are normed and turned; keys and values of stored tokens lie in their places, all else stays."""
    case = make(device, torch.float32, norms=norms)
    q, cache = case.run(function)
    heads = case.qkv.double()
    if norms:
        heads = heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()
        heads[:, :Q_HEADS] *= case.keywords["q_norm"].double()
        heads[:, Q_HEADS:] *= case.keywords["k_norm"].double()
    torch.testing.assert_close(q.double(), turned(case, heads[:, :Q_HEADS]), atol=2e-5, rtol=1e-5)
    expected = case.cache.double()
    keys = turned(case, heads[:, Q_HEADS : Q_HEADS + KV_HEADS])
    for token, place in enumerate(case.mapping.tolist()):
        if place >= 0:
            expected[place // 16, LAYER, 0, place % 16] = keys[token]
            expected[place // 16, LAYER, 1, place % 16] = case.qkv[token, Q_HEADS + KV_HEADS :].double()
    torch.testing.assert_close(cache.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 48)])
def test_kernel_is_the_reference(
    head_dim: int, block_size: int, dtype: torch.dtype, norms: bool, device: torch.device
) -> None:
    """Half precision rounds exactly as the reference after every stage; float32 differs in last bits at most."""
    case = make(device, dtype, head_dim=head_dim, block_size=block_size, norms=norms)
    tolerance = {"atol": 2e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 0, "rtol": 0}
    for result, expected in zip(case.run(rotary_kv_write), case.run(rotary_kv_write_reference), strict=True):
        torch.testing.assert_close(result, expected, **tolerance)


@pytest.mark.parametrize("cache", FLOAT8)
def test_float8_rounds_to_the_nearest(cache: torch.dtype) -> None:
    """The cache holds each value over its head's scale within half a step, cut off at the largest number."""
    case = make(torch.device("cpu"), torch.float32, cache)
    case.keywords["kv_scales"][0, 0] = 1e-7
    _, expected = Case(**{**vars(case), "cache": case.cache.float(), "keywords": {}}).run(rotary_kv_write_reference)
    _, result = case.run(rotary_kv_write_reference)
    largest, half_step = torch.finfo(cache).max, 2.0 ** (-4 if cache == torch.float8_e4m3fn else -3)
    exact = expected[:, LAYER].transpose(1, 2) / case.keywords["kv_scales"].unsqueeze(2)
    written = expected[:, LAYER].transpose(1, 2) != 5.0
    exact, got = exact.clamp(-largest, largest)[written], result[:, LAYER].transpose(1, 2)[written].float()
    assert float(got.abs().max()) == largest
    torch.testing.assert_close(got, exact, rtol=half_step, atol=2e-3)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("cache", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_kernel_is_the_reference(cache: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """Bit by bit, for values that need no rounding (the interpreter's is wrong): quarter turns and powers of two."""
    case = make(device, dtype, cache)
    case.qkv = (torch.randint(-7, 8, case.qkv.shape, device=device) * 0.25).to(dtype)
    case.keywords["kv_scales"] = 2.0 ** torch.randint(-12, 3, (2, KV_HEADS), device=device)
    turns = torch.randint(0, 4, case.angles.shape, device=device)
    table = torch.tensor([1.0, 0.0, -1.0, 0.0], device=device)
    results = []
    for function in (rotary_kv_write, rotary_kv_write_reference):
        cache_now, angles = case.cache.clone(), torch.cat((table[turns], table[(turns + 3) % 4]), 1)
        k_cache, v_cache = cache_now[:, LAYER].unbind(1)
        q = function(case.qkv.clone(), case.positions, angles, k_cache, v_cache, case.mapping, **case.keywords)
        results.append((q, cache_now.view(torch.uint8)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("function", [rotary_kv_write, rotary_kv_write_reference])
def test_keys_are_turned_in_place(function: Any, norms: bool, device: torch.device) -> None:
    """As they lie in the cache, those of tokens that are not stored as well; values stay."""
    case = make(device, DTYPES[-1], norms=norms)
    qkv, case.mapping = case.qkv.clone(), torch.arange(TOKENS, device=device)
    _, cache = case.run(lambda _, *rest, **keywords: function(qkv, *rest, **keywords))
    keys, values = qkv[:, Q_HEADS:].chunk(2, 1)
    assert torch.equal(keys, cache[0, LAYER, 0, :TOKENS])
    assert torch.equal(values, case.qkv[:, Q_HEADS + KV_HEADS :])
    case.mapping.fill_(-1)
    again = case.qkv.clone()
    case.run(lambda _, *rest, **keywords: function(again, *rest, **keywords))
    assert torch.equal(again, qkv)


def test_an_invariant_token_does_not_know_how_many_there_are(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel for many tokens and few: the same bits."""
    case = make(device, DTYPES[-1], norms=True)
    few = case.run(rotary_kv_write_invariant)
    monkeypatch.setattr(pagebus.kernels.layers.rotary_kv_write, "MANY_TOKENS", 1)
    monkeypatch.setattr(pagebus.kernels.layers.rotary_kv_write, "_rotary_kv_write_tokens_kernel", None)
    assert all(torch.equal(*each) for each in zip(few, case.run(rotary_kv_write_invariant), strict=True))


def test_no_tokens(device: torch.device) -> None:
    """An empty pass is no error."""
    case = make(device, torch.float32)
    case.qkv, case.positions, case.mapping = case.qkv[:0], case.positions[:0], case.mapping[:0]
    for function in (rotary_kv_write, rotary_kv_write_reference):
        q, cache = case.run(function)
        assert q.shape == (0, Q_HEADS, 64)
        assert torch.equal(cache, case.cache)


@pytest.mark.usefixtures("many_tokens")
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("function", [rotary_kv_write, rotary_kv_write_reference])
def test_keys_and_values_alone(function: Any, norms: bool, device: torch.device) -> None:
    """Without any query they are what they are beside some."""
    case = make(device, torch.float32, norms=norms)
    _, expected = case.run(function)
    case.qkv = case.qkv[:, Q_HEADS:]
    q, cache = case.run(function)
    assert q.shape == (TOKENS, 0, 64)
    assert torch.equal(cache, expected)
