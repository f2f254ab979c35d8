"""Compiles the kernels of steps that are about to be timed, beside those that are: in a process that uses no GPU.

It runs each step on the meta device and has children compile what Triton would compile at the launch
(:mod:`pagebus.actors.executor.loading.compilation`). What fails there fails at the launch too, and is told then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import torch

from pagebus.actors.executor.tuning.changes import Choices, Measurable
from pagebus.actors.executor.tuning.decode_step import BLOCK_SIZE, DecodeStep
from pagebus.actors.executor.tuning.step_timer import LONGEST
from pagebus.actors.executor.tuning.tables import scratch_tables
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.common.target import Target, compile_for

MOST_PROCESSES, SPARED = 14, 2
"""Children at most, and cores that they leave to the process that times."""


class Wanted(NamedTuple):
    """The step whose kernels are wanted: see :class:`DecodeStep`."""

    config: ModelConfig
    dtype: torch.dtype
    cache_dtype: torch.dtype
    backend: str

    def on(self, device: torch.device, rows: int, num_tokens: int) -> DecodeStep:
        """The step itself."""
        return DecodeStep(
            self.config, device, rows, LONGEST, num_tokens, self.dtype, self.cache_dtype, self.backend
        )  # fmt: skip


class StepCompiler:
    """The process, which ends with the context."""

    def __init__(self, wanted: Wanted, todo: Measurable, target: Target) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, wanted, todo, target), daemon=False)
        self._process.start()
        other.close()

    def begin(self, rows: int, choices: Sequence[Choices]) -> None:
        """Compile for steps of this many rows, after all that was begun before."""
        try:
            self._end.send((rows, choices))
        except OSError:
            return  # it has ended: whoever launches compiles

    def wait(self) -> None:
        """For the first of those that were begun and not waited for."""
        try:
            self._end.recv()
        except (EOFError, OSError):
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._process.join()


def _serve(end: Connection, wanted: Wanted, todo: Measurable, target: Target) -> None:
    """In the process: until the other end is closed."""
    from triton.runtime import driver

    from pagebus.actors.executor.loading.compilation import AbsentGpu, Processes, Recorder, leave_out_torch_compile

    leave_out_torch_compile()
    compile_for(target)
    driver.set_active(AbsentGpu(target))
    step = wanted.on(torch.device("meta"), 256, BLOCK_SIZE)
    processes = Processes(max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - SPARED)))
    with scratch_tables(target, todo) as tables, Recorder(set(), processes.start), step.model.few_layers():
        while True:
            try:
                rows, choices = end.recv()
                for each in ({}, *choices):
                    tables.put(rows, each)
                    with contextlib.suppress(Exception):  # what cannot be launched is told by who times it
                        step.run(rows, LONGEST)
                processes.finish()
                end.send(processes.failed)
            except (EOFError, OSError):  # nobody is there any more
                break
