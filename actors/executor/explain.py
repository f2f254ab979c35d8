"""Explains which kernels an engine would run, by the engine's own chooser, without a GPU or weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from pagebus.actors.executor.batch.step_work import StepWork, prefill_rows
from pagebus.actors.executor.device.device import check_attention, resolve_dtype, resolve_kv_dtype, resolve_token_budget
from pagebus.actors.executor.graphs.graphs import empty_step
from pagebus.actors.executor.loading.dry_run import META, make_runner
from pagebus.actors.executor.loading.limits import decodes_apart, graph_tokens
from pagebus.actors.executor.step.launch import Launch
from pagebus.actors.executor.step.step_kernels import Choice, StepKernels
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from pagebus.kernels.common.target import Target, compile_for
from pagebus.kernels.linear.dispatch import LinearChoice, Source
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.moe.choice import ExpertsChoice
from pagebus.kernels.moe.coded import CodedConfig
from pagebus.kernels.moe.launch.shapes import Config as ExpertsConfig

CPU = torch.device("cpu")
DECODES = (1, 8, 32, 64, 128, 256)
PROMPTS = (512, 1024, 2048, 4096, 8192)
MIXED = ((64, 512), (64, 2048), (250, 2048))
"""Decodes, and the tokens of a prompt beside them."""


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """What a step of ``decodes`` and a prompt of ``prompt_tokens`` runs, and how it is launched."""

    decodes: int
    prompt_tokens: int
    launch: str
    kernels: StepKernels
    why: str
    """Why attention takes this path."""
    attention_kernels: tuple[str, ...] = ()
    """By what each layer stores keys and values, and attends."""

    @property
    def name(self) -> str:
        """``decode 64``, ``prefill 512`` or ``mixed 64 + 512``."""
        if not self.prompt_tokens:
            return f"decode {self.decodes}"
        return f"mixed {self.decodes} + {self.prompt_tokens}" if self.decodes else f"prefill {self.prompt_tokens}"

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        path = self.kernels.attention
        return {
            "step": self.name,
            "decodes": self.decodes,
            "prompt_tokens": self.prompt_tokens,
            "launch": self.launch,
            "attention": {"path": str(path), "kernels": list(self.attention_kernels), "why": self.why},
            "products": {name: _choice_as_json(choice) for name, choice in self.kernels.products.items()},
        }


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    config = None if choice.config is None else _config_as_json(choice.config)
    found = {"kernel": str(choice.kernel), "form": choice.form, "config": config, "why": choice.why}
    found["source"] = str(choice.source)
    if isinstance(choice, LinearChoice) and choice.estimate is not None:
        found["estimated_us"] = {"own": round(choice.estimate.us, 2), "library": round(choice.estimate.library, 2)}
    if isinstance(choice, ExpertsChoice) and choice.us is not None:
        found["estimated_us"] = {"own": round(choice.us, 2)}
    return found


def _config_as_json(config: Config | ExpertsConfig | CodedConfig) -> dict[str, Any]:
    """A launch shape; of experts one for each product."""
    if not isinstance(config, ExpertsConfig | CodedConfig):
        return asdict(config)
    parts = config._asdict()
    return parts | {name: asdict(parts[name]) for name in ("gate_up", "down")}


class AbsentEngine:
    """What an engine with these settings decides on a GPU that need not be here (``target`` None: on a CPU).

    Raises:
        SettingsError: a CPU cannot do what the settings ask.
    """

    def __init__(self, settings: Settings, config: ModelConfig, target: Target | None) -> None:
        compile_for(target)
        if target is None:
            check_attention(settings, CPU)
            budget = resolve_token_budget(settings, CPU)
            settings = settings.replace(enforce_eager=True, max_num_batched_tokens=budget)
        self.dtype = resolve_dtype(settings, config.dtype, CPU if target is None else META)
        self.kv_dtype = resolve_kv_dtype(settings, self.dtype)
        self.runner = make_runner(settings, config, self.dtype)[1]
        self._has_graphs = graph_tokens(settings, config, META, self.dtype) > 0
        self._decodes_apart = decodes_apart(settings, config)

    def steps(self) -> list[ExplainedStep]:
        """Every kind of step that fits the settings' limits."""
        kinds = [*((count, 0) for count in DECODES), *((0, count) for count in PROMPTS), *MIXED]
        return [self.step(*kind) for kind in kinds if self._fits(*kind)]

    def step(self, decodes: int, prompt_tokens: int) -> ExplainedStep:
        """One kind of step."""
        launch, _ = self.launch(decodes, prompt_tokens)
        assert launch.kernels is not None
        chooser = self.runner.model.chooser
        why, attention = chooser.why(launch.rows), tuple(chooser.kernels(launch.kernels.attention))
        form = self.runner.chooser.decode_form(launch.rows.decodes) if decodes else None
        if form is not None and form.source is not Source.RULE:
            why += f"; decodes in {form.form} ({form.source})"
        return ExplainedStep(decodes, prompt_tokens, _launched(launch), launch.kernels, why, attention)

    def launch(self, decodes: int, prompt_tokens: int) -> tuple[Launch, StepWork]:
        """How such a step runs, once all graphs are captured and a library is ready for its prompts; and the step."""
        work = self._work(decodes, prompt_tokens)
        if prompt_tokens:
            self.runner.select_long_rows(prefill_rows(work), False)  # before an engine is ready, all plans are made
        return self.runner.choose(work, self.runner.buckets.fitting(work) if self._has_graphs else None), work

    def _fits(self, decodes: int, prompt_tokens: int) -> bool:
        limits, rows = self.runner.limits, decodes + (prompt_tokens > 0)
        fits = rows <= limits.max_num_seqs and decodes + prompt_tokens <= limits.max_num_batched_tokens
        return fits and prompt_tokens < limits.max_model_len

    def _work(self, decodes: int, prompt_tokens: int) -> StepWork:
        """Decodes in a context of two tokens, beside a whole prompt."""
        scheduled = np.array([1] * decodes + [prompt_tokens] * (prompt_tokens > 0), np.int32)
        rows = np.arange(len(scheduled), dtype=np.int32)
        starts = (rows < decodes).astype(np.int32)
        query_start = np.concatenate(([0], np.cumsum(scheduled))).astype(np.int32)
        ends = starts + scheduled
        return replace(
            empty_step(), num_decodes=decodes if self._decodes_apart else 0, num_tokens=decodes + prompt_tokens,
            max_query_len=int(scheduled.max()), max_context_len=int(ends.max()), slots=rows, starts=starts,
            query_start=query_start, positions=ends, indexes=np.zeros_like(rows),
            hidden_index=query_start[1:] - np.int32(1), context_lens=ends, sample_slots=rows, sequence_ids=rows,
        )  # fmt: skip


def _launched(launch: Launch) -> str:
    if launch.whole is not None:
        return f"graph of {launch.whole.tokens}"
    return "eager" if launch.pieces is None else f"pieces of {launch.pieces.tokens}"
