"""Finds the tensors of quantized modules among those of the files, and checks their headers before any is read."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.quantized.weights import QuantizedPart
from pagebus.actors.executor.loading.formats import eight_bits, four_bit_floats, gguf, online, packed
from pagebus.actors.executor.loading.formats.reading import BIAS, FLOATS, Expected, Reader
from pagebus.actors.executor.loading.weight_copy import StoredTensor
from pagebus.actors.model.config import ModelError
from pagebus.actors.model.family import NameMap
from pagebus.actors.model.gguf.types import row_bytes
from pagebus.actors.model.quantization.quantization import Quantization, all_names
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.actors.model.shards.cuts import Cut
from pagebus.actors.model.shards.quantized import check_whole_groups, module_cut
from pagebus.actors.model.shards.shard import Shard

READERS: Mapping[str, Reader] = (
    eight_bits.READERS | packed.READERS | four_bit_floats.READERS | online.READERS | gguf.READERS
)
"""By the packing of a scheme."""
DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32, "I8": torch.int8,
    "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
}  # fmt: skip
"""Of what is read here; exponents are read as bytes."""
Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One to be read: its tensors by the names that its reader has for them, for ``part``; or, where the model computes
    with a dense weight, for ``view``. ``cut``: what the rank takes of its weight of this ``shape``."""

    name: str
    scheme: Scheme
    tensors: Mapping[str, StoredTensor]
    shape: tuple[int, ...]
    part: QuantizedPart | None
    view: torch.Tensor | None = None
    cut: Cut | None = None

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Found:
    """``modules`` in the order of the files; ``used`` names all tensors that are theirs."""

    modules: list[Module]
    used: frozenset[str]


def find_modules(
    parameters: Parameters, stored: Stored, quantization: Quantization, names: NameMap, shard: Shard | None = None
) -> Found:
    """What the files have for the quantized parts, and for dense parts that they have quantized; with ``shard`` for
    those of a rank.

    Raises:
        ModelError: a tensor is missing or not what its scheme promises; the text names both.
    """
    modules, used = [], set[str]()
    for part in parameters.chosen_parts(lambda part: _any(part.module, part.scheme, part.weight.shape, stored)):
        if part.by_columns:
            raise ModelError(f"{part.module}: experts that are stored column by column are not read quantized")
        cut, shape = _whole(part.module, part.scheme, part.weight.shape, names, shard)
        tensors, taken = _tensors(part.module, part.scheme, shape, stored, parameters.views)
        if cut is not None and cut.dim == len(shape) - 3:  # whole experts, which lie behind each other
            tensors = {name: _experts_of(tensor, cut) for name, tensor in tensors.items()}
            cut, shape = None, tuple(part.weight.shape)
        modules.append(Module(part.module, part.scheme, tensors, shape, part, cut=cut))
        used |= taken
    for name, view in parameters.views.items():
        module = name.removesuffix(".weight")
        if module == name or view.dim() != 2 or _is_dense(stored.get(name)):
            continue
        scheme = quantization.scheme(all_names(module, names)) or quantization.default
        if scheme is not None and _any(module, scheme, tuple(view.shape), stored):
            cut, shape = _whole(module, scheme, tuple(view.shape), names, shard)
            tensors, taken = _tensors(module, scheme, shape, stored, parameters.views)
            modules.append(Module(module, scheme, tensors, shape, None, view, cut))
            used |= taken
    first = {id(each): min((t.file, t.offset) for t in each.tensors.values()) for each in modules}
    return Found(sorted(modules, key=lambda each: first[id(each)]), frozenset(used))


def _whole(
    module: str, scheme: Scheme, local: tuple[int, ...], names: NameMap, shard: Shard | None
) -> tuple[Cut | None, tuple[int, ...]]:
    """What the rank takes of a module of which it has the ``local`` shape, and the shape of the whole."""
    cut = module_cut(module, len(local) == 3, shard, names)
    if cut is None or shard is None:
        return None, local
    shape = cut.stored_shape(local)
    check_whole_groups(module, cut, scheme, shape, shard.world)
    return cut, shape


def _experts_of(tensor: StoredTensor, cut: Cut) -> StoredTensor:
    """The part of a tensor of all experts that has those of one range."""
    (own,), size = cut.ranges, tensor.num_bytes // cut.whole
    shape = (len(own), *tensor.shape[1:])
    return replace(tensor, offset=tensor.offset + own.start * size, shape=shape, num_bytes=len(own) * size, cut=None)


def _is_dense(tensor: StoredTensor | None) -> bool:
    """Whether there is a tensor, and it is not one of GGUF's blocks, which have the names of dense tensors."""
    return tensor is not None and tensor.format not in gguf.FORMATS


def _expected(scheme: Scheme, shape: tuple[int, ...]) -> Mapping[str, Expected]:
    return READERS[scheme.packing].expected(scheme, shape[-2], shape[-1])


def _full_name(module: str, suffix: str, shape: tuple[int, ...]) -> str:
    """Of a tensor; those of all experts at once have no ``.weight``."""
    if len(shape) == 2:
        return f"{module}.{suffix}"
    return module + (suffix.removeprefix("weight") if suffix.startswith("weight") else f"_{suffix}")


def _any(module: str, scheme: Scheme, shape: tuple[int, ...], stored: Stored) -> bool:
    """Whether the files have a tensor of the module."""
    expected = _expected(scheme, shape).items()
    return any(_full_name(module, name, shape) in stored for suffix, each in expected for name in each.names(suffix))


def _tensors(
    module: str, scheme: Scheme, shape: tuple[int, ...], stored: Stored, views: Container[str]
) -> tuple[dict[str, StoredTensor], set[str]]:
    """A module's tensors, and the names of all that are its own. Those of ``views`` are the model's."""
    found, taken = {}, set()
    for suffix, expected in _expected(scheme, shape).items():
        names = [_full_name(module, each, shape) for each in expected.names(suffix)]
        name = next((each for each in names if each in stored), names[0])
        tensor = None if suffix == BIAS and name in views else stored.get(name)
        if tensor is None:
            if expected.needed:
                raise ModelError(_missing(name, module, scheme, stored))
            continue
        taken.add(name)
        if expected.read:
            _check(name, tensor, expected, scheme, shape[:-2])
            found[suffix] = tensor
    return found, taken


def _missing(name: str, module: str, scheme: Scheme, stored: Stored) -> str:
    dense = stored.get(f"{module}.weight")
    if dense is not None and dense.format in FLOATS:
        return (
            f"tensor {module}.weight is not quantized ({dense.format}), "
            f"but is by the checkpoint's configuration ({scheme})"
        )
    return f"the weights lack tensor {name}, which a quantized weight has ({scheme})"


def _check(name: str, tensor: StoredTensor, expected: Expected, scheme: Scheme, lead: tuple[int, ...]) -> None:
    where = f"tensor {name} in {tensor.file.name}"
    if tensor.format not in expected.formats:
        known = ", ".join(expected.formats)
        raise ModelError(f"{where} has format {tensor.format}, not {known}, which {scheme} has")
    shapes = [(*lead, *shape) for shape in expected.shapes]
    if shapes and tensor.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelError(f"{where} has shape {list(tensor.shape)}, not {wanted}, which {scheme} asks for")
    if tensor.num_bytes != _num_bytes(tensor):
        raise ModelError(f"{where} has {tensor.num_bytes} bytes, not those of {list(tensor.shape)} {tensor.format}")


def _num_bytes(tensor: StoredTensor) -> int:
    """Bytes that its shape and format ask for."""
    if tensor.format in gguf.FORMATS:
        return prod(tensor.shape[:-1]) * (row_bytes(tensor.format, tensor.shape[-1]) or 0)
    return prod(tensor.shape) * DTYPES[tensor.format].itemsize
