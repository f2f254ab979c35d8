"""Sampling: the noise against integer arithmetic, the reference against a loop, the kernels against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from pagebus.kernels.sampling import limits as sampling_limits
from pagebus.kernels.sampling import sampling
from pagebus.kernels.sampling.limits import sampling_cuts
from pagebus.kernels.sampling.noise import gumbel_reference, row_keys_reference, token_hash_reference
from pagebus.kernels.sampling.sampling import sample, sample_reference

pytestmark = pytest.mark.share(6)

MASK = 0xFFFFFFFF


def mix(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def hash_of(seed: int, index: int, token: int) -> int:
    a = mix(((seed & MASK) + 0x9E3779B9) & MASK)
    b = mix(((seed >> 32) & MASK) ^ a)
    first = mix((b + index * 0x9E3779B1) & MASK)
    second = mix(((first ^ a) + 0x7F4A7C15) & MASK)
    return mix(mix((token * 0x9E3779B1 + first) & MASK) ^ second)


def parameters(rows: list[tuple[float, int, float, float]], device: torch.device) -> dict[str, torch.Tensor]:
    """Rows of (temperature, top_k, top_p, min_p), each with its own seed and index."""
    heat, top_k, top_p, min_p = zip(*rows, strict=True)
    return {
        "slots": torch.arange(len(rows), dtype=torch.int32, device=device),
        "temperature": torch.tensor(heat, device=device),
        "top_k": torch.tensor(top_k, dtype=torch.int32, device=device),
        "top_p": torch.tensor(top_p, device=device),
        "min_p": torch.tensor(min_p, device=device),
        "seeds": torch.arange(len(rows), device=device) * 0x123456789 - 5,
        "indexes": torch.arange(len(rows), dtype=torch.int32, device=device) * 3,
    }


def kept_by_loop(logits: list[float], heat: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token ids that stay, by sorting and adding up."""
    highest = max(logits)
    weights = [math.exp((x - highest) / heat) for x in logits]
    kept = {i for i, w in enumerate(weights) if min_p <= 0 or w >= min_p * (1 - 1e-6)}
    if 0 < top_k < len(logits):
        smallest = sorted(logits, reverse=True)[top_k - 1]
        kept &= {i for i, x in enumerate(logits) if x >= smallest}
    if top_p < 1:
        total, held, smallest = sum(weights[i] for i in kept), 0.0, highest
        for i in sorted(kept, key=lambda i: -logits[i]):
            if held >= top_p * total:
                break
            held, smallest = held + weights[i], logits[i]
        kept &= {i for i, x in enumerate(logits) if x >= smallest}
    return kept


LIMITS = [
    (1.0, 0, 1.0, 0.0), (0.7, 1, 1.0, 0.0), (1.3, 20, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.5, 0, 0.1, 0.0),
    (1.0, 0, 1.0, 0.05), (2.0, 50, 0.8, 0.01), (1.0, 5000, 0.99, 0.0), (1.0, 3, 0.5, 0.3), (0.0, 5, 0.5, 0.5),
    (5.0, 0, 0.95, 0.0), (1.0, -1, 0.0, 0.0), (1.0, 2500, 0.9999, 0.0), (0.1, 0, 1.0, 1.0), (1.0, 0, 0.999, 1e-4),
]  # fmt: skip


def test_hash_is_the_integer_hash() -> None:
    """Torch's wrapping int32 arithmetic gives the same 32 bits as Python's integers."""
    seeds, indexes, tokens = [0, 1, -1, 2**40 + 3, -(2**63), 2**63 - 1], [0, 1, 7, 2**20, 3, 2**31 - 1], [0, 1, 151935]
    keys = row_keys_reference(torch.tensor(seeds), torch.tensor(indexes, dtype=torch.int32))
    got = token_hash_reference(keys, torch.tensor(tokens)).long() & MASK
    assert got.tolist() == [[hash_of(s, i, t) for t in tokens] for s, i in zip(seeds, indexes, strict=True)]


def test_noise_is_gumbel() -> None:
    """Always finite, with the mean and variance of the standard Gumbel distribution, and precise in its upper tail."""
    hashes = torch.tensor([0, 1, 2, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    exact = [-math.log(-math.log1p(-((h & MASK) + 0.5) / 2**32)) for h in hashes.tolist()]
    noise = gumbel_reference(hashes)
    torch.testing.assert_close(noise[[0, 1, 2, 5, 6]], torch.tensor(exact)[[0, 1, 2, 5, 6]], atol=1e-5, rtol=1e-5)
    assert bool(noise.isfinite().all())
    keys = row_keys_reference(torch.tensor([3]), torch.tensor([0]))
    many = gumbel_reference(token_hash_reference(keys, torch.arange(200_000)))
    assert abs(float(many.mean()) - 0.5772) < 0.01
    assert abs(float(many.var()) - math.pi**2 / 6) < 0.03


def test_reference_follows_the_softmax() -> None:
    """Over many indexes of one seed, tokens come as often as their probability says, also after top_p."""
    logits, count = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0]), 8_000
    words = parameters([(0.8, 0, 1.0, 0.0)] * count, torch.device("cpu"))
    words |= {"seeds": torch.full((count,), 11), "indexes": torch.arange(count, dtype=torch.int32)}
    for top_p, kept in ((1.0, [0, 1, 2, 3, 4]), (0.85, [0, 1, 4])):
        words["top_p"] = torch.full((count,), top_p)
        chosen = sample_reference(logits.expand(count, -1), **words, any_random=True, any_truncation=True)
        expected = torch.zeros(5)
        expected[kept] = (logits[kept] / 0.8).softmax(0)
        assert float((chosen.bincount(minlength=5) / count - expected).abs().max()) < 0.02  # 3.5 standard deviations


def test_reference_keeps_what_a_loop_keeps() -> None:
    """Only tokens that sorting and adding up would keep are ever drawn, and with one left always that."""
    torch.manual_seed(5)
    for row, limits in enumerate(LIMITS):
        if limits[0] == 0:
            continue
        logits = (torch.randn(40) * 3).round(decimals=row % 3)
        words = parameters([limits] * 300, torch.device("cpu"))
        chosen = sample_reference(logits.expand(300, -1), **words, any_random=True, any_truncation=True)
        kept = kept_by_loop(logits.tolist(), *limits)
        assert set(chosen.tolist()) <= kept, limits
        likely = {i for i in kept if (logits[list(kept)] / limits[0]).logsumexp(0) - logits[i] / limits[0] < 3}
        assert likely <= set(chosen.tolist()), limits


def logits_for(rows: int, vocab: int, kind: str, device: torch.device) -> torch.Tensor:
    logits = torch.randn(rows, vocab, device=device) * (0.02 if kind == "flat" else 3.0)
    if kind == "ties":
        return (logits * 2).round() / 2
    if kind == "bans":
        logits[:, 3:] = torch.where(torch.rand(rows, vocab - 3, device=device) < 0.99, -math.inf, logits[:, 3:])
    return logits


@pytest.mark.parametrize("kind", ["peaked", "ties"])
def test_kernel_is_the_reference(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of limits gives the reference's token, over more than one chunk of the vocabulary."""
    monkeypatch.setattr(sampling_limits, "BLOCK", 2048)
    words = parameters(LIMITS, device)
    logits = logits_for(len(LIMITS), 4200, kind, device)
    before = logits.clone()
    for flags in ((False, False), (True, False), (True, True)):
        expected = sample_reference(logits, **words, any_random=flags[0], any_truncation=flags[1])
        result = sample(logits, **words, any_random=flags[0], any_truncation=flags[1])
        assert result.dtype == torch.int32
        assert result.tolist() == expected.tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("kind", "vocab", "short_list"),
    [("peaked", 2500, 4096), ("peaked", 2500, 64), ("flat", 1500, 4096), ("flat", 2500, 64), ("ties", 31, 4096),
     ("ties", 2500, 300), ("bans", 2500, 4096)],
)  # fmt: skip
def test_cut_keeps_what_a_loop_keeps(
    kind: str, vocab: int, short_list: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's threshold keeps exactly the tokens that sorting and adding up keeps, with and without a list."""
    monkeypatch.setattr(sampling_limits, "BLOCK", 1024)
    monkeypatch.setattr(sampling_limits, "LIST_BLOCK", 512)
    monkeypatch.setattr(sampling_limits, "SHORT_LIST", short_list)
    rows = [limits for limits in LIMITS if limits[0] > 0]
    words = parameters(rows, device)
    logits = logits_for(len(rows), vocab, kind, device)
    names = ("slots", "temperature", "top_k", "top_p", "min_p")
    cuts = sampling_cuts(logits, *(words[name] for name in names), 1e-5).tolist()
    for values, limits, cut in zip(logits.tolist(), rows, cuts, strict=True):
        wanted = kept_by_loop(values, *limits)
        kept = {i for i, x in enumerate(values) if x >= cut}
        # float32 sums may move top_p's border by a token of almost no weight; everything else is exact.
        slack = 2 if limits[2] >= 0.99 and kind != "ties" else 0
        assert len(wanted ^ kept) <= slack, (limits, len(wanted), len(kept))


@pytest.mark.parametrize("run", [sample, sample_reference])
def test_greedy_takes_the_lowest_of_equals(run: object, device: torch.device) -> None:
    """The first of several largest logits, wherever the chunks end; a row of bans still gives a token of the range."""
    logits = torch.zeros(3, 5000, device=device)
    logits[0, [2047, 2048, 4999]] = 1
    logits[1, 4999] = 1
    logits[2] = -math.inf
    words = parameters([(0.0, 0, 1.0, 0.0)] * 2 + [(1.0, 4, 0.5, 0.1)], device)
    result = run(logits, **words, any_random=True, any_truncation=True).tolist()  # type: ignore[operator]
    assert result[:2] == [2047, 4999]
    assert 0 <= result[2] < 5000


def test_what_is_no_number_is_never_drawn(device: torch.device) -> None:
    """As if it were banned, in rows of every kind; a row without any number still gives a token of the range. The
    interpreter's maximum of a NaN and a number is NaN, so there the kernel is left out."""
    logits = torch.randn(len(LIMITS) + 1, 1500, device=device)
    logits[:, 3::2] = torch.nan
    banned = logits.nan_to_num(nan=-math.inf)
    logits[-1] = torch.nan
    words = parameters([*LIMITS, (1.0, 0, 1.0, 0.0)], device)
    for flags in ((False, False), (True, False), (True, True)):
        given = {**words, "any_random": flags[0], "any_truncation": flags[1]}
        expected = sample_reference(banned, **given).tolist()
        for run in (sample_reference, sample) if device.type == "cuda" else (sample_reference,):
            result = run(logits, **given).tolist()
            assert result[:-1] == expected[:-1]
            assert 0 <= result[-1] < 1500


@pytest.mark.parametrize("run", [sample, sample_reference])
def test_rows_do_not_depend_on_each_other(run: object, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's token is the same alone and in any batch, from whichever slot it takes what it wants."""
    monkeypatch.setattr(sampling_limits, "BLOCK", 1024)
    monkeypatch.setattr(sampling_limits, "LIST_BLOCK", 512)
    words = parameters(LIMITS[:7], device)
    logits = torch.randn(7, 1000, device=device)
    together = run(logits, **words, any_random=True, any_truncation=True).tolist()  # type: ignore[operator]
    for row in range(7):
        one = words | {name: words[name][row : row + 1] for name in ("slots", "indexes")}
        alone = run(logits[row : row + 1], **one, any_random=True, any_truncation=True)  # type: ignore[operator]
        assert alone.tolist() == together[row : row + 1]
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3], device=device)
    moved = words | {name: words[name][order] for name in ("slots", "indexes")}
    shuffled = run(logits[order], **moved, any_random=True, any_truncation=True)  # type: ignore[operator]
    assert shuffled.tolist() == [together[row] for row in order.tolist()]


def test_many_rows_take_several_launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of as many as a grid has room for."""
    monkeypatch.setattr(sampling, "MOST_ROWS", 3)
    monkeypatch.setattr(sampling_limits, "BLOCK", 1024)
    words, logits = parameters(LIMITS[:7], device), torch.randn(7, 1500, device=device)
    for truncated in (False, True):
        expected = sample_reference(logits, **words, any_random=True, any_truncation=truncated)
        result = sample(logits, **words, any_random=True, any_truncation=truncated)
        assert result.tolist() == expected.tolist()
