"""Copies of blocks between the device and the host tier, as step plans order them, beside the steps.

On CUDA copies have a stream of their own, one transfer per block (a block of all layers is one contiguous piece), and
nothing waits on the host. Three rules keep the order that :class:`pagebus.bus.messages.StepPlan` promises:

- a plan's copies begin after the steps before it (an event of the compute stream);
- copies keep their order among themselves (one stream);
- a step waits for the last copy that touches any block that is new in a block table with it: copied out before it is
  overwritten, copied in before it is read. Steps that get none of these blocks do not wait.

On a CPU a copy is done when it is asked for.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagebus.actors.executor.batch import checks
from pagebus.actors.executor.device.device import is_done, new_event, new_stream
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.memory.block_loads import BlockLoad, Loads, no_loads
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.bus.messages import Int32Array, StepPlan

COPIES_PER_EVENT = 4
"""A step waits for whole groups of copies; one of a 2 MiB block takes about 40 microseconds."""
QUEUE_LENGTH = 512
"""Copies that surely fit in the driver's queue. Beyond these a call may wait, and must not hold Python's lock."""

NO_LOADS = no_loads()

_Copy = Callable[[int, int, int, int], int]
"""(target, source, bytes, stream) -> CUDA's error code."""


class Copies(Protocol):
    """What the engine calls, in its device thread, between a plan's checks and its pass."""

    memory: HostMemory

    def apply(self, plan: StepPlan, loaded: Loads = NO_LOADS) -> torch.cuda.Event | None:
        """Start the plan's copies, and behind them what else is ``loaded``, and make its pass wait for what it needs.
        Returns an event behind the copies, None if there are none or they are done.

        Raises:
            PlanError: a copy names a block that does not exist.
        """
        ...

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all copies so far; None if they are done."""
        ...


def make_copies(kv_cache: torch.Tensor, memory: HostMemory) -> Copies:
    """For the device of ``kv_cache`` [num_blocks, ...]."""
    return StreamCopies(kv_cache, memory) if kv_cache.is_cuda else PlainCopies(kv_cache, memory)


def has_copies(plan: StepPlan) -> bool:
    arrays = plan.swap_out_blocks, plan.swap_out_hosts, plan.swap_in_blocks, plan.swap_in_hosts
    return any(map(len, arrays))


class PlainCopies:
    """Copies on a CPU."""

    def __init__(self, kv_cache: torch.Tensor, memory: HostMemory) -> None:
        self.memory = memory
        num_blocks = len(kv_cache)
        self._device: NDArray[np.uint8] = kv_cache.view(num_blocks, -1).view(torch.uint8).numpy()

    def apply(self, plan: StepPlan, loaded: Loads = NO_LOADS) -> None:
        self._swap(plan)
        device = self._device.reshape(-1)
        for each in loaded.loads:
            device[each.target : each.target + len(each.source)] = each.source.numpy()

    def _swap(self, plan: StepPlan) -> None:
        if not has_copies(plan):
            return
        checks.swaps(plan, len(self._device), self.memory.num_ready)
        block, device = self.memory.block, self._device
        for source, target in zip(plan.swap_out_blocks.tolist(), plan.swap_out_hosts.tolist(), strict=True):
            block(target)[:] = device[source]
        for source, target in zip(plan.swap_in_hosts.tolist(), plan.swap_in_blocks.tolist(), strict=True):
            device[target] = block(source)

    def mark(self) -> None:
        """All are done."""


class StreamCopies:
    """Copies on CUDA. ``_last`` [num_blocks] numbers the copy group that last touched a block (0: none); groups end in
    the order of their numbers, so that a wait for one covers all before it."""

    def __init__(self, kv_cache: torch.Tensor, memory: HostMemory) -> None:
        self.memory = memory
        self._cache = kv_cache  # keeps the memory
        self._base = kv_cache.data_ptr()
        self._num_blocks = len(kv_cache)
        self._stream = new_stream(kv_cache.device)
        self._last = np.zeros(self._num_blocks, np.int64)
        self._group = 0
        self._covered = 0
        """Groups up to this one are done, or the compute stream waits for them already."""
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()
        self._sources: deque[tuple[list[BlockLoad], torch.cuda.Event]] = deque()
        self._quick, self._patient = _driver_copies(ctypes.PyDLL), _driver_copies(ctypes.CDLL)

    def apply(self, plan: StepPlan, loaded: Loads = NO_LOADS) -> torch.cuda.Event | None:
        while self._pending and is_done(self._pending[0][1]):
            self._covered = max(self._covered, self._pending.popleft()[0])
        while self._sources and is_done(self._sources[0][1]):
            self._sources.popleft()
        copied = self._start(plan) if has_copies(plan) else None
        if loaded.loads:
            copied = self._load(loaded.loads, behind_steps=copied is None)
        if self._group > self._covered:
            self._order_pass(plan, loaded.needed)
        return copied

    def mark(self) -> torch.cuda.Event:
        event = new_event()
        event.record(self._stream)
        return event

    def _start(self, plan: StepPlan) -> torch.cuda.Event:
        checks.swaps(plan, self._num_blocks, self.memory.num_ready)
        self._await_steps()
        out, back = plan.swap_out_blocks, plan.swap_in_blocks
        self._copy(0, self.memory.addresses(plan.swap_out_hosts), self._addresses(out), out)
        self._copy(1, self._addresses(back), self.memory.addresses(plan.swap_in_hosts), back)
        return self._pending[-1][1]

    def _await_steps(self) -> None:
        """Copies from here on follow the steps so far."""
        before = new_event()
        before.record()
        self._stream.wait_event(before)

    def _load(self, loads: list[BlockLoad], *, behind_steps: bool) -> torch.cuda.Event:
        """Queue copies from elsewhere in host memory. The sources are kept until the copies are done."""
        if behind_steps:
            self._await_steps()
        for start in range(0, len(loads), COPIES_PER_EVENT):
            group = loads[start : start + COPIES_PER_EVENT]
            copy = (self._quick if len(self._pending) * COPIES_PER_EVENT < QUEUE_LENGTH else self._patient)[1]
            for each in group:
                code = copy(
                    self._base + each.target, each.source.data_ptr(), len(each.source), self._stream.cuda_stream
                )
                if code:
                    raise EngineError(f"CUDA error {code} while copying into a block")
            self._end_group([each.block for each in group])
        event = self._pending[-1][1]
        self._sources.append((loads, event))
        return event

    def _end_group(self, blocks: Int32Array | list[int]) -> None:
        self._group += 1
        self._last[blocks] = self._group
        event = new_event()
        event.record(self._stream)
        self._pending.append((self._group, event))

    def _copy(self, way: int, targets: NDArray[np.int64], sources: NDArray[np.int64], blocks: Int32Array) -> None:
        """Queue the copies of one way, in groups with an event behind each. ``blocks``: the device's."""
        size, stream = self.memory.block_bytes, self._stream.cuda_stream
        pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
        for start in range(0, len(pairs), COPIES_PER_EVENT):
            queued = len(self._pending) * COPIES_PER_EVENT
            copy = (self._quick if queued < QUEUE_LENGTH else self._patient)[way]
            for target, source in pairs[start : start + COPIES_PER_EVENT]:
                code = copy(target, source, size, stream)
                if code:
                    raise EngineError(f"CUDA error {code} while copying a block {('out', 'in')[way]}")
            self._end_group(blocks[start : start + COPIES_PER_EVENT])

    def _addresses(self, blocks: Int32Array) -> NDArray[np.int64]:
        return self._base + blocks.astype(np.int64) * self.memory.block_bytes

    def _order_pass(self, plan: StepPlan, needed_blocks: Int32Array) -> None:
        """Make the compute stream wait for the copies of blocks that are new with this plan."""
        touched = [needed_blocks, plan.new_block_ids, plan.appended_blocks, plan.copy_sources, plan.copy_targets]
        touched += [plan.new_windowed, plan.appended_windowed]
        needed = max((int(self._last[blocks].max()) for blocks in touched if len(blocks)), default=0)
        if needed <= self._covered:
            return
        event = next(event for group, event in self._pending if group == needed)
        torch.cuda.current_stream().wait_event(event)
        self._covered = needed


def _driver_copies(load: Callable[[str], ctypes.CDLL]) -> tuple[_Copy, _Copy]:
    """The driver's copies: to the host, to the device. Torch's own cost several times as much per call."""
    driver = load("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    copies = []
    for name in ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"):
        function = getattr(driver, name)
        function.argtypes, function.restype = (pointer, pointer, size, pointer), ctypes.c_int
        copies.append(function)
    return copies[0], copies[1]


class CopyWatch:
    """Tells one thread up to which step copies are done."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()
        self._newest = 0

    def step_done(self, step: int, copied: torch.cuda.Event | None) -> int:
        """``step`` is launched, or done; ``copied`` is the event behind its copies. Returns up to which step copies are
        done. 0: not even those for an earlier scheduler, which counted its own steps."""
        if step <= self._newest:  # another scheduler's: copies for the one before are those of no step of it
            self._pending = deque((0, event) for _, event in self._pending)
        self._newest = step
        if copied is not None:
            self._pending.append((step, copied))
        while self._pending and is_done(self._pending[0][1]):
            self._pending.popleft()
        return max(0, self._pending[0][0] - 1) if self._pending else step


MEASURED_BLOCKS = 32
"""Blocks that are copied to measure the rate."""


def measure_copy_rate(kv_cache: torch.Tensor, memory: HostMemory) -> float:
    """Bytes per second in the slower direction; 0.0 without host memory to copy to. Overwrites the first blocks."""
    count = min(MEASURED_BLOCKS, len(kv_cache), memory.num_ready)
    if not count:
        return 0.0
    copies = make_copies(kv_cache, memory)
    ids = np.arange(count, dtype=np.int32)
    out = StepPlan(step=1, planned_s=0.0, num_decodes=0, swap_out_blocks=ids, swap_out_hosts=ids)
    back = StepPlan(step=2, planned_s=0.0, num_decodes=0, swap_in_hosts=ids, swap_in_blocks=ids)
    seconds = [_seconds(copies, plan) for plan in (out, back, out, back)]
    return count * memory.block_bytes / max(1e-9, *seconds[2:])


def _seconds(copies: Copies, plan: StepPlan) -> float:
    began = time.perf_counter()
    copied = copies.apply(plan)
    if copied is not None:
        copied.synchronize()
    return time.perf_counter() - began
