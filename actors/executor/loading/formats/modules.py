"""Reads quantized modules one by one, each straight into its part of the model: in memory are the model and the tensors
of one module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pagebus.actors.executor.layers.quantized.weights import empty_layout
from pagebus.actors.executor.loading.formats.cutting import own_codes
from pagebus.actors.executor.loading.formats.finding import DTYPES, READERS, Module
from pagebus.actors.executor.loading.formats.gguf import FORMATS as GGUF_FORMATS
from pagebus.actors.executor.loading.formats.reading import FormatError
from pagebus.actors.executor.loading.formats.storing import store
from pagebus.actors.executor.loading.weight_copy import StoredTensor, read_into
from pagebus.actors.model.config import ModelError
from pagebus.kernels.quantized.layouts import Layout, W8Blocks

DENSE_AT_ONCE = 1 << 24
"""Numbers that are dequantized at once; each takes several float32 numbers meanwhile."""


def read_modules(modules: Sequence[Module], device: torch.device, on_bytes: Callable[[int], None]) -> None:
    """Fill all; what is unpacked is computed on the ``device``.

    Raises:
        ModelError: numbers that the format does not allow; the text names the module and its scheme.
        OSError: a file cannot be read, or ends too early.
    """
    files: dict[Path, int] = {}
    try:
        for module in modules:
            _read_module(module, files, device)
            on_bytes(module.num_bytes)
    finally:
        for file in files.values():
            os.close(file)


def _read_module(module: Module, files: dict[Path, int], device: torch.device) -> None:
    """Read and store one module; its tensors are freed on return."""
    tensors = {name: _read(tensor, files).to(device) for name, tensor in module.tensors.items()}
    try:
        _fill(module, tensors, device)
    except FormatError as error:
        raise ModelError(f"{module.name} {error} ({module.scheme})") from error


def _fill(module: Module, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    if module.part is not None:
        _read_layout(module, tensors, module.part.weight)
        return
    assert module.view is not None
    count, columns = module.view.shape
    layout = empty_layout(module.scheme, (count,), columns, device)
    _read_layout(module, tensors, layout)
    height = layout.block[0] if isinstance(layout, W8Blocks) else 1
    rows = max(1, DENSE_AT_ONCE // (columns * height)) * height
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        module.view[start:stop] = layout.part(None, start, stop).dense(module.view.dtype)


def _read_layout(module: Module, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    reader, scheme = READERS[module.scheme.packing], module.scheme
    rows, columns = module.shape[-2:]
    if len(module.shape) == 2:
        store(layout, own_codes(reader.read(tensors, scheme, rows, columns), module.cut, scheme, 0), scheme)
        return
    for expert in range(module.shape[0]):
        own = {name: tensor[expert] for name, tensor in tensors.items()}
        codes = own_codes(reader.read(own, scheme, rows, columns), module.cut, scheme, 1)
        store(layout.part(expert, 0, layout.shape[-2]), codes, scheme)


def _read(tensor: StoredTensor, files: dict[Path, int]) -> torch.Tensor:
    if tensor.file not in files:
        files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
    data = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    read_into(files[tensor.file], data.numpy().data, tensor.offset)
    if tensor.format in GGUF_FORMATS:  # rows of blocks
        return data.view(*tensor.shape[:-1], -1)
    return data.view(DTYPES[tensor.format]).view(tensor.shape)
