"""Reads quantized modules, a few at a time, each into its part of the model: in memory are the model and the tensors of
these few. While some are stored, the next are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pagebus.actors.executor.layers.quantized.weights import empty_layout
from pagebus.actors.executor.loading.formats.cutting import own_codes
from pagebus.actors.executor.loading.formats.finding import DTYPES, READERS, Module
from pagebus.actors.executor.loading.formats.gguf import FORMATS as GGUF_FORMATS
from pagebus.actors.executor.loading.formats.reading import FormatError
from pagebus.actors.executor.loading.formats.storing import store
from pagebus.actors.executor.loading.weight_copy import BYTES, StoredTensor, WeightCopier
from pagebus.actors.model.config import ModelError
from pagebus.kernels.quantized.layouts import Layout, W8Blocks

BYTES_AT_ONCE = 128 << 20
"""Enough for all threads that read to have work, and little beside a model: twice as much is there at a time."""
DENSE_AT_ONCE = 1 << 24
"""Numbers that are dequantized at once; each takes several float32 numbers meanwhile."""


def read_modules(modules: Sequence[Module], device: torch.device, on_bytes: Callable[[int], None]) -> None:
    """Fill all; what is unpacked is computed on the ``device``. ``on_bytes`` hears of what is read, as from
    :class:`WeightCopier`.

    Raises:
        ModelError: numbers that the format does not allow; the text names the module and its scheme.
        OSError: a file cannot be read, or ends too early.
    """
    with WeightCopier(device, on_bytes) as copier:
        begun: deque[_Begun] = deque()
        for some in _read_together(modules):
            begun.append(_begin(copier, some, device))
            if len(begun) > 1:  # while these are stored, threads read the next
                _store(begun.popleft(), device)
        while begun:
            _store(begun.popleft(), device)


class _Begun(NamedTuple):
    """Modules whose tensors are being read, and what waits for them."""

    modules: list[Module]
    as_stored: list[dict[str, torch.Tensor]]
    wait: Callable[[], None]


def _begin(copier: WeightCopier, modules: list[Module], device: torch.device) -> _Begun:
    as_stored = [{name: _bytes_of(tensor, device) for name, tensor in module.tensors.items()} for module in modules]
    pairs = [
        (replace(tensor, format=BYTES, shape=(tensor.num_bytes,), cut=None), target[name])
        for module, target in zip(modules, as_stored, strict=True)
        for name, tensor in module.tensors.items()
    ]
    return _Begun(modules, as_stored, copier.begin(pairs))


def _store(begun: _Begun, device: torch.device) -> None:
    """Each module's tensors are freed once it is stored."""
    begun.wait()
    for module in begun.modules:
        _store_module(module, begun.as_stored.pop(0), device)


def _read_together(modules: Sequence[Module]) -> Iterator[list[Module]]:
    """Modules one behind another, as many as have BYTES_AT_ONCE, and at least one."""
    some: list[Module] = []
    for module in modules:
        if some and sum(each.num_bytes for each in some) + module.num_bytes > BYTES_AT_ONCE:
            yield some
            some = []
        some.append(module)
    if some:
        yield some


def _bytes_of(tensor: StoredTensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.num_bytes, dtype=torch.uint8, device=device)


def _store_module(module: Module, as_stored: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Store one module; its tensors are freed on return."""
    tensors = {name: _as_tensor(tensor, as_stored[name]) for name, tensor in module.tensors.items()}
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


def _as_tensor(stored: StoredTensor, data: torch.Tensor) -> torch.Tensor:
    if stored.format in GGUF_FORMATS:  # rows of blocks
        return data.view(*stored.shape[:-1], -1)
    return data.view(DTYPES[stored.format]).view(stored.shape)
