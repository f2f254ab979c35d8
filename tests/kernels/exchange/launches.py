"""What launches the kernels of exchange, on tensors without memory: for compiling them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.exchange.all_reduce import all_reduce, all_reduce_norm
from pagebus.kernels.exchange.choice import Choice
from pagebus.kernels.exchange.gather import gather
from pagebus.kernels.exchange.gather_rows import gather_rows
from pagebus.kernels.exchange.peers import Layout, Peers
from pagebus.kernels.layers.squares import row_squares
from pagebus.kernels.sampling.rank_limits import RowLimits, rank_cuts

BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def exchanges() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and launches."""
    for world in (8, 2):
        layout = Layout(world)
        peers = Peers(1, layout, meta(world + 1, dtype=torch.int64), meta(2048, dtype=torch.int32))
        for form in ("push", "signal", "two_shot"):
            choice = Choice(1 << 30, form, 64, 16, 2048, 16384 if world == 2 else 1, 4)
            yield f"sum {form} of {world}", partial(all_reduce, meta(8, 8192), peers, choice)
            yield (
                f"norm {form} of {world}",
                partial(all_reduce_norm, meta(8, 8192), meta(8, 8192), meta(8192), 1e-5, peers, 1.0, choice),
            )
        yield f"gather few of {world}", partial(gather, meta(512, dtype=FP32), peers)
        rows = meta(8, 64, dtype=FP32), meta(8, dtype=torch.int32), [8] * world
        yield f"gather rows of {world}", partial(gather_rows, *rows, peers)
        yield f"gather many of {world}", partial(gather, meta(65536, dtype=FP32), peers)
    rows = meta(2, 8, 5120, dtype=FP32)
    yield (
        "norm push of parts",
        partial(
            all_reduce_norm,
            rows,
            meta(8, 5120),
            meta(5120, dtype=FP32),
            1e-5,
            peers,
            0.5,
            Choice(1 << 30, "push", 64, 16),
        ),
    )
    numbers = meta(8, dtype=FP32), meta(8, dtype=torch.int32), meta(8, dtype=FP32), meta(8, dtype=FP32)
    limits = RowLimits(meta(8, dtype=torch.int32), *numbers)
    yield (
        "limits of 2",
        partial(
            rank_cuts, meta(8, 64128, dtype=FP32), limits, 128256, lambda x: meta(2, *x.shape, dtype=x.dtype),
            lambda x, wanted: meta(8, 128256, dtype=FP32),
        ),
    )  # fmt: skip
    yield "squares", partial(row_squares, meta(8, 4096))
    yield "sum push fp32", partial(all_reduce, meta(2048, dtype=FP32), peers, Choice(1 << 30, "push", 64, 8, 1024))
