"""Chooses the attention path of a step: one value, from one table, by what the host knows before launch.

There are two tables. :data:`PATHS` gives the path of a step: the first row that is possible for the engine and applies
to the step. :data:`LONG_PROMPTS` gives the kernel for long prompts that an engine has beside its own prefill kernel.
The engine, its metrics and ``pagebus explain`` all use :class:`AttentionChooser`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from pagebus.kernels.attention import cudnn_prefill, hopper_prefill, rotary_attention
from pagebus.kernels.attention.rotary_attention import MOST_GROUPED, MOST_ROWS
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.triton import next_power_of_2

MOST_COLUMNS, MOST_RESULTS = 64, 64 * 128
"""Of a run: heads of a KV head, of all its tokens, rounded up; and these times the padded size of a head. More would
not fit in registers."""


class AttentionPath(StrEnum):
    """The ways in which the tokens of a step attend."""

    CPU = "cpu"
    REFERENCE = "reference"
    DETERMINISTIC = "deterministic"
    HOPPER_PREFILL = "hopper_prefill"
    CUDNN_PREFILL = "cudnn_prefill"
    EXPANDED_PREFILL = "expanded_prefill"
    RUNS = "runs"
    DECODE_PREFILL = "decode_prefill"
    PREFILL = "prefill"
    FUSED_DECODE = "fused_decode"
    DECODE = "decode"


class StepRows(NamedTuple):
    """The rows of a step as launched: padded, if they run from a graph.

    ``decodes`` is how many rows have one token, ``prompts`` whether others may be there, ``long_rows`` whether a kernel
    for long prompts takes some. ``whole``: every token attends in every layer, and is not in the cache yet. ``runs``:
    no row has more tokens than one with drafts may have.
    """

    decodes: int
    prompts: bool
    long_rows: bool = False
    whole: bool = True
    runs: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """The properties of an engine's attention that paths depend on. ``target`` None is a CPU; ``windows`` are those of
    all layers (0: none, below 0: chunks); ``backend`` and ``deterministic`` are the settings of these names."""

    target: Target | None
    dtype: torch.dtype
    cache_dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    windows: frozenset[int] = frozenset({0})
    backend: str = "auto"
    deterministic: bool = False
    softcap: bool = False
    """Whether scores are capped, in any layer."""
    sinks: bool = False
    """Whether heads have sinks, in any layer."""
    latent: bool = False
    """Whether keys and values of all heads are made from latents."""
    run: int = 1
    """The most tokens of a row with drafts."""

    @property
    def in_place(self) -> bool:
        """Whether a CPU can attend to the cache without a copy."""
        return self.target is None and self.dtype == self.cache_dtype == torch.float32

    @property
    def fuses(self) -> bool:
        """Whether the decode kernel can norm, rotate and store heads like these."""
        return not self.latent and rotary_attention.supports(self.q_heads, self.kv_heads, self.head_dim)

    @property
    def has_runs(self) -> bool:
        """Whether the decode kernel can take all tokens of a row with drafts together."""
        columns = next_power_of_2(self.run * self.q_heads // self.kv_heads)
        fitting = columns <= MOST_COLUMNS and columns * next_power_of_2(self.head_dim) <= MOST_RESULTS
        return self.run > 1 and fitting and not self.latent and self.cache_dtype != torch.int8

    @property
    def long_prompts_apart(self) -> bool:
        """Whether kernels for long prompts may be used: they change the bits of a result."""
        return self.target is not None and not self.deterministic

    @property
    def has_hopper(self) -> bool:
        """Whether our kernel for long prompts runs on this GPU, over heads like these; it knows no chunks."""
        plain = min(self.windows) >= 0 and not self.latent
        return plain and hopper_prefill.supports(self.dtype, self.head_dim, self.target)

    @property
    def has_cudnn(self) -> bool:
        """Whether cuDNN has a kernel for heads like these: without windows, soft caps and sinks."""
        plain = not any(self.windows) and not self.softcap and not self.sinks and not self.latent
        return plain and cudnn_prefill.supports(self.dtype, self.cache_dtype, self.head_dim)


class LongPromptRule(NamedTuple):
    """A kernel for long prompts: the setups it is ``possible`` for, and ``why`` it is taken there."""

    possible: Callable[[AttentionSetup], bool]
    why: str


LONG_PROMPTS = {
    AttentionPath.HOPPER_PREFILL: LongPromptRule(
        lambda setup: setup.long_prompts_apart and setup.backend != "torch" and setup.has_hopper,
        "sm_90, half precision, heads of 64 to 256, no chunked attention: rows that this kernel computes faster by "
        "measured rates",
    ),
    AttentionPath.CUDNN_PREFILL: LongPromptRule(
        lambda setup: setup.long_prompts_apart and setup.backend != "triton" and setup.has_cudnn,
        "no Hopper kernel here: parts of rows that cuDNN computes faster by measured rates (all, with "
        "--attention-backend torch), once it has plans for their shapes",
    ),
    AttentionPath.EXPANDED_PREFILL: LongPromptRule(
        lambda setup: setup.latent and setup.long_prompts_apart,
        "latent attention: rows that take fewer operations if their latents are expanded to keys and values",
    ),
}
"""Kernels for long prompts; the first that is possible is the engine's."""


class PathRule(NamedTuple):
    """A row of the table of paths: the setups it is ``possible`` for, the steps it ``applies`` to, ``why`` it is taken,
    and the ``kernels`` by which each layer stores keys and values and attends."""

    possible: Callable[[AttentionSetup], bool]
    applies: Callable[[StepRows], bool]
    why: str
    kernels: tuple[str, ...] = ()


def _on_gpu(setup: AttentionSetup) -> bool:
    return setup.target is not None


STORE, DECODE, PREFILL = "rotary_kv_write", "decode", "prefill"
LATENT = {STORE: "latent_write", DECODE: "latent_decode", PREFILL: "latent_prefill"}
"""What these are where keys and values are made from latents."""

PATHS = {
    AttentionPath.CPU: PathRule(
        lambda setup: setup.in_place,
        lambda rows: True,
        "a CPU in float32: decodes read the cache where it lies, prompts take the reference",
    ),
    AttentionPath.REFERENCE: PathRule(
        lambda setup: setup.target is None,
        lambda rows: True,
        "a CPU in another format than float32: plain torch",
    ),
    AttentionPath.DETERMINISTIC: PathRule(
        lambda setup: setup.deterministic,
        lambda rows: True,
        "--deterministic: decodes are prompts of one token, and no keys are cut",
        (STORE, PREFILL),
    ),
    AttentionPath.HOPPER_PREFILL: PathRule(
        lambda setup: long_prompts_of(setup) is AttentionPath.HOPPER_PREFILL,
        lambda rows: rows.long_rows,
        LONG_PROMPTS[AttentionPath.HOPPER_PREFILL].why,
        (STORE, "hopper"),
    ),
    AttentionPath.CUDNN_PREFILL: PathRule(
        lambda setup: long_prompts_of(setup) is AttentionPath.CUDNN_PREFILL,
        lambda rows: rows.long_rows,
        LONG_PROMPTS[AttentionPath.CUDNN_PREFILL].why,
        (STORE, "cudnn"),
    ),
    AttentionPath.EXPANDED_PREFILL: PathRule(
        lambda setup: long_prompts_of(setup) is AttentionPath.EXPANDED_PREFILL,
        lambda rows: rows.long_rows,
        LONG_PROMPTS[AttentionPath.EXPANDED_PREFILL].why,
        (STORE, "expanded"),
    ),
    AttentionPath.RUNS: PathRule(
        lambda setup: setup.target is not None and setup.has_runs,
        lambda rows: rows.prompts and rows.runs,
        "decodes, some with drafts: the decode kernel reads keys once for all tokens of a row",
        (STORE, DECODE),
    ),
    AttentionPath.DECODE_PREFILL: PathRule(
        _on_gpu,
        lambda rows: rows.prompts and rows.decodes > 0,
        "decodes and prompts in one step, or a graph that holds both: each have their kernel",
        (STORE, DECODE, PREFILL),
    ),
    AttentionPath.PREFILL: PathRule(_on_gpu, lambda rows: rows.prompts, "prompts alone", (STORE, PREFILL)),
    AttentionPath.FUSED_DECODE: PathRule(
        lambda setup: setup.target is not None and setup.fuses,
        lambda rows: rows.whole and 0 < rows.decodes <= MOST_ROWS,
        f"decodes alone, at most {MOST_ROWS} rows: one kernel norms and rotates the heads, stores keys and values, and "
        "attends",
        (DECODE,),
    ),
    AttentionPath.DECODE: PathRule(_on_gpu, lambda rows: True, "decodes alone", (STORE, DECODE)),
}
"""Paths of a step; the first that is possible for the setup and applies to the rows is taken."""


def long_prompts_of(setup: AttentionSetup) -> AttentionPath | None:
    """The kernel for long prompts that an engine has; None: its prefill kernel takes them all."""
    return next((path for path, rule in LONG_PROMPTS.items() if rule.possible(setup)), None)


class AttentionChooser:
    """Chooses the paths of one engine's steps."""

    def __init__(self, setup: AttentionSetup) -> None:
        self.setup = setup
        self.long_prompts = long_prompts_of(setup)
        self._possible = [(path, rule.applies) for path, rule in PATHS.items() if rule.possible(setup)]

    @property
    def possible(self) -> list[AttentionPath]:
        """Every path that some step may take."""
        first_for_all = next(place for place, (_, applies) in enumerate(self._possible) if applies(NO_ROWS))
        return [path for path, _ in self._possible[: first_for_all + 1]]

    def choose(self, rows: StepRows) -> AttentionPath:
        """The path of a step with these rows."""
        return next(path for path, applies in self._possible if applies(rows))

    def kernels(self, path: AttentionPath) -> list[str]:
        """By what each layer stores keys and values, and attends, on this path."""
        latent = self.setup.latent
        return [LATENT.get(name, name) if latent else name for name in PATHS[path].kernels]

    def why(self, rows: StepRows) -> str:
        """Why :meth:`choose` gives what it gives."""
        path = self.choose(rows)
        if path is not AttentionPath.DECODE or not rows.whole:
            return PATHS[path].why
        if self.setup.latent:
            return "decodes alone, over latents"
        if rows.decodes > MOST_ROWS:
            return f"decodes alone, more than {MOST_ROWS} rows: two kernels are as fast or faster"
        return f"decodes alone, but one kernel takes at most {MOST_GROUPED} query heads per KV head, of multiples of 16"


NO_ROWS = StepRows(0, False)
"""A step without rows, to which only unconditional rows of the table apply."""
