"""Images of adapters: each matrix lies where kernels look for it, whatever modules, ranks and formats there are."""

from __future__ import annotations

import pytest
import torch

from pagebus.actors.executor.adapters import images
from pagebus.actors.executor.adapters.images import ImageMaker, Product
from pagebus.actors.executor.adapters.reading import HostModule
from pagebus.actors.model.lora.projections import Projection
from pagebus.kernels.lora.pages import Matrices, lay_out

WIDTHS, NAMES = (40, 8, 24), ("q", "k", "v")


def projection(inputs: int) -> Projection:
    return Projection(NAMES, inputs, WIDTHS)


def module(rank: int, inputs: int, width: int, dtype: torch.dtype, *, biased: bool = False) -> HostModule:
    return HostModule(
        torch.randn(rank, inputs, dtype=dtype), torch.randn(width, rank, dtype=dtype), 0.5 * rank,
        torch.randn(width, dtype=dtype) if biased else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [100, 256, 700])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("chunk", [images.CHUNK_BYTES, 4096])
def test_images(chunk: int, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, ordered: bool) -> None:
    """q of rank 3 and v of rank 12 with a bias, in 16 ranks; k has none. Products lie on one chunk or on several."""
    monkeypatch.setattr(images, "CHUNK_BYTES", chunk)
    order = torch.randperm(sum(WIDTHS)) if ordered else None
    maker = ImageMaker([Product(projection(inputs), WIDTHS, order)] * 2, dtype, 256)
    q, v = module(3, inputs, 40, torch.float32), module(12, inputs, 24, dtype, biased=True)
    image = maker.image({"q": q, "v": v})
    a, b = torch.zeros(48, inputs, dtype=dtype), torch.zeros(72, 16, dtype=dtype)
    a[:3], a[32:44], b[:40, :3], b[48:, :12] = q.a.to(dtype), v.a, q.b.to(dtype), v.b
    assert v.bias is not None
    b[48:, 12] = v.bias
    wanted, told = lay_out(Matrices(a, b if order is None else b[order], (1.5, 0.0, 6.0), 13))
    assert torch.equal(torch.cat(image.chunks), wanted.repeat(2))
    assert (len(image.chunks) > 1) == (chunk == 4096)
    assert all(each.nbytes == chunk for each in image.chunks[:-1])
    assert image.begins.tolist() == [0, len(wanted)]
    assert image.fields.tolist() == [[*told[:3], 0, told[3], 13]] * 2
    assert image.scales.tolist() == [1.5, 0.0, 6.0] * 2
    assert maker.image({}).length == 0
