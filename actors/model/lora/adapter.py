"""An adapter folder, checked against a model: which matrices it has for which modules, and its digest.

Nothing but ``adapter_config.json`` and ``adapter_model.safetensors`` is read. Both must be plain files of the folder:
links that lead out of it are refused, and so is everything that would have to be unpickled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from pathlib import Path

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.configuration import AdapterConfig, parse_config
from pagebus.actors.model.lora.errors import AdapterError, NoAdapter
from pagebus.actors.model.lora.matching import Matrices, matched
from pagebus.actors.model.lora.tensor_file import FileTensor, Header, Numbers, in_parts, read_header, read_numbers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 4 << 20
MOST_KNOWN_BYTES = 16 << 20
"""Of headers that are remembered; what follows from them takes several times as much."""
DIGEST_BYTES = 16
PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterShape:
    """What the header of a file says. Adapters that were trained alike share one. ``modules`` are by our names;
    ``tensors`` are all matrices, in the order of the file; ``told`` is JSON that says what they are."""

    modules: Mapping[str, Matrices]
    tensors: tuple[FileTensor, ...]
    told: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter."""

    folder: Path
    shape: AdapterShape
    config: AdapterConfig

    @property
    def rank(self) -> int:
        """The largest."""
        return max(each.rank for each in self.shape.modules.values())

    def scales(self) -> dict[str, float]:
        """Of each module, by our names: by what B A x is multiplied."""
        return {name: self.config.scale_of(each.module, each.rank) for name, each in self.shape.modules.items()}

    def read(self) -> tuple[Numbers, str]:
        """All numbers, and the digest, see :func:`digest_of`.

        Raises:
            AdapterError: see :func:`read_numbers`.
        """
        numbers = read_numbers(self.folder / WEIGHTS, self.shape.tensors)
        return numbers, _digest(self, [numbers])


class AdapterFolders:
    """Opens adapters of one model, of modules for which ``targets`` leave room. What a header says is worked out once,
    for Python's lock is not held for others meanwhile. Any thread."""

    def __init__(self, model: ModelConfig, max_rank: int, targets: Collection[str] = ()) -> None:
        self._model, self._max_rank, self._targets = model, max_rank, targets
        self._shapes: dict[tuple[Header, Hashable], AdapterShape] = {}
        """The one used last behind."""
        self._lock = threading.Lock()

    def open(self, path: Path) -> Adapter:
        """The adapter in a folder. Its numbers are not read yet.

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
        header = read_header(_plain_file(folder, WEIGHTS))
        with self._lock:
            return Adapter(folder, self._shape(header, config), config)

    def _shape(self, header: Header, config: AdapterConfig) -> AdapterShape:
        key = header, config.ranks_told
        known = self._shapes.pop(key, None)
        if known is None:
            modules = matched(header.tensors(), config, self._model, self._max_rank, self._targets)
            every = (each for pair in modules.values() for each in (pair.a, pair.b, pair.bias) if each is not None)
            tensors = tuple(sorted(every, key=attrgetter("start")))
            told = json.dumps([[each.name, each.format, each.shape] for each in tensors])
            known = AdapterShape(modules, tensors, told)
        self._shapes[key] = known
        while len(self._shapes) > 1 and sum(len(each.text) for each, _ in self._shapes) > MOST_KNOWN_BYTES:
            del self._shapes[next(iter(self._shapes))]
        return known


def open_adapter(path: Path, model: ModelConfig, max_rank: int, targets: Collection[str] = ()) -> Adapter:
    """One adapter alone, see :class:`AdapterFolders`."""
    return AdapterFolders(model, max_rank, targets).open(path)


def digest_of(adapter: Adapter) -> str:
    """32 hexadecimal digits that stand for it: 128 bits of SHA-256. Reads all of it, part by part. Raises AdapterError,
    see :func:`read_numbers`."""
    parts = in_parts(adapter.shape.tensors, PART_BYTES)
    return _digest(adapter, (read_numbers(adapter.folder / WEIGHTS, part) for part in parts))


def _digest(adapter: Adapter, parts: Iterable[Numbers]) -> str:
    """Over what of the configuration counts, and the tensors in the order of their file."""
    canonical = f"[{json.dumps(adapter.config.canonical(), sort_keys=True)}, {adapter.shape.told}]".encode()
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
