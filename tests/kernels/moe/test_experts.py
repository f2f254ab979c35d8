"""Products with experts' weights: every way to compute them, at its borders, for any choice of experts."""

from __future__ import annotations

from bisect import bisect_left

import pytest
import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.choice import choose, token_counts
from pagebus.kernels.moe.experts import (
    moe_experts,
    moe_experts_invariant,
    moe_experts_reference,
    shape_of,
)
from pagebus.kernels.moe.grouped import combine, combine_reference
from pagebus.kernels.moe.hopper_experts import gather_pairs
from pagebus.kernels.moe.launch.rule import choose_invariant
from pagebus.kernels.moe.launch.shapes import (
    Config,
    GroupConfig,
    Grouped,
    PairConfig,
    Shape,
    Unsorted,
    brought_here,
    leaves_unsorted,
)
from pagebus.kernels.moe.routing import WIDE_GRID
from pagebus.kernels.moe.sorting import (
    CHUNKS,
    FEW_PAIRS,
    MOST_PAIRS,
    SortedPairs,
    most_items,
    sort_pairs,
    sort_pairs_reference,
)
from pagebus.kernels.moe.weights import ExpertWeights

H200 = Target(90, 132)
HIDDEN, WIDTH, EXPERTS, TOP_K = 48, 40, 128, 8
"""Neither is a multiple of the tiles; as many experts and choices as Qwen3-30B-A3B has."""
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)  # the interpreter's bfloat16 products are wrong
TILE = GroupConfig(32, 32, 2, 4)
WAYS: dict[str, Config] = {
    "unsorted": Unsorted(PairConfig(4, 32, 4), PairConfig(8, 16, 4)),
    "unsorted, ahead": Unsorted(PairConfig(8, 64, 4, 3), PairConfig(4, 64, 4, 3)),
    "items of 16": Grouped(16, TILE, TILE),
    "items of 64, persistent": Grouped(64, GroupConfig(64, 16, 3, 4, programs=2), GroupConfig(64, 16, 3, 8, False, 1)),
    "through tma": Grouped(32, GroupConfig(32, 32, 2, 4, tma=True), GroupConfig(32, 32, 2, 4, tma=True, programs=3)),
}


def make_layer(
    dtype: torch.dtype, device: torch.device, *, gate: Gate | None = None, experts: int = EXPERTS, biased: bool = False
) -> ExpertWeights:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return ExpertWeights(
        random(experts, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
        random(experts, HIDDEN, WIDTH) / WIDTH**0.5,
        random(experts, 2 * WIDTH) if biased else None,
        random(experts, HIDDEN) if biased else None,
        gate or Gate(),
    )


def make_tokens(
    count: int, dtype: torch.dtype, device: torch.device, *, experts: int = EXPERTS, top_k: int = TOP_K
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a view into wider rows; weights; different experts of each token."""
    x = torch.randn(count, HIDDEN + 8, device=device).to(dtype)[:, :HIDDEN]
    chosen = torch.rand(count, experts, device=device).argsort(1)[:, :top_k].int().contiguous()
    return x, torch.rand(count, top_k, device=device), chosen


def expected(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights) -> torch.Tensor:
    """In float64, token by token."""
    wide = ExpertWeights(*(None if each is None else each.double() for each in layer[:4]), layer.gate)
    rows = []
    for token, chosen in enumerate(experts.tolist()):
        row = x.new_zeros(HIDDEN, dtype=torch.float64)
        for choice, expert in enumerate(chosen):
            if expert >= 0:
                row += weights[token, choice].double() * one_expert(x[token].double(), wide, expert)
        rows.append(row)
    return torch.stack(rows)


def one_expert(x: torch.Tensor, layer: ExpertWeights, expert: int) -> torch.Tensor:
    gate, up = (layer.gate_up[expert] @ x + (0 if layer.gate_up_bias is None else layer.gate_up_bias[expert])).chunk(2)
    if layer.gate.kind is GateKind.SILU:
        hidden = gate * gate.sigmoid() * up
    elif layer.gate.kind is GateKind.GELU_TANH:
        hidden = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    else:
        gate, up = gate.clamp(max=layer.gate.limit), up.clamp(-layer.gate.limit, layer.gate.limit)
        hidden = (up + 1) * gate * torch.sigmoid(layer.gate.alpha * gate)
    return layer.down[expert] @ hidden + (0 if layer.down_bias is None else layer.down_bias[expert])


def error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str, dtype: torch.dtype, device: torch.device) -> None:
    """Each kernel gives the weighted sum."""
    layer, tokens = make_layer(dtype, device, experts=6), make_tokens(5, dtype, device, experts=6, top_k=2)
    wanted = expected(*tokens, layer)
    assert error(moe_experts_reference(*tokens, layer), wanted) < LIMITS[dtype]
    result = moe_experts(*tokens, layer, WAYS[way])
    assert result.dtype == dtype
    assert error(result, wanted) < LIMITS[dtype]


@pytest.mark.parametrize(("way", "kind"), [
    *((way, kind) for way in ("unsorted", "items of 16") for kind in GateKind),
    *((way, GateKind.SWIGLU_CLAMPED) for way in WAYS if way not in ("unsorted", "items of 16")),
])  # fmt: skip
def test_gates_and_biases(kind: GateKind, way: str, device: torch.device) -> None:
    """Every gate, with biases, and limits that cut."""
    layer = make_layer(torch.float32, device, gate=Gate(kind, 1.3, 0.7), experts=8, biased=True)
    tokens = make_tokens(2, torch.float32, device, experts=8, top_k=2)
    wanted = expected(*tokens, layer)
    assert error(moe_experts(*tokens, layer, WAYS[way]), wanted) < LIMITS[torch.float32]
    assert error(moe_experts_reference(*tokens, layer), wanted) < LIMITS[torch.float32]


def test_borders_of_sorting() -> None:
    """Of 32 pairs none is sorted, with more experts than four times that; of one token more, all are. It is the number
    of pairs that counts."""
    for count in (1, 4, 5):
        chosen = choose(count, Shape(EXPERTS, TOP_K, HIDDEN, WIDTH), torch.float32, None)
        assert isinstance(chosen, Unsorted) == (count <= 4)
    for count in (32, 33):
        assert leaves_unsorted(count, Shape(EXPERTS, 1, HIDDEN, WIDTH)) == (count <= 32)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_chosen(count: int, device: torch.device) -> None:
    """Beside the border, both kernels with their own launch shapes."""
    layer, tokens = make_layer(torch.float32, device, experts=4), make_tokens(count, torch.float32, device, experts=4)
    tokens = tokens[0], tokens[1][:, :2].contiguous(), tokens[2][:, :2].contiguous()
    assert isinstance(choose(count, shape_of(layer, 2), torch.float32, None), Unsorted) == (count == 1)
    assert error(moe_experts(*tokens, layer), expected(*tokens, layer)) < LIMITS[torch.float32]


def test_counts_launch_all_that_fewer_launch() -> None:
    """Every number of tokens has the kernels of the next one in the list."""
    for shape in (Shape(128, 8, 2048, 768), Shape(60, 4, 2048, 1408), Shape(8, 2, 4096, 14336), Shape(7, 3, 64, 40)):
        counts = token_counts(shape, 5000, torch.bfloat16, H200)
        assert counts[-1] == 5000
        for tokens in range(1, 5001):
            following = counts[bisect_left(counts, tokens)]
            assert launched(tokens, shape) == launched(following, shape), (tokens, following)


def launched(tokens: int, shape: Shape, among: int = 0) -> tuple[object, ...]:
    """All that decides about kernels. ``among`` as in `brought_here`."""
    chosen, pairs = choose(*brought_here(tokens, shape, among), torch.bfloat16, H200), tokens * shape.top_k
    invariant = choose_invariant(*brought_here(tokens, shape, among), torch.bfloat16)
    sorted_by = min(MOST_PAIRS, max(FEW_PAIRS, next_power_of_2(pairs))), pairs > MOST_PAIRS
    return chosen, invariant, tokens > WIDE_GRID, sorted_by


def test_rows_at_odd_addresses() -> None:
    """The tensor memory accelerator cannot read them: not one of the sizes is a multiple of 16 bytes."""
    for shape in (Shape(8, 2, 64, 36), Shape(8, 2, 60, 64)):
        for tokens in (64, 4096):
            chosen = choose(tokens, shape, torch.bfloat16, H200)
            assert isinstance(chosen, Grouped)
            assert (chosen.gate_up.tma, chosen.down.tma) == (False, False)


@pytest.mark.parametrize("count", [16, 17, 65])
@pytest.mark.parametrize("way", ["items of 16", "items of 64, persistent"])
def test_all_tokens_to_one_expert(way: str, count: int, device: torch.device) -> None:
    """Items full to the last place and one more; all other experts have no token."""
    layer, (x, weights, _) = make_layer(torch.float32, device, experts=8), make_tokens(count, torch.float32, device)
    experts = torch.full((count, 1), 5, dtype=torch.int32, device=device)
    weights = weights[:, :1].contiguous()
    result = moe_experts(x, weights, experts, layer, WAYS[way])
    assert error(result, expected(x, weights, experts, layer)) < LIMITS[torch.float32]


@pytest.mark.parametrize("way", WAYS)
def test_padding(way: str, device: torch.device) -> None:
    """Tokens without experts get zeros, though what lies where their products would be is no number."""
    layer, (x, weights, experts) = (
        make_layer(torch.float32, device, experts=8),
        make_tokens(4, torch.float32, device, experts=8, top_k=3),
    )
    for token in (0, 3):
        experts[token], weights[token], x[token] = -1, 0.0, torch.nan
    experts[1, 2:] = -1
    result = moe_experts(x, weights, experts, layer, WAYS[way])
    assert not result[[0, 3]].any()
    assert error(result, expected(x.nan_to_num(), weights, experts, layer)) < LIMITS[torch.float32]
    none = moe_experts(x, weights, experts.fill_(-1), layer, WAYS[way])
    assert not none.any()


@pytest.mark.parametrize("way", WAYS)
def test_order_of_tokens(way: str, device: torch.device) -> None:
    """A token's bits do not depend on its place, nor on the tokens beside it."""
    count = 3 if isinstance(WAYS[way], Unsorted) else 21
    layer = make_layer(torch.float16, device, experts=3)
    tokens = make_tokens(count, torch.float16, device, experts=3, top_k=2)
    mixed = torch.randperm(count, device=device)
    result = moe_experts(*tokens, layer, WAYS[way])
    moved = moe_experts(*(each[mixed] for each in tokens), layer, WAYS[way])
    assert torch.equal(moved, result[mixed])
    alone = moe_experts(*(each[2:3] for each in tokens), layer, WAYS[way])
    assert torch.equal(alone, result[2:3])


def test_invariant(device: torch.device) -> None:
    """The form for --deterministic: a token's bits are the same for any number of tokens."""
    layer = make_layer(torch.float16, device, experts=3)
    tokens = make_tokens(70, torch.float16, device, experts=3, top_k=2)
    whole = moe_experts_invariant(*tokens, layer)
    assert error(whole, expected(*tokens, layer)) < LIMITS[torch.float16]
    widths = set()
    for count in (1, 4, 5, 33):
        assert torch.equal(moe_experts_invariant(*(each[:count] for each in tokens), layer), whole[:count])
        widths.add(choose_invariant(count, shape_of(layer, 2), torch.float16).tokens)
    assert len(widths) > 1


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize(
    ("count", "num_experts", "top_k"),
    [(1, 8, 2), (40, 8, 4), (300, 12, 4), (3, 70, 10), (MOST_PAIRS + 5, 6, 2), (CHUNKS * MOST_PAIRS + 5, 3, 1)],
)
def test_sort_pairs(count: int, num_experts: int, top_k: int, tokens: int, device: torch.device) -> None:
    """Order, items and counts are the reference's, with and without tokens that have no experts."""
    *_, experts = make_tokens(count, torch.float32, device, experts=num_experts, top_k=top_k)
    same(sort_pairs(experts, num_experts, tokens), sort_pairs_reference(experts, num_experts, tokens))
    experts[::3] = -1
    same(sort_pairs(experts, num_experts, tokens), sort_pairs_reference(experts, num_experts, tokens))
    experts.fill_(num_experts - 1)
    same(sort_pairs(experts, num_experts, tokens), sort_pairs_reference(experts, num_experts, tokens))


def same(given: SortedPairs, wanted: SortedPairs) -> None:
    count, pairs = int(wanted.num_items), int(wanted.counts.sum())
    assert int(given.num_items) == count <= len(given.items)
    assert torch.equal(given.items[:count, :3], wanted.items[:count, :3])
    assert torch.equal(given.order[:pairs], wanted.order[:pairs])
    assert torch.equal(given.counts, wanted.counts)


@pytest.mark.parametrize(("count", "size"), [(1, 48), (21, 1100), (70, 8)])
def test_tokens_are_copied_into_the_order_of_their_pairs(count: int, size: int, device: torch.device) -> None:
    """Of rows that are apart, wider than a program or not; what stands behind the last pair is never followed."""
    x = torch.randn(count, size + 8, device=device)[:, :size]
    order = torch.randperm(3 * count, device=device).int()
    known = 3 * count - 2
    order[known:] = torch.tensor([2**31 - 1, -(2**31)], device=device).int()
    gathered = gather_pairs(x, order, 3)
    assert gathered.shape == (3 * count, size)
    assert torch.equal(gathered[:known], x[order[:known].long() // 3])


def test_most_items() -> None:
    """The bound is met by the worst case, and holds for fewer pairs than experts."""
    for pairs, experts, tokens in ((3, 8, 16), (40, 8, 16), (8, 8, 16), (1000, 8, 64)):
        worst = [1] * min(pairs, experts)
        worst[0] += pairs - len(worst)
        items = sum(-(-count // tokens) for count in worst)
        assert items <= most_items(pairs, experts, tokens) <= items + 1


def test_combine(device: torch.device) -> None:
    """Bit for bit the reference, one program for several tokens or for one; what has no expert is never read."""
    for count in (3, 515):
        products = torch.randn(count, 3, 72, device=device)
        weights = torch.rand(count, 3, device=device)
        experts = torch.randint(-1, 4, (count, 3), dtype=torch.int32, device=device)
        products[experts < 0] = torch.nan
        result = combine(products, weights, experts)
        torch.testing.assert_close(result, combine_reference(products, weights, experts), rtol=1e-6, atol=1e-6)


def test_no_tokens(device: torch.device) -> None:
    """An empty pass is no error: the last layer of a part of a prompt computes none."""
    layer, (x, weights, experts) = make_layer(torch.float32, device, experts=8), make_tokens(1, torch.float32, device)
    for call in (moe_experts, moe_experts_reference):
        assert call(x[:0], weights[:0], experts[:0], layer).shape == (0, HIDDEN)
