"""Weights from safetensors files, or random ones.

The files' headers are read and checked first: a missing tensor, a wrong shape or an unknown format is found before the
first gigabyte is copied (:mod:`pagebus.actors.executor.loading.weight_copy`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch

from pagebus.actors.executor.layers.parameters import Parameters, Views
from pagebus.actors.executor.loading.formats.finding import Module, find_modules
from pagebus.actors.executor.loading.formats.modules import read_modules
from pagebus.actors.executor.loading.formats.noise import fill_layout
from pagebus.actors.executor.loading.gguf_tensors import gguf_tensors
from pagebus.actors.executor.loading.weight_copy import FORMATS, StoredTensor, bytes_to_read, copy_weights
from pagebus.actors.model.config import ModelConfig, ModelError, read_json
from pagebus.actors.model.family import NameMap
from pagebus.actors.model.gguf.files import is_gguf
from pagebus.actors.model.pooling.pooler import Pooler
from pagebus.actors.model.shards.cuts import Cut, cut_of, is_absent
from pagebus.actors.model.shards.quantized import module_cut
from pagebus.actors.model.shards.shard import Shard

Progress = Callable[[float], None]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth")
MAX_HEADER_BYTES = 100_000_000
DUMMY_RANGE = 1e-3
"""As vLLM's dummy weights, so that both are measured with the same: the numbers that a GPU multiplies decide how much
power it draws, and so its clock (docs/performance.md)."""
NAMES_SHOWN = 3
TIED_HEAD = "lm_head."
"""Where the head is the embedding, what files have of it is not read, in whatever format."""

UNUSED_SUFFIXES = (
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *(".k_scale", ".v_scale", "_proj.output_scale", ".kv_scale"),
)
"""Tables that old checkpoints carry and that are computed here; scales that
:mod:`pagebus.actors.executor.loading.kv_scales` reads."""


class Weighted(Protocol):
    """A model, or a part of one: ``config`` says what its files hold, ``parameters`` are its tensors."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def parameters(self) -> Parameters: ...


@torch.inference_mode()
def load_weights(model: Weighted, path: Path, load_format: str, seed: int, progress: Progress) -> None:
    """Fill the model's tensors. ``load_format``: "dummy" (random, the same for a seed), or "auto", "gguf" or
    "safetensors".

    ``progress`` gets the share of bytes done, rising to 1.0, from whichever thread copies, one call at a time.

    Raises:
        ModelError: files or tensors are missing, broken, or not what config.json promises; the text names them.
    """
    if load_format == "dummy":
        fill_with_noise(model, seed)
    else:
        stored = _own_tensors(model, path)
        modules = _quantized_modules(model, stored)
        views = _copied(model, modules)
        check_tensors(stored, views, _tied(model))
        _copy_all(model, stored, views, modules, progress)
    model.parameters.finish()
    progress(1.0)


def check_files(model: Weighted, path: Path) -> None:
    """Whether the files in ``path`` have what the model wants, by their headers. Raises ModelError."""
    stored = _own_tensors(model, path)
    check_tensors(stored, _copied(model, _quantized_modules(model, stored)), _tied(model))


def unmatched_entries(model: Weighted) -> list[str]:
    """Entries of the checkpoint's lists of what is not quantized, or is otherwise, that mean no weight of the model."""
    config = model.config
    elsewhere = config.stage is not None or (config.shard is not None and config.shard.by_expert)
    if config.quantization is None or elsewhere:  # they may mean a weight of another stage or rank
        return []
    views = [name.removesuffix(".weight") for name in model.parameters.views]
    return config.quantization.unmatched([*model.parameters.modules, *views], config.names)


def _quantized_modules(model: Weighted, stored: dict[str, StoredTensor]) -> list[Module]:
    """What is quantized; its tensors, and those of dense weights that files have quantized, are taken out of
    ``stored``."""
    quantization, parameters, names = model.config.quantization, model.parameters, model.config.names
    if quantization is None:
        return []
    if model.config.tie_word_embeddings:
        for name in [name for name in stored if name.startswith(TIED_HEAD)]:
            del stored[name]
    found = find_modules(parameters, stored, quantization, names, model.config.shard)
    for name in found.used:
        del stored[name]
    return found.modules


def _copied(model: Weighted, modules: list[Module]) -> Views:
    """The model's dense tensors but those that come from a quantized module."""
    dequantized = {f"{module.name}.weight" for module in modules if module.view is not None}
    return {name: view for name, view in model.parameters.views.items() if name not in dequantized}


def _own_tensors(model: Weighted, path: Path) -> dict[str, StoredTensor]:
    """What the files in ``path`` have of the model, by our names; it goes by these. Raises ModelError."""
    config = model.config
    stored = gguf_tensors(path) if is_gguf(path) else our_names(read_headers(weight_files(path)), config.names)
    stored = own_parts(stored | module_tensors(path, config.pooler), model)
    model.parameters.find(stored)
    return stored


def our_names(stored: dict[str, StoredTensor], names: NameMap) -> dict[str, StoredTensor]:
    """The tensors that the text model has, by our names. Raises ModelError for two of one name."""
    found: dict[str, StoredTensor] = {}
    for theirs, tensor in stored.items():
        name = names.ours(theirs)
        if name in found:
            raise ModelError(f"tensor {name} is there twice, once as {theirs} in {tensor.file.name}")
        if name is not None:
            found[name] = tensor
    return found


def own_parts(stored: dict[str, StoredTensor], model: Weighted) -> dict[str, StoredTensor]:
    """The tensors of the model's stage, each with the cut that its rank takes of it. Raises ModelError."""
    shard, names, stage = model.config.shard, model.config.names, model.config.stage
    if stage is not None:
        stored = {name: tensor for name, tensor in stored.items() if stage.has(name)}
    if shard is None:
        return stored
    here = {name: tensor for name, tensor in stored.items() if not is_absent(name, shard)}
    return {name: replace(tensor, cut=cut_of(name, shard, names)) for name, tensor in here.items()}


def module_tensors(path: Path, pooler: Pooler | None) -> dict[str, StoredTensor]:
    """The tensors of dense modules of sentence-transformers, each of which has a folder. Raises ModelError."""
    found: dict[str, StoredTensor] = {}
    for product in () if pooler is None else pooler.head:
        if product.file:
            stored = read_headers(weight_files(path / product.file))
            found |= {f"{product.file}.{name}": tensor for name, tensor in stored.items()}
    return found


def fill_with_noise(model: Weighted, seed: int) -> None:
    """Random numbers of up to DUMMY_RANGE, for every tensor, made on the model's own device."""
    shard, names = model.config.shard, model.config.names
    fill_parameters(model.parameters, seed, shard, lambda name: cut_of(name, shard, names) if shard else None)


def fill_parameters(
    parameters: Parameters, seed: int, shard: Shard | None, cut: Callable[[str], Cut | None]
) -> None:  # fmt: skip
    """:func:`fill_with_noise` for tensors of which a rank takes what ``cut`` says, by their names."""
    generator = make_generator(parameters.device).manual_seed(seed)
    if shard is not None:
        _fill_parts_with_noise(parameters, shard, cut, seed, generator)
        return
    for tensor in parameters.tensors:
        tensor.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
    for layout in parameters.layouts:
        fill_layout(layout, DUMMY_RANGE, generator)


def _fill_parts_with_noise(
    parameters: Parameters, shard: Shard, cut: Callable[[str], Cut | None], seed: int, generator: torch.Generator
) -> None:  # fmt: skip
    """Random numbers for one rank: tensors that every rank has whole are equal on all of them."""
    for name, view in parameters.views.items():
        taken = cut(name)
        generator.manual_seed(crc32(f"{seed} {name} {0 if taken is None else shard.rank}".encode()))
        if taken is not None and taken.is_zero:
            view.zero_()
        else:
            view.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
    for ways in parameters.parts:
        for part in ways[0]:
            taken = module_cut(part.module, len(part.weight.shape) == 3, shard, parameters.names)
            generator.manual_seed(crc32(f"{seed} {part.module} {0 if taken is None else shard.rank}".encode()))
            fill_layout(part.weight, DUMMY_RANGE, generator)


def make_generator(device: torch.device) -> torch.Generator:
    """A copy of the device's own generator: to make one otherwise, parts of torch would be imported first."""
    default = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    return default.clone_state()


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder: those of its index, else its one file, else all. Raises ModelError."""
    if (path / INDEX_FILE).is_file():
        names = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f"{path / INDEX_FILE} has no weight_map")
        files = sorted({str(name) for name in names.values()})
        if any(Path(name).name != name for name in files):
            raise ModelError(f"{path / INDEX_FILE}: weight_map names files outside the model's folder")
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            raise ModelError(f"{path}: weight file {missing[0]} is missing ({len(missing)} of {len(files)} are)")
        return [path / name for name in files]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{path}: {_other_files(path)}")
    return found


def _other_files(path: Path) -> str:
    """Why a folder without safetensors files cannot be loaded."""
    pickles = [each.name for suffix in PICKLES for each in sorted(path.glob(f"*{suffix}"))]
    if not pickles:
        return "no safetensors weights (other formats are not read)"
    why = f"{pickles[0]} is a pickle, which could run code, and is never read"
    return f"no safetensors weights: {why} (save the model as safetensors)"


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor in the files, by name. Raises ModelError for a broken file or a name that occurs twice."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(file).items():
            if name in stored:
                raise ModelError(f"tensor {name} is in both {stored[name].file.name} and {file.name}")
            stored[name] = tensor
    return stored


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """One file's tensors: eight bytes of header length, the header in JSON, the data."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= size - 8 - length:
                raise ValueError(f"tensor {name} lies outside the file, which is perhaps not complete")
            first, shape = 8 + length + start, tuple(entry["shape"])
            tensors[name] = StoredTensor(file, first, str(entry["dtype"]), shape, end - start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    return tensors


def _tied(model: Weighted) -> set[str]:
    """Tensors that files may have, and that are not read."""
    return {"lm_head.weight", "model.lm_head.weight"} if model.config.tie_word_embeddings else set()


def check_tensors(stored: dict[str, StoredTensor], views: Views, unused: Collection[str] = ()) -> None:
    """The files hold exactly these ``views`` of a model, with their shapes, and perhaps what is ``unused``. Raises
    ModelError with the names."""
    missing = [name for name in views if name not in stored]
    if missing:
        raise ModelError(f"the weights lack {_some(missing)}, which config.json asks for")
    for name, view in views.items():
        tensor = stored[name]
        shape = tuple(view.shape) if tensor.cut is None else tensor.cut.stored_shape(view.shape)
        if tensor.shape != shape:
            found, promised = list(tensor.shape), list(shape)
            raise ModelError(f"tensor {name} in {tensor.file.name} has shape {found}, config.json says {promised}")
        if tensor.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ModelError(f"tensor {name} in {tensor.file.name} has format {tensor.format}; only {known} are read")
        if tensor.num_bytes != (wanted := prod(shape) * FORMATS[tensor.format].itemsize):
            raise ModelError(f"tensor {name} in {tensor.file.name} has {tensor.num_bytes} bytes, its shape {wanted}")
    extra = [name for name in stored if name not in views and name not in unused and not name.endswith(UNUSED_SUFFIXES)]
    if extra:
        raise ModelError(f"the weights hold {_some(extra)}, which config.json does not ask for")


def _some(names: list[str]) -> str:
    """``tensor a, b, c and 5 more``."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"tensor {', '.join(names[:NAMES_SHOWN])}{more}"


def _copy_all(
    model: Weighted, stored: dict[str, StoredTensor], views: Views, modules: list[Module], progress: Progress
) -> None:
    """Copy every tensor of the model out of its file, in the order in which they lie there; then what is quantized."""
    wanted = sum(bytes_to_read(stored[name]) for name in views)
    total, done = wanted + sum(each.num_bytes for each in modules), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done / total)

    in_order = sorted(views, key=lambda name: (stored[name].file, stored[name].offset))
    try:
        copy_weights([(stored[name], views[name]) for name in in_order], count)
        read_modules(modules, model.parameters.device, count)
    except OSError as error:
        raise ModelError(f"the weights cannot be read: {error}") from error
