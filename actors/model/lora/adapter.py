"""An adapter folder, checked against a model: which matrices it has for which modules, and its digest.

Nothing but ``adapter_config.json`` and ``adapter_model.safetensors`` is read. Both must be plain files of the folder:
links that lead out of it are refused, and so is everything that would have to be unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.configuration import AdapterConfig, parse_config
from pagebus.actors.model.lora.errors import AdapterError, NoAdapter
from pagebus.actors.model.lora.matching import Matrices, matched
from pagebus.actors.model.lora.tensor_file import FileTensor, Numbers, in_parts, read_header, read_numbers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 4 << 20
DIGEST_BYTES = 16
PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter. ``modules`` are by our names; ``digest`` stands for configuration and weights."""

    folder: Path
    modules: Mapping[str, Matrices]
    config: AdapterConfig

    @property
    def rank(self) -> int:
        """The largest."""
        return max(each.rank for each in self.modules.values())

    def tensors(self) -> list[FileTensor]:
        """All matrices, in the order in which they lie in the file."""
        every = (each for pair in self.modules.values() for each in (pair.a, pair.b, pair.bias) if each is not None)
        return sorted(every, key=_place)

    def read(self) -> tuple[Numbers, str]:
        """All their numbers, and the digest, see :func:`digest_of`.

        Raises:
            AdapterError: see :func:`read_numbers`.
        """
        numbers = read_numbers(self.folder / WEIGHTS, self.tensors())
        return numbers, _digest(self, [numbers])


def open_adapter(path: Path, model: ModelConfig, max_rank: int, targets: Collection[str] = ()) -> Adapter:
    """The adapter in a folder, of modules for which ``targets`` leave room. Its numbers are not read yet: see
    :func:`digest_of`.

    Raises:
        NoAdapter: there is no such folder, or no adapter in it.
        AdapterError: it is broken, does not fit the model or asks for what is not served.
    """
    folder = _folder(path)
    file = _plain_file(folder, CONFIG)
    if file.stat().st_size > MOST_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG} is larger than {MOST_CONFIG_BYTES >> 20} MiB")
    try:
        config = parse_config(json.loads(file.read_bytes()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is no JSON: {error}") from error
    tensors = read_header(_plain_file(folder, WEIGHTS))
    return Adapter(folder, matched(tensors, config, model, max_rank, targets), config)


def digest_of(adapter: Adapter) -> str:
    """32 hexadecimal digits that stand for it: 128 bits of SHA-256. Reads all of it, part by part. Raises AdapterError,
    see :func:`read_numbers`."""
    parts = in_parts(adapter.tensors(), PART_BYTES)
    return _digest(adapter, (read_numbers(adapter.folder / WEIGHTS, part) for part in parts))


def _digest(adapter: Adapter, parts: Iterable[Numbers]) -> str:
    """Over what of the configuration counts, and the tensors in the order of their file."""
    what = [adapter.config.canonical(), [[each.name, each.format, each.shape] for each in adapter.tensors()]]
    canonical = json.dumps(what, sort_keys=True).encode()
    hashed = sha256(b"pagebus adapter 2" + len(canonical).to_bytes(8, "little") + canonical)
    for part in parts:
        hashed.update(part.raw.data)
    return hashed.hexdigest()[: 2 * DIGEST_BYTES]


def _folder(path: Path) -> Path:
    try:
        folder = path.resolve(strict=True)
        names = {each.name for each in folder.iterdir()}
    except (OSError, ValueError, RuntimeError) as error:
        raise NoAdapter(f"no adapter found at {path}: there is no such folder") from error
    if CONFIG not in names:
        raise NoAdapter(f"no adapter found at {path}: it has no {CONFIG}")
    if WEIGHTS not in names:
        pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
        if pickled:
            raise AdapterError(f"{pickled[0]} is pickled, and could run code: save the adapter as safetensors")
        raise NoAdapter(f"no adapter found at {path}: it has no {WEIGHTS}")
    return folder


def _plain_file(folder: Path, name: str) -> Path:
    """A file of the folder. Hubs keep files elsewhere and link them: within the same repository that is right."""
    try:
        file = (folder / name).resolve()
    except (OSError, RuntimeError):  # links in a circle
        file = Path("/")
    home = folder.parent.parent if folder.parent.name == "snapshots" else folder
    if not file.is_relative_to(home) or not file.is_file():
        raise AdapterError(f"{name} is no plain file of the adapter's folder")
    return file


def _place(tensor: FileTensor) -> int:
    return tensor.start
