"""Tables of adapters for tests and benches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebus.kernels.lora.pages import UNIT, Matrices, PagedTable, lay_out


def contiguous_table(
    adapters: Sequence[Matrices | None], widths: tuple[int, ...], largest: int, page_size: int = 0
) -> PagedTable:
    """A table whose adapters lie behind each other, each in one page; with a ``page_size``, in pages in reverse order.
    None: this one does not adapt the product."""
    found = [each for each in adapters if each is not None]
    device, modules = found[0].a.device, len(widths)
    flats, places, scales = [], [], []
    for each in adapters:
        flat, (rank, rows, step, b) = (found[0].a.new_zeros(UNIT), [0] * 4) if each is None else lay_out(each)
        flats.append(flat)
        places.append([rank, rows, step, 0, b, 0 if each is None else each.constant])
        scales.append([0.0] * modules if each is None else [float(scale) for scale in each.scales])
    size = max(map(len, flats))
    num_pages = -(-size // page_size) if page_size else 1
    padded = num_pages * page_size if page_size else size
    flat = torch.cat([torch.nn.functional.pad(each, (0, padded - len(each))) for each in flats])
    order = torch.arange(len(flats) * num_pages, device=device)
    if page_size:
        flat = flat.view(-1, page_size).flip(0).flatten()
        order = order.flip(0)
    return PagedTable(
        flat,
        (order * (page_size or padded)).view(len(flats), num_pages),
        torch.tensor(places, dtype=torch.int32, device=device),
        torch.tensor(scales, dtype=torch.float32, device=device),
        widths,
        largest,
        page_size or padded,
        any(each.constant for each in found),
    )
