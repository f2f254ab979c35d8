"""CUDA graphs of decode steps, one per batch bucket, all in one memory pool.

A graph holds everything between the upload and the read-back: inputs from the slots, forward, logits, plain sampling,
store. It reads rows, lengths and tables from device memory at fixed addresses, so one graph serves any content.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from actors.executor.batch import StepWork
from actors.executor.errors import EngineError

if TYPE_CHECKING:
    from actors.executor.runner import Runner


def bucket_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every multiple of 8, up to and including ``largest``."""
    sizes = [size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size <= largest]
    return sizes if sizes[-1] == largest else [*sizes, largest]


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    sampled: torch.Tensor


class DecodeGraphs:
    """Graphs for decode-only steps of up to ``largest`` rows."""

    def __init__(self, largest: int) -> None:
        self._sizes = bucket_sizes(largest)
        self._bucket_of = np.array([0, *np.repeat(self._sizes, np.diff([0, *self._sizes]))]).tolist()
        self._captured: dict[int, _Captured] = {}

    def bucket(self, num_rows: int) -> int:
        """The smallest bucket that holds ``num_rows``; 0 if none does."""
        return self._bucket_of[num_rows] if num_rows < len(self._bucket_of) else 0

    def replay(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch; returns the logits [bucket, V] float32 and tokens [bucket], valid until the next replay."""
        captured = self._captured[bucket]
        captured.graph.replay()
        return captured.logits, captured.sampled

    def capture(self, runner: Runner, progress: Callable[[float], None]) -> None:
        """Capture every bucket, the largest first, so that the smaller ones find the pool large enough.

        On the meta device, where there is nothing to capture, the passes are run once.
        """
        if runner.kv_cache.is_meta:
            for bucket in self._sizes:
                decode_pass(runner, empty_decode(runner.limits.max_model_len), bucket)
            return
        pool = torch.cuda.graph_pool_handle()
        with _no_collection():
            for done, bucket in enumerate(reversed(self._sizes)):
                self._captured[bucket] = self._capture_one(runner, bucket, pool)
                progress((done + 1) / len(self._sizes))

    def _capture_one(self, runner: Runner, bucket: int, pool: Any) -> _Captured:
        work = empty_decode(runner.limits.max_model_len)
        runner.uploader.send(work, bucket)
        decode_pass(runner, work, bucket)  # warm: kernels compiled, library workspaces allocated
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            logits, sampled = decode_pass(runner, work, bucket)
        except BaseException as error:
            _end_broken_capture(graph)
            raise EngineError(
                f"capturing the CUDA graph of batch {bucket} failed ({error}); --enforce-eager does without"
            ) from error
        graph.capture_end()
        return _Captured(graph, _borrow(logits), sampled)


def empty_decode(max_context_len: int) -> StepWork:
    """A step without rows, to be padded to a bucket."""
    ints, flags = np.empty(0, np.int32), np.empty(0, np.bool_)
    return StepWork(
        num_decodes=0, num_tokens=0, max_query_len=1, max_context_len=max_context_len, slots=ints, starts=ints,
        query_start=np.zeros(1, np.int32), positions=ints, indexes=ints, sample_slots=ints, sequence_ids=ints,
        length_ended=flags, can_stop=flags, end_ids=ints, deltas={},
    )  # fmt: skip


def decode_pass(runner: Runner, work: StepWork, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a graph holds: inputs, forward, sampling and store of ``bucket`` rows; logits and tokens."""
    hidden = runner.forward(work, padded_rows=bucket)
    logits = runner.model.logits(hidden)
    sampled = runner.sample_plainly(logits, runner.uploader.header.slots[:bucket], any_random=True)
    return logits, sampled


class _DeviceMemory:
    """Names a piece of device memory without owning it, in numba's array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _borrow(logits: torch.Tensor) -> torch.Tensor:
    """A view of float32 ``logits`` that does not keep them: the pool gives the memory to the next capture too.

    Held by the graphs themselves, the logits of all buckets would take gigabytes. Between one replay and the next
    nobody writes there, and that is the only time they are read.
    """
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    return torch.as_tensor(_DeviceMemory(logits), device=logits.device)


def _end_broken_capture(graph: torch.cuda.CUDAGraph) -> None:
    """The first error is the one to report, whatever ending the capture says."""
    try:
        graph.capture_end()
    except Exception:
        return


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while capturing: a finalizer that calls CUDA would break the capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
