"""What adapters add to embeddings and to logits."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.lora.behind import add_adapters
from pagebus.kernels.lora.embedding import add_to_embedding, add_to_embedding_reference
from pagebus.kernels.lora.plan import DECODE_TOKENS, PROMPT_TOKENS
from tests.kernels.lora.test_adapters import DTYPES, LIMITS, Case, error, mixed


@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PROMPT_TOKENS])
@pytest.mark.parametrize(("dtype", "page_size"), [*((dtype, 0) for dtype in DTYPES), (torch.float32, 2048)])
def test_embeddings(tokens: int, dtype: torch.dtype, page_size: int, device: torch.device) -> None:
    """A token's column of A is what the product with it alone gives; the last ids end a piece of A."""
    vocab = 300
    case, count = Case((70,), device, dtype, inputs=vocab, page_size=page_size), 58
    plan, y = mixed(count, tokens, device), case.random(count, 70)
    ids = torch.randint(0, vocab, (count,), device=device, dtype=torch.int32)
    ids[:4] = torch.tensor([0, 255, 256, vocab - 1])
    one_hot = torch.nn.functional.one_hot(ids.long(), vocab)
    wanted = case.expected(one_hot, plan, y)
    assert error(add_to_embedding_reference(ids, case.table, plan, y.clone()), wanted) < LIMITS[dtype]
    assert error(add_to_embedding(ids, case.table, plan, y), wanted) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits(dtype: torch.dtype, device: torch.device) -> None:
    """They are float32, whatever the tokens are."""
    case = Case((150,), device, dtype)
    plan, x, y = mixed(33, DECODE_TOKENS, device), case.random(33, case.inputs), torch.randn(33, 150, device=device)
    wanted = case.expected(x, plan, y)
    assert error(add_adapters(x, case.table, plan, y), wanted) < LIMITS[dtype]
