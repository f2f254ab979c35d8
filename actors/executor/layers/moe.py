"""A mixture of experts as the feed-forward part of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.products import AdaptedExperts
from pagebus.actors.executor.layers.linear import GatedLinear, Linear
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters, Views
from pagebus.actors.executor.layers.quantized.experts import quantized_experts
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.executor.layers.stacked_experts import as_stored, put_in_order
from pagebus.actors.model.config import ModelError
from pagebus.actors.model.family import EXPERT_NAMES, NameMap
from pagebus.actors.model.spec import Dense, Moe
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.routing import Routing, Score
from pagebus.kernels.moe.weights import ExpertWeights
from pagebus.kernels.quantized.layouts import Weight
from pagebus.kernels.quantized.products import Inputs

STACKED = ("experts.gate_up_proj", "experts.down_proj")
"""Names of the experts' weights in files that have them as one tensor each."""
EXPERT_WEIGHTS = ("experts_gate_up", "experts_down")
"""How their weights are called where their layouts are told."""


class MixtureOfExperts:
    """The sum over a token's experts of down(act(gate(x)) * up(x)), weighted by the router, and the shared expert.

    The router's matrix has a last row more where the shared expert has a gate: both are one product, in float32.
    """

    __slots__ = (
        "_choice_bias",
        "_counts",
        "_experts",
        "_ops",
        "_router",
        "_router_bias",
        "_routing",
        "_shared",
        "_spec",
        "adapted",
        "prefix",
    )

    reads_halves = False
    """Whether the norm before it may be done by halves: several products read it, and they want it whole."""

    def __init__(self, spec: Moe, hidden: int, parameters: Parameters, prefix: str, ops: Ops, names: NameMap) -> None:
        _check(spec)
        self._spec, self._ops, self._routing = spec, ops, routing_of(spec)
        self.prefix = f"{prefix}.experts"
        self.adapted: AdaptedExperts | None = None
        """What adapters add to experts, where there may be any."""
        rows = {f"{prefix}.gate.weight": spec.experts}
        if spec.shared_gate:
            rows[f"{prefix}.shared_expert_gate.weight"] = 1
        self._router = parameters.matrix(rows, hidden)
        name = f"{prefix}.gate.bias"
        self._router_bias = parameters.bias({name: spec.experts}, torch.float32) if spec.router_bias else None
        name = f"{prefix}.gate.e_score_correction_bias"
        self._choice_bias = parameters.bias({name: spec.experts}, torch.float32) if spec.choice_bias else None
        self._counts = parameters.count(spec.experts)
        quantized = quantized_experts(spec, hidden, parameters, prefix, STACKED, EXPERT_NAMES)
        self._experts = quantized or _expert_weights(spec, hidden, parameters, prefix, names)
        part, name = spec.shared, f"{prefix}.shared_expert"
        self._shared = None if part is None else SharedExpert(part, hidden, parameters, name, ops, names.gate_up)

    def adapt(self, adapted: AdaptedExperts) -> None:
        """Have adapters add to it what they have."""
        self.adapted = adapted

    def __call__(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """x [T, H] -> [T, H]; where ``padding`` [T] is negative there is no token, and no expert is read for it."""
        logits, count = self._ops.linear(x, self._router, None, torch.float32), self._spec.experts
        weights, experts = self._ops.route(
            logits[:, :count], self._routing, self._choice_bias, padding, self._router_bias, counts=self._counts,
            own=self._spec.own,
        )  # fmt: skip
        if self._spec.weight_on_input:
            total = self._weighted_before(x, weights, experts)
        else:
            total = self._products(x, weights, experts)
        if self._shared is None:
            return total
        return self._ops.add_shared(total, self._shared(x), logits[:, count:] if self._spec.shared_gate else None)

    def _products(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, rows: int = 1) -> torch.Tensor:
        """The weighted sum of each token's experts, with what adapters add; each token is ``rows`` rows of x."""
        addition = None if self.adapted is None else self.adapted.addition
        if addition is None:
            return self._ops.moe_experts(x, weights, experts, self._experts)
        tables, of_token = addition
        of_row = of_token if rows == 1 else of_token.repeat_interleave(rows)
        return self._ops.adapted_experts(x, weights, experts, self._experts, tables, of_row)

    def _weighted_before(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Each token's experts see it times their weights [T, k]: pairs are tokens of one expert."""
        inputs = (x.unsqueeze(1) * weights.to(x.dtype).unsqueeze(2)).flatten(0, 1)
        pairs = experts.view(-1, 1)
        products = self._products(inputs, torch.ones_like(weights).view(-1, 1), pairs, experts.shape[1])
        return products if experts.shape[1] == 1 else products.view(*experts.shape, x.shape[1]).sum(1)

    def into(
        self, stream: ResidualStream, x: Inputs, before: Norm | None, after: Norm | None,
        scale: float, padding: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add the part of x [T, H] to the stream, ``padding`` as above; all else as in :meth:`ResidualStream.add`."""
        assert isinstance(x, torch.Tensor)
        stream.add_sum(self(x, padding), after, scale)

    @property
    def products(self) -> list[Linear]:
        """Of the shared expert."""
        return [] if self._shared is None else self._shared.products

    @property
    def weights(self) -> dict[str, Weight]:
        """Of the shared expert, by the names of its products."""
        return {} if self._shared is None else self._shared.weights

    @property
    def expert_weights(self) -> dict[str, Weight]:
        """Of the experts, by the names of their products."""
        return dict(zip(EXPERT_WEIGHTS, (self._experts.gate_up, self._experts.down), strict=True))


class SharedExpert:
    """down(act(gate(x)) * up(x)) of all tokens."""

    __slots__ = ("_down", "_gate_up")

    def __init__(
        self, spec: Dense, hidden: int, parameters: Parameters, prefix: str, ops: Ops, fused: str | None
    ) -> None:
        sizes = {"gate_proj": spec.width, "up_proj": spec.width} if fused is None else {fused: 2 * spec.width}
        self._gate_up = GatedLinear(parameters, prefix, sizes, hidden, ops, bias=spec.bias, act=spec.act)
        self._down = Linear(parameters, prefix, {"down_proj": hidden}, spec.width, ops, bias=spec.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        return self._down(self._gate_up(x))

    @property
    def products(self) -> list[Linear]:
        """In the order in which they are computed."""
        return [self._gate_up, self._down]

    @property
    def weights(self) -> dict[str, Weight]:
        """By the names of its products."""
        return {"shared_gate_up": self._gate_up.weight, "shared_down": self._down.weight}


def routing_of(spec: Moe) -> Routing:
    """How the kernels choose the experts."""
    best = 2 if spec.group_score == "top2" else 1
    return Routing(
        spec.top_k, Score(spec.score), spec.renormalise, spec.factor, spec.groups, spec.keep_groups, best
    )  # fmt: skip


def _check(spec: Moe) -> None:
    """Raises ModelError for what no kernel computes."""
    if spec.act == "gelu":
        raise ModelError("experts with this activation are not served")
    try:
        routing_of(spec).check(spec.experts)
    except ValueError as error:
        raise ModelError(f"config.json: {error}") from error


def _expert_weights(spec: Moe, hidden: int, parameters: Parameters, prefix: str, names: NameMap) -> ExpertWeights:
    def stored(part: int, kind: str, *shape: int) -> torch.Tensor:
        """Weights or biases [E, ..] of the first product (part 0) or the second."""
        name, parts = f"{prefix}.{STACKED[part]}{'_bias' if kind == 'bias' else ''}", (slice(2), slice(2, 3))[part]

        def stacked(tensor: torch.Tensor) -> Callable[[], Views]:
            return lambda: {name: as_stored(tensor) if names.columns_first else tensor}

        def one_by_one(tensor: torch.Tensor, words: tuple[str, ...]) -> Callable[[], Views]:
            """Each expert's rows, divided among ``words``."""
            return lambda: {
                f"{prefix}.experts.{index}.{word}.{kind}": rows
                for index, expert in zip(spec.here, tensor, strict=True)
                for word, rows in zip(words, expert.chunk(len(words)), strict=True)
            }

        def put_stacked_in_order() -> None:
            if name in parameters.views:
                put_in_order(found, columns_first=names.columns_first, by_turns=by_turns)

        found = parameters.stored_in_ways(
            (len(spec.here), *shape),
            lambda tensor: [stacked(tensor), *(one_by_one(tensor, words[parts]) for words in EXPERT_NAMES)],
        )
        by_turns = names.gates_by_turns and part == 0
        if by_turns or (names.columns_first and found.dim() == 3):
            parameters.after_load(put_stacked_in_order)
        return found

    gate_up, down = stored(0, "weight", 2 * spec.width, hidden), stored(1, "weight", hidden, spec.width)
    gate = Gate(GateKind(spec.act), spec.alpha, spec.limit)
    if not spec.bias:
        return ExpertWeights(gate_up, down, gate=gate, among=spec.experts)
    biases = stored(0, "bias", 2 * spec.width), stored(1, "bias", hidden)
    return ExpertWeights(gate_up, down, *biases, gate, spec.experts)
