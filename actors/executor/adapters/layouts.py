"""Which numbers of a file lie where in an adapter's image: worked out once for all adapters that were trained alike.

The step's thread needs Python's lock for each launch, and whoever lays out a matrix at a time takes it from there
thousands of times for an adapter. So the places of numbers are laid out, once, by what lays out numbers. Whatever
adapter follows is then copied by one call for each chunk, which does without the lock.
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from pagebus.actors.executor.adapters.images import Bits, Image, ImageMaker, bits_of
from pagebus.actors.executor.adapters.reading import AdapterNumbers, in_order, parts_of
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import AdapterShape
from pagebus.actors.model.lora.projections import all_projections
from pagebus.actors.model.shards.local import whole_config

UNITS = (256, 128, 64, 32)
"""Numbers that lie together in the file and in the image, the most that all of it consists of: an index of 8 bytes says
where each such unit comes from."""
MOST_PLACES = 1 << 31


Index = npt.NDArray[np.intp]


class Layout(NamedTuple):
    """The unit of the file from which each unit of an image comes, -1 for zeros; begins and fields as of
    :class:`Image`; and of each of its scales which module's it is, from 1 on, 0 for none."""

    unit: int
    sources: Index
    begins: torch.Tensor
    fields: torch.Tensor
    modules: torch.Tensor

    def fill(self, chunks: list[Bits], values: Bits) -> None:
        """Copy the numbers of a file."""
        units, begin = values[: len(values) // self.unit * self.unit].reshape(-1, self.unit), 0
        for chunk in chunks:
            rows = chunk.reshape(-1, self.unit)
            sources = self.sources[begin : begin + len(rows)]
            np.take(units, sources, axis=0, out=rows, mode="clip")  # other modes copy through a buffer
            rows[sources < 0] = 0
            begin += len(rows)


class Layouts:
    """Makes images of adapters of a model, or of a rank's part of one. Any thread."""

    def __init__(self, images: ImageMaker, config: ModelConfig) -> None:
        self._images, self._config = images, config
        self._places = ImageMaker(images.products, torch.int32, UNITS[0])
        self._whole = {each.name: each for each in all_projections(whole_config(config))}
        self._known: WeakKeyDictionary[AdapterShape, Layout | None] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def image(self, adapter: AdapterNumbers) -> Image:
        """The adapter as blocks of the cache hold it."""
        with self._lock:
            if adapter.shape not in self._known:
                self._known[adapter.shape] = self._worked_out(adapter.shape)
            layout = self._known[adapter.shape]
        if layout is None:
            return self._images.image(adapter.parts(self._config))
        chunks = self._images.empty(len(layout.sources) * layout.unit)
        layout.fill([bits_of(each) for each in chunks], bits_of(adapter.values))
        scales = torch.tensor([0.0, *[adapter.scales[name] for name in adapter.shape.modules]])
        return Image(tuple(chunks), layout.begins, layout.fields, scales[layout.modules])

    def _worked_out(self, shape: AdapterShape) -> Layout | None:
        """None: its numbers are computed with, or too few of them lie together."""
        if sum(each.size for each in shape.tensors) >= MOST_PLACES or any(each.bias for each in shape.modules.values()):
            return None
        tensors = in_order(shape, lambda begin, end: torch.from_numpy(np.arange(begin + 1, end + 1, dtype=np.int32)))
        numbers = {name: float(number) for number, name in enumerate(shape.modules, 1)}
        sources, told, unit, length = list[_Units](), list[tuple[torch.Tensor, ...]](), UNITS[0], 0
        for product in self._images.products:
            parts = parts_of(self._whole[product.projection.name], shape, tensors, numbers, self._config)
            entries = self._places.entries(parts, product)
            places = np.empty(entries.length, np.int32)
            entries.fill(places)
            found = _units(places, unit)
            if found is None:
                return None
            unit = found.unit
            sources.append(found)
            told.append((entries.begins + length, entries.fields, entries.scales))
            length += entries.length
        begins, fields, modules = (torch.cat(each) for each in zip(*told, strict=True))
        return Layout(unit, np.concatenate([each.divided(unit) for each in sources]), begins, fields, modules.long())


class _Units(NamedTuple):
    """Of one product: what :class:`Layout` has of all."""

    unit: int
    sources: Index

    def divided(self, unit: int) -> Index:
        """In smaller units."""
        each = self.unit // unit
        parts = self.sources[:, None] * each + np.arange(each)
        return np.where(parts < 0, -1, parts).ravel()


def _units(places: Bits, most: int) -> _Units | None:
    """``places`` [n]: of each number of the image, where it is in the file, from 1 on, 0 for zeros."""
    for unit in (each for each in UNITS if each <= most):
        rows = places.reshape(-1, unit)
        firsts = rows[:, 0]
        is_empty = ~rows.any(axis=1)
        follow = np.equal(np.diff(rows), 1).all(axis=1) & ((firsts - 1) % unit == 0)
        if np.all(is_empty | follow):
            return _Units(unit, np.where(is_empty, -1, (firsts - 1) // unit).astype(np.intp))
    return None
