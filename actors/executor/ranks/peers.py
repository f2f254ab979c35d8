"""Ranks on GPUs of one host, which write into each other's memory. What is on the host goes over gloo."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from pagebus.actors.executor.device.comm import Comm, whole
from pagebus.actors.executor.device.errors import EngineError, EngineStalled
from pagebus.actors.executor.ranks.gloo import GlooComm
from pagebus.actors.executor.ranks.nccl import NcclComm
from pagebus.actors.executor.ranks.symmetric import SymmetricMemory
from pagebus.kernels.exchange.all_reduce import all_reduce, all_reduce_norm
from pagebus.kernels.exchange.choice import choices
from pagebus.kernels.exchange.gather import gather
from pagebus.kernels.exchange.gather_rows import gather_rows
from pagebus.kernels.exchange.peers import FAILED, FORMS, HOST_WORDS, Layout, Limits, Peers

if TYPE_CHECKING:
    from pagebus.actors.executor.device.operations import AddNorm
    from pagebus.kernels.coded.rounding import RoundedTokens

DISTRIBUTED: Any = torch.distributed
NUMBERS = itertools.count()
"""Of the groups of this process: the same on all ranks."""
FORMATS = (torch.float32, torch.float16, torch.bfloat16)
PATIENCE_S = 30.0
CHECKED_BYTES = 1024 * 1024
"""That each rank writes to each other one at start, which then reads them."""


class PeerComm(Comm):
    """One of the ranks of ``host``, with a GPU of its own, all of which see all GPUs of the replica.

    Exchanges are queued on the current stream, and may be captured. Each rank makes the same ones in the same order.

    Args:
        host: the exchange of what is on the host, not connected yet.
        device: this rank's GPU.
        limits: bytes that a call may tell, by form; None: the default.
        patience_s: how long the device waits for a rank before :meth:`check` fails.
        nccl: of the same ``host``, for sums beyond the limits, or None: these go in pieces.
    """

    leaves_rows_out = True

    def __init__(
        self, host: GlooComm, device: torch.device, limits: Limits | None = None, patience_s: float = PATIENCE_S,
        nccl: NcclComm | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size = host.rank, host.size
        self._host, self._device, self._patience_s = host, device, patience_s
        self._layout = Layout(self.size, limits)
        self._note = torch.zeros(HOST_WORDS, dtype=torch.int32, pin_memory=True)
        self._nccl = nccl
        self.captured_bytes = math.inf if nccl is None else self._layout.limits.two_shot
        self._known: set[Hashable] = set()
        self._memory: SymmetricMemory | None = None
        self._peers: Peers | None = None

    @property
    def peers(self) -> Peers:
        """What kernels need. Raises EngineError before the ranks have met."""
        if self._peers is None:
            raise EngineError(f"rank {self.rank} has not met the others yet")
        return self._peers

    def connect(self) -> None:
        """Meet the other ranks, map their memory, and see that it can be written to."""
        (self._nccl or self._host).connect()
        try:
            with torch.cuda.device(self._device):
                self._peers = self._map()
        except RuntimeError as error:
            raise EngineError(f"rank {self.rank} does not reach the memory of the other GPUs: {error}") from error

    def _map(self) -> Peers:
        memory = self._memory = SymmetricMemory(self._layout.num_bytes, self._device)
        self._layout.clear(memory.own)
        torch.cuda.synchronize()
        store = DISTRIBUTED.PrefixStore("memory", self._host.store)
        addresses = memory.meet(store, self.rank, self.size, f"pagebus-{next(NUMBERS)}")
        self._check_memory(memory)
        table = torch.tensor([*addresses, self._note.data_ptr()], dtype=torch.int64, device=self._device)
        blocks = torch.cuda.get_device_properties(self._device).multi_processor_count
        peers = Peers(
            self.rank, self._layout, table, self._layout.new_state(self._device), int(self._patience_s * 1e9),
            min(128, int(self._host.least(blocks))),
        )  # fmt: skip
        torch.cuda.synchronize()
        self._host.least(0.0)  # nobody is told anything before all are ready
        return peers

    def _check_memory(self, memory: SymmetricMemory) -> None:
        """Write to all others, and read what they have written."""
        area = self._layout.signal
        size = min(CHECKED_BYTES, area.slot)

        def slot(of: int, sender: int) -> torch.Tensor:
            start = area.start + sender * area.slot
            return memory.of_rank(of)[start : start + size]

        others = [rank for rank in range(self.size) if rank != self.rank]
        for other in others:
            slot(other, self.rank).copy_(self._pattern(self.rank, other, size))
        torch.cuda.synchronize()
        self._host.least(0.0)
        for other in others:
            if not torch.equal(slot(self.rank, other), self._pattern(other, self.rank, size)):
                raise RuntimeError(
                    f"what rank {other} wrote into the memory of rank {self.rank} is not there; the two GPUs cannot "
                    f"exchange directly (is an IOMMU or ACS on?)"
                )
        self._host.least(0.0)
        self._layout.clear(memory.own)
        torch.cuda.synchronize()

    def _pattern(self, sender: int, receiver: int, size: int) -> torch.Tensor:
        numbers = torch.arange(size, device=self._device)
        return ((numbers * 31 + 7 * sender + 3 * receiver) % 251).to(torch.uint8)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As in :class:`Comm`; what is on the host goes over gloo."""
        if x.is_cpu:
            return self._host.all_gather(x)
        self._load("gather", lambda peers: [gather(self._words(count), peers) for count in self._sizes()])
        return gather(x, self.peers)

    def _words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def _sizes(self) -> tuple[int, int]:
        """Words of few and of many, as :func:`gather` tells them apart."""
        return 32, self._layout.limits.gather // 4 + 1

    def gather_rows(self, x: torch.Tensor, wanted: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """As in :class:`Comm`, of numbers of 32 bits."""
        return gather_rows(x, wanted, widths, self.peers)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As in :class:`Comm`, in place."""
        if x.is_cpu or x.dtype not in FORMATS:
            return super().all_reduce(x)
        x = x.contiguous()
        if self._nccl and self._beyond(x):
            return self._nccl.all_reduce(x)
        aligned = x.numel() % 16 == 0
        few = x.view(-1)[: 256 if aligned else 255]
        forms = choices(self.size, norm=False)
        self._load(("sum", x.dtype, aligned), lambda peers: [all_reduce(few, peers, form) for form in forms])
        return all_reduce(x, self.peers, out=x)

    def all_reduce_norm(
        self, add_norm: AddNorm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        scale: float = 1.0, **options: Any,
    ) -> torch.Tensor | RoundedTokens:  # fmt: skip
        """As in :class:`Comm`: all in one kernel, if it is a plain RMS norm."""
        plain = all(value is None or value is False for value in options.values())
        alike = x.dim() == 3 or x.dtype == residual.dtype
        if not (plain and alike) or residual.dtype not in FORMATS or (self._nccl and self._beyond(residual)):
            return super().all_reduce_norm(add_norm, x, residual, weight, eps, scale, **options)
        if x.dim() == 3 and x.dtype != torch.float32:
            x = whole(x, residual)
        forms = choices(self.size, norm=True)
        key = "norm", x.shape[:-2], x.shape[-1], residual.dtype, weight.dtype, residual.stride(0) % 16, scale == 1.0
        self._load(
            key,
            lambda peers: [
                all_reduce_norm(x[..., :1, :], residual[:1].clone(), weight, eps, peers, scale, form) for form in forms
            ],
        )
        return all_reduce_norm(x, residual, weight, eps, self.peers, scale)

    def _load(self, key: Hashable, run: Callable[[Peers], object]) -> None:
        """At the first call of a kind ``run`` all its forms once: what other sizes take is then compiled and loaded. It
        could not be while a graph is captured. Other ranks may have a graph of this call, so they take no part."""
        if key in self._known or torch.cuda.is_current_stream_capturing():
            return
        self._known.add(key)
        scratch = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=self._device)
        table = torch.full_like(self.peers.table, scratch.data_ptr())
        state = self._layout.new_state(self._device)
        state[FAILED] = 1  # nothing waits
        run(replace(self.peers, table=table, state=state))

    def _beyond(self, x: torch.Tensor) -> bool:
        return x.numel() * x.element_size() > self._layout.limits.two_shot

    def least(self, value: float) -> float:
        """As in :class:`Comm`, over the host."""
        return self._host.least(value)

    def tell_all(self, text: str) -> list[str]:
        """As in :class:`Comm`, over the host."""
        return self._host.tell_all(text)

    def check(self) -> None:
        """As in :class:`Comm`."""
        failed, form, sender, call, block = self._note[:5].tolist()
        if failed:
            raise EngineStalled(
                f"rank {self.rank} has waited {self._patience_s:g} s for rank {sender}: block {block} of call {call} "
                f"of the exchange {FORMS[form]}"
            )

    def close(self) -> None:
        """Leave without waiting; the memory stays mapped until the process ends."""
        self._host.close()
