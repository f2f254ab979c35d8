"""Captures a graph, without anything beside it that would break the capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """In this block, launches of this thread go into a new graph, and its allocations come from the ``pool``."""
    graph = torch.cuda.CUDAGraph()
    with no_collection():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            _end_broken_capture(graph)
            raise
        graph.capture_end()


def _end_broken_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End the capture. The error that broke it is the one to report, not one that follows here."""
    try:
        graph.capture_end()
    except Exception:
        return


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection while capturing: a finalizer that calls CUDA would break the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
