"""One module's tensors as a layout, by the readers that the loader uses."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagebus.actors.executor.layers.quantized.weights import empty_layout
from pagebus.actors.executor.loading.formats.finding import READERS
from pagebus.actors.executor.loading.formats.storing import store
from pagebus.actors.model.quantization.parsing import parse_quantization
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.kernels.quantized.layouts import Layout
from tests.helpers.quantized.packers import Packer

CPU = torch.device("cpu")


def parsed(packer: Packer) -> Scheme:
    """The scheme that a checkpoint's configuration says."""
    quantization = parse_quantization(dict(packer.config), {})
    assert quantization is not None
    assert quantization.default is not None
    return quantization.default


def layout_of(scheme: Scheme, tensors: Mapping[str, torch.Tensor], rows: int, columns: int) -> Layout:
    """A module's weight [rows, columns]."""
    layout = empty_layout(scheme, (rows,), columns, CPU)
    store(layout, READERS[scheme.packing].read(tensors, scheme, rows, columns), scheme)
    return layout


def read(packer: Packer, weight: torch.Tensor) -> tuple[Layout, torch.Tensor]:
    """A weight packed and read, and what the packer says that it means."""
    tensors, dense = packer.pack(weight)
    return layout_of(parsed(packer), tensors, *weight.shape), dense
