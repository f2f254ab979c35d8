"""Random numbers for layouts, as those of dense dummy weights."""

from __future__ import annotations

import torch

from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Rows

MIDDLE, LARGEST = 8, 100


def fill_layout(layout: Layout, largest: float, generator: torch.Generator) -> None:
    """Weights of up to about ``largest``, either sign."""
    if isinstance(layout, W4Words):
        layout.words.random_(-(2**31), 2**31, generator=generator)
        _fill_words(layout, largest)
    else:
        values = torch.empty(layout.values.shape, dtype=torch.int8, device=layout.values.device)
        values.random_(-LARGEST, LARGEST + 1, generator=generator)
        layout.values.copy_(values)
        layout.scale.fill_(largest / LARGEST)
    if not isinstance(layout, W8Rows):
        if layout.zero is not None:
            layout.zero.fill_(MIDDLE if isinstance(layout, W4Words) else 0)
        if layout.low is not None:
            layout.low.zero_()
        if layout.order is not None:
            layout.order.copy_(torch.arange(layout.order.shape[-1], device=layout.order.device))


def _fill_words(layout: W4Words, largest: float) -> None:
    if layout.table is not None and not bool(layout.table.any()):
        layout.table.copy_(torch.linspace(-1, 1, 16))
    reach = MIDDLE if layout.table is None else float(layout.table.abs().max())
    if layout.whole is not None:
        layout.whole.fill_(largest / reach)
        layout.scale.fill_(1.0)
    elif layout.scale.dtype == torch.uint8:
        layout.scale.fill_(127 - 12)  # 2 ** -12, times up to 6
    else:
        layout.scale.fill_(largest / reach)
