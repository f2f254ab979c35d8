"""Every kernel but attention at the shapes of real models, on the GPU, against its reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from pagebus.kernels.batch.inputs import prepare_inputs, prepare_inputs_reference, store_sampled
from pagebus.kernels.common.int8 import block_bytes, split_blocks
from pagebus.kernels.layers.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write, rotary_kv_write_reference
from pagebus.kernels.linear.activation import silu_mul, silu_mul_reference
from pagebus.kernels.sampling.bad_words import apply_bad_words, apply_bad_words_reference
from pagebus.kernels.sampling.limits import sampling_cuts
from pagebus.kernels.sampling.logprobs import token_logprobs, token_logprobs_reference
from pagebus.kernels.sampling.penalties import apply_penalties, apply_penalties_reference
from pagebus.kernels.sampling.sampling import sample, sample_reference
from pagebus.kernels.sampling.token_masks import apply_token_masks, apply_token_masks_reference
from tests.gpu.kernels.cases import CUDA, SHAPES, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]


@pytest.mark.parametrize("rows", [2, 40])
def test_decode_step_in_a_graph(rows: int) -> None:
    """Inputs, cache writes, attention and sampling captured once serve any later lengths, slots and tables."""
    kv_heads, head_dim, vocab, longest, block_size = 2, 64, 5000, 512, 16
    ints = {"dtype": torch.int32, "device": CUDA}
    tokens = torch.zeros((rows + 1, longest), **ints)
    blocks = rows * (longest // block_size)
    tables = torch.zeros((rows + 1, longest // block_size), **ints)
    cache = torch.randn(blocks, 2, 2, block_size, kv_heads, head_dim, device=CUDA).bfloat16()
    k_cache, v_cache = cache[:, 1, 0], cache[:, 1, 1]
    slots, starts = torch.zeros(rows, **ints), torch.zeros(rows, **ints)
    ids, positions, lens = (torch.zeros(rows, **ints) for _ in range(3))
    mapping, query_start = torch.zeros(rows, dtype=torch.int64, device=CUDA), torch.arange(rows + 1, **ints)
    embedding = torch.randn(1000, (8 + 2 * kv_heads) * head_dim, device=CUDA).bfloat16()
    head = torch.randn(8 * head_dim, vocab, device=CUDA).bfloat16()
    heat, seeds = torch.full((rows,), 0.8, device=CUDA), torch.arange(rows, device=CUDA)
    order = torch.arange(rows, **ints)
    keywords: dict[str, Any] = {
        "slots": slots, "query_start": query_start, "context_lens": lens, "block_tables": tables,
        "scale": head_dim**-0.5, "num_decodes": rows,
    }  # fmt: skip

    angles = torch.rand(longest, head_dim // 2, device=CUDA)
    table = torch.cat((angles.cos(), angles.sin()), 1)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        prepare_inputs(tokens, tables, slots, starts, query_start, block_size, input_ids=ids, positions=positions,
                       slot_mapping=mapping, context_lens=lens)  # fmt: skip
        qkv = embedding[ids.long()].view(rows, -1, head_dim)
        q = rotary_kv_write(qkv, positions, table, k_cache, v_cache, mapping)
        attended = paged_attention(q, k_cache, v_cache, **keywords)
        logits = (attended.flatten(1) @ head).float()
        chosen = sample(logits, order, heat, ids, heat, heat, seeds, starts, any_random=True, any_truncation=False)
        store_sampled(tokens, slots, starts + 1, chosen % 1000)
        return q, attended, logits, chosen

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, attended, logits, chosen = step()
    for longest_now in (1, 17, 400):
        tokens.copy_(torch.randint(0, 1000, tokens.shape))
        tables[:rows].copy_(torch.randperm(blocks).view(rows, -1))
        slots.copy_(torch.randperm(rows))
        starts.copy_(torch.randint(0, longest_now, (rows,)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(lens, starts + 1)
        expected = paged_attention_reference(q.float(), k_cache.float(), v_cache.float(), **keywords)
        assert relative_error(attended, expected) < 8e-3
        wanted = sample_reference(
            logits, order, heat, ids, heat, heat, seeds, starts, any_random=True, any_truncation=False
        )
        assert int((wanted != chosen).sum()) <= 1
        assert torch.equal(tokens[slots.long(), starts.long() + 1], chosen % 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama8b", "qwen06b"])
def test_layers(shape: str, dtype: torch.dtype) -> None:
    """Norms, rotary embedding, activation and cache writes at a model's sizes, one token to many."""
    q_heads, kv_heads, head_dim, _window = SHAPES[shape]
    hidden, inner = (4096, 14336) if shape == "llama8b" else (1024, 3072)
    limit = 1e-6 if dtype == torch.float32 else 3e-3
    for tokens in (1, 257, 2048):
        x, residual = torch.randn(2, tokens, hidden, device=CUDA).to(dtype).unbind(0)
        weight = torch.randn(hidden, device=CUDA).to(dtype)
        assert relative_error(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)) < limit
        other = residual.clone()
        result, expected = add_rms_norm(x, residual, weight, 1e-5), add_rms_norm_reference(x, other, weight, 1e-5)
        assert torch.equal(residual, other)
        assert relative_error(result, expected) < limit
        for count in (2, 3, 8):
            parts = torch.randn(count, tokens, hidden, device=CUDA)
            result, expected = (
                call(parts, into, weight, 1e-5)
                for call, into in ((add_rms_norm, residual), (add_rms_norm_reference, other))
            )
            assert relative_error(residual, other) < limit
            assert relative_error(result, expected) < limit
            other.copy_(residual)
        gated = torch.randn(tokens, 2 * inner, device=CUDA).to(dtype)
        assert relative_error(silu_mul(gated), silu_mul_reference(gated)) < limit

        heads = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device=CUDA).to(dtype)[:, :q_heads]
        weight = torch.randn(head_dim, device=CUDA).to(dtype)
        assert relative_error(rms_norm(heads, weight, 1e-5), rms_norm_reference(heads, weight, 1e-5)) < limit


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotary_kv_write_to_int8(shape: str, norms: bool) -> None:
    """One token to many: the blocks have the reference's bytes, but for a rounding here and there behind norms."""
    q_heads, kv_heads, head_dim, _window = SHAPES[shape]
    table = torch.rand(5000, head_dim, device=CUDA) * 2 - 1
    keywords: dict[str, Any] = {}
    if norms:
        weights = torch.randn(2, head_dim, device=CUDA).bfloat16()
        keywords |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    for tokens in (1, 257, 2048):
        qkv = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device=CUDA).bfloat16()
        positions = torch.randint(0, 5000, (tokens,), dtype=torch.int32, device=CUDA)
        mapping = torch.randperm(3200, device=CUDA)[:tokens]
        mapping[1::5] = -1
        results = []
        for function in (rotary_kv_write, rotary_kv_write_reference):
            blocks = torch.full((200, block_bytes(3, 16, kv_heads, head_dim)), 7, dtype=torch.int8, device=CUDA)
            numbers, scales = split_blocks(blocks, 3, kv_heads, head_dim)
            k_cache, v_cache = numbers[:, 2].unbind(1)
            function(qkv.clone(), positions, table, k_cache, v_cache, mapping, kv_scales=scales[2], **keywords)
            results.append(blocks)
        differing = int((results[0] != results[1]).sum())
        assert differing <= (results[0].numel() * 1e-3 if norms else 0)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotary_kv_write(shape: str, dtype: torch.dtype, norms: bool) -> None:
    """Every model's heads, one token to many: rounded as the reference rounds, and nothing but its places written."""
    q_heads, kv_heads, head_dim, _window = SHAPES[shape]
    wide = torch.float32 if dtype == torch.float32 else torch.bfloat16
    table = torch.rand(5000, head_dim, device=CUDA) * 2 - 1
    keywords: dict[str, Any] = {}
    if norms:
        weights = torch.randn(2, head_dim, device=CUDA).to(wide)
        keywords |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    if dtype.itemsize == 1:
        keywords["kv_scales"] = torch.rand(2, kv_heads, device=CUDA) * 0.1 + 0.001
    for tokens in (1, 257, 2048):
        qkv = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device=CUDA).to(wide)
        positions = torch.randint(0, 5000, (tokens,), dtype=torch.int32, device=CUDA)
        mapping = torch.randperm(3200, device=CUDA)[:tokens]
        mapping[1::5] = -1
        results = []
        for function in (rotary_kv_write, rotary_kv_write_reference):
            cache = torch.full((200, 3, 2, 16, kv_heads, head_dim), 7.0, device=CUDA).to(dtype)
            k_cache, v_cache = cache[:, 2].unbind(1)
            q = function(qkv.clone(), positions, table, k_cache, v_cache, mapping, **keywords)
            results.append((q.float(), cache.float()))
        for result, expected in zip(*results, strict=True):
            if norms or dtype == torch.float32:  # a norm's sum may differ in the last bit, and with it a rounding
                assert relative_error(result, expected) < (1e-6 if dtype == torch.float32 else 2e-3)
                assert int((result != expected).sum()) <= result.numel() * (1 if dtype == torch.float32 else 1e-3)
            else:
                assert torch.equal(result, expected)


def sampling_rows(rows: int) -> dict[str, torch.Tensor]:
    """Temperatures and limits of all sorts, greedy rows among them."""
    index = torch.arange(rows, device=CUDA)
    return {
        "slots": index.to(torch.int32),
        "temperature": torch.where(index % 5 == 0, 0.0, 0.3 + 0.2 * (index % 7)),
        "top_k": torch.where(index % 3 == 0, 0, 1 + index % 90).to(torch.int32),
        "top_p": torch.where(index % 4 == 0, 1.0, 0.05 + 0.9 * (index % 11) / 11),
        "min_p": torch.where(index % 6 == 0, 0.02, 0.0),
        "seeds": index * 0x9876543210 - 77,
        "indexes": (index % 13).to(torch.int32),
    }


@pytest.mark.parametrize("vocab", [128256, 151936])
@pytest.mark.parametrize("spread", [4.0, 0.1])
def test_sampling(vocab: int, spread: float) -> None:
    """Real vocabularies, peaked and flat: same tokens as the reference but where a last bit decides."""
    rows = 40
    words, logits = sampling_rows(rows), torch.randn(40, vocab, device=CUDA) * spread
    greedy = sample(logits, **words, any_random=False, any_truncation=False)
    assert torch.equal(greedy.long(), logits.argmax(1))
    narrow = logits.bfloat16()
    result = sample(narrow, **words, any_random=True, any_truncation=False)
    assert torch.equal(result, sample(narrow.float(), **words, any_random=True, any_truncation=False))
    for truncation in (False, True):
        result = sample(logits, **words, any_random=True, any_truncation=truncation)
        expected = sample_reference(logits, **words, any_random=True, any_truncation=truncation)
        assert int((result != expected).sum()) <= 1
        assert torch.equal(result[::5].long(), logits.argmax(1)[::5])
    on_cpu = {name: value[:8].cpu() for name, value in words.items()}
    elsewhere = sample_reference(logits[:8].cpu(), **on_cpu, any_random=True, any_truncation=True)
    assert int((elsewhere != result[:8].cpu()).sum()) <= 1


def test_sampling_limits_are_exact() -> None:
    """top_k keeps exactly k of different logits, top_p the fewest that reach its share."""
    rows, vocab = 60, 128256
    words, logits = sampling_rows(rows), torch.randn(60, vocab, device=CUDA) * 3
    names = ("temperature", "top_k", "top_p", "min_p")
    no_p, no_k = torch.ones(rows, device=CUDA), torch.zeros(rows, dtype=torch.int32, device=CUDA)
    heat = words["temperature"].clamp(min=0.3)
    cuts = sampling_cuts(logits, words["slots"], heat, words["top_k"], no_p, no_p * 0, 1e-5)
    kept = (logits >= cuts.unsqueeze(1)).sum(1)
    ties = torch.where(
        words["top_k"] > 0, logits.sort(1, descending=True).values[torch.arange(rows), words["top_k"] - 1], 0
    )
    wanted = torch.where(words["top_k"] > 0, (logits >= ties.unsqueeze(1)).sum(1), vocab)
    assert torch.equal(kept, wanted)
    cuts = sampling_cuts(logits, words["slots"], heat, no_k, words["top_p"], no_p * 0, 1e-5)
    shares = (logits.double() / heat.unsqueeze(1).double()).softmax(1)
    held = torch.where(logits >= cuts.unsqueeze(1), shares, 0).sum(1)
    without_last = torch.where(logits > cuts.unsqueeze(1), shares, 0).sum(1)
    assert bool((held >= words["top_p"] - 1e-5).all())
    limited = words["top_p"] < 1
    assert bool((without_last < words["top_p"] + 1e-5)[limited].all())
    assert set(names) <= set(words)


def test_prepare_inputs_and_penalties() -> None:
    """A large mixed pass, and penalties over long histories."""
    rows, longest = 300, 4096
    ints = {"dtype": torch.int32, "device": CUDA}
    tokens = torch.randint(0, 128256, (rows + 1, longest), **ints)
    tables = torch.randint(0, 1 << 20, (rows + 1, longest // 16), **ints)
    slots = torch.randperm(rows + 1)[:rows].to(**ints)
    starts = torch.randint(-1, 2000, (rows,), **ints)
    counts = torch.ones(rows, dtype=torch.int64)
    counts[200:] = torch.randint(0, 60, (100,))
    query_start = torch.cat((torch.zeros(1), counts.cumsum(0))).to(**ints)
    num_tokens = int(query_start[-1]) + 33
    outputs = [
        {name: torch.full((size,), -5, dtype=dtype, device=CUDA) for name, size, dtype in (
            ("input_ids", num_tokens, torch.int32), ("positions", num_tokens, torch.int32),
            ("slot_mapping", num_tokens, torch.int64), ("context_lens", rows, torch.int32))}
        for _ in range(2)
    ]  # fmt: skip
    prepare_inputs(tokens, tables, slots, starts, query_start, 16, **outputs[0])
    prepare_inputs_reference(tokens, tables, slots, starts, query_start, 16, **outputs[1])
    for name in outputs[0]:
        assert torch.equal(outputs[0][name], outputs[1][name]), name

    logits = torch.randn(rows, 128256, device=CUDA)
    again = logits.clone()
    lens = torch.randint(0, longest, (rows,), **ints)
    factors = [1 + torch.rand(rows, device=CUDA), torch.rand(rows, device=CUDA), torch.rand(rows, device=CUDA)]
    factors[0][:50], factors[1][:50], factors[2][:50] = 1, 0, 0
    apply_penalties(logits, tokens, slots, lens // 3, lens, *factors)
    apply_penalties_reference(again, tokens, slots, lens // 3, lens, *factors)
    torch.testing.assert_close(logits, again, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_token_logprobs(vocab: int, num_top: int) -> None:
    """Real vocabularies: ids and ranks are exact, also with many equal logits; values to the last bits."""
    rows = 70
    logits = torch.randn(rows, vocab, device=CUDA) * 4
    logits[::3] = logits[::3].bfloat16().float()
    logits[1::7] = logits[1::7].round()
    tokens = torch.randint(0, vocab, (rows,), dtype=torch.int32, device=CUDA)
    tokens[::2] = logits[::2].argmax(1).int()
    result, expected = token_logprobs(logits, tokens, num_top), token_logprobs_reference(logits, tokens, num_top)
    assert torch.equal(result[:, 1 : 2 + num_top], expected[:, 1 : 2 + num_top])
    values = torch.cat((result[:, :1], result[:, 2 + num_top :]), 1).view(torch.float32)
    wanted = torch.cat((expected[:, :1], expected[:, 2 + num_top :]), 1).view(torch.float32)
    torch.testing.assert_close(values, wanted, atol=2e-5, rtol=1e-6)
    exact = logits.double().log_softmax(1).gather(1, tokens.long().unsqueeze(1))[:, 0]
    torch.testing.assert_close(values[:, 0].double(), exact, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("vocab", [128256, 151936])
def test_restrictions(vocab: int) -> None:
    """Masks and bad words of many rows, with words that have been begun and words that have not."""
    rows, longest, size = 90, 300, 512
    ints = {"dtype": torch.int32, "device": CUDA}
    slots = torch.randperm(rows + 1)[:rows].to(**ints)
    masks = torch.randint(-(2**31), 2**31 - 1, (rows + 1, -(-vocab // 32)), **ints)
    logits = torch.randn(rows, vocab, device=CUDA)
    again = logits.clone()
    places = torch.where(slots % 5 == 0, -1, slots)
    apply_token_masks(logits, places, masks)
    apply_token_masks_reference(again, places, masks)
    assert torch.equal(logits, again)

    tokens = torch.randint(0, 3, (rows + 1, longest), **ints)
    words, lens = torch.randint(0, 3, (rows + 1, size), **ints), torch.zeros(rows + 1, size, **ints)
    place, length = 0, 1
    while place + length <= size:
        place += length
        lens[:, place - 1] = length
        length = length % 6 + 1
    prompt_lens = torch.randint(1, 100, (rows,), **ints)
    indexes = torch.randint(0, 100, (rows,), **ints)
    logits = torch.randn(rows, vocab, device=CUDA)
    again = logits.clone()
    apply_bad_words(logits, tokens, slots, prompt_lens, indexes, words, lens)
    apply_bad_words_reference(again, tokens, slots, prompt_lens, indexes, words, lens)
    assert torch.equal(logits, again)
    assert bool((logits == -torch.inf).any())
