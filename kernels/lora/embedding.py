"""What adapters add to the embedding of tokens: y += s B^T, where s is a token's column of A times a scale.

A is stored as of products, and its inputs are the vocabulary. A small kernel gathers s, and that of products adds.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.lora.expand import expand
from pagebus.kernels.lora.pages import COLUMNS, PLACE_FIELDS, PagedTable, elements, read_back
from pagebus.kernels.lora.plan import AdapterPlan

TOKENS = 16
"""Of a program."""


def add_to_embedding_reference(
    input_ids: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor
) -> torch.Tensor:
    """Add to y [T, H], in place, what each token's adapter has for its id [T]; returns y."""
    vocab = int(input_ids.max()) + 1 if len(input_ids) else 0
    for adapter in plan.of_token.unique().tolist():
        found = read_back(table, adapter, vocab) if adapter >= 0 else None
        if found is None:
            continue
        tokens = (plan.of_token == adapter).nonzero().flatten()
        s = found.a.float().T.index_select(0, input_ids[tokens].int()) * found.scales[0]
        y[tokens] += (s @ found.b.float().T).to(y.dtype)
    return y


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_columns_kernel(
    ids_ptr,  # [T]
    of_token_ptr,  # [T]
    s_ptr,  # [T, LARGEST] float32 out
    memory_ptr,
    pages_ptr,
    places_ptr,
    scales_ptr,
    num_tokens,  # T
    LARGEST: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    token, row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, 8)
    here = token < num_tokens
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    adapter = tl.load(of_token_ptr + token, mask=here, other=-1)
    adapted = adapter >= 0
    adapter = tl.where(adapted, adapter, 0)
    column = tl.load(ids_ptr + token, mask=here, other=0).to(tl.int32)
    rank = tl.load(places_ptr + adapter * FIELDS, mask=adapted, other=0)
    rows = tl.load(places_ptr + adapter * FIELDS + 1, mask=adapted, other=0)
    a = tl.load(places_ptr + adapter * FIELDS + 3, mask=adapted, other=0)
    scale = tl.load(scales_ptr + adapter, mask=adapted, other=0.0)
    for begin in range(0, tl.max(rank, axis=0), 8):
        exists = (begin + row)[None, :] < rank[:, None]
        offset = (a + column // COLUMNS * rows * COLUMNS + column % COLUMNS)[:, None] + (begin + row)[None, :] * COLUMNS
        place = elements(pages_ptr, adapter[:, None], offset, exists, PAGES, PAGE)
        values = tl.load(memory_ptr + place, mask=exists, other=0.0).to(tl.float32)
        sums = s_ptr + token.to(tl.int64)[:, None] * LARGEST + (begin + row)[None, :]
        tl.store(sums, values * scale[:, None], mask=exists)


def add_to_embedding(input_ids: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor) -> torch.Tensor:
    """As `add_to_embedding_reference`."""
    num_tokens = len(input_ids)
    assert len(plan.of_token) == num_tokens
    s = torch.empty((1, num_tokens, table.largest), dtype=torch.float32, device=y.device)
    if num_tokens == 0:
        return y
    _gather_columns_kernel[(-(-num_tokens // TOKENS),)](
        input_ids, plan.of_token, s, table.memory, table.pages, table.places, table.scales, num_tokens,
        LARGEST=table.largest, PAGES=table.pages.shape[1], PAGE=table.kernel_page, FIELDS=PLACE_FIELDS, TOKENS=TOKENS,
        num_warps=4, **pdl(y.device),
    )  # fmt: skip
    return expand(s, table, plan, y)
