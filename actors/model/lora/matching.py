"""Which matrices an adapter file has for which modules of a model, all of their shapes checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.configuration import AdapterConfig
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.lora.names import STACKED, Place, copied, place_of
from pagebus.actors.model.lora.projections import BIAS, EMBEDDING, HEAD, all_projections, projections
from pagebus.actors.model.lora.tensor_file import FileTensor

OTHERS = {
    "lora_embedding_": "only embed_tokens has an adapter of embeddings",
    "lora_magnitude_vector": "the magnitudes of DoRA are not served",
    "modules_to_save": "whole matrices in place of the model's are not served",
    "kv_b_proj": "keys and values are made of latents without adapters",
    ".bias": "biases in place of the model's are not served",
}
"""Parts of tensors' names that say why they are refused."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Of one module: A [rank, inputs] and B [outputs, rank] in the file. ``module`` is its name in the configuration,
    which says by what B A x is multiplied.

    ``experts`` > 0: of that many experts, A [experts * rank, inputs], expert by expert, and B [outputs, rank *
    experts], whose columns are the experts' of each rank. ``transposed``: A has outputs, and B inputs; what is added is
    A^T B^T.
    """

    a: FileTensor
    b: FileTensor
    rank: int
    module: str
    experts: int = 0
    transposed: bool = False
    bias: FileTensor | None = None
    """[outputs], beside B: it is multiplied as well."""


Found = dict[str, Matrices]
"""By our names of modules, those of one expert with its number: ``...mlp.experts.3.gate_proj``."""


def matched(
    tensors: Mapping[str, FileTensor],
    config: AdapterConfig,
    model: ModelConfig,
    max_rank: int,
    targets: Collection[str],
) -> Found:
    """The matrices of each module. Raises AdapterError."""
    return _Matching(config, model, max_rank, targets).all_of(tensors)


class _Matching:
    def __init__(self, config: AdapterConfig, model: ModelConfig, max_rank: int, targets: Collection[str]) -> None:
        self._config, self._model, self._biased = config, model, BIAS in targets
        self._max_rank = max_rank
        self._known = {module: each for each in projections(model, targets) for module in each.modules}
        self._every = {module for each in all_projections(model) for module in each.modules}

    def all_of(self, tensors: Mapping[str, FileTensor]) -> Found:
        pairs: dict[str, dict[str, FileTensor]] = {}
        places: dict[str, Place] = {}
        for name, tensor in tensors.items():
            if self._is_copy(name, tensor):
                continue
            place = self._place(name)
            key = place.ours if place.number is None else _numbered(place.ours, place.number)
            if pairs.setdefault(key, {}).setdefault(place.matrix, tensor) is not tensor:
                raise AdapterError(f"tensor {name}: {key} has two of them")
            if place.matrix == "bias" and not self._biased:
                raise AdapterError(f"tensor {name}: there is no room for biases: name bias in --lora-target-modules")
            places[key] = place
        if not pairs:
            raise AdapterError("adapter_model.safetensors holds no matrices")
        found: Found = {}
        for key, pair in pairs.items():
            if len(matrices_of := pair.keys() - {"bias"}) != 2:
                raise AdapterError(f"{places[key].module} has lora_{min(matrices_of, default='B.bias')} alone")
            ours, matrices = self._checked(key, places[key], pair)
            if ours in found:
                raise AdapterError(f"tensor {pair['A'].name}: {ours} has two of them")
            found[ours] = matrices
        _check_once(found)
        if self._config.tied and self._model.spec.head.tied and (EMBEDDING in found) != (HEAD in found):
            raise AdapterError(
                "adapter_config.json: ensure_weight_tying: only one of embedding and head is in the file"
            )
        return found

    def _is_copy(self, name: str, tensor: FileTensor) -> bool:
        """Whether it is the model's own matrix, which is not read."""
        shape = self._model.vocab_size, self._model.hidden_size
        if copied(name, self._model.names) is None:
            return False
        if tensor.shape != shape:
            text = f"shape {list(tensor.shape)}, the model's has {list(shape)}"
            raise AdapterError(f"tensor {name} has {text}: other vocabularies are not served")
        return True

    def _place(self, name: str) -> Place:
        place = place_of(name, self._model.names)
        if place is None:
            raise AdapterError(f"tensor {name}: {_why_unknown(name)}")
        stacked = STACKED.fullmatch(place.ours) if place.stacked else None
        module = place.ours if stacked is None else f"{stacked['experts']}.down_proj"
        known = self._known.get(module)
        if known is None and module in self._every:
            which = "experts" if ".experts." in module else module.rpartition(".")[2]
            raise AdapterError(f"tensor {name}: there is no room for {which}: name it in --lora-target-modules")
        is_there = known is not None and (place.number is None or place.number < known.experts)
        if not is_there or (known is not None and known.experts and place.number is None and not place.stacked):
            raise AdapterError(f"tensor {name}: {_why_unknown(name)}")
        return place

    def _checked(self, key: str, place: Place, pair: Mapping[str, FileTensor]) -> tuple[str, Matrices]:
        """Its name among all, and its matrices."""
        if place.stacked:
            return self._stacked(place, pair)
        known, rank = self._known[place.ours], self._rank(place.module)
        width = known.widths[known.modules.index(place.ours)]
        self._check_shapes(pair, (rank, known.inputs), (width, rank))
        bias = pair.get("bias")
        if bias is not None and (place.number is not None or bias.shape != (width,)):
            raise AdapterError(f"tensor {bias.name}: no bias of {width} outputs of a product that all tokens share")
        return key, Matrices(pair["A"], pair["B"], rank, place.module, bias=bias)

    def _stacked(self, place: Place, pair: Mapping[str, FileTensor]) -> tuple[str, Matrices]:
        """All experts' of one product: where PEFT does not say of which, their sizes do."""
        if "bias" in pair:
            raise AdapterError(f"tensor {pair['bias'].name}: biases of experts are not served")
        match = STACKED.fullmatch(place.ours)
        assert match is not None
        products = [self._known[f"{match['experts']}.{name}"] for name in ("gate_proj", "down_proj")]
        module = place.module.removesuffix(".base_layer")
        a, b = (_sizes(pair[matrix]) for matrix in ("A", "B"))
        for known in products:
            inputs, outputs, count = known.inputs, sum(known.widths), known.experts
            ways = [
                way for way, sizes in ((False, (inputs, outputs)), (True, (outputs, inputs))) if (a[1], b[0]) == sizes
            ]
            if not ways:
                continue
            named = f"{module}.{known.fused.rpartition('.')[2]}"
            rank = self._rank(named)
            self._check_shapes(pair, (rank * count, a[1]), (b[0], rank * count))
            transposed = ways[0] if len(ways) == 1 else self._is_transposed(pair["A"].name)
            return known.fused, Matrices(pair["A"], pair["B"], rank, named, count, transposed)
        text = f"shapes {list(a)} and {list(b)} are of no product of the model's {products[0].experts} experts"
        raise AdapterError(f"tensor {pair['A'].name}: {text}")

    def _is_transposed(self, name: str) -> bool:
        """Of matrices whose sizes fit both ways: what PEFT took for inputs depends on how the model has its weights,
        and on its version."""
        names, corrected = self._model.names, self._config.corrected
        if names.columns_first and names.gates_by_turns:  # transformers says of these how they are
            return False
        if corrected is None:
            raise AdapterError(f"tensor {name}: inputs and outputs cannot be told apart without peft_version")
        return corrected == names.columns_first

    def _rank(self, module: str) -> int:
        rank = self._config.rank_of(module)
        if rank > self._max_rank:
            raise AdapterError(
                f"{module} has rank {rank}, this server takes up to {self._max_rank} (--max-lora-rank)"
            )  # fmt: skip
        return rank

    def _check_shapes(self, pair: Mapping[str, FileTensor], a: tuple[int, ...], b: tuple[int, ...]) -> None:
        for tensor, shape in ((pair["A"], a), (pair["B"], b)):
            if tensor.shape != shape:
                text = f"shape {list(tensor.shape)}, rank and model ask for {list(shape)}"
                raise AdapterError(f"tensor {tensor.name} has {text}: it was made for another model, or is broken")


def _check_once(found: Found) -> None:
    """No product of experts is there in one tensor and one by one."""
    for ours, each in found.items():
        if each.experts:
            prefix, _, part = ours.rpartition(".")
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            ones = {_numbered(f"{prefix}.{name}", number) for name in parts for number in range(each.experts)}
            if twice := sorted(ones & found.keys()):
                raise AdapterError(f"tensor {each.a.name}: {twice[0]} has two of them")


def _numbered(module: str, number: int) -> str:
    prefix, _, part = module.rpartition(".")
    return f"{prefix}.{number}.{part}"


def _sizes(tensor: FileTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise AdapterError(f"tensor {tensor.name} has shape {list(tensor.shape)}, where two sizes are wanted")
    return tensor.shape[0], tensor.shape[1]


def _why_unknown(name: str) -> str:
    return next((why for part, why in OTHERS.items() if part in name), "the model has no such projection")
